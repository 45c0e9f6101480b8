"""Offline generation in one call: ``LLM(model).generate(prompts, SamplingParams(...))``. Knows no files and no queue.

Names follow DeepInfer's LLM where the meaning is the same; unlike it, every prompt gets a completion with its finish
reason, in prompt order, and an unknown argument is an error.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import structlog
from pydantic import ValidationError

from engine.client import EngineClient
from engine.frames import Heartbeat, Hello
from schemas.errors import ConstraintError, SettingsError
from schemas.log import configure_logging
from schemas.model_files import model_ref
from schemas.records import (
    THINKING_END,
    Completion,
    Constraint,
    ConstraintKind,
    LoadFormat,
    Message,
    Request,
    Sampling,
    row_seed,
    short_hash,
)
from schemas.settings import EngineSettings

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Plain text (no chat template), a conversation (through the model's chat template), or token ids.

The name of a special token is that token in plain text, as in a prompt rendered by the caller; in a message it is text.
"""

SCHEMA_TYPES = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "ebnf": ConstraintKind.EBNF,
    "choice": ConstraintKind.CHOICE,
}
GREEDY_BELOW = 1e-5  # temperatures under it are greedy, as in DeepInfer


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued; names and defaults are DeepInfer's. Raises ValueError or ConstraintError when built.

    ``golden_token_ids`` are the output, whatever the model would draw: ``logprobs`` tells what it gave them.
    ``so_args``: {"schema_type": "json" | "regex" | "ebnf" | "choice", "schema": text, or a dict (json), or a list of
    strings (choice)}; keys come out in the schema's order. ``top_labels``: how many labels of each closed set to rank.
    ``seq_seed`` None: derived from the LLM's seed and prompt. ``thinking_token_budget``: tokens of a free part before
    the answer, up to ``thinking_end``, which ``max_tokens`` counts too; it comes as ``reasoning``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 or 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_labels: int = 0
    seq_seed: int | None = None
    golden_token_ids: Sequence[int] | None = None
    thinking_token_budget: int | None = None
    thinking_end: str = THINKING_END
    so_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        is_free = self.so_args is None and self.thinking_token_budget is None
        if self.golden_token_ids is not None and not (is_free and self.golden_token_ids):
            raise ValueError("golden_token_ids must be some tokens, without so_args and thinking")
        self.sampling  # noqa: B018 - both raise for what is wrong
        self.constraint  # noqa: B018

    @cached_property
    def sampling(self) -> Sampling:
        """The engine's record of these parameters."""
        fields = {
            "temperature": 0.0 if 0 <= self.temperature < GREEDY_BELOW else self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": len(self.golden_token_ids) if self.golden_token_ids else self.max_tokens,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "ignore_eos": self.ignore_eos or self.golden_token_ids is not None,
            "logprobs": self.logprobs,
            "top_labels": self.top_labels,
        }
        if self.thinking_token_budget is not None:
            fields["thinking"] = {"max_tokens": self.thinking_token_budget, "end": self.thinking_end}
        try:
            return msgspec.convert(fields, Sampling)
        except msgspec.ValidationError as error:
            raise ValueError(f"bad sampling parameters: {error}") from error

    @cached_property
    def constraint(self) -> Constraint | None:
        """The checked constraint of ``so_args``."""
        if self.so_args is None:
            return None
        if set(self.so_args) != {"schema_type", "schema"}:
            raise ConstraintError(f"so_args needs the keys schema_type and schema, not {sorted(self.so_args)}")
        schema_type, schema = self.so_args["schema_type"], self.so_args["schema"]
        if schema_type not in SCHEMA_TYPES:
            raise ConstraintError(f"unknown schema_type {schema_type!r}: use one of {', '.join(SCHEMA_TYPES)}")
        if not isinstance(schema, str):
            if schema_type not in ("json", "choice"):
                raise ConstraintError(f"schema of type {schema_type} must be text, not {type(schema).__name__}")
            schema = json.dumps(schema, ensure_ascii=False)
        from schemas.constraints import load_constraint  # imports jsonschema, a second's work

        return load_constraint(SCHEMA_TYPES[schema_type], schema)


class LLM:
    """A model in an engine process of its own, ready to generate. Close it, or use it in a ``with`` statement."""

    def __init__(
        self,
        model: str,
        dtype: str = "auto",
        max_model_len: int = 4096,
        seed: int = 0,
        *,
        quantization: Literal["none", "fp8"] = "none",
        revision: str | None = None,
        load_format: LoadFormat = "auto",
        deterministic: bool = False,
        **engine_settings: Any,
    ) -> None:
        """Load ``model`` (a directory, a GGUF file, a hub name or a demo alias) and block until it is ready.

        ``deterministic``: a prompt's answer does not depend on the prompts beside it, to the bit; slower.
        ``engine_settings`` are the fields of schemas.settings.EngineSettings. Raises TypeError for an unknown one,
        SettingsError for a bad value, ModelError, KernelError or EngineError when the model cannot be loaded.
        """
        settings = _engine_settings(engine_settings)
        if not structlog.is_configured():  # its default prints to standard output, which is the caller's
            configure_logging("WARNING")
        ref = model_ref(
            model,
            dtype=dtype,
            quantization=quantization,
            revision=revision,
            load_format=load_format,
            max_model_len=max_model_len,
            deterministic=deterministic,
        )
        self.seed = seed
        self._call_indices = itertools.count()
        self._client = EngineClient(ref, settings)
        try:
            self._client.start()
        except BaseException:
            self._client.stop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue every prompt: one completion for each, in prompt order, whatever becomes of it.

        A prompt that is too long, or a constraint that leads nowhere, ends with that finish reason and an ``error``;
        the others are not touched. ``sampling_params`` is for all prompts, or one for each. ``progress`` draws a bar.
        Raises TypeError or ValueError before anything runs, EngineError when the engine is beyond restarting.
        """
        requests = self._requests(_as_list(prompts), sampling_params)
        futures: list[Future[Completion]] = []
        with _progress(len(requests), is_shown=progress) as advance:
            try:
                for request, constraint in requests:
                    futures.append(self._client.submit(request, constraint))
                    futures[-1].add_done_callback(advance)
                return [future.result() for future in futures]
            finally:  # after an interrupt the engine must not go on with what nobody waits for
                pairs = zip(requests, futures, strict=False)
                self._client.cancel([request.request_id for (request, _), future in pairs if not future.done()])

    @property
    def hello(self) -> Hello:
        """What the engine process said of itself: device, kernels and why, longest sequence."""
        return self._client.hello

    def settled_stats(self) -> Heartbeat | None:
        """What was counted until the last step; waits for what is still running. None if the engine failed."""
        return self._client.settled_stats()

    def close(self) -> None:
        """Stop the engine process."""
        self._client.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _requests(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Request, Constraint | None]]:
        params = _params_of_each(sampling_params, len(prompts))
        call_index = next(self._call_indices)
        num_seen: Counter[str] = Counter()
        requests = []
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            content = _content(prompt, index)
            key = short_hash(repr(content))
            seed = row_seed(self.seed, key, num_seen[key], 0) if each.seq_seed is None else each.seq_seed % 2**63
            num_seen[key] += 1  # a prompt given twice is drawn twice
            request = Request(
                request_id=f"{call_index}-{index}",
                constraint_key=each.constraint.key if each.constraint else None,
                sampling=each.sampling,
                seed=seed,
                golden_token_ids=tuple(each.golden_token_ids or ()),
                **content,
            )
            requests.append((request, each.constraint))
        return requests


def _engine_settings(given: Mapping[str, Any]) -> EngineSettings:
    if unknown := sorted(set(given) - set(EngineSettings.model_fields)):
        known = ", ".join(EngineSettings.model_fields)
        raise TypeError(f"LLM() got unexpected keyword arguments: {', '.join(unknown)} (engine settings are {known})")
    try:
        return EngineSettings(**given)
    except ValidationError as error:
        text = "; ".join(f"{e['loc'][0]}: {e['msg']}, not {e['input']!r}" for e in error.errors())
        raise SettingsError(f"bad engine settings: {text}") from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """A single prompt, of any of the three kinds, is a list of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping)):
        return [prompts]
    return prompts


def _params_of_each(
    given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(f"{len(given)} sampling parameters for {num_prompts} prompts: give one, or one for each")
    return given


def _content(prompt: object, index: int) -> dict[str, Any]:
    """The field of Request that ``prompt`` fills. Raises TypeError that names its place in the list."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if prompt and all(isinstance(part, Mapping) for part in prompt):
            return {"messages": tuple(_message(part, index) for part in prompt)}
        if all(isinstance(part, int) for part in prompt):
            return {"token_ids": tuple(prompt)}
    raise TypeError(f"prompt {index} is neither text, nor a list of messages, nor a list of token ids: {prompt!r:.100}")


def _message(part: Mapping[str, Any], index: int) -> Message:
    try:
        return msgspec.convert(dict(part), Message)
    except msgspec.ValidationError as error:
        raise TypeError(f"prompt {index} has a message that is not {{role: text, content: text}}: {error}") from error


@contextmanager
def _progress(num_requests: int, *, is_shown: bool) -> Iterator[Callable[[object], None]]:
    """Yield the callback that counts a finished request."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("generate", total=num_requests)
        yield lambda _: bar.advance(task)
