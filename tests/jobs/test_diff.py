"""What changed between two jobs, against a brute-force comparison of their rows."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.diff import compare
from jobs.job import Job
from schemas.errors import InputDataError
from schemas.records import FinishReason, Request
from tests.jobs.verbs import Machine, commit, json_lines
from tests.tiny_jobs import Answer, ScriptedEngine, make_job, prompt_of, run_job, write_input


def night(
    root: Path, name: str, rows: list[tuple[int | None, str]], answers: dict[str, Answer], **fields: object
) -> Job:
    """A finished job over rows of id and text, labelled by their text."""
    path = write_input(root / f"{name}.parquet", {"id": [row[0] for row in rows], "text": [row[1] for row in rows]})
    job = make_job(root, [path], name=name, prompt_column="text", **fields)

    def answer(request: Request) -> Answer:
        return answers.get(prompt_of(request), "same")

    return run_job(job, ScriptedEngine(answer))


def test_flips_are_found_by_content_where_the_files_differ(tmp_path: Path) -> None:
    first = night(tmp_path, "mon", [(1, "a"), (2, "b"), (3, "c")], {"a": "x", "b": "x"})
    second = night(tmp_path, "tue", [(9, "c"), (8, "b"), (7, "a"), (6, "d")], {"a": "y", "b": "x"}, seed=1)
    found = compare(first, second)
    assert (found.matched_by, found.changed) == ("content of text", ("seed",))
    assert found.flips == {("x", "y"): 1}
    assert (found.num_equal, found.num_only_first, found.num_only_second, found.num_repeated) == (2, 0, 1, 0)
    (flip,) = found.examples
    assert (flip.inputs, flip.before, flip.after) == ({"text": "a"}, "x", "y")
    assert flip.where.endswith("tue.parquet row 2")


def test_a_row_without_a_label_counts_as_its_status(tmp_path: Path) -> None:
    rows = [(1, "a"), (2, "b")]
    first = night(tmp_path, "mon", rows, {"a": ("", FinishReason.PROMPT_TOO_LONG)})
    second = night(tmp_path, "tue", rows, {"b": ("", FinishReason.PROMPT_TOO_LONG)})
    assert compare(first, second).flips == {("(prompt_too_long)", "same"): 1, ("same", "(prompt_too_long)"): 1}


def test_the_same_files_are_matched_by_row_and_need_no_longer_exist(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"text": ["a", "a", "b"]})
    first = run_job(make_job(tmp_path, [path]), ScriptedEngine("x"))
    second = run_job(make_job(tmp_path, [path], seed=1), ScriptedEngine(lambda r: "xy"["a" in prompt_of(r)]))
    path.unlink()
    found = compare(first, second)
    assert (found.matched_by, found.flips, found.num_equal) == ("row", {("x", "y"): 2}, 1)


def test_a_key_that_is_no_column_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    job = night(tmp_path, "mon", [(1, "a")], {})
    with pytest.raises(InputDataError, match=r"no column 'idd'.*Did you mean 'id'"):
        compare(job, job, key=["idd"])


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([1, None, 2], r"tue\.parquet row 1: --key id is null"),
        ([1, 2, 1], r"tue\.parquet row 2 has the same --key as .*tue\.parquet row 0, id 1"),
    ],
)
def test_a_key_that_is_null_or_occurs_twice_names_file_row_and_way_out(
    tmp_path: Path, ids: list[int | None], complaint: str
) -> None:
    first = night(tmp_path, "mon", [(1, "a"), (2, "b")], {})
    second = night(tmp_path, "tue", [(key, "a") for key in ids], {})
    for one, other in ((first, second), (second, first)):
        with pytest.raises(InputDataError, match=complaint + ".*leave --key out"):
            compare(one, other, key=["id"])


def night_of_ids(root: Path, name: str, rows: list[tuple[int, str]]) -> Job:
    """A finished job that asks about ids; each row has its own label, also where ids are equal."""
    path = write_input(root / f"{name}.parquet", {"id": [key for key, _ in rows]})
    job, labels = make_job(root, [path], name=name, prompt_template="{{ id }}", chunk_rows=1), (t for _, t in rows)
    return run_job(job, ScriptedEngine(lambda request: next(labels)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xy")), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xy")), min_size=1, max_size=8),
)
def test_counts_equal_those_of_brute_force_with_repeated_rows_too(
    tmp_path: Path, before: list[tuple[int, str]], after: list[tuple[int, str]]
) -> None:
    found = compare(
        *(night_of_ids(tmp_path, name, rows) for name, rows in (("mon", before), ("tue", after))), match="content"
    )
    pairs = [
        pair
        for key in range(5)
        for pair in zip([t for k, t in before if k == key], [t for k, t in after if k == key], strict=False)
    ]
    assert found.flips == Counter(pair for pair in pairs if pair[0] != pair[1])
    assert found.num_equal == sum(a == b for a, b in pairs)
    assert found.num_only_first == len(before) - len(pairs)
    assert found.num_only_second == len(after) - len(pairs)
    assert found.num_repeated == len(after) - len({key for key, _ in after})


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_the_verb_tells_flips_in_words_and_as_json(machine: Machine) -> None:
    data = machine.write_rows(4)
    for seed in ("0", "1"):
        assert machine.submit(data, "--no-wait", "--name", f"n{seed}", "--seed", seed).exit_code == 0
    first, second = (machine.open_job(f"n{seed}") for seed in "01")
    commit(first, [0], label="a")
    commit(second, [0], label="b")
    shown = machine.run("diff", "n0", "n1")
    assert shown.exit_code == 0, shown.output
    assert "flipped" in shown.stdout
    (fields,) = json_lines(machine.run("diff", "n0", "n1", "--key", "id", "--examples", "1", "--json"))
    assert fields["flips"] == [{"before": "a", "after": "b", "rows": 4}]
    assert (fields["num_flipped"], fields["changed"], len(fields["examples"])) == (4, ["seed"], 1)
