"""One of several ranks, a process of test_replica: engines of several topologies, one after the other.

Prompts go to the replicas by their numbers.
"""

import gc
from typing import Any

from torch import distributed

from engine.follower import Follower
from engine.loop import Engine
from engine.parts import load_parts
from schemas.log import configure_logging
from schemas.model_files import model_ref
from schemas.records import Request, Sampling
from schemas.settings import EngineSettings


def run_cases(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """The greedy tokens of this rank's requests, by case."""
    configure_logging()
    return [run_case(case, rank) for case in cases]


def run_case(case: dict[str, Any], rank: int) -> dict[str, list[int]]:
    ref = model_ref(case["model"], dtype=case["dtype"], max_model_len=128)
    settings = EngineSettings(**case["settings"])
    parts = load_parts(ref, settings, rank, case["rendezvous"])
    ranks = parts.ranks
    try:
        if not ranks.is_leader:
            follower = Follower(ref, settings, parts)
            while True:
                try:
                    follower.step()
                except RuntimeError:  # the leader is done and gone
                    return {}
        return serve(Engine(ref, settings, parts), case, rank // ranks.topology.ranks_per_replica)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        gc.collect()  # an engine is full of cycles, and followers wait until its connections are gone


def serve(engine: Engine, case: dict[str, Any], replica: int) -> dict[str, list[int]]:
    num_replicas = case["settings"].get("data_parallel", 1)
    sampling = Sampling(max_tokens=case["max_tokens"], ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for batch, prompts in enumerate(case["batches"]):
        engine.hear(batch + 1)
        for index, prompt in prompts.items():
            if int(index) % num_replicas == replica:
                engine.add(Request(request_id=index, token_ids=tuple(prompt), sampling=sampling))
        while engine.has_work():
            for completion in engine.step():
                assert completion.error is None, completion.error
                tokens[completion.request_id] = list(completion.token_ids)
    engine.beat()
    return tokens | ({"moves": [engine.stats.num_expert_moves]} if engine.stats.expert_balance else {})
