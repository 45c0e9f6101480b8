"""Several ranks give the greedy tokens of one in every topology: processes run all cases, one after the other."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import StepSize
from engine.dist import Group, Ranks
from engine.loop import Engine
from engine.parts import load_parts
from engine.replica import Replica
from engine.topology import Topology
from engine.types import Run
from schemas.model_files import model_ref
from schemas.settings import EngineSettings
from tests.engine.fakes import make_sequence
from tests.engine.one_of_ranks import run_cases, serve
from tests.engine.test_parity import random_prompts
from tests.tiny_models import VOCAB_SIZE, write_tiny_model

MAX_TOKENS = 12
SMALL_STEPS = {
    "num_threads": 1,
    "kv_cache_gib": 0.01,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "block_size": 8,
}
Cases = dict[str, tuple[str, dict[str, Any]]]
CASES: Cases = {
    "tensor": ("llama3", {"tensor_parallel": 2}),
    "tensor, tied head, biases": ("qwen2", {"tensor_parallel": 2, "overlap": True}),
    "context": ("qwen3", {"context_parallel": 2}),
    "context, windows": ("mistral", {"context_parallel": 2, "overlap": True}),
    "data": ("llama", {"data_parallel": 2}),
    "data and experts": ("qwen3_moe", {"data_parallel": 2, "expert_parallel": 2, "overlap": True}),
    "data and experts, v2": ("deepseek_v2", {"data_parallel": 2, "expert_parallel": 2}),
    "data and experts that move": (
        "qwen3_moe",
        {"data_parallel": 2, "expert_parallel": 2, "expert_copies": 1, "rebalance_interval": 2},
    ),
    "context and experts that move, v3": (
        "deepseek_v3",
        {"context_parallel": 2, "expert_parallel": 2, "expert_copies": 2, "rebalance_interval": 3, "overlap": True},
    ),
    "context and experts, v3": ("deepseek_v3", {"context_parallel": 2, "expert_parallel": 2}),
}

CASES_OF_FOUR: Cases = {
    "tensor and context": ("llama3", {"tensor_parallel": 2, "context_parallel": 2, "overlap": True}),
    "data and context, experts over both": (
        "deepseek_v3",
        {"data_parallel": 2, "context_parallel": 2, "expert_parallel": 4, "overlap": True},
    ),
    "data, experts that move": (
        "qwen3_moe",
        {"data_parallel": 4, "expert_parallel": 4, "expert_copies": 1, "rebalance_interval": 2, "overlap": True},
    ),
    "data, experts in pairs": ("deepseek_v2", {"data_parallel": 4, "expert_parallel": 2}),
}


def batches() -> list[dict[str, list[int]]]:
    """Long and short prompts, some of which begin alike; then some for the first replica alone, then for both."""
    prompts = random_prompts([3, 60, 17, 31, 1, 44, 2, 9], VOCAB_SIZE, shared=24)
    numbered = {str(index): prompt for index, prompt in enumerate(prompts)}
    first_alone = {"10": prompts[1][::-1], "12": prompts[3]}
    return [numbered, first_alone, {"20": prompts[5], "21": prompts[0]}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    families = {family for family, _ in (CASES | CASES_OF_FOUR).values()}
    return {family: str(write_tiny_model(directory / family, family)) for family in families}


@pytest.fixture(scope="module")
def on_cpus(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[int]]]:
    """The tokens of all requests, by case, from two processes."""
    return run_ranks(CASES, 2, models, str(tmp_path_factory.mktemp("rendezvous")))


def run_ranks(
    cases: Cases, num_ranks: int, models: dict[str, str], directory: str, *, device: str = "cpu"
) -> dict[str, dict[str, list[int]]]:
    """The tokens of all requests, by case, from as many processes as there are ranks."""
    described = [
        {
            "model": models[family],
            "dtype": "float32",
            "settings": SMALL_STEPS | settings | {"device": device},
            "max_tokens": MAX_TOKENS,
            "batches": batches(),
            "rendezvous": f"{directory}/{number}",
        }
        for number, (family, settings) in enumerate(cases.values())
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_cases.__module__])  # torch is imported once for all
    with ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
        parts = list(pool.map(run_cases, range(num_ranks), [described] * num_ranks))
    return {name: {k: v for part in parts for k, v in part[number].items()} for number, name in enumerate(cases)}


def run_one_rank(model: str, device: str, kernels: str = "auto") -> dict[str, list[int]]:
    case = {"settings": {}, "max_tokens": MAX_TOKENS, "batches": batches()}
    ref = model_ref(model, dtype="float32", max_model_len=128)
    settings = EngineSettings(device=device, kernels=kernels, **SMALL_STEPS)
    return serve(Engine(ref, settings, load_parts(ref, settings)), case, 0)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_greedy_tokens_of_one(
    name: str, models: dict[str, str], on_cpus: dict[str, dict[str, list[int]]]
) -> None:
    tokens = dict(on_cpus[name])
    if "move" in name:
        assert tokens.pop("moves")[0] > 0
    assert tokens == run_one_rank(models[CASES[name][0]], "cpu")


@pytest.mark.slow
def test_four_ranks_give_the_greedy_tokens_of_one(models: dict[str, str], tmp_path: Path) -> None:
    tokens = run_ranks(CASES_OF_FOUR, 4, models, str(tmp_path))
    assert tokens["data, experts that move"].pop("moves")[0] > 0
    assert tokens == {name: run_one_rank(models[family], "cpu") for name, (family, _) in CASES_OF_FOUR.items()}


ON_GPUS = {"reference": CASES, "auto": {name: CASES[name] for name in ("tensor", "data and experts, v2")}}
"""All cases in plain torch, which compiles nothing; two with what a GPU runs, graphs included."""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kernels", ON_GPUS)
def test_two_gpus_give_the_greedy_tokens_of_one(kernels: str, models: dict[str, str], tmp_path: Path) -> None:
    cases = {name: (family, settings | {"kernels": kernels}) for name, (family, settings) in ON_GPUS[kernels].items()}
    tokens = run_ranks(cases, 2, models, str(tmp_path), device="cuda")
    for case in tokens.values():
        case.pop("moves", None)
    assert tokens == {name: run_one_rank(models[family], "cuda", kernels) for name, (family, _) in cases.items()}


class RecordingRunner:
    """Keeps what it is told to run."""

    device = torch.device("cpu")
    step_sizes = ()

    def __init__(self) -> None:
        self.steps: list[tuple[Any, StepSize]] = []

    def run(self, arrays: Any, size: StepSize, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """See Runner.run."""
        self.steps.append((arrays, size))
        return torch.empty(0)


def test_a_part_of_a_prefill_is_no_decode_even_with_one_row_a_run() -> None:
    context = Group()
    context.size = 2
    runner = RecordingRunner()
    replica = Replica(runner, Ranks(Topology(context=2), context=context), 8, 4)  # type: ignore[arg-type]
    sequence = make_sequence([5, 6])
    sequence.block_ids.append(3)
    replica.run([Run(sequence, 0, 2, True)])
    ((arrays, size),) = runner.steps
    assert len(arrays["input_ids"]) == len(arrays["seq_lens"]) == 1
    assert (size.rows, size.is_decode) == (1, False)
    sequence.token_ids.append(7)
    replica.run([Run(sequence, 2, 1, True)])
    assert runner.steps[1][1] == StepSize(1, 1, True)
