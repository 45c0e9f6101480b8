"""Steps launched before the tokens of the step before are read: the same completions, and nothing left behind."""

from typing import Any

import msgspec
import pytest
import torch

from schemas.records import Completion, FinishReason, Request, Sampling
from tests.engine.fakes import END, HashModel, finish_all, make_engine, run_all
from tests.engine.test_loop import CONSTRAINTS, mixed_requests, request
from tests.engine.test_parity import make_engine as make_real_engine
from tests.tiny_models import write_tiny_model


def complete(overlap: bool, count: int = 96, **settings: Any) -> dict[str, Completion]:
    engine = make_engine(overlap=overlap, **settings)
    for constraint in CONSTRAINTS:
        engine.add_constraint(constraint)
    return run_all(engine, mixed_requests(count))


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 17}, {"num_blocks": 60, "max_model_len": 120}, {"prefix_cache": False}],
    ids=str,
)
def test_overlap_changes_no_completion(settings: dict[str, Any]) -> None:
    overlapped, plain = complete(True, **settings), complete(False)
    assert overlapped.keys() == plain.keys()
    for name, completion in overlapped.items():
        other = plain[name]
        assert (completion.token_ids, completion.text, completion.finish_reason, completion.logprobs) == (
            other.token_ids,
            other.text,
            other.finish_reason,
            other.logprobs,
        )


def test_free_rows_run_ahead_and_a_row_that_ended_costs_one_row_more() -> None:
    models = {overlap: HashModel() for overlap in (True, False)}
    for overlap, model in models.items():
        run_all(make_engine(model, overlap=overlap), [request(i, max_tokens=6) for i in range(4)])
    assert sum(models[True].num_rows) == sum(models[False].num_rows)  # a budget's end is known before
    ending = {overlap: HashModel(favourites=[END], boost=100.0) for overlap in (True, False)}
    for overlap, model in ending.items():
        done = run_all(make_engine(model, overlap=overlap), [request(i) for i in range(4)])
        assert {completion.token_ids for completion in done.values()} == {(END,)}
    assert sum(ending[True].num_rows) == sum(ending[False].num_rows) + 4


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    engine = make_engine(HashModel(), overlap=True)
    engine.add(request("a", max_tokens=5))
    engine.step()
    (sequence,) = engine._scheduler.running
    assert (sequence.num_output, sequence.num_in_flight) == (0, 1)
    engine.step()
    assert (sequence.num_output, sequence.num_in_flight) == (1, 1)
    finish_all(engine)


def test_a_cancelled_row_drops_what_is_in_flight() -> None:
    engine = make_engine(HashModel(), overlap=True)
    for name in ("a", "b"):
        engine.add(request(name, max_tokens=8))
    engine.step()
    engine.step()
    engine.cancel(["a"])
    done = finish_all(engine)
    assert done["a"].finish_reason == FinishReason.CANCELLED
    assert done["b"].num_prompt_tokens > 0
    assert len(done["b"].token_ids) == 8


def ranked(request: Request) -> Request:
    sampling = Sampling(max_tokens=24, top_labels=3)
    return msgspec.structs.replace(request, request_id=f"ranked {request.request_id}", sampling=sampling)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
@pytest.mark.parametrize("is_filtered", [False, True], ids=["fused", "filtered"])
def test_no_step_waits_for_the_device(family: str, is_filtered: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Else the next step is launched too late: torch raises where a call waits for all that was launched."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"), family)
    engine = make_real_engine(str(model), 256, dtype="bfloat16", device="cuda", max_num_seqs=32, kv_cache_gib=0.1)
    for constraint in CONSTRAINTS:
        engine.add_constraint(constraint)
    requests = [
        each for each in mixed_requests(96) if is_filtered or not (each.sampling.top_k or each.sampling.top_p < 1)
    ]
    requests += [ranked(each) for each in requests if each.constraint_key == CONSTRAINTS[3].key]
    run_all(engine, requests)  # compiles kernels and grammars
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = run_all(engine, requests)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(done) == len(requests)
