"""The least time that a machine needs for a workload: its measured matmul and copy rates against what must be done.

Counts each prompt token that no row before it had, and each step that the longest output takes; knows no engine.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

BYTES = 2  # of a bfloat16
MATMUL_SIZE = 8192
CPU_MATMUL_SIZES = (1024, 2048, 4096)
CPU_REPEATS = 5
COPY_BYTES = 2**31
SPARSE_RATE = 4  # of DeepSeek V4's layers with an index


@dataclass(frozen=True)
class Rates:
    """What a device reaches: bf16 matmul of 8192 x 8192 matrices, and bytes read plus written by a large copy.

    A CPU's: the best of some smaller sizes, a few times each, by a weight in oneDNN's own layout.
    """

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class RowWork:
    """Tokens of one row: prompt, how much of it the prefix cache gave, and output."""

    num_prompt: int
    num_cached: int
    num_output: int


def measure_rates(device: str = "cuda", repeats: int = 20) -> Rates | None:
    """Measure the CPU or the first GPU; None without one. Frees what it took."""
    import torch

    if device == "cpu":
        return _cpu_rates()
    if not torch.cuda.is_available():
        return None
    rates = Rates(2 * MATMUL_SIZE**3 / _matmul_seconds(repeats), 2 * COPY_BYTES / _copy_seconds(repeats))
    torch.cuda.empty_cache()
    return rates


def _cpu_rates() -> Rates:
    import torch

    from kernels.reference import ReferenceKernels

    kernels = ReferenceKernels(torch.device("cpu"), torch.bfloat16)
    flops_per_s = 0.0
    for size in CPU_MATMUL_SIZES:
        rows, packed = torch.randn(size, size).bfloat16(), kernels.pack_weight(torch.randn(size, size).bfloat16())
        flops_per_s = max(flops_per_s, 2 * size**3 / _best_seconds(partial(kernels.linear, rows, packed)))
    source, target = (torch.ones(COPY_BYTES // 8, dtype=torch.uint8) for _ in range(2))
    return Rates(flops_per_s, 2 * len(source) / _best_seconds(lambda: target.copy_(source)))


def _best_seconds(operation: Callable[[], Any]) -> float:
    operation()
    times = []
    for _ in range(CPU_REPEATS):
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return min(times)


def _matmul_seconds(repeats: int) -> float:
    import torch

    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return seconds_of(lambda: left @ right, repeats)


def _copy_seconds(repeats: int) -> float:
    import torch

    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return seconds_of(lambda: target.copy_(source), repeats)


def seconds_of(operation: Callable[[], Any], repeats: int) -> float:
    """Mean of so many calls that the GPU works through one after the other."""
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
class Costs:
    """Work of a decoder: its parameters by what reads them, and the cache bytes of a token."""

    body_parameters: float  # multiply every token, and are read once a step
    head_parameters: float
    attention_width: float  # half the multiplications of a row with a key that it sees, over heads and layers
    cache_bytes: float
    expert_parameters: float = 0  # of one expert in each sparse layer
    num_experts: int = 1
    num_selected: float = 0  # experts of a token
    window: int = 0  # last tokens of which a row reads, in addition ...
    window_width: float = 0.0  # ... at a cost as above ...
    window_bytes: float = 0  # ... so much each
    parameter_bytes: int = BYTES  # of body and experts

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Costs":
        """From the config.json of a shape, dense or DeepSeek's."""
        if "compress_ratios" in config:
            return _compressed_costs(config)
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        head_parameters = hidden * config["vocab_size"]
        dense = 3 * hidden * config["intermediate_size"]
        if "kv_lora_rank" not in config:
            head, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
            attention = hidden * head * (2 * heads + 2 * kv_heads)
            cache_bytes = 2 * BYTES * layers * kv_heads * head
            return cls(layers * (attention + dense), head_parameters, layers * heads * head, cache_bytes)
        rank, key, value = config["kv_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"]
        rope, q_rank = config["qk_rope_head_dim"], config["q_lora_rank"]
        query = heads * (key + rope)
        to_query = hidden * query if q_rank is None else (hidden + query) * q_rank
        attention = to_query + hidden * (rank + rope) + rank * heads * (key + value) + heads * value * hidden
        num_dense, expert = config["first_k_dense_replace"], 3 * hidden * config["moe_intermediate_size"]
        num_sparse = layers - num_dense
        sparse = hidden * config["n_routed_experts"] + config["n_shared_experts"] * expert
        return cls(
            body_parameters=layers * attention + num_dense * dense + num_sparse * sparse,
            head_parameters=head_parameters,
            attention_width=layers * heads * (key + rope + value) / 2,
            cache_bytes=BYTES * layers * (rank + rope),
            expert_parameters=num_sparse * expert,
            num_experts=config["n_routed_experts"],
            num_selected=config["num_experts_per_tok"],
        )

    def attention_flops(self, contexts: Iterable[int]) -> float:
        """Of rows that see so many keys."""
        in_full, in_window = 0, 0
        for context in contexts:
            in_full += context
            in_window += min(context, self.window)
        return 4 * (self.attention_width * in_full + self.window_width * in_window)

    def token_parameters(self) -> float:
        """Those that multiply one token, the head's left out."""
        return self.body_parameters + self.num_selected * self.expert_parameters

    def read_parameters(self, num_rows: int) -> float:
        """Those that a step of so many rows reads, the head's left out, if rows pick experts independently."""
        num_read = self.num_experts * (1 - (1 - self.num_selected / self.num_experts) ** num_rows)
        return self.body_parameters + num_read * self.expert_parameters


def _compressed_costs(config: Mapping[str, Any]) -> Costs:
    """DeepSeek V4: rows see a window of tokens, and an entry for every so many; all entries, as up to 2,048 tokens."""
    hidden, head, width = config["hidden_size"], config["head_dim"], config["num_attention_heads"] * config["head_dim"]
    q_rank, projected = config["q_lora_rank"], config["o_groups"] * config["o_lora_rank"]
    streams, index, index_heads = config["hc_mult"], config["index_head_dim"], config["index_n_heads"]
    expert, layers = 3 * hidden * config["moe_intermediate_size"], config["num_hidden_layers"]
    attention = hidden * (q_rank + head) + q_rank * width + config["o_lora_rank"] * width + projected * hidden
    mixes = 2 * streams * (streams + 2) * streams * hidden
    body = layers * (attention + mixes + hidden * config["n_routed_experts"] + expert) + streams * streams * hidden
    attention_width = cache_values = 0.0
    for rate in filter(None, config["compress_ratios"]):
        is_sparse = rate == SPARSE_RATE
        body += 2 * hidden * head * (1 + is_sparse)
        attention_width += width / rate
        cache_values += head / rate
        if is_sparse:
            body += index_heads * (index * q_rank + hidden) + 4 * hidden * index
            attention_width += index_heads * index / 2 / rate
            cache_values += index / rate
    return Costs(
        body_parameters=body,
        head_parameters=hidden * config["vocab_size"],
        attention_width=attention_width,
        cache_bytes=round(BYTES * cache_values),
        expert_parameters=layers * expert,
        num_experts=config["n_routed_experts"],
        num_selected=config["num_experts_per_tok"],
        window=config["sliding_window"],
        window_width=layers * width,
        window_bytes=BYTES * layers * head,
    )


def prefill_seconds(costs: Costs, rates: Rates, rows: Sequence[RowWork]) -> float:
    """FLOPs of the prompt tokens that had to be computed, attention included, at the matmul rate."""
    flops = 0.0
    for row in rows:
        own = row.num_prompt - row.num_cached
        flops += 2 * own * costs.token_parameters()
        flops += costs.attention_flops(range(row.num_cached + 1, row.num_prompt + 1))
    return flops / rates.flops_per_s


def decode_seconds(costs: Costs, rates: Rates, rows: Sequence[RowWork]) -> float:
    """All rows decoding together, step by step: the larger of bytes (weights once, each row's cache) and FLOPs."""
    seconds = 0.0
    for step in range(1, max(row.num_output for row in rows)):  # the first token is the prefill's
        contexts = [row.num_prompt + step for row in rows if row.num_output > step]
        num_bytes = costs.parameter_bytes * costs.read_parameters(len(contexts)) + BYTES * costs.head_parameters
        num_bytes += costs.cache_bytes * sum(contexts)
        num_bytes += costs.window_bytes * sum(min(context, costs.window) for context in contexts)
        parameters = costs.token_parameters() + costs.head_parameters
        flops = 2 * len(contexts) * parameters + costs.attention_flops(contexts)
        seconds += max(num_bytes / rates.bytes_per_s, flops / rates.flops_per_s)
    return seconds


def roofline(config: Mapping[str, Any], rates: Rates, rows: Sequence[RowWork], seconds: float, *, is_free: bool) -> Any:
    """The roofline line of a result. Decode steps count only for free text: constrained rows need fewer than tokens."""
    costs = Costs.of(config)
    prefill = prefill_seconds(costs, rates, rows)
    decode = decode_seconds(costs, rates, rows) if is_free else 0.0
    return {
        "rates": asdict(rates),
        "prefill_bound_s": prefill,
        "decode_bound_s": decode,
        "share_of_bound": (prefill + decode) / seconds,
    }
