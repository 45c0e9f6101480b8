"""A night whose report has something in every section, and the night before it."""

import json
import random
from pathlib import Path

import msgspec
import pyarrow as pa

from jobs.finish import try_finish
from jobs.job import ENFORCEMENT_FILE, Job
from jobs.provenance import Provenance, Sample, count_work
from schemas.constraints import enforcement_plan
from schemas.records import Completion, FinishReason, Label, Request, RowResult, encode_json
from tests.tiny_jobs import ScriptedEngine, completion, json_schema, make_job, prompt_of, run_chunk, write_input

ROUTES = ("billing", "bug", "feature request", "other <b>&amp;</b>")
SCHEMA = {
    "type": "object",
    "properties": {"route": {"enum": list(ROUTES)}, "urgent": {"type": "boolean"}},
    "required": ["route", "urgent"],
    "additionalProperties": False,
}
EVIL = "<script>console.error('injected')</script><img src=x onerror=alert(1)>"


def make_night(root: Path, name: str = "night", num_rows: int = 600, *, seed: int = 0, finish: bool = True) -> Job:
    """A job of ``num_rows`` tickets in chunks of 100, labelled by a random model that is right most of the time."""
    dice = random.Random(seed)
    golds = [None if number % 50 == 0 else dice.choice(ROUTES) for number in range(num_rows)]
    texts = [None if number % 97 == 0 else f"ticket {number} {golds[number]} {EVIL}" for number in range(num_rows)]
    path = write_input(
        root / f"{name}-{seed}.parquet", {"text": pa.array(texts, pa.string()), "route": pa.array(golds, pa.string())}
    )
    job = make_job(
        root,
        [path],
        name=name,
        chunk_rows=100,
        prompt_column="text",
        gold_column="route",
        constraint=json_schema(SCHEMA),
        seed=seed,
    )
    job.store.create(ENFORCEMENT_FILE, encode_json(enforcement_plan(json_schema(SCHEMA))))

    def answer(request: Request) -> Completion:
        number = int(prompt_of(request).split()[1])
        luck = random.Random(f"{seed} {number} {request.seed}")
        gold = golds[number] or ROUTES[0]
        route = gold if luck.random() < 0.8 else luck.choice(ROUTES)
        text = json.dumps({"route": route, "urgent": luck.random() < 0.1})
        reason = FinishReason.STOP
        if number % 31 == 0:
            text = text[:9]
        if number % 41 == 0:
            reason = FinishReason.PROMPT_TOO_LONG
        return msgspec.structs.replace(
            completion(request, (text, reason)),
            token_ids=tuple(range(5 + luck.randrange(20))),
            labels=(Label(path="/route", text=route, probability=1 - luck.random() * (0.3 if route == gold else 0.9)),),
            num_prompt_tokens=40 + luck.randrange(400),
            num_cached_tokens=32,
            seconds=0.5 + luck.random(),
            first_token_s=0.1 + luck.random() / 10,
            error="prompt is 9120 tokens" if reason is FinishReason.PROMPT_TOO_LONG else None,
        )

    for chunk in job.chunks if finish else job.chunks[:-1]:
        rows = run_chunk(job, chunk.index, ScriptedEngine(answer))
        assert job.commit_part(chunk.index, rows, provenance=provenance(chunk.index, rows))
    if finish:
        assert try_finish(job)
    return job


def provenance(index: int, rows: list[RowResult]) -> Provenance:
    start = 1_800_000_000.0 + 20 * index
    samples = tuple(
        Sample(
            at_s=start + s,
            num_running=64 - s,
            gpu_share=0.9 - s / 100,
            power_w=500.0 + s,
            energy_j=1000.0 * (20 * index + s),
        )
        for s in range(25)
    )
    return Provenance(
        started_s=start,
        finished_s=start + 24,
        worker="host 12",
        device="cuda:0",
        gpus=("NVIDIA H200",),
        kernels=(("linear", "triton", "it is <fast>"),),
        versions={"nightmill": "0.1.0", "torch": "2.13"},
        settings={"max_num_seqs": 512},
        samples=samples,
        **count_work(rows),
    )
