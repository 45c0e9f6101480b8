"""Each kernel backend at DeepSeek's sizes: its time against the GPU's limit, its result against the reference's.

Operations are timed in a CUDA graph, as the engine replays them. Knows no engine.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.api import AttentionBatch, Choice, Gate, Kernels, SamplingBatch, Scoring
from kernels.reference import ReferenceKernels
from kernels.select import BackendError, select_kernels
from ops.bench.measurement import write_result
from ops.bench.roofline import BYTES, Rates, measure_rates, seconds_of
from schemas.errors import InputDataError

HIDDEN, INNER, EXPERTS, SELECTED = 2048, 1408, 64, 6  # DeepSeek-V2-Lite's experts
KEY, ROPE, VALUE, RANK, PAGE = 128, 64, 128, 512, 64  # latent attention of V2 and V3
VOCAB = 151_936  # Qwen3's
FP8_SPEEDUP = 2  # of the tensor cores' peak over bfloat16's


@dataclass(frozen=True)
class Case:
    """One operation at one size, what it must compute and move at least, and who can do it."""

    operation: str
    size: str
    flops: float
    num_bytes: float
    backends: Mapping[str, Callable[[], Tensor]]
    wanted: Callable[[], Tensor]
    speedup: int = 1  # of the matmul rate
    seen: Callable[[Tensor], Tensor] = lambda out: out  # of a result: the part that is defined


def run_kernels_bench(commit: str | None = None) -> list[str]:
    """Measure, write one JSON file, and return the lines to print. Raises InputDataError without a GPU."""
    rates = measure_rates()
    if rates is None:
        raise InputDataError("kernel backends are measured on a GPU, and torch sees none")
    device = torch.device("cuda")
    opened, left_out = _open_backends(device)
    with torch.inference_mode():
        results = [measure(case, rates, _graph_seconds) for case in _cases(device, opened)]
    facts = {"rates": asdict(rates), "results": results, "left_out": left_out} | ({"commit": commit} if commit else {})
    path = write_result("kernels", {"dtype": "bfloat16"}, [], **facts)
    return [*table(results), *(f"left out: {name}: {cause}" for name, cause in left_out.items()), path.name]


def measure(case: Case, rates: Rates, clock: Callable[[Callable[[], Tensor]], float]) -> dict[str, Any]:
    """Times, shares of the bound and relative errors of a case's backends; one that fails says why."""
    by_bytes, by_flops = case.num_bytes / rates.bytes_per_s, case.flops / (rates.flops_per_s * case.speedup)
    bound_s, limit = max((by_bytes, "bytes"), (by_flops, "flops"))
    wanted = case.seen(case.wanted())
    backends: dict[str, Any] = {}
    for name, compute in case.backends.items():
        try:
            error = relative_error(case.seen(compute()), wanted)
            seconds = clock(compute)
        except (RuntimeError, AssertionError) as failure:  # a library that does not take the size
            backends[name] = {"failure": str(failure)[:300]}
        else:
            backends[name] = {"ms": seconds * 1e3, "share_of_bound": bound_s / seconds, "relative_error": error}
    sizes = {"operation": case.operation, "size": case.size}
    return sizes | {"bound_ms": bound_s * 1e3, "bound_by": limit, "backends": backends}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference by the norm of what is wanted, in fp32."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-30))


def table(results: list[dict[str, Any]]) -> list[str]:
    """One line a backend."""
    lines = [f"{'operation':<20}{'size':<44}{'backend':<22}{'ms':>9}{'of bound':>10}{'error':>10}"]
    for case in results:
        for name, found in case["backends"].items():
            start = f"{case['operation']:<20}{case['size']:<44}{name:<22}"
            if "failure" in found:
                lines.append(f"{start}{found['failure'].splitlines()[0][:60]}")
            else:
                share = f"{found['share_of_bound']:.0%}"
                lines.append(f"{start}{found['ms']:>9.4f}{share:>10}{found['relative_error']:>10.5f}")
    return lines


def _open_backends(device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """Kernels by name ("hopper fp8": with fp8 weights), and the cause where one cannot be had."""
    opened: dict[str, Any] = {"reference": ReferenceKernels(device, torch.bfloat16)}
    left_out: dict[str, str] = {}
    for name, is_fp8 in (("triton", False), ("hopper", False), ("hopper fp8", True)):
        try:
            opened[name], choices = select_kernels(device, torch.bfloat16, name.split()[0], is_fp8=is_fp8)
        except BackendError as error:
            left_out[name] = str(error)
        else:
            left_out |= {choice.operation: choice.reason for choice in choices if _is_missing(choice)}
    return opened, left_out


def _is_missing(choice: Choice) -> bool:
    return "cannot be imported" in choice.reason


def _graph_seconds(compute: Callable[[], Tensor]) -> float:
    """Seconds of one replay of the operation."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return seconds_of(graph.replay, repeats=30)


def _cases(device: torch.device, opened: Mapping[str, Any]) -> Iterator[Case]:
    """One after the other, so that only one has its tensors in memory."""
    draw = random.Random(5)
    yield _latent_case(device, opened, 16, [draw.randint(100, 1500) for _ in range(256)])
    yield _latent_case(device, opened, 128, [2048] * 64)
    for num_rows in (64, 256, 2048, 8192):
        yield _grouped_case(device, opened, num_rows)
    for num_rows in (64, 256, 8192):
        yield _experts_case(device, opened, num_rows, is_fp8=False)
    for num_rows in (256, 8192):
        yield _router_case(device, opened, num_rows)
        if "hopper fp8" in opened:
            yield _experts_case(device, opened, num_rows, is_fp8=True)
            yield _projection_case(device, opened, num_rows)
    for num_rows in (1, 256):
        for filters in ({}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.95}):
            yield _sampling_case(device, opened, num_rows, filters)


def _latent_case(device: torch.device, opened: Mapping[str, Any], heads: int, lens: Sequence[int]) -> Case:
    """Decode attention with both its projections; FlashMLA also with fewer heads than it is used for."""
    batch = decode_batch(lens, device)
    fused = _normal(device, len(lens), heads, KEY + ROPE, seed=1)
    cache = _normal(device, int(batch.block_table.max()) + 1, PAGE, 1, RANK + ROPE, seed=2)
    weight = _normal(device, heads * (KEY + VALUE), RANK, seed=3) * 0.05

    def attend(kernels: Kernels, dtype: torch.dtype) -> Callable[[], Tensor]:
        q, q_rope = torch.split(fused.to(dtype), [KEY, ROPE], dim=-1)
        up, latents = kernels.pack_up_projection(weight.to(dtype), heads, KEY), cache.to(dtype)
        return lambda: kernels.latent_attention(q, q_rope, latents, batch, up, scale=(KEY + ROPE) ** -0.5)

    backends = {"triton": attend(opened["triton"], torch.bfloat16)} if "triton" in opened else {}
    if "hopper" in opened and opened["hopper"].libraries.flash_mla is not None:
        flash = type(opened["hopper"])(device, torch.bfloat16, opened["hopper"].libraries)
        flash.min_heads = 1
        backends["flash_mla"] = attend(flash, torch.bfloat16)
    multiplications = sum(lens) * heads * (2 * RANK + ROPE) + len(lens) * heads * RANK * (KEY + VALUE)
    num_bytes = BYTES * (sum(lens) * (RANK + ROPE) + weight.numel())
    size = f"{len(lens)} rows, {heads} heads, {min(lens)}-{max(lens)} keys"
    wanted = attend(ReferenceKernels(device), torch.float32)
    return Case("latent attention", size, 2.0 * multiplications, num_bytes, backends, wanted)


def decode_batch(lens: Sequence[int], device: torch.device) -> AttentionBatch:
    """Sequences of so many tokens, whose last is the step's row; each has pages of its own, as far apart as can be."""
    num_pages = [-(-length // PAGE) for length in lens]
    table = torch.zeros(len(lens), max(num_pages), dtype=torch.int64)
    for row, count in enumerate(num_pages):
        table[row, :count] = 1 + row + len(lens) * torch.arange(count)
    positions = torch.tensor(lens) - 1
    slots = table[torch.arange(len(lens)), positions // PAGE] * PAGE + positions % PAGE
    return AttentionBatch(
        slots=slots.to(device),
        block_table=table.to(device),
        seq_lens=torch.tensor(lens, device=device),
        query_starts=torch.arange(len(lens) + 1, device=device),
        positions=positions.to(device),
        query_lens=(1,) * len(lens),
        host_seq_lens=tuple(lens),
        num_decodes=len(lens),
    )


def _grouped_case(device: torch.device, opened: Mapping[str, Any], num_rows: int) -> Case:
    """The larger product of the experts alone, rows sorted and copied before; aligned to what DeepGEMM asks for."""
    from kernels import reference_moe, triton_moe

    x, _, experts, gate_up, _ = _expert_inputs(device, num_rows)
    rows = triton_moe.sort_by_expert(experts, EXPERTS, 128)
    gathered = x.index_select(0, rows.sources)
    tiling = triton_moe.Tiling(128, 128, 64, 8, 3)
    backends: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: reference_moe.grouped_linear(gathered, gate_up, rows),
        "triton": lambda: triton_moe.grouped_linear(gathered, gate_up, rows, tiling),
    }
    if "hopper" in opened and (library := opened["hopper"].libraries.deep_gemm) is not None:

        def deep_gemm() -> Tensor:
            out = gathered.new_empty(len(gathered), gate_up.shape[1])
            library.m_grouped_bf16_gemm_nt_contiguous(gathered, gate_up, out, rows.experts)
            return out

        backends["deep_gemm"] = deep_gemm
    num_values = EXPERTS * 2 * INNER * HIDDEN + num_rows * SELECTED * (HIDDEN + 2 * INNER)
    is_row = rows.experts >= 0
    return Case(
        operation="grouped GEMM",
        size=f"{num_rows} rows, top {SELECTED} of {EXPERTS}",
        flops=2.0 * num_rows * SELECTED * 2 * INNER * HIDDEN,
        num_bytes=BYTES * num_values,
        backends=backends,
        wanted=lambda: reference_moe.grouped_linear(gathered.float(), gate_up.float(), rows),
        seen=lambda out: out[is_row],
    )


def _experts_case(device: torch.device, opened: Mapping[str, Any], num_rows: int, *, is_fp8: bool) -> Case:
    """All of the experts: rows sorted, both products, the gate, the weighted sum."""
    x, weights, experts, gate_up, down = _expert_inputs(device, num_rows)
    oracle = ReferenceKernels(device, is_fp8=is_fp8)
    packed_oracle = oracle.pack_experts(gate_up.float(), down.float())
    backends: dict[str, Callable[[], Tensor]] = {}
    if not is_fp8:
        torch_kernels, packed_torch = opened["reference"], opened["reference"].pack_experts(gate_up, down)
        backends["torch"] = lambda: torch_kernels.experts_mlp(x, weights, experts, packed_torch)
        if "triton" in opened:
            triton, packed_triton = opened["triton"], opened["triton"].pack_experts(gate_up, down)
            backends["triton"] = lambda: triton.experts_mlp(x, weights, experts, packed_triton)
    name = "hopper fp8" if is_fp8 else "hopper"
    if name in opened and opened[name].libraries.deep_gemm is not None:
        hopper, packed_hopper = opened[name], opened[name].pack_experts(gate_up, down)
        backends["deep_gemm contiguous"] = lambda: hopper.experts_mlp_contiguous(x, weights, experts, packed_hopper)
        if num_rows <= 512:
            backends["deep_gemm masked"] = lambda: hopper.experts_mlp_masked(x, weights, experts, packed_hopper)
    return Case(
        operation="experts fp8" if is_fp8 else "experts",
        size=f"{num_rows} rows, top {SELECTED} of {EXPERTS}",
        flops=2.0 * num_rows * SELECTED * 3 * INNER * HIDDEN,
        num_bytes=(1 if is_fp8 else BYTES) * EXPERTS * 3 * INNER * HIDDEN + BYTES * num_rows * 2 * HIDDEN,
        backends=backends,
        wanted=lambda: oracle.experts_mlp(x.float(), weights, experts, packed_oracle),
        speedup=FP8_SPEEDUP if is_fp8 else 1,
    )


def _projection_case(device: torch.device, opened: Mapping[str, Any], num_rows: int) -> Case:
    """A gate and up projection of an 8B model in fp8, its rows rounded on the way; bfloat16 beside it."""
    inputs, outputs = 4096, 24576
    x, weight = _normal(device, num_rows, inputs, seed=1), _normal(device, outputs, inputs, seed=2) * 0.02
    kernels, oracle = opened["hopper fp8"], ReferenceKernels(device, is_fp8=True)
    packed, packed_oracle = kernels.pack_projection(weight), oracle.pack_projection(weight.float())
    return Case(
        operation="projection fp8",
        size=f"{num_rows} rows, {inputs} to {outputs}",
        flops=2.0 * num_rows * inputs * outputs,
        num_bytes=inputs * outputs + BYTES * num_rows * (inputs + outputs),
        backends={
            "torch bfloat16": lambda: torch.nn.functional.linear(x, weight),
            "deep_gemm": lambda: kernels.linear(x, packed),
        },
        wanted=lambda: oracle.linear(x.float(), packed_oracle),
        speedup=FP8_SPEEDUP,
    )


def _router_case(device: torch.device, opened: Mapping[str, Any], num_rows: int) -> Case:
    """Logits in fp32; Triton leaves parts of them for ``route`` to add up."""
    x, weight = _normal(device, num_rows, HIDDEN, seed=1), _normal(device, EXPERTS, HIDDEN, seed=2).float() * 0.02

    def logits(kernels: Kernels) -> Callable[[], Tensor]:
        packed = kernels.pack_router(weight)
        return lambda: kernels.router_logits(x, packed)

    return Case(
        operation="router",
        size=f"{num_rows} rows, {EXPERTS} experts",
        flops=2.0 * num_rows * HIDDEN * EXPERTS,
        num_bytes=BYTES * num_rows * HIDDEN + 2 * BYTES * EXPERTS * (HIDDEN + num_rows),
        backends={name: logits(opened[name]) for name in ("reference", "triton") if name in opened},
        wanted=lambda: torch.mm(x.double(), weight.double().T).float(),
        seen=lambda out: out.sum(0) if out.dim() == 3 else out,
    )


def _sampling_case(
    device: torch.device, opened: Mapping[str, Any], num_rows: int, filters: Mapping[str, float]
) -> Case:
    """A draw for each row, whose logits are read once at least; of the result, the tokens' log-probabilities."""
    logits, rows = 3 * _normal(device, num_rows, VOCAB, seed=1).float(), torch.arange(num_rows, device=device)
    parameters: dict[str, Any] = {
        name: torch.full((num_rows,), value, device=device) for name, value in filters.items()
    }
    batch = SamplingBatch(torch.ones(num_rows, device=device), rows, rows, **parameters)
    return Case(
        operation="sampling",
        size=", ".join([f"{num_rows} rows of {VOCAB}", *(f"{name} {value}" for name, value in filters.items())]),
        flops=0.0,
        num_bytes=4.0 * logits.numel(),
        backends={"triton": lambda: opened["triton"].sample(logits, batch)[1]} if "triton" in opened else {},
        wanted=lambda: ReferenceKernels(device).sample(logits, batch)[1],
    )


def _expert_inputs(device: torch.device, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, weights and experts of their choices, and the experts' two weights."""
    kernels = ReferenceKernels(device)
    logits = _normal(device, num_rows, EXPERTS, seed=num_rows).float()
    weights, experts = kernels.route(logits, Gate(Scoring.SOFTMAX, SELECTED))
    gate_up = _normal(device, EXPERTS, 2 * INNER, HIDDEN, seed=1) * 0.02
    down = _normal(device, EXPERTS, HIDDEN, INNER, seed=2) * 0.02
    return _normal(device, num_rows, HIDDEN, seed=3), weights, experts, gate_up, down


def _normal(device: torch.device, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, device=device, generator=generator).bfloat16()
