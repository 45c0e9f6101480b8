"""Counters of one engine, read by its heartbeat. Knows nothing of what counts them."""

from dataclasses import dataclass, field


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
    num_draws: int = 0  # runs that gave their sequence tokens: output tokens over these are tokens a step
    num_draft_tokens: int = 0  # verified: a row of a step was spent on each
    num_accepted_tokens: int = 0  # of these, drawn as guessed
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
    drafts_by_position: list[int] = field(default_factory=list)  # num_draft_tokens, by position in the draft ...
    accepted_by_position: list[int] = field(default_factory=list)  # ... and num_accepted_tokens

    def count_draft(self, num_verified: int, num_accepted: int) -> None:
        """Count a draft, of which the first ``num_accepted`` tokens were drawn as guessed."""
        self.num_draft_tokens += num_verified
        self.num_accepted_tokens += num_accepted
        if (missing := num_verified - len(self.drafts_by_position)) > 0:
            self.drafts_by_position += [0] * missing
            self.accepted_by_position += [0] * missing
        for position in range(num_verified):
            self.drafts_by_position[position] += 1
            self.accepted_by_position[position] += position < num_accepted
