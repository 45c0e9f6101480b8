"""Where and how this machine runs; nothing here changes an answer (that is JobSpec's).

Order: command-line flag, environment (``NIGHTMILL_ENGINE__MAX_NUM_SEQS``), ``nightmill.toml``, default.
Built by entry points only.
"""

import os
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from schemas.errors import SettingsError

BROKER_SCHEMES = ("redis", "rediss", "redis+socket")


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/nightmill`` or ``~/.local/state/nightmill``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nightmill"


class Section(BaseModel):
    """A nested group of settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Section):
    """Sizes and devices of one engine: the sizes are those of each replica, one device for each rank."""

    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: cuda where torch sees one
    kernels: str = "auto"  # a backend's name, or auto with a printed reason
    num_threads: int = Field(default=0, ge=0)  # CPU threads of a rank; 0: OMP_NUM_THREADS, else its share of the cores
    data_parallel: int = Field(default=1, ge=1)  # replicas, each with rows of its own
    expert_parallel: int = Field(default=1, ge=1)  # ranks that share a layer's experts
    expert_copies: int = Field(default=0, ge=0)  # experts that each rank holds beyond its share: copies of busy ones
    rebalance_interval: int = Field(default=0, ge=0)  # steps after which a layer's experts are placed anew; 0: never
    exchange: str = "auto"  # of rows between such ranks: collective, deep_ep, or auto: the faster one, as measured
    tensor_parallel: int = Field(default=1, ge=1)  # ranks that share each weight matrix
    context_parallel: int = Field(default=1, ge=1)  # ranks that share the rows of a prefill
    block_size: int = Field(default=0, ge=0)  # tokens per KV block; 0: 16, or 64 for latent attention on a GPU
    kv_cache_gib: float = Field(default=0.0, ge=0)  # 0: 0.9 of free GPU memory; 2 GiB on the CPU
    max_num_seqs: int = Field(default=0, ge=0)  # sequences in a batch; 0: 64 on the CPU, 1024 on a GPU
    max_num_batched_tokens: int = Field(default=0, ge=0)  # rows of a step; 0: 512 on the CPU, 4096 on a GPU
    cuda_graphs: bool = True  # decode steps on a GPU are replayed instead of launched kernel by kernel
    overlap: bool | None = None  # launch a step before the tokens of the one before are read; None: on a GPU
    num_draft_tokens: int | None = Field(default=None, ge=0)  # guessed and verified a step; None: as many as pay
    draft_model: str | None = None  # directory or hub name of what guesses blocks of tokens; None: nothing does
    prefix_cache: bool = True
    compile_timeout_s: float = Field(default=20.0, gt=0)  # for one constraint
    grammar_dir: Path | None = None  # keeps compiled grammars; None: a worker's are in its state_dir
    max_restarts: int = Field(default=5, ge=0)  # engine deaths tolerated per window of 10 minutes
    start_timeout_s: float = Field(default=600.0, gt=0)
    hang_timeout_s: float = Field(default=300.0, gt=0)  # no heartbeat for so long: the engine is killed and restarted


class WorkerSettings(Section):
    """What a worker serves and how it holds messages."""

    model: str = "smollm2"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "fp8"] = "none"
    load_format: Literal["auto", "random"] = "auto"
    max_model_len: int = Field(default=4096, ge=16)
    deterministic: bool = False
    chunks_in_flight: int = Field(default=2, ge=1)  # two keep the batch full while one commits
    drain_s: float = Field(default=600.0, ge=0)  # after SIGTERM, before running chunks are given back
    visibility_timeout_s: float = Field(default=60.0, gt=0)
    reconcile_interval_s: float = Field(default=15.0, gt=0)
    metrics_port: int | None = None  # of /metrics, /healthz and /readyz; None: none of them
    metrics_host: str = "127.0.0.1"


class JobsSettings(Section):
    """How rows are read and cut."""

    chunk_rows: int = Field(default=2048, ge=1)
    chunk_bytes: int = Field(default=128 * 2**20, ge=2**20)  # fewer rows a chunk where they are wide
    read_batch_bytes: int = Field(default=64 * 2**20, ge=2**20)  # memory for the rows of one read
    max_chunk_deliveries: int = Field(default=3, ge=1)  # a chunk that fails so often is parked
    report: bool = True  # write report.html when a job ends
    gpu_hour_price: float = Field(default=0.0, ge=0)  # for reports; 0: not known. Without GPUs: of the machine
    currency: str = "USD"


class LogSettings(Section):
    """How events are printed."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["auto", "console", "json"] = "auto"


class Settings(BaseSettings):
    """All settings of one process."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="NIGHTMILL_", env_nested_delimiter="__", toml_file="nightmill.toml"
    )

    broker_url: str | None = None  # None: the embedded server under state_dir
    broker_password_file: Path | None = None  # its content is the password, so that none stands in the environment
    broker_ca_file: Path | None = None  # who may sign the broker's certificate; None: whom this machine trusts
    jobs_root: str = ""  # directory or object-store URI that client and workers share; default state_dir/jobs
    state_dir: Path = Field(default_factory=default_state_dir)
    schedules: str = "schedules.toml"  # file or URI of the nightly runs
    engine: EngineSettings = EngineSettings()
    worker: WorkerSettings = WorkerSettings()
    jobs: JobsSettings = JobsSettings()
    log: LogSettings = LogSettings()

    @field_validator("broker_url")
    @classmethod
    def _check_scheme(cls, url: str | None) -> str | None:
        """Refuse the URLs that kombu would silently send to localhost:6379."""
        if url is not None and urlsplit(url).scheme not in BROKER_SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(BROKER_SCHEMES)}, not {urlsplit(url).scheme!r}")
        return url

    @model_validator(mode="before")
    @classmethod
    def _fill_jobs_root(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("jobs_root"):
            state_dir = Path(values.get("state_dir") or default_state_dir())
            values = {**values, "jobs_root": str(state_dir.absolute() / "jobs")}
        return values

    def engine_settings(self) -> EngineSettings:
        """Those of a worker's engine, with a place for its compiled grammars."""
        grammar_dir = self.engine.grammar_dir or self.state_dir / "grammars"
        return self.engine.model_copy(update={"grammar_dir": grammar_dir})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Build from flags, environment and file. Raises SettingsError that names each wrong setting."""
        unknown = [name for name in os.environ if name.startswith("NIGHTMILL_") and not cls._is_known(name)]
        if unknown:
            raise SettingsError(f"unknown settings in the environment: {', '.join(sorted(unknown))}")
        try:
            return cls(**overrides)
        except ValidationError as error:
            lines = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
            raise SettingsError("bad settings: " + "; ".join(lines)) from error

    @classmethod
    def _is_known(cls, env_name: str) -> bool:
        section, _, key = env_name.removeprefix("NIGHTMILL_").lower().partition("__")
        field = cls.model_fields.get(section)
        if field is None or not key:
            return field is not None
        annotation = field.annotation
        return isinstance(annotation, type) and issubclass(annotation, BaseModel) and key in annotation.model_fields
