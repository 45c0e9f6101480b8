"""Continuous batching: who is admitted, what the next step computes, who gives up blocks when none is free.

Decode rows come first, prefill chunks fill the rest of the token budget, a preempted sequence is recomputed later from
its own tokens. Planning returns a value that ``carry_out`` executes. Knows no tensors, no grammar and no text.
"""

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as Seq

from engine.cache import BlockHasher, BlockPool, extend_block_hashes
from engine.types import Ids, Room, Run, Sequence, SequenceStatus, StepPlan


class Scheduler:
    """Owns the sequences from ``add`` to ``finish``."""

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, step_sizes: Seq[int] = ()
    ) -> None:
        """``step_sizes``, ascending: rows that a step is padded to; the last rows wait rather than cause padding."""
        self.pool = pool
        self.step_sizes = step_sizes
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # so that all decode rows fit into a step
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._hasher = BlockHasher(pool.block_size)
        self._computing: dict[bytes, Sequence] = {}  # prompt blocks that a running sequence is about to compute

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose tokens, at its full length, fit into the pool."""
        assert self.pool.num_blocks_for(sequence.num_prompt + sequence.max_tokens) <= self.pool.capacity
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into the batch, in order, while places and blocks last; returns those moved.

        A sequence whose next missing block is just being computed by another one waits for it: a batch of rows with
        one system prompt computes it once. It does not hold up those behind it.
        """
        num_running = len(self.running)
        delayed: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_num_seqs and len(delayed) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            hashes = self._usable_hashes(sequence)
            prefix = self.pool.find_prefix(hashes)
            if len(prefix) < len(hashes) and hashes[len(prefix)] in self._computing:
                delayed.append(sequence)
            elif self._fits(sequence, prefix):
                self._start(sequence, prefix, hashes)
            else:
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(delayed))
        return self.running[num_running:]

    def plan(self) -> StepPlan:
        """Decide the next step without changing anything."""
        preempted = self._choose_victims()
        decodes: list[Run] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            if sequence.is_ready and sequence not in preempted:
                num_computed = sequence.num_computed
                if len(sequence.token_ids) + sequence.num_in_flight - num_computed == 1:
                    decodes.append(Run(sequence, num_computed, 1, True))
                else:
                    prefills.append(sequence)
        return StepPlan(tuple(preempted), (*decodes, *self._chunks(prefills, len(decodes))), len(decodes))

    def room(self, plan: StepPlan) -> Room:
        """What a plan leaves for drafts: they take no row and no block that anything else could have.

        A step has logits of ``max_num_seqs`` rows at most: memory for them, and graphs, are made for so many.
        """
        if plan.preempted:
            return Room(0, 0, 0, self.pool.block_size)
        num_needed = sum(max(0, self._num_missing_blocks(sequence)) for sequence in self.running)
        num_blocks = max(0, self.pool.num_free - num_needed - len(self.running))
        num_draws = self.max_num_seqs - sum(run.wants_logits for run in plan.runs)
        return Room(self.max_num_batched_tokens - plan.num_tokens, num_draws, num_blocks, self.pool.block_size)

    def carry_out(self, plan: StepPlan) -> None:
        """Preempt and allocate as planned."""
        for sequence in plan.preempted:  # the youngest first, so that the oldest ends up at the queue's head
            self._leave_batch(sequence)
            sequence.num_computed = 0
            sequence.num_preemptions += 1
            sequence.set_status(SequenceStatus.WAITING)
            self.waiting.appendleft(sequence)
        for run in plan.runs:
            missing = self.pool.num_blocks_for(run.sequence.num_tokens + len(run.draft.token_ids))
            missing -= len(run.sequence.block_ids)
            if missing > 0:
                run.sequence.block_ids.extend(self.pool.allocate(missing))

    def mark_computed(self, plan: StepPlan) -> None:
        """Record that the runs are launched, and make full blocks of known tokens findable.

        Steps run on the device in the order of their launch, so whoever finds a block reads it after it was written.
        """
        for run in plan.runs:
            sequence = run.sequence
            sequence.num_computed = run.start + run.num_tokens
            num_full = min(sequence.num_computed, len(sequence.token_ids)) // self.pool.block_size
            if self.pool.prefix_cache and num_full > sequence.num_registered:
                extend_block_hashes(sequence.block_hashes, sequence.token_ids, self.pool.block_size)
                for index in range(sequence.num_registered, num_full):
                    self.pool.register(sequence.block_ids[index], sequence.block_hashes[index])
                    self._computing.pop(sequence.block_hashes[index], None)
                sequence.num_registered = num_full

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for so many tokens, if some are left for everybody else; whether it has them."""
        missing = self.pool.num_blocks_for(num_tokens) - len(sequence.block_ids)
        if missing > max(0, self.pool.num_free - len(self.running)):
            return False
        sequence.block_ids.extend(self.pool.allocate(max(0, missing)))
        return True

    def keep(self, sequence: Sequence, drafted: Ids, num_before: int) -> None:
        """Count what the last step computed of a draft, behind ``num_before`` tokens, as far as the sequence has it."""
        if sequence.status is SequenceStatus.RUNNING:  # else its blocks are gone
            pairs = zip(sequence.token_ids[num_before:-1], drafted, strict=False)
            sequence.num_computed += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_batch(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.set_status(SequenceStatus.FINISHED)

    def _usable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks a prefix hit may cover: at least one token is left to compute."""
        if not self.pool.prefix_cache:
            return []
        if not sequence.block_hashes:
            sequence.block_hashes = self._hasher.hash_prompt(sequence.token_ids)
        extend_block_hashes(sequence.block_hashes, sequence.token_ids, self.pool.block_size)
        return sequence.block_hashes[: (sequence.num_tokens - 1) // self.pool.block_size]

    def _fits(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether all blocks of the tokens so far are free, and one more for each running sequence."""
        num_new = self.pool.num_blocks_for(sequence.num_tokens) - len(prefix)
        return num_new + self.pool.num_free_in(prefix) + len(self.running) <= self.pool.num_free

    def _start(self, sequence: Sequence, prefix: list[int], hashes: list[bytes]) -> None:
        self.pool.take(prefix)
        sequence.block_ids.extend(prefix)
        sequence.block_ids.extend(self.pool.allocate(self._num_missing_blocks(sequence)))
        sequence.num_registered = len(prefix)
        sequence.num_computed = len(prefix) * self.pool.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)  # forced output may be cached too
        for block_hash in hashes[len(prefix) :]:
            self._computing.setdefault(block_hash, sequence)
        sequence.set_status(SequenceStatus.RUNNING)
        self.running.append(sequence)

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        return self.pool.num_blocks_for(sequence.num_tokens) - len(sequence.block_ids)

    def _chunks(self, prefills: list[Sequence], num_decodes: int) -> list[Run]:
        """Runs of several tokens, in order of admission, within what the decodes leave of the budget."""
        budget = self._num_rows(prefills, num_decodes) - num_decodes
        chunks: list[Run] = []
        for sequence in prefills:
            if budget <= 0:
                break
            num_tokens = min(budget, sequence.num_uncomputed)
            chunks.append(Run(sequence, sequence.num_computed, num_tokens, num_tokens == sequence.num_uncomputed))
            budget -= num_tokens
        return chunks

    def _num_rows(self, prefills: list[Sequence], num_decodes: int) -> int:
        """Rows of the next step: all, or what fills a step size if that leaves out the smaller part of prefills."""
        wanted = min(self.max_num_batched_tokens, num_decodes + sum(sequence.num_uncomputed for sequence in prefills))
        filled = bisect_right(self.step_sizes, wanted)
        if filled == 0:
            return wanted
        size = self.step_sizes[filled - 1]
        return size if wanted - size < size - num_decodes else wanted

    def _choose_victims(self) -> list[Sequence]:
        """The youngest sequences, as many as it takes for those left to have the blocks of all their tokens."""
        num_tokens_per_block, num_needed = self.pool.block_size, 0
        for sequence in self.running:  # every step, every sequence: no calls in here
            num_tokens = len(sequence.token_ids) + sequence.num_in_flight
            missing = -(-num_tokens // num_tokens_per_block) - len(sequence.block_ids)
            if missing > 0:  # a rejected draft may have left blocks
                num_needed += missing
        victims: list[Sequence] = []
        freed: list[int] = []
        while num_needed > self.pool.num_free + self.pool.num_freed_by(freed):
            victim = self.running[-1 - len(victims)]
            victims.append(victim)
            freed.extend(victim.block_ids)
            num_needed -= max(0, self._num_missing_blocks(victim))
        return victims

    def _leave_batch(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        for block_hash in sequence.block_hashes[sequence.num_registered :]:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]
        self.pool.release(sequence.block_ids)
        del sequence.block_ids[:]
        sequence.num_registered = 0
