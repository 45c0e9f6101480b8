"""What a job will take: tokens, time, devices, disk; from footers, a sample of rows, and rates that were measured.

A rate comes from a rehearsal (jobs.rehearsal), else from earlier jobs of this jobs root; without either, time is
not known and that is said. Knows no engine and writes nothing.
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from jobs.job import SUCCESS_FILE, Success
from jobs.ledger import Ledger, scope_of
from jobs.prompts import Prompt, PromptBuilder, Refusal
from jobs.provenance import Throughput
from jobs.source import ChunkReader, python_rows
from jobs.store import Store, local_path, open_store
from schemas.constraints import max_bytes
from schemas.errors import ModelError, NightmillError, NotFound, PromptError
from schemas.model_files import resolve_model
from schemas.records import Chunk, JobSpec
from schemas.settings import Settings
from schemas.tokenizer import TokenCounter

if TYPE_CHECKING:
    from jobs.api import Prepared

MAX_LOOKED_AT = 100_000  # rows whose prompts are made: some seconds
MAX_HELD = 10_000  # prompts in memory
NUM_TOKENISED = 200
NUM_PLACES = 10  # of the input that they come from
BLOCK_TOKENS = 16  # the prefix cache shares whole blocks
NUM_HISTORY = 5  # jobs
MIN_HISTORY_ROWS = 50  # a shorter job says little
SAME_QUESTION_SPREAD, OTHER_QUESTION_SPREAD = 0.25, 1.0
"""By how much a rate of an earlier job may be off; that of another question is little more than a guess."""

QUESTION_FIELDS = ("prompt_template", "prompt_column", "messages_column", "body_column", "system", "constraint_column")
RESULT_BYTES = 160  # of a row's meta columns in parts and output together, compressed


@dataclass(frozen=True)
class RowSample:
    """What the rows of the input, or many of them, would ask. Token counts are None where no tokenizer can be read."""

    num_rows: int
    statuses: Counter[str]  # of rows that would not be asked, by what they would come back as
    num_repeated: int  # rows that ask what a row before them asks
    num_known: int  # rows that the ledger has an answer for
    prompt_tokens: tuple[int, ...] | None  # of some of the rows that would be asked, sorted
    prefix_tokens: int  # with which all of these begin
    problem: str | None = None

    @property
    def num_asked(self) -> int:
        """Rows that the model would be asked about."""
        return self.num_rows - self.statuses.total() - self.num_known - self.num_repeated

    @property
    def asked_share(self) -> float:
        """Of all rows looked at."""
        return self.num_asked / self.num_rows if self.num_rows else 0.0


@dataclass(frozen=True)
class Rate:
    """How fast one worker is: computed tokens a second (prompts without what the cache had, and outputs).

    ``spread`` 0.2 means that the true rate is likely between 1 / 1.2 and 1.2 times this one.
    """

    source: str
    hardware: str
    tokens_per_s: float
    output_tokens: float  # of a row, all its completions together, on average
    cached_share: float  # of prompt tokens
    spread: float
    devices_per_worker: float = 1.0
    start_s: float = 0.0  # of a worker that has to be started
    fixed_s: float = 0.0  # of a job, however many rows: the first batch, the last one, the output files
    bytes_per_row: float | None = None  # of the output files
    num_answered: int = 0  # rows that are in the ledger since, for they were asked to measure


@dataclass(frozen=True)
class Forecast:
    """The whole. Fields are None where nothing that was measured tells them."""

    num_rows: int
    num_asked: int
    sample: RowSample
    max_output_tokens: int
    num_workers: int
    disk_bytes: int
    free_bytes: int | None
    rate: Rate | None = None
    eta_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    device_hours: float | None = None


def forecast(
    prepared: "Prepared", settings: Settings, sample: RowSample, *, num_workers: int, rate: Rate | None = None
) -> Forecast:
    """Put a sample together with ``rate``, or with what earlier jobs measured.

    ``num_workers`` serve the job's queue now; with none, one will be started.
    """
    spec = prepared.spec
    rate = rate or rate_of_history(spec, open_store(settings.jobs_root), sample)
    num_answered = 0 if rate is None or spec.refresh else rate.num_answered
    num_asked = max(0, round(prepared.num_rows * sample.asked_share) - num_answered)
    plain = Forecast(
        num_rows=prepared.num_rows,
        num_asked=num_asked,
        sample=sample,
        max_output_tokens=bound_output(spec),
        num_workers=num_workers,
        disk_bytes=_disk_bytes(prepared, rate),
        free_bytes=_free_bytes(prepared.output or settings.jobs_root),
        rate=rate,
    )
    if rate is None or sample.prompt_tokens is None:
        return plain
    prompt_tokens = float(np.mean(sample.prompt_tokens)) if sample.prompt_tokens else 0.0
    num_tokens = num_asked * (prompt_tokens * (1 - rate.cached_share) + rate.output_tokens)
    busy_s = num_tokens / rate.tokens_per_s / max(1, num_workers)
    fixed_s = rate.fixed_s + (0.0 if num_workers else rate.start_s) if num_asked else 0.0
    return replace(
        plain,
        eta_s=fixed_s + busy_s,
        low_s=(fixed_s + busy_s) / (1 + rate.spread),
        high_s=(fixed_s + busy_s) * (1 + rate.spread),
        device_hours=busy_s * max(1, num_workers) * rate.devices_per_worker / 3600,
    )


def sample_rows(prepared: "Prepared", settings: Settings) -> RowSample:
    """See what rows would ask: all of them, or ``MAX_LOOKED_AT`` from places all over the input; tokenise a few."""
    spec = prepared.spec
    statuses: Counter[str] = Counter()
    asked: list[Prompt] = []
    num_rows = num_repeated = num_known = 0
    questions = Questions(prepared, settings)
    for piece in choose_pieces(prepared.plan.chunks, MAX_LOOKED_AT):
        found = questions.look(questions.read(piece, questions.columns))
        num_rows += len(found.built)
        statuses.update(str(item.status) for item in found.built if isinstance(item, Refusal))
        num_repeated += found.num_repeated
        num_known += found.num_known
        asked += [prompt for prompt in found.built if isinstance(prompt, Prompt) and prompt.content_key in found.new]
        asked = asked[:: -(-len(asked) // MAX_HELD)] if len(asked) > MAX_HELD else asked
    questions.close()
    shown = asked[:: -(-len(asked) // NUM_TOKENISED)] if asked else []
    try:
        token_ids = _encode(spec, shown)
    except (ModelError, PromptError) as error:
        return RowSample(num_rows, statuses, num_repeated, num_known, None, 0, str(error))
    lengths = tuple(sorted(map(len, token_ids)))
    return RowSample(num_rows, statuses, num_repeated, num_known, lengths, _shared_start(token_ids))


class Look(NamedTuple):
    """What some rows ask, in order, and the keys of the questions that are neither known nor were met before."""

    built: list[Prompt | Refusal]
    new: frozenset[str]
    num_repeated: int
    num_known: int


class Questions:
    """Reads rows of a job that is not submitted yet and remembers what they asked; owned by one reader."""

    def __init__(self, prepared: "Prepared", settings: Settings) -> None:
        self._spec, self._schema = prepared.spec, prepared.plan.input_schema
        self._builder = PromptBuilder(self._spec, self._schema)
        self._ledger = None if self._spec.refresh else Ledger(open_store(settings.jobs_root), self._spec)
        self._met: set[str] = set()
        self._reader = ChunkReader()
        self.columns = self._builder.columns

    def read(self, piece: Chunk, columns: Sequence[str]) -> list[pa.RecordBatch]:
        """Read a piece of a chunk."""
        file = self._spec.inputs[piece.input_index]
        return self._reader.read(file, self._schema, piece.start_row, piece.num_rows, columns)

    def look(self, batches: Sequence[pa.RecordBatch]) -> Look:
        """See what the rows ask."""
        built = [self._builder.build(row) for batch in batches for row in python_rows(batch)]
        keys = [item.content_key for item in built if isinstance(item, Prompt)]
        unmet = list(dict.fromkeys(key for key in keys if key not in self._met))
        self._met.update(unmet)
        positions = self._ledger.find(unmet).positions.tolist() if self._ledger else []
        known = {unmet[position] for position in positions}
        new = frozenset(unmet) - known
        return Look(built, new, num_repeated=len(keys) - len(unmet), num_known=len(known))

    def close(self) -> None:
        """Close the input files."""
        self._reader.close()


def choose_pieces(chunks: Sequence[Chunk], num_rows: int, num_places: int = NUM_PLACES) -> list[Chunk]:
    """Cut ``num_rows`` rows out of the chunks, in order, from places that are evenly spread; each row once."""
    total = sum(chunk.num_rows for chunk in chunks)
    if total <= num_rows:
        return list(chunks)
    num_skipped = total - num_rows
    taken = [place * num_rows // num_places for place in range(num_places + 1)]
    starts = [taken[place] + place * num_skipped // num_places for place in range(num_places)]
    ends = [start + taken[place + 1] - taken[place] for place, start in enumerate(starts)]
    pieces, offset = [], 0
    for chunk in chunks:
        for start, end in zip(starts, ends, strict=True):
            first, last = max(start, offset), min(end, offset + chunk.num_rows)
            if first < last:
                start_row = chunk.start_row + first - offset
                pieces.append(msgspec.structs.replace(chunk, start_row=start_row, num_rows=last - first))
        offset += chunk.num_rows
    return pieces


def bound_output(spec: JobSpec) -> int:
    """The most tokens that an answer can have: a token is at least one byte of the constraint's longest text."""
    longest = max_bytes(spec.constraint) if spec.constraint else None
    bound = None if longest is None else longest + spec.sampling.thinking_budget
    return min(filter(None, (bound, spec.sampling.max_tokens)), default=spec.sampling.budget)


def rate_of_history(spec: JobSpec, root: Store, sample: RowSample) -> Rate | None:
    """What the last jobs of this model measured: those that asked the same question if there are any."""
    found = [(other, success) for other, success in _read_history(root) if other.model.queue == spec.model.queue]
    same = [(other, success) for other, success in found if _asks_the_same(other, spec)]
    latest = sorted(same or found, key=lambda pair: pair[1].finished, reverse=True)[:NUM_HISTORY]
    if not latest or (first := latest[0][1].throughput) is None:
        return None
    alike = [s for _, s in latest if s.throughput and s.throughput.hardware == first.hardware]
    rates = [rate for s in alike if (rate := _speed(s))]
    if not rates:
        return None
    middle = float(np.median(rates))
    seen_spread = max(max(rates) / middle, middle / min(rates)) - 1
    whose = "that asked the same" if same else "of this model that asked something else"
    output_tokens, cached_share = (
        first.num_output_tokens / first.num_asked,
        first.num_cached_tokens / max(1, first.num_prompt_tokens),
    )
    if not same:
        output_tokens = min(output_tokens, bound_output(spec))
        shared = sample.prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        cached_share = shared / float(np.mean(sample.prompt_tokens)) if sample.prompt_tokens else 0.0
    return Rate(
        source=f"the last {len(rates)} jobs {whose}" if len(rates) > 1 else f"the last job {whose}",
        hardware=first.hardware,
        tokens_per_s=middle,
        output_tokens=output_tokens,
        cached_share=float(cached_share),
        spread=max(seen_spread, SAME_QUESTION_SPREAD if same else OTHER_QUESTION_SPREAD),
        devices_per_worker=first.num_devices / first.num_workers,
        start_s=first.start_s,
        bytes_per_row=_bytes_per_row(latest[0][1]) if same else None,
    )


def computed_tokens(throughput: Throughput) -> int:
    """Tokens that were computed: prompts without what the prefix cache had, and outputs."""
    return throughput.num_prompt_tokens - throughput.num_cached_tokens + throughput.num_output_tokens


def _speed(success: Success) -> float | None:
    """Computed tokens a second and worker."""
    throughput = success.throughput
    if throughput is None or not throughput.busy_s or not (tokens := computed_tokens(throughput)):
        return None
    return tokens / throughput.busy_s / throughput.num_workers


def _bytes_per_row(success: Success) -> float | None:
    return sum(file.size_bytes for file in success.outputs) / success.num_rows if success.num_rows else None


def _read_history(root: Store) -> Iterator[tuple[JobSpec, Success]]:
    from jobs.job import Job

    for job_id in Job.list_ids(root):
        try:
            success = msgspec.json.decode(root.read(f"{job_id}/{SUCCESS_FILE}"), type=Success)
            if success.throughput is not None and success.throughput.num_asked >= MIN_HISTORY_ROWS:
                yield Job.open(root, job_id).spec, success
        except (NotFound, NightmillError, msgspec.MsgspecError):
            continue  # it runs, or another version wrote it: no measurement


def _asks_the_same(first: JobSpec, second: JobSpec) -> bool:
    return scope_of(first) == scope_of(second) and all(
        getattr(first, name) == getattr(second, name) for name in QUESTION_FIELDS
    )


def _encode(spec: JobSpec, prompts: Sequence[Prompt]) -> list[list[int]]:
    counter = TokenCounter(resolve_model(spec.model.name, spec.model.revision))
    return [
        counter.encode_text(prompt.text or "") if prompt.messages is None else counter.encode_messages(prompt.messages)
        for prompt in prompts
    ]


def _shared_start(token_ids: Sequence[list[int]]) -> int:
    if len(token_ids) < 2:
        return 0
    low, high = min(token_ids), max(token_ids)  # the extremes of an order differ earliest
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False)))


def _disk_bytes(prepared: "Prepared", rate: Rate | None) -> int:
    """Of parts and output files: the input's kept columns once more, and the results twice."""
    spec, num_rows = prepared.spec, prepared.num_rows
    if rate is not None and rate.bytes_per_row is not None:
        return round(num_rows * (rate.bytes_per_row + RESULT_BYTES))
    num_input_rows = max(1, sum(file.num_rows for file in spec.inputs))
    num_columns = len(prepared.plan.input_schema.names)
    kept_share = 1.0 if spec.columns is None else len(spec.columns) / max(1, num_columns)
    input_bytes = sum(file.size_bytes for file in spec.inputs) * num_rows / num_input_rows
    return round(input_bytes * kept_share + num_rows * (RESULT_BYTES + 2 * bound_output(spec)))


def _free_bytes(location: str) -> int | None:
    """Free space where a local location is or will be; None for a bucket."""
    if (path := local_path(location)) is None:
        return None
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free
