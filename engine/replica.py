"""Launches steps on all ranks of a replica, in step with the replicas that it shares experts with.

The leader lays a step out, agrees with the other leaders on its size and hands it to its followers; a leader without
rows joins with a row of nobody. Knows no requests. With one rank there is nobody to talk to.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.batch import StepSize
from engine.device import EngineSizes
from engine.dist import Ranks
from engine.expert_balance import ExpertBalance
from engine.graphs import GraphLimits
from engine.lookahead import Lookahead, make_lookahead
from engine.mirror import mirror
from engine.models import Model
from engine.runner import Runner, lay_out, size_of
from engine.types import Run
from schemas.errors import EngineError
from schemas.settings import EngineSettings

ROW_OF_NOBODY = {
    "input_ids": np.zeros(1, np.int64),
    "sources": np.full(1, -1, np.int64),
    "positions": np.zeros(1, np.int64),
    "slots": np.zeros(1, np.int64),  # block 0 belongs to nobody
    "logits_rows": np.zeros(1, np.int64),
    "block_table": np.zeros((1, 1), np.int64),
    "seq_lens": np.ones(1, np.int64),
    "query_starts": np.arange(2),
}
"""A layout that computes what nobody reads."""

NUM_DIMS = {name: array.ndim for name, array in ROW_OF_NOBODY.items()} | {"order": 1}
"""Of the arrays that a leader sends: a layout, and ``order``, which is empty when there is nothing to do."""


def make_replica(
    model: Model,
    device: torch.device,
    ranks: Ranks,
    settings: EngineSettings,
    *,
    sizes: EngineSizes,
    max_model_len: int,
) -> Replica:
    """Allocate the cache and record graphs. Raises EngineError if the longest sequence does not fit."""
    block_size, drafter = sizes.block_size, model.block_drafter
    longest = max_model_len + (drafter.spec.block_size if drafter else 0)  # what follows the last token may be guessed
    blocks_per_sequence = -(-longest // block_size)
    num_blocks = ranks.replica.smallest(sizes.kv_cache_bytes // model.cache_bytes_per_block(block_size))
    if num_blocks <= blocks_per_sequence:
        raise EngineError(
            f"the KV cache holds {max(0, num_blocks - 1) * block_size} tokens, less than max_model_len "
            f"{max_model_len}: raise engine.kv_cache_gib or lower max_model_len"
        )
    num_blocks = min(num_blocks, 2 * sizes.max_num_seqs * blocks_per_sequence + 1)  # twice what full batches fill
    max_mixed_rows = min(sizes.max_num_batched_tokens, model.max_mixed_rows)
    limits = GraphLimits(sizes.max_num_seqs, max_mixed_rows, blocks_per_sequence)
    graphs = limits if settings.cuda_graphs else None
    runner = Runner(model, device, num_blocks=num_blocks, block_size=block_size, graphs=graphs)
    lookahead = make_lookahead(model, runner, block_size)
    return Replica(runner, ranks, num_blocks, block_size, balance=model.expert_balance, lookahead=lookahead)


class Replica:
    """This rank's part in its replica. Owned by the engine's loop, or on other ranks than the leader by Follower."""

    def __init__(
        self,
        runner: Runner,
        ranks: Ranks,
        num_blocks: int,
        block_size: int,
        *,
        balance: ExpertBalance | None = None,
        lookahead: Lookahead | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.expert_balance, self.lookahead = balance, lookahead
        if balance:
            balance.start()
        self.step_sizes = runner.step_sizes
        self._runner, self._ranks, self._block_size = runner, ranks, block_size
        self._num_heard = 0  # batches of requests that the client has announced to all ranks
        self.is_awake = False  # some leader has work, or is about to get some: all must agree on the next step

    def hear(self, num_batches: int) -> None:
        """The client has sent that many batches of requests, to whomever."""
        self._num_heard = num_batches
        self.is_awake = self._ranks.lockstep.size > 1

    def run(self, runs: Seq[Run], drawn: Tensor | None = None) -> Tensor:
        """Launch the runs, decodes first: float32 logits [L, V] of those that reach their sequence's last token.

        ``drawn`` int64 [L'] on the device: the tokens of the step before, for the runs whose token is still in flight.
        """
        layout = lay_out(runs, self._block_size)
        size = self._agree(layout, is_busy=True)
        return self._lead(layout, size, drawn)

    def stand_by(self, *, is_busy: bool) -> bool:
        """Join the others' step without rows of one's own, if there is any; ``is_busy``: rows will come.

        Returns whether anybody had rows.
        """
        if self._ranks.lockstep.size == 1:
            return False
        size = self._agree(None, is_busy=is_busy)
        if size.rows:
            self._lead(ROW_OF_NOBODY, size, None)
        return size.rows > 0

    def keep_in_touch(self) -> None:
        """Let followers know that the leader is there, so that they say so to the client."""
        if self._ranks.replica.size > 1:
            empty = {name: np.empty((0,) * num_dims, np.int64) for name, num_dims in NUM_DIMS.items()}
            self._ranks.replica.send_arrays(empty)

    @torch.inference_mode()
    def follow(self) -> bool:
        """Do what the leader does next; whether that was a step."""
        arrays = self._ranks.replica.receive_arrays(NUM_DIMS)
        order = arrays.pop("order").tolist()
        if not order:
            return False
        num_drawn, rows, logits_rows, is_decode = order
        drawn = None
        if num_drawn:
            drawn = self._ranks.replica.receive(torch.empty(num_drawn, dtype=torch.int64, device=self._runner.device))
        self._run(arrays, StepSize(rows, logits_rows, bool(is_decode)), drawn)
        return True

    def _agree(self, layout: Mapping[str, np.ndarray] | None, *, is_busy: bool) -> StepSize:
        """The size of the next step over all leaders."""
        own, is_decode = StepSize(0, 0, is_decode=True), True
        if layout:
            own, is_decode = size_of(self._part(layout)), size_of(layout).is_decode  # a part may look like decodes
        heard = self._num_heard
        rows, logits_rows, is_mixed, busy, newest, oldest = self._ranks.lockstep.largest(
            [own.rows, own.logits_rows, not is_decode, is_busy, heard, -heard]
        )
        self.is_awake = self._ranks.lockstep.size > 1 and bool(busy or newest != -oldest)
        return StepSize(rows, max(1, logits_rows), not is_mixed)  # a mirrored step has one on each rank

    def _lead(self, layout: Mapping[str, np.ndarray], size: StepSize, drawn: Tensor | None) -> Tensor:
        replica = self._ranks.replica
        if replica.size > 1:
            drawn = drawn if (layout["sources"] >= 0).any() else None
            num_drawn = 0 if drawn is None else len(drawn)
            order = np.array([num_drawn, size.rows, size.logits_rows, size.is_decode], np.int64)
            replica.send_arrays({name: order if name == "order" else layout[name] for name in NUM_DIMS})
            if drawn is not None:
                replica.send(drawn)
        return self._run(layout, size, drawn)

    def _run(self, layout: Mapping[str, np.ndarray], size: StepSize, drawn: Tensor | None) -> Tensor:
        logits = self._runner.run(self._part(layout), size, drawn)
        if self.expert_balance:
            self.expert_balance.end_step()
        return logits

    def _part(self, layout: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """This rank's rows: all of them, but for a step with a prefill that several ranks share."""
        context = self._ranks.context
        if context.size == 1 or size_of(layout).is_decode:
            return layout
        return mirror(layout, context.index, context.size)
