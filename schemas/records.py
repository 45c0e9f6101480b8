"""The records that cross a file, a queue or the engine's pipe, and their identities.

All are frozen, reject unknown fields when decoded and carry a format version where they are the top of a file.
Knows nothing of where they are stored or who computes them.
"""

import hashlib
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import msgspec

FORMAT_VERSION = 1
"""Version of every file that Nightmill writes; a reader refuses a newer one."""

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)  # mypy does not see that subclasses inherit these
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: frozen, keyword-only, strict when decoded."""


class RowStatus(StrEnum):
    """What became of a row; design.md section 4 defines each."""

    OK = "ok"
    CLOSED = "closed"
    INVALID = "invalid"
    TRUNCATED = "truncated"
    PROMPT_TOO_LONG = "prompt_too_long"
    INPUT_ERROR = "input_error"
    CONSTRAINT_ERROR = "constraint_error"
    FAILED = "failed"
    SKIPPED = "skipped"


class JobState(StrEnum):
    """Where a job stands, derived from its files."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    DONE_WITH_ERRORS = "done_with_errors"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Priority(StrEnum):
    """Whose chunks a worker takes first; a chunk that runs is never interrupted for another."""

    INTERACTIVE = "interactive"
    NIGHTLY = "nightly"


EXIT_CODES = {
    JobState.DONE: 0,
    JobState.DONE_WITH_ERRORS: 3,
    JobState.FAILED: 1,
    JobState.CANCELLED: 1,
}
"""Exit codes of the verbs that wait for a job's end."""


class FinishReason(StrEnum):
    """Why the engine stopped generating."""

    STOP = "stop"  # end token, stop string, or the grammar's end
    LENGTH = "length"  # max_tokens or max_model_len reached
    CLOSED = "closed"  # steered to the grammar's shortest end because the budget ran out
    PROMPT_TOO_LONG = "prompt_too_long"
    CONSTRAINT_ERROR = "constraint_error"  # cannot compile, or no token is allowed
    CANCELLED = "cancelled"
    ERROR = "error"


class ConstraintKind(StrEnum):
    """The languages a constraint can be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


class Constraint(Record):
    """A constraint's source text: JSON Schema text, a regex, an EBNF grammar, or a JSON list of strings."""

    kind: ConstraintKind
    source: str

    @property
    def key(self) -> str:
        """Sixteen hex digits that identify kind and source."""
        return short_hash(self.kind, self.source)


class Message(Record):
    """One chat message."""

    role: str
    content: str


DEFAULT_MAX_TOKENS = 256
THINKING_END = "</think>"


class Thinking(Record):
    """A free part of the output before the answer, until the model writes ``end`` or its own budget is used up."""

    max_tokens: int  # before ``end``
    end: str = THINKING_END

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not self.end:
            raise ValueError("thinking needs at least 1 token and an end that is not empty")

    @property
    def budget(self) -> int:
        """Tokens of the thinking and its end at most: a token is a byte or more."""
        return self.max_tokens + len(self.end.encode())

    @property
    def start(self) -> str:
        """What some models write first: ``<think>`` where ``</think>`` is the end."""
        return self.end.replace("/", "", 1)


class Sampling(Record):
    """How tokens are drawn. ``temperature`` 0 is greedy; 0 or 1.0 switches the filters off."""

    max_tokens: int | None = None  # thinking included; None: that of the constraint's longest text, else of a default
    thinking: Thinking | None = None  # None: the answer is all there is
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_labels: int = 0  # the most probable labels to tell of each closed set; 0: only the chosen one's probability
    force_text: bool = True  # text that the constraint forces gets the tokenizer's own tokens instead of being drawn

    def __post_init__(self) -> None:
        checks = {
            "max_tokens must be at least 1": self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens must be above {self.thinking_budget}, which thinking and its end may take": (
                self.max_tokens is None or self.thinking is None or self.max_tokens > self.thinking_budget
            ),
            "temperature must be 0 or more": self.temperature >= 0,
            "top_k must be 0 (off) or more": self.top_k >= 0,
            "top_labels must be 0 (off) or more": self.top_labels >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "repetition_penalty must be above 0": self.repetition_penalty > 0,
            "stop strings must not be empty": all(self.stop),
        }
        if failed := [text for text, holds in checks.items() if not holds]:
            raise ValueError("; ".join(failed))

    @property
    def budget(self) -> int:
        """Tokens of the output at most."""
        return self.max_tokens or DEFAULT_MAX_TOKENS + self.thinking_budget

    @property
    def thinking_budget(self) -> int:
        """Tokens of the output before the answer at most."""
        return self.thinking.budget if self.thinking else 0


LoadFormat = Literal["auto", "random", "random_skewed"]
"""Where weights come from: the model's files, or nowhere, for benchmarks; then routers may prefer some experts."""


class ModelRef(Record):
    """Everything about the model that changes an answer."""

    name: str  # what the user typed: a demo alias, a local path or a hub name
    digest: str  # schemas.model_files.model_digest
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantization: Literal["none", "fp8"] = "none"
    revision: str | None = None
    load_format: LoadFormat = "auto"
    max_model_len: int = 4096
    deterministic: bool = False  # computed so that a row's bits do not depend on what shares its batch

    @property
    def queue(self) -> str:
        """The Celery queue of the workers that can serve this model."""
        name = f"nightmill.{self.digest}.{self.dtype}.{self.quantization}.{self.max_model_len}"
        return f"{name}.deterministic" if self.deterministic else name


class ChatEncoding(StrEnum):
    """How a conversation becomes a prompt: by the checkpoint's template, or as a family without one is trained on."""

    TEMPLATE = "template"
    DEEPSEEK_V4 = "deepseek_v4"
    DEEPSEEK_V41 = "deepseek_v41"


class InputFormat(StrEnum):
    """What an input file is made of."""

    PARQUET = "parquet"
    ARROW = "arrow"
    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    OPENAI_BATCH = "openai_batch"  # JSON lines of custom_id, method, url and body


class InputFile(Record):
    """One input shard as it was at submit."""

    uri: str
    size_bytes: int
    modified: str  # modification time in ns, or the object's etag
    num_rows: int
    partition: tuple[tuple[str, str | None], ...] = ()  # hive columns of the directories above it, as text
    format: InputFormat = InputFormat.PARQUET


class RetryPolicy(Record):
    """How often a row may be tried and what changes: truncated rows get a larger budget, invalid ones another seed."""

    max_attempts: int = 3
    budget_factor: float = 2.0


class JobSpec(Record):
    """Everything that changes the answer of a job; written once to ``job.json``."""

    name: str
    inputs: tuple[InputFile, ...]
    model: ModelRef
    prompt_template: str | None = None  # Jinja2 over the row's columns; None: the column(s) as they are
    prompt_column: str | None = None
    messages_column: str | None = None
    body_column: str | None = None  # whole requests: bodies of the OpenAI API, each with what it says of its answer
    chat_encoding: ChatEncoding = ChatEncoding.TEMPLATE
    system: str | None = None
    chat: bool = True  # False: plain completion, no chat template
    constraint: Constraint | None = None
    constraint_column: str | None = None
    constraint_column_kind: ConstraintKind | None = None
    sampling: Sampling = Sampling()
    num_completions: int = 1
    seed: int = 0
    retry: RetryPolicy = RetryPolicy()
    output_column: str = "label"
    gold_column: str | None = None
    columns: tuple[str, ...] | None = None  # input columns kept in the output; None: all
    where: str | None = None  # rows for which this expression is false are `skipped`
    limit: int | None = None
    calibration: dict[str, float] = {}  # temperatures of the labels' probabilities, by path; see Calibration
    refresh: bool = False  # ask again what an earlier job has answered
    slot: str | None = None  # when the schedule of the job's name was due: each night is a job of its own
    format_version: int = FORMAT_VERSION

    @property
    def job_id(self) -> str:
        """The job's name and twelve hex digits over the whole spec: the same spec is the same job."""
        return f"{self.name}-{short_hash(encode_json(self).decode(), digits=12)}"


class Calibration(Record):
    """The file that ``jobs.calibrate`` writes: a temperature for the labels at each path, ``*`` for an item's index."""

    temperatures: dict[str, Annotated[float, msgspec.Meta(gt=0)]]
    job_id: str  # whose labels, compared with its column of gold labels, they were fitted to
    gold_column: str
    format_version: int = FORMAT_VERSION


class Chunk(Record):
    """A run of rows of one input file: the unit of work and of commit."""

    index: int
    input_index: int
    start_row: int
    num_rows: int


class Request(Record):
    """One generation, as it crosses the engine's pipe. Exactly one of text, messages and token_ids is set."""

    request_id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    data_spans: tuple[tuple[int, int], ...] = ()  # of ``text``: there the name of a special token is text
    has_start: bool = False  # ``text`` begins with the model's start token by itself
    constraint_key: str | None = None
    sampling: Sampling = Sampling()
    seed: int = 0
    golden_token_ids: tuple[int, ...] = ()  # the output, whatever would be drawn: to learn its log-probabilities

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.text, self.messages, self.token_ids)) != 1:
            raise ValueError("a request needs exactly one of text, messages and token_ids")


class Label(Record):
    """One label of an output, chosen from a closed set, with its probability; ``engine.labels`` says of what.

    What compares it with the others of its set is there only if asked for.
    """

    path: str  # JSON pointer; "" is the whole output
    text: str  # a string as it is, anything else as JSON
    probability: float
    margin: float | None = None  # by how much the most probable label leads
    entropy: float | None = None  # of the distribution over the set, in nats
    ranked: tuple[tuple[str, float], ...] = ()  # labels and probabilities, the most probable first


class Completion(Record):
    """What the engine returns for a request: always one per request, failures included."""

    request_id: str
    finish_reason: FinishReason
    text: str = ""  # the answer
    reasoning: str | None = None  # what was written before it; None: no thinking was asked for
    num_reasoning_tokens: int = 0  # of the output tokens, the first ones, with the end of the thinking
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None  # of each output token, after mask and before temperature
    labels: tuple[Label, ...] = ()
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_draft_tokens: int = 0  # guessed and verified
    num_accepted_tokens: int = 0  # of these, drawn as guessed
    seconds: float = 0.0  # from admission to finish
    first_token_s: float | None = None  # from admission to the first token that was drawn, not forced


class Attempt(Record):
    """One try at a row: what came of it and what it was given."""

    status: RowStatus
    finish_reason: FinishReason
    seed: int
    max_tokens: int
    num_output_tokens: int
    temperature: float = 0.0


class RowResult(Record):
    """A row's final state, as a part file holds it. ``row_index`` counts from the start of the input file."""

    row_index: int
    status: RowStatus
    raw: str | list[str] | None = None  # a list, as ``value``, if the job asks for several completions
    reasoning: str | list[str | None] | None = None
    value: Any = None
    error: str | None = None
    finish_reason: FinishReason | None = None
    attempts: tuple[Attempt, ...] = ()
    labels: tuple[Label, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0  # among the output tokens
    num_draft_tokens: int = 0  # as a completion counts them, over all of them
    num_accepted_tokens: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None  # of the first try
    content_key: str | None = None  # of its prompt: equal keys are equal questions; None: it was not asked
    copied_from: str | None = None  # the job that asked the same before; None: it was asked for this row


def short_hash(*parts: str, digits: int = 16) -> str:
    """Hash text parts, each ended by a zero byte, to ``digits`` hex digits of SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:digits]


def row_seed(job_seed: int, content_key: str, completion_index: int, attempt: int) -> int:
    """Derive a row's 63-bit seed; equal prompts share it, whatever chunk or worker runs them."""
    return int(short_hash(str(job_seed), content_key, str(completion_index), str(attempt)), 16) >> 1


def encode_json(record: Any) -> bytes:
    """Encode a record as JSON with its fields in the order of the class."""
    return msgspec.json.encode(record)


def decode_json(data: bytes | str, record_type: type[T]) -> T:
    """Decode JSON into a record. Raises msgspec.ValidationError naming the path of what is wrong."""
    return msgspec.json.decode(data, type=record_type)
