"""What a constraint costs a full batch: rows of one schema against free rows of the same lengths, in one process.

More rows wait than the batch holds, so that it stays full as in a job. Nothing is forced, so that both sides draw every
token. Knows no pipe.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.loop import Engine
from ops.bench.measurement import Run, percentiles, summarise, write_result
from schemas.constraints import make_validator
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
    engine = Engine(model_ref(bench.model, dtype="float32", max_model_len=256), settings)
    constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=SCHEMA)
    engine.add_constraint(constraint)
    work = time_masks(engine, min_rows=round(NEARLY_FULL * bench.num_rows))
    _answer(engine, _requests(bench, "warm-up", constraint.key))
    for seconds in work:
        seconds.clear()
    runs: list[Run] = []
    for repeat in range(bench.repeats):
        budgets = None
        for name in NAMES:
            key = constraint.key if name == "constrained" else None
            requests = _requests(bench, f"{name}-{repeat}", key, budgets, num_before=repeat + 1)
            started = time.perf_counter()
            done = _answer(engine, requests)
            runs.append(_run(name, repeat, time.perf_counter() - started, done, constraint if key else None))
            budgets = [len(each.token_ids) for each in done]
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


def _requests(
    bench: MasksBench,
    name: str,
    key: str | None,
    budgets: Sequence[int] | None = None,
    num_before: int = 0,
) -> list[Request]:
    """The rows of a run; ``num_before`` runs have drawn other ones."""
    num_rows = NUM_BATCHES * bench.num_rows
    return [
        Request(
            request_id=f"{name}-{index}",
            token_ids=tuple(1000 + (index * 97 + place * 31) % 40_000 for place in range(PROMPT_TOKENS)),
            constraint_key=key,
            seed=num_before * num_rows + index,
            sampling=Sampling(
                temperature=1.0,
                max_tokens=budgets[index] if budgets else None,
                ignore_eos=budgets is not None,
                force_text=False,
            ),
        )
        for index in range(num_rows)
    ]


def _answer(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work():
        done |= {completion.request_id: completion for completion in engine.step()}
    return [done[request.request_id] for request in requests]


def _run(name: str, repeat: int, seconds: float, done: Sequence[Completion], constraint: Constraint | None) -> Run:
    validator = make_validator(constraint) if constraint else None
    ended = [each for each in done if each.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
    return Run(
        system=name,
        repeat=repeat,
        seconds=seconds,
        num_rows=len(done),
        num_output_tokens=sum(len(each.token_ids) for each in done),
        num_valid=sum(validator is None or validator.check(each.text)[1] is None for each in ended),
        load_average=os.getloadavg()[0],
    )
