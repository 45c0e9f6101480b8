"""FlashMLA and DeepGEMM against the reference, at the sizes of DeepSeek's models, where a Hopper GPU has them."""

import dataclasses

import pytest
import torch

from kernels.api import Choice, Gate, Scoring
from kernels.reference import ReferenceKernels
from kernels.select import BackendError, select_kernels
from tests.kernels.test_triton_mla import make_batch

pytest.importorskip("triton", reason="triton is not installed")

from kernels.hopper import HopperKernels, Libraries, load_libraries
from tests.kernels.test_triton_dense import DEVICE, draw, relative_error

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TOLERANCE = 1e-2  # of bfloat16
FP8_TOLERANCE = 3e-2  # rounded to bfloat16 first, one inner value in 16 falls to the next code, 6 % away
KEY, ROPE, VALUE, RANK = 128, 64, 128, 512
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="no Hopper GPU")]


def hopper_kernels(library: str, *, is_fp8: bool = False) -> HopperKernels:
    """The backend, or a skip that says why a library cannot be had."""
    try:
        kernels, choices = select_kernels(DEVICE, torch.bfloat16, "hopper", is_fp8=is_fp8)
    except BackendError as error:
        pytest.skip(str(error))
    missing = [choice.reason for choice in choices if choice.reason.startswith(f"{library} cannot")]
    if missing:
        pytest.skip(missing[0])
    assert isinstance(kernels, HopperKernels)
    return kernels


def test_a_library_that_is_missing_is_named_and_triton_takes_its_place() -> None:
    libraries, choices = load_libraries()
    for name, choice in zip(("flash_mla", "deep_gemm"), choices, strict=True):
        assert isinstance(choice, Choice)
        if getattr(libraries, name) is None:
            assert (choice.backend, name in choice.reason) == ("triton", True)
        else:
            assert choice.backend == name


def test_without_its_libraries_the_backend_computes_what_triton_does() -> None:
    kernels = HopperKernels(DEVICE, torch.float32, Libraries(None, None))
    x, gate_up, down = draw(3, 64), draw(4, 128, 64, seed=1), draw(4, 64, 64, seed=2)
    weights, experts = draw(3, 1, seed=3), torch.tensor([[0], [3], [0]], device=DEVICE)
    packed = kernels.pack_experts(gate_up, down)
    got, wanted = (each.experts_mlp(x, weights, experts, packed) for each in (kernels, ReferenceKernels(DEVICE)))
    assert relative_error(got, wanted) < 1e-5


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("query_lens", [[1] * 9, [1, 1, 5, 2, 40]], ids=["decodes", "runs"])
class TestFlashMla:
    """Latent attention with FlashMLA where it applies."""

    pytestmark = on_hopper

    def test_it_equals_the_reference(self, heads: int, query_lens: list[int]) -> None:
        kernels = hopper_kernels("flash_mla")
        starts = [1500, 63, 64, 700, 0, 127, 2047, 5, 300][: len(query_lens)]
        batch = dataclasses.replace(make_batch(starts, query_lens, 64), host_table=None)  # nothing is expanded
        fused = draw(sum(query_lens), heads, KEY + ROPE, seed=1)
        cache = draw(int(batch.block_table.max()) + 1, 64, 1, RANK + ROPE, seed=2)
        weight = draw(heads * (KEY + VALUE), RANK, seed=3) / 16

        def attend(kernels: ReferenceKernels, kind: torch.dtype) -> torch.Tensor:
            q, q_rope = fused.to(kind).split([KEY, ROPE], dim=-1)
            up = kernels.pack_up_projection(weight.to(kind), heads, KEY)
            return kernels.latent_attention(q, q_rope, cache.to(kind), batch, up, scale=0.02)

        got = attend(kernels, torch.bfloat16)
        assert relative_error(got, attend(ReferenceKernels(DEVICE), torch.float32)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_recorded_graph_follows_the_lengths_of_each_replay(backend: str) -> None:
    kernels = hopper_kernels("flash_mla") if backend == "hopper" else select_kernels(DEVICE, torch.bfloat16, backend)[0]
    batch = make_batch([1000, 700, 64, 2000], [1, 1, 1, 1], 64)
    recorded = dataclasses.replace(batch, host_seq_lens=(), host_table=None, seq_lens=batch.seq_lens.clone())
    q, q_rope = draw(4, 16, KEY + ROPE, dtype=torch.bfloat16, seed=1).split([KEY, ROPE], dim=-1)
    cache = draw(int(batch.block_table.max()) + 1, 64, 1, RANK + ROPE, dtype=torch.bfloat16, seed=2)
    weight = draw(16 * (KEY + VALUE), RANK, dtype=torch.bfloat16, seed=3) / 16
    up = kernels.pack_up_projection(weight, 16, KEY)

    def attend() -> torch.Tensor:
        kernels.latent_attention(q, q_rope, cache, recorded, up, scale=0.02)  # as of a first layer
        return kernels.latent_attention(q, q_rope, cache, recorded, up, scale=0.02)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    oracle = ReferenceKernels(DEVICE)
    for lens in ([1001, 701, 65, 2001], [1, 64, 65, 3], [900, 2, 10, 1999]):
        recorded.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        now = dataclasses.replace(batch, seq_lens=recorded.seq_lens, host_seq_lens=tuple(lens))
        wanted = oracle.latent_attention(
            q.float(),
            q_rope.float(),
            cache.float(),
            now,
            oracle.pack_up_projection(weight.float(), 16, KEY),
            scale=0.02,
        )
        assert relative_error(out, wanted) < TOLERANCE, lens


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 5, 256, 4000])
def test_deep_gemm_experts_equal_the_reference(num_rows: int, is_fp8: bool) -> None:
    kernels, oracle = hopper_kernels("deep_gemm", is_fp8=is_fp8), ReferenceKernels(DEVICE, is_fp8=is_fp8)
    x, gate_up = draw(num_rows, 2048, seed=1), draw(64, 2816, 2048, seed=2) * 0.02
    down, logits = draw(64, 2048, 1408, seed=3) * 0.02, draw(num_rows, 64, seed=4)
    weights, experts = kernels.route(logits, Gate(Scoring.SOFTMAX, 6))
    experts[::7, 2] = -1
    x, gate_up, down = x.bfloat16(), gate_up.bfloat16(), down.bfloat16()
    wanted = oracle.experts_mlp(x.float(), weights, experts, oracle.pack_experts(gate_up.float(), down.float()))
    packed = kernels.pack_experts(gate_up, down)
    for compute in (kernels.experts_mlp, kernels.experts_mlp_contiguous, kernels.experts_mlp_masked):
        error = relative_error(compute(x, weights, experts, packed), wanted)
        assert error < (FP8_TOLERANCE if is_fp8 else TOLERANCE), compute


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("num_rows", [1, 77, 4000])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 1024), (2624, 2048), (200, 100)])
def test_fp8_projections_equal_the_reference(num_rows: int, outputs: int, inputs: int) -> None:
    """The last shape is none of DeepGEMM's."""
    kernels, oracle = hopper_kernels("deep_gemm", is_fp8=True), ReferenceKernels(DEVICE, is_fp8=True)
    x, weight = draw(num_rows, inputs, seed=1).bfloat16(), draw(outputs, inputs, seed=2).bfloat16()
    bias = draw(outputs, seed=3).bfloat16()
    got = kernels.linear(x, kernels.pack_projection(weight, bias))
    wanted = oracle.linear(x.float(), oracle.pack_projection(weight.float(), bias.float()))
    assert relative_error(got, wanted) < TOLERANCE
