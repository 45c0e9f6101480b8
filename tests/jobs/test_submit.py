import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.submit import make_constraint
from schemas.errors import ConstraintError
from schemas.records import ConstraintKind, Priority, RowStatus, Sampling, Thinking
from tests.jobs.verbs import HandWorker, Machine, commit, json_lines, until

NOBODY_LISTENS = "redis://127.0.0.1:1/0"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def refuse(machine: Machine, *arguments: str) -> str:
    """Submit what must be refused: exit code 2, one line, nothing written. Returns the line."""
    result = machine.submit(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert machine.job_ids() == []
    return result.stderr


def test_a_missing_file_is_named(machine: Machine) -> None:
    assert "nothing.parquet" in refuse(machine, str(machine.path / "nothing.parquet"))


def test_a_file_that_is_not_parquet_is_named(machine: Machine) -> None:
    (machine.path / "text.parquet").write_text("id,text\n1,hello\n")
    assert "text.parquet is not a readable Parquet file" in refuse(machine, str(machine.path / "text.parquet"))


def test_an_empty_file_is_not_parquet(machine: Machine) -> None:
    (machine.path / "empty.parquet").touch()
    assert "it is empty" in refuse(machine, str(machine.path / "empty.parquet"))


def test_an_unknown_column_is_answered_with_those_there_are(machine: Machine) -> None:
    data = machine.write_rows(3)
    result = machine.run("submit", data, "--model", str(machine.model), "--column", "txt")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in ("'txt'", "id, text, kind"))


@pytest.mark.parametrize("option", ["--gold", "--columns", "--constraint-column"])
def test_unknown_columns_are_found_in_every_option(machine: Machine, option: str) -> None:
    data = machine.write_rows(3)
    result = machine.run("submit", data, "--model", str(machine.model), "--column", "text", option, "nope")
    assert (result.exit_code, "'nope'" in result.stderr) == (2, True), result.output


def test_output_columns_that_the_input_has_are_refused(machine: Machine) -> None:
    data = machine.write("data.parquet", text=["a"], label=["b"])
    assert "label" in refuse(machine, data)
    assert machine.submit(data, "--out", "mine", "--dry-run").exit_code == 0


def test_a_template_with_an_unknown_name_is_refused(machine: Machine) -> None:
    data = machine.write_rows(3)
    result = machine.run("submit", data, "--model", str(machine.model), "--prompt", "Say {{ txt }}")
    assert (result.exit_code, "'txt'" in result.stderr) == (2, True), result.output


def test_a_prompt_may_be_a_file_and_its_first_rendering_is_shown(machine: Machine) -> None:
    data = machine.write_rows(3)
    (machine.path / "prompt.txt").write_text("Judge: {{ text }}!")
    prompt = f"@{machine.path / 'prompt.txt'}"
    result = machine.run("submit", data, "--model", str(machine.model), "--prompt", prompt, "--dry-run")
    assert "Judge: message 0!" in result.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--schema", "{not json"], "JSON"),
        (["--schema", '{"type": "strin"}'], "strin"),
        (["--schema", "nowhere.json"], "nowhere.json"),
        (["--regex", "a("], "regex"),
        (["--choice", " , "], "choice"),
        (["--schema", "{}", "--regex", "a"], "only one of"),
        (["--choice", "a", "--constraint-column", "text"], "not both"),
    ],
)
def test_a_bad_constraint_is_refused_before_anything_is_written(
    machine: Machine, options: list[str], told: str
) -> None:
    data = machine.write_rows(3)
    result = machine.run("submit", data, "--model", str(machine.model), "--column", "text", *options)
    assert (result.exit_code, told in result.stderr) == (2, True), result.output
    assert machine.job_ids() == []


def test_an_unknown_model_is_refused(machine: Machine) -> None:
    data = machine.write_rows(3)
    result = machine.run("submit", data, "--column", "text", "--model", "no-such-model")
    assert (result.exit_code, "unknown model 'no-such-model'" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--top-p", "0"], "top_p must be in"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--max-tokens", "50", "--thinking-tokens", "50"], "max_tokens must be above 58"),
        (["--thinking-end", "done"], "--thinking-end goes with --thinking-tokens"),
        (["--thinking-tokens", "5000"], "lower --thinking-tokens"),
        (["--limit", "0"], "--limit"),
        (["--name", "a/b"], "a/b"),
        (["--no-such-option"], "No such option"),
        (["--jobs-root", "ftp://x/y"], "ftp"),
        (["--broker-url", "amqp://x"], "scheme must be one of"),
    ],
)
def test_bad_values_of_options_exit_with_2(machine: Machine, options: list[str], told: str) -> None:
    result = machine.submit(machine.write_rows(3), *options)
    assert (result.exit_code, told in result.stderr) == (2, True), result.output
    assert machine.job_ids() == []


def test_an_unknown_setting_in_the_environment_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTMILL_ENGINE__MAX_SEQS", "3")
    assert "NIGHTMILL_ENGINE__MAX_SEQS" in refuse(machine, machine.write_rows(3))


def test_a_dry_run_tells_the_plan_and_writes_nothing(machine: Machine) -> None:
    data = machine.write_rows(10)
    schema = '{"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}'
    arguments = [data, "--model", str(machine.model), "--column", "text", "--schema", schema, "--dry-run"]
    result = machine.run("submit", *arguments, "--chunk-rows", "4", "--json")
    (event,) = json_lines(result)
    assert (event["rows"], event["chunks"], event["files"]) == (10, 3, 1)
    assert event["label"] == "label: struct<kind: string>"
    assert "[user] message 0" in event["prompt"]
    assert {"path", "decision", "reason"} == set(event["constraint"][0])
    assert not machine.settings.state_dir.exists()
    assert "nothing was written" in machine.run("submit", *arguments).stdout


def test_the_enforcement_table_is_kept_with_the_job(machine: Machine) -> None:
    data = machine.write_rows(3)
    schema = '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}'
    arguments = [data, "--model", str(machine.model), "--column", "text", "--schema", schema]
    result = machine.run("submit", *arguments, "--no-wait")
    assert "note: /uniqueItems is checked after decoding, not enforced" in result.stderr
    table = json.loads(machine.job().store.read("enforcement.json"))
    assert {row["keyword"]: row["decision"] for row in table}["uniqueItems"] == "checked"


def test_zero_rows_end_at_once_with_an_empty_output(machine: Machine) -> None:
    data = machine.write("none.parquet", text=[])
    result = machine.run("submit", data, "--model", str(machine.model), "--choice", "a,b")
    assert result.exit_code == 0, result.output
    assert "no rows" in result.stderr
    assert "done · no rows" in result.stdout
    (output,) = machine.job().success().outputs  # type: ignore[union-attr]
    assert pq.read_table(output.uri).num_rows == 0


def test_null_prompts_are_told_before_the_start(machine: Machine) -> None:
    data = machine.write("nulls.parquet", text=[None, None])
    result = machine.submit(data, "--no-wait")
    assert result.exit_code == 0
    assert "note: the first rows have no prompt: text is null" in result.stderr


def test_an_unreachable_broker_leaves_the_job_intact_and_resume_goes_on(machine: Machine) -> None:
    data = machine.write_rows(10)
    result = machine.submit(data, "--broker-url", NOBODY_LISTENS, "--chunk-rows", "4")
    assert result.exit_code == 1
    job = machine.job()
    assert job.pending() == (0, 1, 2)
    assert f"python -m jobs.resume {job.job_id}" in result.stderr
    assert "Traceback" not in result.output
    assert machine.run("resume", job.job_id, "--no-wait").exit_code == 0
    assert machine.queue.depth(job.spec.model.queue) == 3


def test_passwords_stay_out_of_messages(machine: Machine) -> None:
    url = NOBODY_LISTENS.replace("://", "://user:s3cret@")
    result = machine.submit(machine.write_rows(3), "--broker-url", url)
    assert (result.exit_code, "s3cret" in result.output) == (1, False)


def test_without_waiting_the_chunks_are_queued_and_the_worker_to_start_is_named(machine: Machine) -> None:
    result = machine.submit(machine.write_rows(10), "--no-wait", "--chunk-rows", "4")
    job = machine.job()
    assert result.exit_code == 0
    assert f"NIGHTMILL_WORKER__MODEL={machine.model}" in result.stdout
    assert machine.queue.depth(job.spec.model.queue) == 3


def test_a_cancelled_job_is_not_started_by_the_same_submit(machine: Machine) -> None:
    data = machine.write_rows(4)
    machine.submit(data, "--no-wait")
    machine.run("cancel", "data")
    machine.queue._redis.flushall()
    result = machine.submit(data, "--no-wait")
    assert (result.exit_code, "jobs.resume" in result.stdout) == (1, True)
    assert machine.queue.depth(machine.job().spec.model.queue) == 0


def test_every_sampling_option_reaches_the_job(machine: Machine) -> None:
    options = (
        "--max-tokens 70 --temperature 0.5 --top-k 9 --top-p 0.8 --min-p 0.1 --repetition-penalty 1.2 --stop . --stop ;"
    )
    rest = "--thinking-tokens 20 --thinking-end </t> --top-labels 5 --n 3 --seed 11 --max-attempts 2"
    assert machine.submit(machine.write_rows(4), "--no-wait", *options.split(), *rest.split()).exit_code == 0
    spec = machine.job().spec
    assert spec.sampling == Sampling(
        max_tokens=70,
        thinking=Thinking(max_tokens=20, end="</t>"),
        temperature=0.5,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.2,
        stop=(".", ";"),
        top_labels=5,
    )
    assert (spec.num_completions, spec.seed, spec.retry.max_attempts) == (3, 11, 2)


@pytest.mark.parametrize("priority", Priority)
def test_a_priority_is_given_as_the_readme_writes_it(machine: Machine, priority: Priority) -> None:
    assert machine.submit(machine.write_rows(1), "--no-wait", "--priority", priority.value).exit_code == 0
    assert machine.job().priority is priority


def test_the_same_submit_again_queues_nothing_twice(machine: Machine) -> None:
    data = machine.write_rows(10)
    for _ in range(2):
        assert machine.submit(data, "--no-wait", "--chunk-rows", "4").exit_code == 0
    assert machine.queue.depth(machine.job().spec.model.queue) == 3


def test_a_finished_job_is_shown_at_once(machine: Machine) -> None:
    data = machine.write_rows(10)
    machine.submit(data, "--no-wait", "--gold", "kind")
    commit(machine.job(), [0])
    events = json_lines(machine.submit(data, "--gold", "kind", "--json"))
    assert [event["event"] for event in events] == ["summary"]
    assert events[0]["counts"] == {"ok": 10}
    expected = {"num_equal": 5, "num_compared": 10, "commonest": "b", "num_commonest": 5, "share": 0.5}
    assert events[0]["agreement"] == expected


@pytest.mark.parametrize(("status", "code"), [(RowStatus.OK, 0), (RowStatus.INVALID, 1)])
def test_waiting_ends_with_the_jobs_exit_code(machine: Machine, status: RowStatus, code: int) -> None:
    HandWorker(machine, status=status).start()
    result = machine.submit(
        machine.write_rows(10), "--chunk-rows", "4", "--broker-url", machine.queue.broker_url, "--wait"
    )
    assert result.exit_code == code, result.output
    assert "10 / 10 rows" in result.stderr
    assert f"10 {status}" in result.stdout
    assert str(machine.job().success().outputs[0].uri.rpartition("/")[0]) in result.stdout  # type: ignore[union-attr]


def test_some_failed_rows_end_with_3_and_the_commonest_cause(machine: Machine) -> None:
    data = machine.write_rows(8)
    machine.submit(data, "--no-wait", "--chunk-rows", "4")
    commit(machine.job(), [0])
    commit(machine.job(), [1], status=RowStatus.INVALID)
    result = machine.submit(data, "--chunk-rows", "4")
    assert result.exit_code == 3
    assert "commonest cause: invalid: it went wrong (4 rows)" in result.stdout


def test_output_that_would_replace_somebody_elses_file_is_an_error(machine: Machine) -> None:
    data = machine.write_rows(4)
    (machine.path / "out").mkdir()
    pq.write_table(pq.read_table(data), machine.path / "out" / "data.parquet")
    result = machine.submit(data, "--output", str(machine.path / "out"), "--no-wait")
    assert result.exit_code == 2
    assert "out/data.parquet is not this job's: move it away, or choose another --output" in result.stderr
    assert machine.job_ids() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_wait_says_how_to_go_on(machine: Machine, number: signal.Signals) -> None:
    url = machine.queue.broker_url
    arguments = [machine.write_rows(4), "--model", str(machine.model), "--choice", "a,b", "--column", "text"]
    command = [sys.executable, "-m", "jobs.submit", *arguments, *machine.flags, "--broker-url", url, "--wait"]
    log = machine.path / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL, env={**os.environ})
    until(lambda: "nobody serves" in log.read_text(), "the wait")
    process.send_signal(number)
    assert process.wait(20) == 130
    told = log.read_text()
    assert "Traceback" not in told
    assert f"python -m jobs.resume {machine.job_ids()[0]}" in told
    assert f"python -m jobs.status {machine.job_ids()[0]}" in told
    assert machine.queue.depth(machine.job().spec.model.queue) == 1, "the job goes on without the terminal"


def test_choices_come_from_lists_repeats_and_files_without_doubles(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("yes, please\nno\n\n")
    constraint = make_constraint(None, None, None, ["no,maybe", "never", f"@{tmp_path / 'labels.txt'}"])
    assert constraint is not None
    assert constraint.kind is ConstraintKind.CHOICE
    assert json.loads(constraint.source) == ["no", "maybe", "never", "yes, please"]


def test_schemas_and_grammars_are_files_or_written_out(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    (tmp_path / "g.ebnf").write_text('root ::= "a" | "b"')
    for value in (str(tmp_path / "s.json"), f"@{tmp_path / 's.json'}", '{"type": "integer"}'):
        found = make_constraint(value, None, None, [])
        assert found is not None
        assert json.loads(found.source) == {"type": "integer"}
    for value in (str(tmp_path / "g.ebnf"), 'root ::= "a" | "b"'):
        found = make_constraint(None, None, value, [])
        assert found is not None
        assert found.source == 'root ::= "a" | "b"'


def test_two_constraints_are_one_too_many() -> None:
    with pytest.raises(ConstraintError, match="only one of"):
        make_constraint(None, "a", None, ["b"])
