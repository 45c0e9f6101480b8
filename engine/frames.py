"""The frames of the pipe between client and rank: four bytes of length (big endian), then msgpack with a ``type`` tag.

Frozen format: a change bumps PROTOCOL_VERSION, and both sides refuse another's version. Knows no sockets.
"""

import msgspec

from schemas.records import Completion, Constraint, ModelRef, Record, Request

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 2**30


class Start(Record, tag=True):
    """Client's first frame: what to load. ``engine`` is EngineSettings as a plain mapping."""

    protocol_version: int
    model: ModelRef
    engine: dict[str, object]
    rank: int = 0
    rendezvous: str = ""  # a file that does not exist yet, where the ranks of an engine meet


class AddConstraint(Record, tag=True):
    """Make a constraint known under its key before the first request that names it."""

    constraint: Constraint


class Submit(Record, tag=True):
    """Requests to run; never more in flight than the rank's credits."""

    requests: tuple[Request, ...]


class Announce(Record, tag=True):
    """So many batches of requests have gone to whichever rank; those that share experts step while one has work."""

    num_batches: int


class Cancel(Record, tag=True):
    """End these requests with finish reason ``cancelled``."""

    request_ids: tuple[str, ...]


class Stop(Record, tag=True):
    """Finish nothing more and exit with status 0."""


class Hello(Record, tag=True):
    """Rank's first frame, once the model is loaded."""

    protocol_version: int
    pid: int
    credits: int  # requests that may be in flight; each completion gives one back
    max_model_len: int
    device: str
    kernels: tuple[tuple[str, str, str], ...]  # operation, backend, reason
    gpus: tuple[str, ...] = ()  # UUIDs


class Completions(Record, tag=True):
    """Finished requests."""

    completions: tuple[Completion, ...]


class Heartbeat(Record, tag=True):
    """Sent from the step loop, so that a hung step stops it: once a second, and when work begins or ends.

    The one of the end comes before the last completions.
    """

    phase: str  # "loading", "running", "idle"
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_forced_tokens: int = 0
    num_draws: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_batched_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    step_s: float = 0.0
    mask_s: float = 0.0
    num_expert_moves: int = 0
    expert_balance: float = 0.0
    expert_balance_unmoved: float = 0.0
    drafts_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()


class Fatal(Record, tag=True):
    """The rank cannot go on; it exits after this. ``kind`` is an exception class of schemas.errors."""

    kind: str
    message: str


ClientFrame = Start | AddConstraint | Submit | Announce | Cancel | Stop
RankFrame = Hello | Completions | Heartbeat | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_client_frame = msgspec.msgpack.Decoder(ClientFrame).decode
decode_rank_frame = msgspec.msgpack.Decoder(RankFrame).decode
