from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from jobs.store import replace
from schemas.records import JobState, encode_json
from tests.jobs.verbs import Machine, commit, json_lines


@pytest.fixture
def done(tmp_path: Path) -> Iterator[Machine]:
    """A machine with a finished job of three chunks."""
    machine = Machine(tmp_path)
    data = machine.write("data.parquet", text=[f"t{i}" for i in range(12)], score=[float("nan")] * 12)
    machine.submit(data, "--no-wait", "--chunk-rows", "4")
    commit(machine.job(), [0, 1, 2])
    assert machine.run("resume", "data").exit_code == 0
    yield machine
    machine.close()


def output_path(machine: Machine) -> str:
    success = machine.job().success()
    assert success is not None
    return success.outputs[0].uri


def faults(machine: Machine) -> list[str]:
    result = machine.run("verify", "data", "--json")
    (report,) = json_lines(result)
    assert result.exit_code == (1 if report["faults"] else 0)
    found: list[str] = report["faults"]
    return found


def test_a_sound_job_has_no_faults(done: Machine) -> None:
    result = done.run("verify", "data")
    assert result.exit_code == 0, result.output
    assert "12 rows read, 12 labels validated\n0 faults" in result.stdout


def rewrite(path: str, table: pa.Table) -> None:
    pq.write_table(table, path)


def test_swapped_rows_in_the_output_are_found(done: Machine) -> None:
    table = pq.read_table(output_path(done))
    rewrite(output_path(done), table.take([1, 0, *range(2, 12)]))
    assert faults(done) == ["chunk 0: column text differs from the input"]


def test_a_changed_label_in_the_output_is_found(done: Machine) -> None:
    table = pq.read_table(output_path(done))
    labels = pc.if_else(pc.equal(table["text"], "t9"), "b", table["label"])
    rewrite(output_path(done), table.set_column(table.schema.get_field_index("label"), "label", labels))
    assert faults(done) == ["chunk 2: column label differs from the part"]


def test_a_row_too_many_or_a_column_too_few_is_found(done: Machine) -> None:
    path = output_path(done)
    table = pq.read_table(path)
    rewrite(path, pa.concat_tables([table, table.slice(0, 2)]))
    assert faults(done) == [f"{path} has 14 rows, written were 12"]
    rewrite(path, table.drop_columns(["score"]))
    assert any(fault.startswith(f"{path} has other columns") for fault in faults(done))


@pytest.mark.parametrize("column", ["label_error", "label_meta", "label_confidence"])
def test_a_change_of_what_stands_beside_the_label_is_found(done: Machine, column: str) -> None:
    table = pq.read_table(output_path(done))
    place = table.schema.get_field_index(column)
    cells = table[column].to_pylist()
    cells[5] = {"label_error": "none", "label_meta": None, "label_confidence": 0.5}[column]
    changed = pa.array(cells, table.schema.field(place).type)
    rewrite(output_path(done), table.set_column(place, table.schema.field(place), changed))
    assert faults(done) == [f"chunk 1: column {column} differs from the part"]


def test_another_state_and_a_file_that_readers_take_for_output_are_found(done: Machine) -> None:
    success = done.job().success()
    assert success is not None
    replace(done.job().store, "_SUCCESS.json", encode_json(msgspec.structs.replace(success, state=JobState.FAILED)))
    stray = Path(output_path(done)).with_name("old.parquet")
    stray.write_bytes(Path(output_path(done)).read_bytes())
    assert faults(done) == [
        f"_SUCCESS.json says that the job is failed, its rows say {success.state}",
        f"{stray} is none of the job's files, but readers of the directory take it",
    ]


def test_a_missing_row_is_found(done: Machine) -> None:
    rewrite(output_path(done), pq.read_table(output_path(done)).slice(0, 11))
    assert any("chunk 2" in fault for fault in faults(done))


def test_a_missing_output_is_found(done: Machine) -> None:
    Path(output_path(done)).unlink()
    assert len(faults(done)) == 4  # of three chunks, and of the file


def test_a_damaged_part_is_found(done: Machine) -> None:
    part = Path(done.job().store.locate("parts/part-00001.parquet"))
    content = bytearray(part.read_bytes())
    content[20] ^= 0xFF
    part.write_bytes(content)
    assert any("part-00001" in fault for fault in faults(done))


def test_an_ok_row_that_the_constraint_refuses_is_found(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        machine.submit(machine.write_rows(4), "--no-wait")
        commit(machine.job(), [0], label="neither")
        machine.run("resume", "data")
        found = faults(machine)
        assert len(found) == 4
        assert found[2].startswith("input 0 row 2 is ok but invalid: ")
    finally:
        machine.close()


def test_a_job_that_has_not_ended_is_not_verified(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        machine.submit(machine.write_rows(4), "--no-wait")
        result = machine.run("verify", "data")
        assert (result.exit_code, "has not ended" in result.stderr) == (1, True)
    finally:
        machine.close()
