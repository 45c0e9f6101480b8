"""Rows to results: one each, in order; statuses by finish reason and validator; retries that can help, recorded."""

import json
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import results as results_module
from jobs.finish import try_finish
from jobs.results import RETRY_TEMPERATURE, next_sampling, run_rows
from jobs.verify import verify
from schemas.choices import MAX_LABELS
from schemas.errors import EngineError, Interrupted
from schemas.records import (
    Completion,
    Constraint,
    ConstraintKind,
    FinishReason,
    JobSpec,
    Label,
    Request,
    RetryPolicy,
    RowResult,
    RowStatus,
    Sampling,
    Thinking,
    row_seed,
)
from tests.tiny_jobs import (
    MODEL,
    YES_NO,
    Answer,
    ScriptedEngine,
    completion,
    json_schema,
    make_job,
    prompt_of,
    run_chunk,
    run_job,
    write_input,
)

STOP, LENGTH, CLOSED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CLOSED
NO_RETRY = RetryPolicy(max_attempts=1)


def run_one(tmp_path: Path, answer: Any, **fields: Any) -> tuple[RowResult, ScriptedEngine]:
    engine = ScriptedEngine(answer)
    write_input(tmp_path / "one.parquet", {"text": ["hello"]})
    (row,) = run_chunk(make_job(tmp_path, [tmp_path / "one.parquet"], **{"constraint": YES_NO, **fields}), 0, engine)
    return row, engine


@pytest.mark.parametrize(
    ("answer", "status", "label"),
    [
        ("yes", RowStatus.OK, "yes"),
        (("yes", CLOSED), RowStatus.CLOSED, "yes"),
        ("maybe", RowStatus.INVALID, None),
        (("ye", CLOSED), RowStatus.INVALID, None),
        (("ye", LENGTH), RowStatus.TRUNCATED, None),
        (("yes", LENGTH), RowStatus.TRUNCATED, None),
        (("", FinishReason.PROMPT_TOO_LONG), RowStatus.PROMPT_TOO_LONG, None),
        (("", FinishReason.CONSTRAINT_ERROR), RowStatus.CONSTRAINT_ERROR, None),
        (("yes", FinishReason.ERROR), RowStatus.FAILED, None),
    ],
)
def test_every_finish_reason_has_its_status_and_no_failure_has_a_label(
    tmp_path: Path, answer: Answer, status: RowStatus, label: str | None
) -> None:
    row, _ = run_one(tmp_path, answer, retry=NO_RETRY)
    text = answer if isinstance(answer, str) else answer[0]
    assert (row.status, row.value, row.raw) == (status, label, text)
    assert (row.error is None) == (status in (RowStatus.OK, RowStatus.CLOSED))
    assert [attempt.status for attempt in row.attempts] == [status]


def test_without_a_constraint_any_text_that_ends_is_ok_but_no_text_is_not(tmp_path: Path) -> None:
    assert run_one(tmp_path, "so be it", constraint=None)[0].value == "so be it"
    empty, _ = run_one(tmp_path, " ", constraint=None)
    assert (empty.status, empty.value) == (RowStatus.INVALID, None)


def test_the_engines_error_and_counts_reach_the_row(tmp_path: Path) -> None:
    def answer(request: Request) -> Completion:
        return Completion(
            request_id=request.request_id,
            finish_reason=FinishReason.PROMPT_TOO_LONG,
            error="prompt is 9120 tokens, limit 512",
            num_prompt_tokens=9120,
            seconds=0.5,
        )

    row, _ = run_one(tmp_path, answer)
    assert (row.error, row.num_prompt_tokens, row.seconds) == ("prompt is 9120 tokens, limit 512", 9120, 0.5)


def test_a_document_that_its_column_cannot_hold_is_not_ok(tmp_path: Path) -> None:
    row, _ = run_one(tmp_path, str(2**63), constraint=json_schema({"type": "integer"}), retry=NO_RETRY)
    assert (row.status, row.value, row.raw) == (RowStatus.INVALID, None, str(2**63))
    assert "64-bit" in row.error


def test_a_truncated_row_gets_more_budget_up_to_the_models_limit(tmp_path: Path) -> None:
    def answer(request: Request) -> Answer:
        return "yes" if request.sampling.max_tokens >= 300 else ("ye", LENGTH)

    row, engine = run_one(tmp_path, answer, sampling=Sampling(max_tokens=100), constraint=None)
    assert [request.sampling.max_tokens for request in engine.requests] == [100, 200, 400]
    assert (row.status, row.value) == (RowStatus.OK, "yes")
    assert [(a.status, a.max_tokens) for a in row.attempts] == [
        (RowStatus.TRUNCATED, 100),
        (RowStatus.TRUNCATED, 200),
        (RowStatus.OK, 400),
    ]


def test_a_truncated_row_gets_what_the_longest_text_of_its_constraint_needs_where_there_is_room(tmp_path: Path) -> None:
    def budgets(max_length: int) -> list[int]:
        constraint = Constraint(kind=ConstraintKind.REGEX, source=f"[a-z]{{{max_length}}}")
        _, engine = run_one(tmp_path, ("ab", LENGTH), sampling=Sampling(max_tokens=20), constraint=constraint)
        return [request.sampling.max_tokens for request in engine.requests]

    assert budgets(150) == [20, 151]
    assert budgets(504) == [20, 505], "all the room beside a prompt of seven tokens"
    assert budgets(505) == [20, 40, 80]
    assert budgets(19) == [20], "it was enough, so that more cannot help"


def test_a_row_that_was_told_no_budget_has_room_for_the_longest_text_of_its_constraint(tmp_path: Path) -> None:
    def budget(source: str | None, **sampling: int) -> int:
        constraint = Constraint(kind=ConstraintKind.REGEX, source=source) if source else None
        _, engine = run_one(tmp_path, "yes", sampling=Sampling(**sampling), constraint=constraint)
        return engine.requests[0].sampling.budget

    assert budget("yes|no") == 4
    assert budget("yes|[a-z]{400}") == 401
    assert budget("yes|[a-z]{4000}") == MODEL.max_model_len
    assert budget("yes|a*") == 256
    assert budget(None) == 256
    assert budget("yes|no", max_tokens=9) == 9


def test_thinking_has_a_budget_of_its_own_besides_the_answers(tmp_path: Path) -> None:
    thinking = Thinking(max_tokens=100, end="</t>")
    sampling = Sampling(thinking=thinking)
    _, engine = run_one(tmp_path, "yes", sampling=sampling)
    assert engine.requests[0].sampling == msgspec.structs.replace(sampling, max_tokens=104 + 4)
    assert run_one(tmp_path, "yes", sampling=sampling, constraint=None)[1].requests[0].sampling.budget == 104 + 256
    constraint = Constraint(kind=ConstraintKind.REGEX, source="[a-z]{150}")
    short = msgspec.structs.replace(sampling, max_tokens=120)
    _, engine = run_one(tmp_path, ("ab", LENGTH), sampling=short, constraint=constraint)
    assert [request.sampling.max_tokens for request in engine.requests] == [120, 104 + 151]


def test_what_was_thought_is_in_a_column_of_its_own_and_counted(tmp_path: Path) -> None:
    def answer(request: Request) -> Completion:
        plain = completion(request, ("maybe" if request.sampling.temperature == 0 else "yes", STOP))
        return msgspec.structs.replace(plain, reasoning="since", num_reasoning_tokens=2)

    sampling = Sampling(thinking=Thinking(max_tokens=9))
    for num_completions, reasoning in ((1, "since"), (2, ["since", "since"])):
        job = make_job(tmp_path, sampling=sampling, constraint=YES_NO, num_completions=num_completions)
        assert try_finish(run_job(job, ScriptedEngine(answer)))
        assert verify(job).faults == []
        success = job.success()
        assert success is not None
        table = pq.read_table(success.outputs[0].uri)
        assert table.column_names[-7:] == [
            *("label", "label_raw", "label_reasoning", "label_status", "label_error", "label_confidence", "label_meta")
        ]
        assert table["label_reasoning"].to_pylist() == [reasoning] * 10
        assert table["label_meta"][0].as_py()["reasoning_tokens"] == 2 * num_completions


def test_silent_repair_a_document_cut_by_its_budget_is_never_completed(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "string"}, "items": {"type": "array"}}}
    for text in ('{"n": "A", "items": ["x", "y"', '{"n": "A"}'):  # the second is whole, but the model was not done
        row, _ = run_one(tmp_path, (text, LENGTH), constraint=json_schema(schema), retry=RetryPolicy(max_attempts=1))
        assert (row.status, row.value, row.raw) == (RowStatus.TRUNCATED, None, text)


def test_a_truncated_row_is_not_tried_again_with_the_same_budget(tmp_path: Path) -> None:
    room = MODEL.max_model_len - 7
    row, engine = run_one(
        tmp_path, ("ye", LENGTH), sampling=Sampling(max_tokens=400), retry=RetryPolicy(max_attempts=9), constraint=None
    )
    assert [request.sampling.max_tokens for request in engine.requests] == [400, room]
    assert (row.status, row.raw, row.value) == (RowStatus.TRUNCATED, "ye", None)
    _, engine = run_one(tmp_path, ("ye", LENGTH), retry=RetryPolicy(budget_factor=1.0), constraint=None)
    assert len(engine.requests) == 1


def test_an_invalid_greedy_row_is_tried_again_with_a_seed_and_a_little_temperature(tmp_path: Path) -> None:
    def answer(request: Request) -> Answer:
        return "yes" if request.sampling.temperature else "maybe"

    row, engine = run_one(tmp_path, answer)
    assert [request.sampling.temperature for request in engine.requests] == [0.0, RETRY_TEMPERATURE]
    assert engine.requests[0].seed != engine.requests[1].seed
    assert [(a.status, a.temperature) for a in row.attempts] == [
        (RowStatus.INVALID, 0.0),
        (RowStatus.OK, RETRY_TEMPERATURE),
    ]


def test_attempts_are_bounded_and_all_recorded(tmp_path: Path) -> None:
    row, engine = run_one(tmp_path, "maybe", sampling=Sampling(temperature=0.7), retry=RetryPolicy(max_attempts=4))
    assert (len(engine.requests), len(row.attempts), row.status) == (4, 4, RowStatus.INVALID)
    assert len({attempt.seed for attempt in row.attempts}) == 4


@pytest.mark.parametrize("reason", [FinishReason.PROMPT_TOO_LONG, FinishReason.CONSTRAINT_ERROR, FinishReason.ERROR])
def test_a_failure_that_another_try_cannot_cure_is_final(tmp_path: Path, reason: FinishReason) -> None:
    _, engine = run_one(tmp_path, ("", reason))
    assert len(engine.requests) == 1


@given(
    max_tokens=st.integers(1, 600),
    prompt=st.integers(0, 600),
    factor=st.floats(0.5, 10),
    status=st.sampled_from(list(RowStatus)),
    attempts=st.integers(1, 5),
    longest=st.none() | st.integers(1, 700),
)
def test_a_next_try_always_differs_from_the_last(
    max_tokens: int, prompt: int, factor: float, status: RowStatus, attempts: int, longest: int | None
) -> None:
    spec = JobSpec(name="t", inputs=(), model=MODEL, retry=RetryPolicy(max_attempts=3, budget_factor=factor))
    sampling = Sampling(max_tokens=max_tokens)
    done = Completion(request_id="1", finish_reason=LENGTH, num_prompt_tokens=prompt)
    constraint = Constraint(kind=ConstraintKind.REGEX, source=f"a{{{longest}}}") if longest else None
    following = next_sampling(spec, sampling, done, status, attempts, constraint=constraint)
    if following is None:
        return
    assert attempts < 3
    assert status in (RowStatus.TRUNCATED, RowStatus.INVALID)
    assert (following.max_tokens > max_tokens) or (following.temperature > 0)
    assert following.max_tokens <= max(max_tokens, MODEL.max_model_len - prompt)


def test_seeds_come_from_the_question_not_from_its_place(tmp_path: Path) -> None:
    write_input(tmp_path / "a.parquet", {"text": ["same", "other", "same"]})
    engines = []
    for chunk_rows in (1, 3):
        job = make_job(tmp_path, [tmp_path / "a.parquet"], chunk_rows=chunk_rows, name=f"by{chunk_rows}", seed=5)
        engine = ScriptedEngine()
        for chunk in job.chunks:
            run_chunk(job, chunk.index, engine)
        engines.append([request.seed for request in engine.requests])
    first, other, again = engines[0]
    assert (first == again, first == other) == (True, False)
    assert engines[1] == [first, other]  # a chunk asks once
    assert row_seed(5, "k", 0, 0) != row_seed(6, "k", 0, 0)


def test_several_completions_are_a_list_and_ok_only_if_each_is(tmp_path: Path) -> None:
    def answer(request: Request) -> Answer:
        return "no" if request.request_id.split(":")[-2] == "1" else "yes"

    row, engine = run_one(tmp_path, answer, num_completions=3)
    assert (row.status, row.value, row.raw) == (RowStatus.OK, ["yes", "no", "yes"], ["yes", "no", "yes"])
    assert len({request.seed for request in engine.requests}) == 3

    def one_bad(request: Request) -> Answer:
        return "maybe" if request.request_id.split(":")[-2] == "1" else "yes"

    row, engine = run_one(tmp_path, one_bad, num_completions=3)
    assert (row.status, row.value, row.raw) == (RowStatus.INVALID, None, ["yes", "maybe", "yes"])
    assert row.error.startswith("completion 1: ")
    assert (len(engine.requests), len(row.attempts)) == (5, 5)


RANKED = Label(path="", text="yes", probability=0.8, margin=0.6, entropy=0.5, ranked=(("yes", 0.8), ("no", 0.2)))


@pytest.mark.parametrize(
    ("calibration", "num_ranked", "asked", "probability"),
    [({}, 2, 2, 0.8), ({"": 2.0}, 1, MAX_LABELS, 2 / 3), ({"/other": 2.0}, 2, MAX_LABELS, 0.8)],
)
def test_the_probabilities_of_a_rows_labels_are_kept_or_calibrated(
    tmp_path: Path, calibration: dict[str, float], num_ranked: int, asked: int, probability: float
) -> None:
    def answer(request: Request) -> Completion:
        return Completion(request_id=request.request_id, finish_reason=STOP, text="yes", labels=(RANKED,))

    sampling = Sampling(top_labels=num_ranked)
    row, engine = run_one(tmp_path, answer, sampling=sampling, calibration=calibration)
    assert [request.sampling.top_labels for request in engine.requests] == [asked]
    (label,) = row.labels
    assert label.probability == label.ranked[0][1] == pytest.approx(probability)
    assert label.margin == pytest.approx(2 * probability - 1)
    assert len(label.ranked) == num_ranked


def test_a_row_that_is_not_ok_has_no_labels(tmp_path: Path) -> None:
    def answer(request: Request) -> Completion:
        return Completion(request_id=request.request_id, finish_reason=STOP, text="maybe", labels=(RANKED,))

    assert run_one(tmp_path, answer)[0].labels == ()


def test_rows_that_are_not_asked_cost_no_request(tmp_path: Path) -> None:
    rows = {"text": ["a", None, "c", "", "e"], "n": [1, 1, 0, 1, 1]}
    job = make_job(tmp_path, [write_input(tmp_path / "a.parquet", rows)], chunk_rows=9, prompt_column="text", where="n")
    engine = ScriptedEngine()
    statuses = [row.status for row in run_chunk(job, 0, engine)]
    bad = RowStatus.INPUT_ERROR
    assert statuses == [RowStatus.OK, bad, RowStatus.SKIPPED, bad, RowStatus.OK]
    assert engine.prompts() == ["a", "e"]


def test_a_row_whose_own_constraint_is_broken_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    rows = {"text": ["x"] * 3, "c": ["yes|no", "(", "no|yes"]}
    job = make_job(
        tmp_path,
        [write_input(tmp_path / "a.parquet", rows)],
        prompt_column="text",
        constraint_column="c",
        constraint_column_kind=ConstraintKind.REGEX,
    )
    assert [row.status for row in run_chunk(job, 0, ScriptedEngine())] == [
        RowStatus.OK,
        RowStatus.CONSTRAINT_ERROR,
        RowStatus.OK,
    ]


def test_rows_of_mixed_kinds_are_each_held_to_their_own_constraint(tmp_path: Path) -> None:
    cells = [
        {"kind": "choice", "source": '["yes", "no"]'},
        {"kind": "regex", "source": "y.s"},
        {"kind": "ebnf", "source": 'root ::= "y" "es"'},
        {"kind": "json_schema", "source": '{"type": "integer"}'},
        {"kind": "regex", "source": "no"},
        None,
    ]
    path = write_input(tmp_path / "a.parquet", {"text": [f"row {i}" for i in range(6)], "c": cells})
    job = make_job(tmp_path, [path], chunk_rows=6, prompt_column="text", constraint_column="c")
    rows = run_chunk(job, 0, ScriptedEngine(lambda request: "3" if "3" in prompt_of(request) else "yes"))
    invalid, refused = RowStatus.INVALID, RowStatus.CONSTRAINT_ERROR
    assert [row.status for row in rows] == [*[RowStatus.OK] * 4, invalid, refused]
    assert [row.value for row in rows] == ['"yes"', '"yes"', '"yes"', "3", None, None]
    assert job.commit_part(0, rows)
    assert try_finish(job)
    assert verify(job).faults == []


class ShuffledEngine:
    """Finishes requests in an order of its own, from another thread, with a bounded number in flight."""

    def __init__(self, order: list[int]) -> None:
        self._order = deque(order)
        self._waiting: list[tuple[Request, Future[Completion]]] = []
        self.max_in_flight = 0
        self.num_asked = 0

    def __call__(self, request: Request, constraint: Constraint | None) -> Future[Completion]:
        self.num_asked += 1
        future: Future[Completion] = Future()
        self._waiting.append((request, future))
        self.max_in_flight = max(self.max_in_flight, len(self._waiting))
        return future

    def finish_one(self) -> None:
        position = self._order.popleft() % len(self._waiting)
        request, future = self._waiting.pop(position)
        text = prompt_of(request)
        is_first_try = request.request_id.endswith(":0")
        future.set_result(completion(request, (text[:2], LENGTH) if is_first_try and text.endswith("3") else text))

    def run(self, is_over: threading.Event) -> None:
        while not is_over.wait(0.0005):
            if self._waiting and self._order:
                self.finish_one()


@pytest.mark.parametrize("window", [1, 3, 100])
def test_equal_questions_of_a_chunk_are_asked_once_and_all_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(results_module, "WINDOW", window)
    texts = [None if i % 7 == 0 else f"answer {i % 5}" for i in range(40)]
    path = write_input(tmp_path / "a.parquet", {"id": range(40), "text": texts})
    fields = {"temperature": 1.0, "max_tokens": 9}
    job = make_job(tmp_path, [path], chunk_rows=40, prompt_column="text", sampling=Sampling(**fields))
    engine, is_over = ShuffledEngine([7919 * i for i in range(1000)]), threading.Event()
    thread = threading.Thread(target=engine.run, args=(is_over,))
    thread.start()
    rows = run_rows(job, job.chunks[0], engine, is_cancelled=lambda: False)
    is_over.set()
    thread.join()
    assert [row.row_index for row in rows] == list(range(40))
    assert [row.value for row in rows] == texts
    assert engine.num_asked == 6  # five texts, of which "answer 3" is cut off once
    for row in rows:
        twin = next(other for other in rows if other.value == row.value)
        assert msgspec.structs.replace(row, row_index=twin.row_index, copied_from=twin.copied_from) == twin
    assert sum(row.copied_from is None and row.value is not None for row in rows) == 5


@pytest.mark.parametrize("window", [1, 3, 100])
def test_results_are_in_row_order_whatever_order_requests_finish_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(results_module, "WINDOW", window)
    texts = [f"answer {i}" for i in range(40)]
    job = make_job(tmp_path, [write_input(tmp_path / "a.parquet", {"text": texts})], chunk_rows=25)
    engine, is_over = ShuffledEngine([7919 * i for i in range(1000)]), threading.Event()
    thread = threading.Thread(target=engine.run, args=(is_over,))
    thread.start()
    rows = [row for chunk in job.chunks for row in run_rows(job, chunk, engine, is_cancelled=lambda: False)]
    is_over.set()
    thread.join()
    assert [row.row_index for row in rows] == list(range(40))
    assert [row.value for row in rows] == texts
    assert engine.max_in_flight <= window + 1


def test_a_chunk_stops_soon_when_asked_and_gives_its_requests_back(tmp_path: Path) -> None:
    job, engine, given_back = make_job(tmp_path, chunk_rows=10), ShuffledEngine([]), []
    with pytest.raises(Interrupted):
        run_rows(job, job.chunks[0], engine, is_cancelled=lambda: len(engine._waiting) == 10, cancel=given_back.extend)
    assert sorted(given_back) == sorted(request.request_id for request, _ in engine._waiting)


def test_a_request_cancelled_in_the_engine_is_no_failed_row(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="cancelled in the engine"):
        run_one(tmp_path, ("yes", FinishReason.CANCELLED))


def test_an_engine_that_is_gone_ends_the_chunk_with_its_cause(tmp_path: Path) -> None:
    given_back: list[str] = []

    def dead(request: Request, constraint: Constraint | None) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_exception(EngineError("six deaths in ten minutes"))
        return future

    job = make_job(tmp_path)
    with pytest.raises(EngineError, match="six deaths"):
        run_rows(job, job.chunks[0], dead, is_cancelled=lambda: False, cancel=given_back.extend)


def test_progress_ends_with_the_chunks_counts(tmp_path: Path) -> None:
    job, seen = make_job(tmp_path, chunk_rows=10, where="'3' not in text", constraint=YES_NO), []
    run_rows(job, job.chunks[0], ScriptedEngine(), is_cancelled=lambda: False, on_progress=seen.append)
    assert seen[-1] == {RowStatus.OK: 9, RowStatus.SKIPPED: 1}


def test_two_runs_of_a_chunk_share_no_request_id(tmp_path: Path) -> None:
    job, engine = make_job(tmp_path), ScriptedEngine()
    run_chunk(job, 0, engine)
    run_chunk(job, 0, engine)
    assert len({request.request_id for request in engine.requests}) == 8


def test_a_struct_label_has_its_values_in_schema_order(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"reason": {"type": "string"}, "label": {"enum": ["a", "b"]}},
        "required": ["reason", "label"],
        "additionalProperties": False,
    }
    row, _ = run_one(tmp_path, '{"reason": "ü", "label": "b"}', constraint=json_schema(schema))
    assert json.dumps(row.value, ensure_ascii=False) == '{"reason": "ü", "label": "b"}'


def test_a_job_of_one_template_for_all_rows_reads_no_column(tmp_path: Path) -> None:
    path = write_input(tmp_path / "a.parquet", pa.table({"n": [1, 2, 3]}))
    engine = ScriptedEngine()
    assert len(run_chunk(make_job(tmp_path, [path], prompt_template="Say yes."), 0, engine)) == 3
    assert engine.prompts() == ["Say yes."]
