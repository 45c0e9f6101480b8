"""What a constraint costs a full batch: rows of one schema against free rows of the same lengths, in one process.

Two engines with one model take turns, a step each, so that whatever else the machine does hits both. More rows wait
than the batch holds, so that it stays full as in a job. Nothing is forced: both sides draw every token. Knows no pipe.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from engine.loop import Engine
from engine.parts import load_parts
from ops.bench.measurement import Run, percentiles, summarise, write_result
from schemas.constraints import Validator, make_validator
from schemas.model_files import model_ref
from schemas.records import Completion, Constraint, ConstraintKind, FinishReason, Request, Sampling
from schemas.settings import EngineSettings

LABELS = '"billing", "bug", "feature", "login", "other"'
SCHEMA = (
    '{"type": "object", "properties": {"reason": {"type": "string", "maxLength": 60}, '
    f'"route": {{"enum": [{LABELS}]}}}}, "required": ["reason", "route"], "additionalProperties": false}}'
)
PROMPT_TOKENS = 16
NUM_BATCHES = 2
"""Rows of a run, of batches that are full."""
NEARLY_FULL = 0.9
"""Of a batch: a step with fewer constrained rows has less to do and does not count."""
NAMES = ("constrained", "free")


@dataclass(frozen=True)
class MasksBench:
    """What to measure."""

    num_rows: int = 256  # of the batch
    repeats: int = 3
    model: str = "smollm2"
    device: str = "cpu"


def run_masks_bench(bench: MasksBench) -> list[str]:
    """Measure in turns, write ``masks-DEVICE.json`` and return the lines to print."""
    settings = EngineSettings(device=bench.device, max_num_seqs=bench.num_rows, prefix_cache=False)
    model = model_ref(bench.model, dtype="float32", max_model_len=256)
    parts = load_parts(model, settings)
    constrained, free = (Engine(model, settings, parts) for _ in NAMES)
    constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=SCHEMA)
    constrained.add_constraint(constraint)
    work = time_masks(constrained, min_rows=round(NEARLY_FULL * bench.num_rows))
    answer_in_turns(constrained, free, _requests(bench, "warm-up", constraint.key))
    for seconds in work:
        seconds.clear()
    validator = make_validator(constraint)
    runs: list[Run] = []
    for repeat in range(bench.repeats):
        requests = _requests(bench, str(repeat), constraint.key, num_before=repeat + 1)
        for name, (seconds_of_side, done) in zip(NAMES, answer_in_turns(constrained, free, requests), strict=True):
            runs.append(_run(name, repeat, seconds_of_side, done, None if name == "free" else validator))
    medians = {name: rates["output_tokens_per_s"].median for name, rates in summarise(runs).items()}
    ratio = medians["constrained"] / medians["free"]
    filled, whole = (percentiles(seconds, 1e3) for seconds in work)
    config = {"num_rows": bench.num_rows, "repeats": bench.repeats, "model": bench.model, "schema": SCHEMA}
    facts = {
        "constrained_to_free": ratio,
        "mask_ms_per_step": whole,
        "fill_ms_per_step": filled,
        "num_full_steps": len(work.whole_s),
    }
    path = write_result(f"masks-{bench.device}", config, runs, **facts)
    return [
        *(f"{name:<12}{rate:>10.1f} output tokens/s" for name, rate in medians.items()),
        f"constrained to free: {ratio:.3f}",
        f"masks of a full step ({len(work.whole_s)} steps): p50 {whole['p50']} ms, p99 {whole['p99']} ms",
        f"  of it behind the launched forward: p50 {filled['p50']} ms, p99 {filled['p99']} ms",
        f"written to {path}",
    ]


class MaskWork(NamedTuple):
    """Seconds of each step that counts."""

    filled_s: list[float]  # until the masks lie where the sampler reads them, while a GPU computes the forward
    whole_s: list[float]  # that, and accepting the tokens that were drawn before


def time_masks(engine: Engine, min_rows: int = 1) -> MaskWork:
    """What the masks of each later step cost that has so many constrained rows; the lists grow as the engine steps."""
    work = MaskWork([], [])
    fill: Callable[..., Any] = engine._grammars.fill
    accept: Callable[..., Any] = engine._accept
    accepted_s = 0.0

    def timed_accept(*args: Any) -> Any:
        nonlocal accepted_s
        started = time.perf_counter()
        error = accept(*args)
        accepted_s += time.perf_counter() - started
        return error

    def timed_fill(matchers: Sequence[Any]) -> Any:
        nonlocal accepted_s
        started = time.perf_counter()
        masks = fill(matchers)
        filled_s = time.perf_counter() - started
        if sum(matcher is not None for matcher in matchers) >= min_rows:
            work.filled_s.append(filled_s)
            work.whole_s.append(filled_s + accepted_s)
        accepted_s = 0.0
        return masks

    engine._grammars.fill = timed_fill  # type: ignore[method-assign]
    engine._accept = timed_accept  # type: ignore[assignment, method-assign]
    return work


def answer_in_turns(
    constrained: Engine, free: Engine, requests: Sequence[Request]
) -> tuple[tuple[float, list[Completion]], tuple[float, list[Completion]]]:
    """Answer requests with their constraint and, in the other engine, without; each side's seconds and completions.

    A free row ends with the step in which its constrained one ends, so that each step has the same rows on both sides.
    """
    engines, seconds = (constrained, free), [0.0, 0.0]
    done: tuple[dict[str, Completion], dict[str, Completion]] = {}, {}
    for request in requests:
        constrained.add(request)
        unending = replace(request.sampling, ignore_eos=True, max_tokens=free.max_model_len)
        free.add(replace(request, constraint_key=None, sampling=unending))
    while any(engine.has_work() for engine in engines):
        for side, engine in enumerate(engines):
            started = time.perf_counter()
            ended = engine.step()
            seconds[side] += time.perf_counter() - started
            done[side].update((completion.request_id, completion) for completion in ended)
        free.cancel(done[0].keys() - done[1].keys())
    first, second = ([by_id[request.request_id] for request in requests] for by_id in done)
    return (seconds[0], first), (seconds[1], second)


def _requests(bench: MasksBench, name: str, key: str, num_before: int = 0) -> list[Request]:
    """The rows of a run; ``num_before`` runs have drawn other ones."""
    num_rows = NUM_BATCHES * bench.num_rows
    return [
        Request(
            request_id=f"{name}-{index}",
            token_ids=tuple(1000 + (index * 97 + place * 31) % 40_000 for place in range(PROMPT_TOKENS)),
            constraint_key=key,
            seed=num_before * num_rows + index,
            sampling=Sampling(temperature=1.0, force_text=False),
        )
        for index in range(num_rows)
    ]


def _run(name: str, repeat: int, seconds: float, done: Sequence[Completion], validator: Validator | None) -> Run:
    ended = [each for each in done if validator is None or each.finish_reason == FinishReason.STOP]
    return Run(
        system=name,
        repeat=repeat,
        seconds=seconds,
        num_rows=len(done),
        num_output_tokens=sum(len(each.token_ids) for each in done),
        num_valid=sum(validator is None or validator.check(each.text)[1] is None for each in ended),
        load_average=os.getloadavg()[0],
    )
