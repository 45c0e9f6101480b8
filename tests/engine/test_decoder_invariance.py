"""With batch-invariant kernels a row's logits have the same bits, whatever else is computed and however it is cut."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.decoder import Decoder
from engine.weights import load_model
from kernels.select import select_kernels
from schemas.errors import SettingsError
from schemas.model_files import ModelFiles
from schemas.records import Completion, ModelRef, Request, Sampling
from tests.engine.fakes import run_all
from tests.engine.test_decoder import random_ids
from tests.engine.test_draft import KnowsTheAnswers
from tests.engine.test_parity import make_engine, random_prompts
from tests.step_batches import BLOCK_SIZE, block_tables, move_batch, step_batch
from tests.tiny_models import VOCAB_SIZE, write_tiny_model

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH, NUM_SHARED = 75, 40  # of the request that is looked at, more than a split of keys; tokens of a prefix hit

MODELS = [
    ("smollm2", "float32", "cpu"),
    ("mistral", "float32", "cpu"),
    ("qwen3_moe", "float32", "cpu"),
    ("deepseek_v2_lite", "float32", "cpu"),
    ("deepseek_v3", "bfloat16", "cpu"),
    pytest.param(("qwen3", "bfloat16", "cuda"), marks=on_gpu),
    pytest.param(("mistral", "float16", "cuda"), marks=on_gpu),
    pytest.param(("smollm2", "float32", "cuda"), marks=on_gpu),
    pytest.param(("qwen3_moe", "bfloat16", "cuda"), marks=on_gpu),
    pytest.param(("deepseek_v2_lite", "bfloat16", "cuda"), marks=on_gpu),
    pytest.param(("deepseek_v3", "bfloat16", "cuda"), marks=on_gpu),
]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family, dtype, device_name = request.param
    directory, device = write_tiny_model(tmp_path_factory.mktemp("model"), family), torch.device(device_name)
    kernels, _ = select_kernels(device, getattr(torch, dtype), "auto", is_invariant=True)
    ref = ModelRef(name=str(directory), digest="0" * 16, dtype=dtype)
    loaded = load_model(ModelFiles(directory, "huggingface"), ref, kernels, device)
    assert isinstance(loaded, Decoder)
    return loaded


def logits_of(
    model: Decoder,
    cache: list[torch.Tensor],
    token_ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    logits_rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Of a step with these runs, computed where the cache lies."""
    batch = step_batch(token_ids, starts, tables, logits_rows=logits_rows)
    return model.logits(model.forward(move_batch(batch, cache[0].device), cache))


def all_logits(model: Decoder) -> torch.Tensor:
    """Of the request alone, in one step."""
    cache = model.alloc_cache(40, BLOCK_SIZE)
    return logits_of(model, cache, [random_ids(LENGTH, 1)], [0], block_tables([LENGTH]), range(LENGTH))


@pytest.mark.parametrize("batch_size", [2, 37, 256])
def test_a_prefill_and_a_decode_have_the_same_bits_in_any_batch(model: Decoder, batch_size: int) -> None:
    ids, place = random_ids(LENGTH, 1), batch_size // 2
    others = [random_ids(2 + (seed * 7) % 19, seed) for seed in range(2, batch_size + 1)]
    rows = [*others[:place], ids, *others[place:]]
    tables = block_tables([len(row) for row in rows], seed=batch_size)
    cache = model.alloc_cache(sum(map(len, tables)) + 1, BLOCK_SIZE)
    prefill = logits_of(model, cache, [row[:-1] for row in rows], [0] * len(rows), tables)
    decode = logits_of(model, cache, [row[-1:] for row in rows], [len(row) - 1 for row in rows], tables)
    expected = all_logits(model)
    assert torch.equal(prefill[place], expected[-2])
    assert torch.equal(decode[place], expected[-1])


@pytest.mark.parametrize("sizes", [(7, 1, 33, 16, 9, 9), (63, 1, 1, 1, 9)])
def test_chunks_of_any_size_have_the_same_bits(model: Decoder, sizes: tuple[int, ...]) -> None:
    ids, tables, expected = random_ids(LENGTH, 1), block_tables([LENGTH], seed=3), all_logits(model)
    cache, start = model.alloc_cache(40, BLOCK_SIZE), 0
    for size in sizes:
        logits = logits_of(model, cache, [ids[start : start + size]], [start], tables)
        start += size
        assert torch.equal(logits[0], expected[start - 1])


def test_a_prefix_that_another_row_computed_has_the_same_bits(model: Decoder) -> None:
    ids = random_ids(LENGTH, 1)
    table, other = block_tables([LENGTH, NUM_SHARED + 9])
    table[: NUM_SHARED // BLOCK_SIZE] = other[: NUM_SHARED // BLOCK_SIZE]
    cache = model.alloc_cache(40, BLOCK_SIZE)
    logits_of(model, cache, [ids[:NUM_SHARED] + random_ids(9, 5)], [0], [other])
    got = logits_of(model, cache, [ids[NUM_SHARED:]], [NUM_SHARED], [table])
    assert torch.equal(got[0], all_logits(model)[-1])


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("smollm2", {}),
        ("deepseek_v3", {}),
        *(
            pytest.param(family, {"device": "cuda", "dtype": "bfloat16"}, marks=on_gpu)
            for family in ("qwen3", "qwen3_moe", "deepseek_v2_lite")
        ),
    ],
)
def test_an_engine_draws_the_same_alone_in_chunks_with_prefix_hits_preempted_and_from_drafts(
    tmp_path: Path, family: str, where: dict[str, Any]
) -> None:
    name = str(write_tiny_model(tmp_path, family))
    prompts = random_prompts([1 + (i * 13) % 50 for i in range(37)], VOCAB_SIZE, shared=40)
    requests = [
        Request(
            request_id=str(i),
            token_ids=tuple(ids),
            seed=i,
            sampling=Sampling(max_tokens=12, temperature=float(i % 2), top_p=0.9, ignore_eos=True, logprobs=True),
        )
        for i, ids in enumerate(prompts)
    ]
    settings = {"deterministic": True, "block_size": 8, "num_threads": 1, **where}
    crowded = make_engine(name, 128, 200, max_num_seqs=16, max_num_batched_tokens=48, **settings)
    together = run_all(crowded, requests)
    assert crowded.stats.num_preemptions
    assert crowded.stats.num_cached_tokens
    source = KnowsTheAnswers({name: (None, None, done.token_ids) for name, done in together.items()})
    guessing = make_engine(
        name, 128, 400, max_num_seqs=16, max_num_batched_tokens=80, num_draft_tokens=3, draft_source=source, **settings
    )
    for request_id, completion in run_all(guessing, requests).items():
        assert drawn(completion) == drawn(together[request_id])
    assert 0 < guessing.stats.num_accepted_tokens < guessing.stats.num_draft_tokens
    roomy = make_engine(name, 128, prefix_cache=False, max_num_seqs=4, **settings)
    for request in requests[::12]:
        assert drawn(run_all(roomy, [request])[request.request_id]) == drawn(together[request.request_id])


def drawn(completion: Completion) -> tuple[object, ...]:
    assert completion.token_ids, completion.error
    return completion.token_ids, completion.logprobs


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"data_parallel": 2, "expert_parallel": 2, "rebalance_interval": 5}, "rebalance_interval 5"),
        ({"tensor_parallel": 4}, "tensor_parallel 4"),
        ({"data_parallel": 2, "expert_parallel": 2, "exchange": "deep_ep"}, "exchange deep_ep"),
    ],
)
def test_ranks_that_would_sum_in_another_order_are_refused(settings: dict[str, Any], cause: str) -> None:
    with pytest.raises(SettingsError, match=rf"{cause}.* deterministic"):
        make_engine("smollm2", 64, deterministic=True, **settings)
