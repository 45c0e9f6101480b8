"""What the engine's steps compute and how busy they keep the device, seen from inside the process. Knows no pipe.

``route`` with and without forced text: rows computed against the prompts' own tokens. ``free`` on a GPU: the share of
the time in which a kernel runs, by torch's profiler, over steps in the middle of the run.
"""

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from engine.loop import Engine
from ops.bench.labelling import WARM_UP_ROWS, model_directory
from ops.bench.measurement import write_result
from ops.bench.workloads import Workload, free, route
from schemas.model_files import model_ref
from schemas.records import Constraint, ConstraintKind, Request, Sampling
from schemas.settings import EngineSettings

SKIPPED_STEPS, PROFILED_STEPS = 300, 40


@dataclass(frozen=True)
class StepCounts:
    """One pass over a workload. ``computed_share``: rows computed by own prompt tokens (those not in the cache)."""

    workload: str
    force_text: bool
    seconds: float
    num_rows: int
    num_steps: int
    num_computed_rows: int
    num_own_prompt_tokens: int
    num_forced_tokens: int

    @property
    def computed_share(self) -> float:
        """Above 1 by what forced text and draws add."""
        return self.num_computed_rows / self.num_own_prompt_tokens


def run_steps_bench(shape: str, questions: Path, tokenizer: Path | None, commit: str | None = None) -> list[str]:
    """Measure, write ``steps-SHAPE.json`` and return the lines to print."""
    with model_directory(shape, tokenizer) as directory:
        workload = route(questions)
        counts = [_count(_load(directory), workload, force_text=force_text) for force_text in (True, False)]
        busy = _busy_share(_load(directory), free()) if torch.cuda.is_available() else None
    facts = {"counts": [asdict(each) | {"computed_share": each.computed_share} for each in counts], "free_busy": busy}
    path = write_result(f"steps-{shape}", {"dtype": "bfloat16"}, [], **facts, **({"commit": commit} if commit else {}))
    lines = [
        f"{each.workload}, forced text {'on' if each.force_text else 'off'}: {each.num_rows / each.seconds:.0f} "
        f"rows/s, {each.num_steps} steps, {each.computed_share:.2f} rows computed for each own prompt token"
        for each in counts
    ]
    return [*lines, f"free: a kernel runs {busy:.1%} of the time" if busy else "free: no GPU", path.name]


def _load(directory: Path) -> Engine:
    """A fresh engine, so that no pass finds its rows in the prefix cache."""
    gc.collect()  # of the one before, which took most of a GPU's memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Engine(model_ref(str(directory), dtype="bfloat16", load_format="random"), EngineSettings())


def _requests(workload: Workload, constraint_key: str | None, name: str, **sampling: Any) -> Iterator[Request]:
    for index, (prompt, budget) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
        is_text = isinstance(prompt, str)
        yield Request(
            request_id=f"{name}-{index}",
            text=str(prompt) if is_text else None,
            token_ids=None if is_text else tuple(cast("list[int]", prompt)),
            constraint_key=constraint_key,
            seed=index,
            sampling=Sampling(max_tokens=budget, **(workload.sampling | sampling)),
        )


class _Feed:
    """Keeps an engine full with the requests of an iterator."""

    def __init__(self, engine: Engine, requests: Iterator[Request]) -> None:
        self._engine, self._requests = engine, requests
        self._num_pending = 0
        self.done: list[Any] = []

    def step(self) -> bool:
        """Add what the engine has room for and take one step; whether there was anything to do."""
        room = self._engine.credits - self._num_pending
        for request in itertools.islice(self._requests, room):
            self._engine.add(request)
            self._num_pending += 1
        if not self._engine.has_work():
            return False
        completions = self._engine.step()
        self._num_pending -= len(completions)
        self.done += completions
        return True


def _count(engine: Engine, workload: Workload, *, force_text: bool) -> StepCounts:
    constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=workload.schema or "")
    engine.add_constraint(constraint)
    num_warm_up = min(WARM_UP_ROWS, len(workload.prompts) // 4)
    warm_up = _Feed(engine, itertools.islice(_requests(workload, constraint.key, "warm-up"), num_warm_up))
    while warm_up.step():
        pass
    before = replace(engine.stats)
    feed = _Feed(engine, _requests(workload, constraint.key, f"forced-{force_text}", force_text=force_text))
    start = time.perf_counter()
    while feed.step():
        pass
    seconds = time.perf_counter() - start
    return StepCounts(
        workload=workload.name,
        force_text=force_text,
        seconds=seconds,
        num_rows=len(feed.done),
        num_steps=engine.stats.num_steps - before.num_steps,
        num_computed_rows=engine.stats.num_batched_tokens - before.num_batched_tokens,
        num_own_prompt_tokens=sum(each.num_prompt_tokens - each.num_cached_tokens for each in feed.done),
        num_forced_tokens=engine.stats.num_forced_tokens - before.num_forced_tokens,
    )


def _busy_share(engine: Engine, workload: Workload) -> float:
    """The share of the profiled time in which at least one kernel or copy runs."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    feed = _Feed(engine, _requests(workload, None, "free"))
    for _ in range(SKIPPED_STEPS):
        feed.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            feed.step()
        torch.cuda.synchronize()
    on_device = (each for each in profiler.events() if each.device_type == DeviceType.CUDA)
    spans = sorted((each.time_range.start, each.time_range.end) for each in on_device)
    while feed.step():
        pass
    return union_length(spans) / float(max(end for _, end in spans) - spans[0][0])


def union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals, given by ascending start."""
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
