"""Counters of one engine, read by its heartbeat. Knows nothing of what counts them."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, but for the gauges. Owned by the loop; the field names are the heartbeat's."""

    num_running: int = 0  # gauge
    num_waiting: int = 0  # gauge
    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted requests, cached ones included
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_forced_tokens: int = 0  # of the output tokens, those that the grammar forced
    num_batched_tokens: int = 0  # rows computed: recomputation after a preemption counts again
    num_preemptions: int = 0
    num_finished: int = 0
    num_kv_blocks: int = 0  # gauge, as the next
    num_kv_blocks_used: int = 0
    step_s: float = 0.0  # in steps, and of these
    mask_s: float = 0.0  # in filling masks
    num_expert_moves: int = 0
    expert_balance: float = 0.0  # gauge: mean load of a rank over the busiest one's; 0 where it is not measured
    expert_balance_unmoved: float = 0.0  # gauge: what it would be if no expert had moved
