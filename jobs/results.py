"""Rows of a chunk to validated results: window, statuses, retries. Knows no engine but through ``submit``.

``ok`` means: ended by itself and an independent validator accepted it. Every try is recorded, nothing is repaired.
"""

import functools
import math
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from jobs.arrow_types import AS_WRITTEN, DoesNotFit, LabelColumn, completion_column
from jobs.confidence import calibrate, engine_sampling
from jobs.job import Job
from jobs.prompts import Prompt, PromptBuilder, Refusal
from jobs.reproducer import keep_reproducer
from jobs.source import ChunkReader
from jobs.spill import Spill
from schemas.constraints import Validator, make_validator, max_bytes
from schemas.errors import Interrupted
from schemas.records import (
    DEFAULT_MAX_TOKENS,
    Attempt,
    Chunk,
    Completion,
    Constraint,
    FinishReason,
    JobSpec,
    Request,
    RowResult,
    RowStatus,
    Sampling,
    row_seed,
)

Submit = Callable[[Request, Constraint | None], Future[Completion]]
Progress = Callable[[Mapping[RowStatus, int]], None]
Keep = Callable[[int, Request, Constraint | None, str], None]

WINDOW = 1024
"""Requests of one chunk in flight: two chunks keep 2,048 waiting, more than any batch holds."""
TICK_S = 0.25
RETRY_TEMPERATURE = 0.3
"""A greedy row that failed its schema would fail the same way again, so its retries draw a little."""
STATUS_OF_FAILURE = {
    FinishReason.LENGTH: RowStatus.TRUNCATED,
    FinishReason.PROMPT_TOO_LONG: RowStatus.PROMPT_TOO_LONG,
    FinishReason.CONSTRAINT_ERROR: RowStatus.CONSTRAINT_ERROR,
    FinishReason.ERROR: RowStatus.FAILED,
}
LABELLED = (RowStatus.OK, RowStatus.CLOSED)
SEVERITY = dict.fromkeys(RowStatus, 2) | {RowStatus.OK: 0, RowStatus.CLOSED: 1}


def run_rows(
    job: Job,
    chunk: Chunk,
    submit: Submit,
    *,
    is_cancelled: Callable[[], bool],
    on_progress: Progress = lambda counts: None,
    cancel: Callable[[list[str]], None] = lambda request_ids: None,
    reader: ChunkReader | None = None,
    spill: Spill | None = None,
    skip: Collection[int] = (),
) -> list[RowResult]:
    """Label the rows of a chunk, in order, one result each, but for those to ``skip``.

    ``submit`` may block while the engine is full. ``on_progress`` gets this chunk's counts, a few times a second.
    Pass one ``reader`` to all chunks of a worker, so that a row group is decoded once. Rows that ``spill`` has are not
    asked again, and those that finish are added to it.
    Raises Interrupted soon after ``is_cancelled()`` turns true, and whatever a future raises (the engine is gone);
    requests in flight are given to ``cancel`` then.
    """
    builder = PromptBuilder(job.spec, job.input_schema)
    rows = job.read_rows(chunk, builder.columns, reader)

    def keep(row_index: int, request: Request, constraint: Constraint | None, error: str) -> None:
        keep_reproducer(job, chunk, row_index, request=request, constraint=constraint, error=error, reader=reader)

    wanted = ((index, builder.build(row)) for index, row in enumerate(rows, chunk.start_row) if index not in skip)
    return _ChunkRun(job, submit, cancel, spill, keep).run(wanted, is_cancelled, on_progress)


class _Outcome(NamedTuple):
    """What one completion came to."""

    completion: Completion
    status: RowStatus
    value: Any
    error: str | None


class _Row:
    """A row on its way; owned by its _ChunkRun."""

    def __init__(self, index: int, prompt: Prompt, num_completions: int) -> None:
        self.index = index
        self.prompt = prompt
        self.attempts: list[list[Attempt]] = [[] for _ in range(num_completions)]
        self.outcomes: dict[int, _Outcome] = {}
        self.seconds = 0.0
        self.first_token_s: float | None = None


class _ChunkRun:
    """What is in flight and what is done of one chunk. One thread runs it; futures only feed its queue."""

    def __init__(
        self, job: Job, submit: Submit, cancel: Callable[[list[str]], None], spill: Spill | None, keep: Keep
    ) -> None:
        self._job_id = job.job_id
        self._spec = spec = job.spec
        self._sampling = engine_sampling(spec)
        self._keep_reproducer = keep
        self._spill = spill
        self._spilled = spill.read() if spill else {}
        self._submit = submit
        self._cancel = cancel
        self._column = completion_column(spec)
        self._name = f"{job.job_id}:{uuid.uuid4().hex[:8]}"  # a second delivery may run in the same engine
        self._checked: dict[tuple[Constraint | None, str], tuple[Any, str | None]] = {}
        self._in_flight: dict[str, tuple[_Row, int, Request]] = {}
        self._finished: queue.SimpleQueue[tuple[str, Future[Completion]]] = queue.SimpleQueue()
        self._twins: dict[str, list[int]] = {}  # by content key: the rows that wait for the first to ask the same
        self._answered: dict[str, RowResult] = {}
        self._results: list[RowResult] = []
        self._counts: Counter[RowStatus] = Counter()

    def run(
        self,
        rows: Iterable[tuple[int, Prompt | Refusal]],
        is_cancelled: Callable[[], bool],
        on_progress: Progress,
    ) -> list[RowResult]:
        """Start rows as the window allows and collect what finishes, until all are done."""
        self._is_cancelled, self._on_progress, self._next_tick = is_cancelled, on_progress, time.monotonic()
        try:
            for index, prompt in rows:
                self._start(index, prompt)
                self._collect(WINDOW)
            self._collect(0)
        except BaseException:
            self._cancel(list(self._in_flight))
            raise
        on_progress(dict(self._counts))
        return sorted(self._results, key=lambda result: result.row_index)

    def _start(self, index: int, prompt: Prompt | Refusal) -> None:
        if isinstance(prompt, Refusal):
            self._end(RowResult(row_index=index, status=prompt.status, error=prompt.error))
            return
        key = prompt.content_key  # the seed comes from it too: equal questions have equal answers
        if (spilled := self._spilled.pop(index, None)) is not None:
            self._answered[key] = spilled
            self._end(spilled)
            return
        if (answered := self._answered.get(key)) is not None:
            self._end(self._copy(answered, index))
            return
        if key in self._twins:
            self._twins[key].append(index)
            return
        self._twins[key] = []
        row = _Row(index, prompt, self._spec.num_completions)
        sampling = first_sampling(self._spec, prompt.sampling or self._sampling, prompt.constraint)
        for completion_index in range(self._spec.num_completions):
            self._ask(row, completion_index, sampling)

    def _ask(self, row: _Row, completion_index: int, sampling: Sampling) -> None:
        attempt = len(row.attempts[completion_index])
        request = Request(
            request_id=f"{self._name}:{row.index}:{completion_index}:{attempt}",
            text=row.prompt.text,
            messages=row.prompt.messages,
            data_spans=row.prompt.data_spans,
            has_start=row.prompt.has_start,
            constraint_key=row.prompt.constraint_key,
            sampling=sampling,
            seed=row_seed(self._spec.seed, row.prompt.content_key, completion_index, attempt),
        )
        self._in_flight[request.request_id] = (row, completion_index, request)
        future = self._submit(request, row.prompt.constraint)
        future.add_done_callback(lambda done: self._finished.put((request.request_id, done)))

    def _collect(self, max_in_flight: int) -> None:
        """Take in what has finished; wait while more than ``max_in_flight`` requests are out."""
        self._tick()
        while self._in_flight:
            is_full = len(self._in_flight) > max_in_flight
            try:
                request_id, future = self._finished.get(block=is_full, timeout=TICK_S)
            except queue.Empty:
                if not is_full:
                    return
            else:
                self._take(*self._in_flight.pop(request_id), future.result())
            self._tick()

    def _tick(self) -> None:
        if (now := time.monotonic()) < self._next_tick:
            return
        self._next_tick = now + TICK_S
        if self._is_cancelled():
            raise Interrupted(f"{self._name}: stopped with {len(self._results)} rows done and not committed")
        self._on_progress(dict(self._counts))

    def _take(self, row: _Row, completion_index: int, request: Request, completion: Completion) -> None:
        if completion.finish_reason is FinishReason.CANCELLED:  # somebody stops the engine: no row's fault
            raise Interrupted(f"{request.request_id} was cancelled in the engine")
        outcome = self._judge(row, completion)
        if outcome.status is RowStatus.FAILED:
            self._keep_reproducer(row.index, request, row.prompt.constraint, outcome.error or "")
        row.seconds += completion.seconds
        if row.first_token_s is None:
            row.first_token_s = completion.first_token_s
        attempts = row.attempts[completion_index]
        attempts.append(_attempt(request, outcome))
        sampling = next_sampling(
            self._spec,
            request.sampling,
            completion,
            outcome.status,
            len(attempts),
            constraint=row.prompt.constraint,
        )
        if sampling is not None:
            self._ask(row, completion_index, sampling)
            return
        row.outcomes[completion_index] = outcome
        if len(row.outcomes) == len(row.attempts):
            result = _row_result(row, self._spec)
            if self._spill is not None:
                self._spill.add(result)
            self._answered[row.prompt.content_key] = result
            self._end(result)
            for index in self._twins.pop(row.prompt.content_key):
                self._end(self._copy(result, index))

    def _copy(self, result: RowResult, index: int) -> RowResult:
        """The answer of a row that asked the same first."""
        return msgspec.structs.replace(result, row_index=index, copied_from=self._job_id)

    def _end(self, result: RowResult) -> None:
        self._results.append(result)
        self._counts[result.status] += 1

    def _judge(self, row: _Row, completion: Completion) -> _Outcome:
        """Give a completion its status: design.md section 4's table."""
        reason = completion.finish_reason
        if reason in STATUS_OF_FAILURE:
            error = completion.error or f"the engine ended it with {reason.value}"
            return _Outcome(completion, STATUS_OF_FAILURE[reason], None, error)
        value, fault = self._check(row.prompt, completion.text)
        if fault is not None:
            return _Outcome(completion, RowStatus.INVALID, None, fault)
        return _Outcome(completion, RowStatus.CLOSED if reason is FinishReason.CLOSED else RowStatus.OK, value, None)

    def _check(self, prompt: Prompt, text: str) -> tuple[Any, str | None]:
        """Return the label, or None and why the text is none. Labels repeat, so a text is validated once a chunk."""
        if prompt.read is not None:
            try:
                text = prompt.read(text)
            except ValueError as error:
                return None, str(error)
        constraint = prompt.checked or prompt.constraint
        key = (constraint, text)
        if key not in self._checked:
            self._checked[key] = _check_text(constraint, self._column, text)
        return self._checked[key]


def _check_text(constraint: Constraint | None, column: LabelColumn, text: str) -> tuple[Any, str | None]:
    if constraint is None:
        return (text, None) if text.strip() else (None, "the model ended at once, without any text")
    value, error = _validator(constraint).check(text)
    if error is not None:
        return None, error
    try:
        return column.fit(text if column is AS_WRITTEN else value), None
    except DoesNotFit as misfit:
        return None, f"valid, but not as a label of type {column.type}: {misfit}"


@functools.lru_cache(maxsize=256)
def _validator(constraint: Constraint) -> Validator:
    """Making one costs more than a chunk of tiny rows."""
    return make_validator(constraint)


def first_sampling(spec: JobSpec, sampling: Sampling, constraint: Constraint | None) -> Sampling:
    """Give a row that was told no budget room for the longest text of its constraint, if there is one."""
    if sampling.max_tokens is not None:
        return sampling
    longest = max_bytes(constraint) if constraint else None
    enough = DEFAULT_MAX_TOKENS if longest is None else longest + 1  # a token is a byte or more, and one ends the text
    enough += sampling.thinking_budget
    return msgspec.structs.replace(sampling, max_tokens=min(enough, spec.model.max_model_len))


def next_sampling(
    spec: JobSpec,
    sampling: Sampling,
    completion: Completion,
    status: RowStatus,
    num_attempts: int,
    *,
    constraint: Constraint | None,
) -> Sampling | None:
    """Say what a failed try gets next, or None if nothing can help or the tries are used up.

    A truncated row gets what the longest text of its ``constraint`` can need, where there is room for that.
    """
    if num_attempts >= spec.retry.max_attempts:
        return None
    if status is RowStatus.TRUNCATED:
        room = spec.model.max_model_len - completion.num_prompt_tokens
        longest = max_bytes(constraint) if constraint else None
        if longest is not None and longest + sampling.thinking_budget < room:
            max_tokens = longest + sampling.thinking_budget + 1
        else:
            max_tokens = min(math.ceil(sampling.budget * spec.retry.budget_factor), room)
        if max_tokens > sampling.budget:  # the same budget would end at the same place
            return msgspec.structs.replace(sampling, max_tokens=max_tokens)
    if status is RowStatus.INVALID:
        return msgspec.structs.replace(sampling, temperature=sampling.temperature or RETRY_TEMPERATURE)
    return None


def _attempt(request: Request, outcome: _Outcome) -> Attempt:
    return Attempt(
        status=outcome.status,
        finish_reason=outcome.completion.finish_reason,
        seed=request.seed,
        max_tokens=request.sampling.budget,
        temperature=request.sampling.temperature,
        num_output_tokens=len(outcome.completion.token_ids),
    )


def _row_result(row: _Row, spec: JobSpec) -> RowResult:
    """Put a row's completions together; with several, it is ``ok`` only if each is, and has lists for values."""
    outcomes = [row.outcomes[index] for index in range(len(row.attempts))]
    is_single = len(outcomes) == 1
    worst_index, worst = max(enumerate(outcomes), key=lambda item: (SEVERITY[item[1].status], -item[0]))
    values = [outcome.value for outcome in outcomes]
    texts = [outcome.completion.text for outcome in outcomes]
    reasoning = [outcome.completion.reasoning for outcome in outcomes]
    return RowResult(
        row_index=row.index,
        status=worst.status,
        raw=texts[0] if is_single else texts,
        reasoning=reasoning[0] if is_single else reasoning,
        value=(values[0] if is_single else values) if worst.status in LABELLED else None,
        error=worst.error if is_single or worst.error is None else f"completion {worst_index}: {worst.error}",
        finish_reason=worst.completion.finish_reason,
        attempts=tuple(attempt for attempts in row.attempts for attempt in attempts),
        labels=calibrate(worst.completion.labels, spec) if is_single and worst.status in LABELLED else (),
        num_prompt_tokens=worst.completion.num_prompt_tokens,
        num_cached_tokens=worst.completion.num_cached_tokens,
        num_output_tokens=sum(len(outcome.completion.token_ids) for outcome in outcomes),
        num_reasoning_tokens=sum(outcome.completion.num_reasoning_tokens for outcome in outcomes),
        num_draft_tokens=sum(outcome.completion.num_draft_tokens for outcome in outcomes),
        num_accepted_tokens=sum(outcome.completion.num_accepted_tokens for outcome in outcomes),
        seconds=row.seconds,
        first_token_s=row.first_token_s,
        content_key=row.prompt.content_key,
    )
