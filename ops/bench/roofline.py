"""The least time that a machine needs for a workload: its measured matmul and copy rates against what must be done.

Counts each prompt token that no row before it had, and each step that the longest output takes; knows no engine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BYTES = 2  # of a bfloat16
MATMUL_SIZE = 8192
COPY_BYTES = 2**31


@dataclass(frozen=True)
class Rates:
    """What a device reaches: bf16 matmul of 8192 x 8192 matrices, and bytes read plus written by a large copy."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class RowWork:
    """Tokens of one row: prompt, how much of it the prefix cache gave, and output."""

    num_prompt: int
    num_cached: int
    num_output: int


def measure_rates(repeats: int = 20) -> Rates | None:
    """Measure the first GPU; None without one. Frees what it took."""
    import torch

    if not torch.cuda.is_available():
        return None
    rates = Rates(2 * MATMUL_SIZE**3 / _matmul_seconds(repeats), 2 * COPY_BYTES / _copy_seconds(repeats))
    torch.cuda.empty_cache()
    return rates


def _matmul_seconds(repeats: int) -> float:
    import torch

    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return _seconds(lambda: left @ right, repeats)


def _copy_seconds(repeats: int) -> float:
    import torch

    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return _seconds(lambda: target.copy_(source), repeats)


def _seconds(operation: Callable[[], Any], repeats: int) -> float:
    import torch

    for _ in range(3):
        operation()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        operation()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


@dataclass(frozen=True)
class DenseCosts:
    """Work of a dense decoder: parameters that multiply every token, those of the head, and cache bytes of a token."""

    body_parameters: int
    head_parameters: int
    attention_width: int  # query heads x head size x layers
    cache_bytes: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "DenseCosts":
        """From the config.json of a dense shape."""
        hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        return cls(
            body_parameters=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_parameters=hidden * config["vocab_size"],
            attention_width=layers * heads * head,
            cache_bytes=2 * BYTES * layers * kv_heads * head,
        )


def prefill_seconds(costs: DenseCosts, rates: Rates, rows: Sequence[RowWork]) -> float:
    """FLOPs of the prompt tokens that had to be computed, attention included, at the matmul rate."""
    flops = 0.0
    for row in rows:
        own = row.num_prompt - row.num_cached
        num_pairs = own * row.num_cached + own * (own + 1) / 2
        flops += 2 * own * costs.body_parameters + 4 * costs.attention_width * num_pairs
    return flops / rates.flops_per_s


def decode_seconds(costs: DenseCosts, rates: Rates, rows: Sequence[RowWork]) -> float:
    """All rows decoding together, step by step: the larger of bytes (weights once, each row's cache) and FLOPs."""
    seconds = 0.0
    for step in range(1, max(row.num_output for row in rows)):  # the first token is the prefill's
        contexts = [row.num_prompt + step for row in rows if row.num_output > step]
        parameters = costs.body_parameters + costs.head_parameters
        num_bytes = BYTES * parameters + costs.cache_bytes * sum(contexts)
        flops = 2 * len(contexts) * parameters + 4 * costs.attention_width * sum(contexts)
        seconds += max(num_bytes / rates.bytes_per_s, flops / rates.flops_per_s)
    return seconds


def roofline(config: Mapping[str, Any], rates: Rates, rows: Sequence[RowWork], seconds: float, *, is_free: bool) -> Any:
    """The roofline line of a result. Decode steps count only for free text: constrained rows need fewer than tokens."""
    costs = DenseCosts.of(config)
    prefill = prefill_seconds(costs, rates, rows)
    decode = decode_seconds(costs, rates, rows) if is_free else 0.0
    return {
        "rates": asdict(rates),
        "prefill_bound_s": prefill,
        "decode_bound_s": decode,
        "share_of_bound": (prefill + decode) / seconds,
    }
