"""The scheduler under a state machine, and its rules one by one."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache import BlockPool
from engine.scheduler import Scheduler
from engine.types import Sequence, SequenceStatus, StepPlan
from schemas.records import Request, Sampling

BLOCK_SIZE = 4


def make_sequence(tokens: list[int], max_tokens: int = 8) -> Sequence:
    request = Request(request_id="r", token_ids=tuple(tokens), sampling=Sampling(max_tokens=max_tokens))
    return Sequence(request, array("q", tokens), len(tokens), max_tokens)


def make_scheduler(
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    budget: int = 16,
    prefix_cache: bool = True,
    step_sizes: tuple[int, ...] = (),
) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_cache=prefix_cache)
    return Scheduler(pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, step_sizes=step_sizes)


def step(scheduler: Scheduler) -> StepPlan:
    """One step of a model that always draws token 7; a sequence ends at its max_tokens."""
    scheduler.admit()
    plan = scheduler.plan()
    scheduler.carry_out(plan)
    drawn = [run.sequence for run in plan.runs if run.wants_logits]
    scheduler.mark_computed(plan)
    for sequence in drawn:
        sequence.token_ids.append(7)
        if sequence.num_output >= sequence.max_tokens:
            scheduler.finish(sequence)
    return plan


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, are cancelled and run; nothing is lost, overbooked or leaked, and everything ends."""

    @initialize(
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        prefix=st.booleans(),
        step_sizes=st.sampled_from([(), (3, 6, 9), (4, 16)]),
    )
    def make(self, num_blocks: int, max_num_seqs: int, budget: int, prefix: bool, step_sizes: tuple[int, ...]) -> None:
        self.scheduler = make_scheduler(num_blocks, max_num_seqs, budget, prefix, step_sizes)
        self.sequences: list[Sequence] = []

    @rule(
        shared=st.integers(0, 9), own=st.lists(st.integers(0, 2), min_size=1, max_size=6), max_tokens=st.integers(1, 12)
    )
    def add(self, shared: int, own: list[int], max_tokens: int) -> None:
        sequence = make_sequence([5] * shared + own, max_tokens)
        if self.scheduler.pool.num_blocks_for(sequence.num_prompt + max_tokens) <= self.scheduler.pool.capacity:
            self.sequences.append(sequence)
            self.scheduler.add(sequence)

    @rule()
    def step(self) -> None:
        scheduler = self.scheduler
        before = {id(s): s.num_computed for s in self.sequences}
        had_work = scheduler.has_work
        plan = step(scheduler)
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        assert all(run.num_tokens == 1 for run in plan.runs[: plan.num_decodes])
        assert all(run.num_tokens > 0 for run in plan.runs)
        assert len({id(run.sequence) for run in plan.runs}) == len(plan.runs)
        assert all(run.start >= before[id(run.sequence)] for run in plan.runs)
        assert bool(plan.runs) == had_work, "a step with work computes something"

    @precondition(lambda self: any(s.status is not SequenceStatus.FINISHED for s in self.sequences))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]
        self.scheduler.finish(live[data.draw(st.integers(0, len(live) - 1))])

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        places = [*self.scheduler.waiting, *self.scheduler.running]
        live = [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]
        assert sorted(map(id, places)) == sorted(map(id, live))
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        held = {block for s in self.scheduler.running for block in s.block_ids}
        assert self.scheduler.pool.num_free == self.scheduler.pool.capacity - len(held)
        assert all(not s.block_ids for s in self.sequences if s.status is not SequenceStatus.RUNNING)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        bound = sum(s.num_prompt + s.max_tokens for s in self.sequences) * 20 + 10
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            step(self.scheduler)
        assert not self.scheduler.has_work
        assert self.scheduler.pool.num_free == self.scheduler.pool.capacity
        assert not self.scheduler._computing


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_decode_rows_come_first_and_prefill_fills_the_budget() -> None:
    scheduler = make_scheduler(budget=10)
    first, second = make_sequence([1] * 5), make_sequence([2] * 30)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    plan = step(scheduler)
    assert [(run.sequence, run.num_tokens) for run in plan.runs] == [(first, 1), (second, 9)]
    assert plan.num_decodes == 1


def test_a_long_prompt_is_computed_in_chunks_and_drawn_from_once() -> None:
    scheduler = make_scheduler(budget=10)
    sequence = make_sequence([1] * 25, max_tokens=1)
    scheduler.add(sequence)
    plans = [step(scheduler) for _ in range(3)]
    assert [[run.num_tokens for run in plan.runs] for plan in plans] == [[10], [10], [5]]
    assert sequence.status is SequenceStatus.FINISHED


def test_rows_that_share_a_prompt_start_compute_it_once() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=32, budget=1000)
    system = list(range(100, 140))  # ten blocks
    rows = [make_sequence([*system, 10 + i, 20, 30], max_tokens=2) for i in range(32)]
    for row in rows:
        scheduler.add(row)
    num_computed = 0
    while scheduler.has_work:
        num_computed += step(scheduler).num_tokens
    assert num_computed == 40 + 32 * 3 + 32
    assert sorted(row.num_cached for row in rows) == [0] + [40] * 31


def test_a_delayed_row_does_not_hold_up_others() -> None:
    scheduler = make_scheduler(num_blocks=200, budget=100)
    same = [make_sequence([1] * 20) for _ in range(2)]
    other = make_sequence([2] * 20)
    for sequence in (*same, other):
        scheduler.add(sequence)
    scheduler.admit()
    assert scheduler.running == [same[0], other]
    assert list(scheduler.waiting) == [same[1]]


def test_a_row_waiting_for_a_prefix_starts_when_the_one_that_computed_it_is_cancelled() -> None:
    scheduler = make_scheduler(num_blocks=200, budget=4)
    first, second = make_sequence([1] * 20), make_sequence([1] * 20)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.finish(first)
    plan = step(scheduler)
    assert [run.sequence for run in plan.runs] == [second]
    assert second.num_cached == 4


def test_one_prompt_token_is_always_left_to_compute() -> None:
    scheduler = make_scheduler(budget=100)
    for _ in range(2):
        scheduler.add(make_sequence([3] * 8, max_tokens=1))
    plans = [step(scheduler), step(scheduler)]
    assert [run.num_tokens for plan in plans for run in plan.runs] == [8, 4]


def test_the_youngest_is_preempted_and_goes_back_to_the_head_of_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=100, prefix_cache=False)
    old, young, third = (make_sequence([i] * 7, max_tokens=12) for i in (1, 2, 3))
    for sequence in (old, young, third):
        scheduler.add(sequence)
    preempted: list[Sequence] = []
    while not preempted:
        preempted = list(step(scheduler).preempted)
    assert preempted == [young]
    assert list(scheduler.waiting) == [young, third]
    assert young.num_output > 0
    assert young.num_computed == 0


def test_planning_changes_nothing() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=100)
    for i in range(3):
        scheduler.add(make_sequence([i] * 7, max_tokens=12))
    while scheduler.has_work:
        scheduler.admit()
        assert scheduler.plan() == scheduler.plan()
        step(scheduler)


def test_the_last_rows_wait_rather_than_cause_padding() -> None:
    scheduler = make_scheduler(budget=100, step_sizes=(8, 16, 32))
    for tokens in ([1] * 12, [2] * 9, [3] * 2):
        scheduler.add(make_sequence(tokens))
    assert [run.num_tokens for run in step(scheduler).runs] == [12, 4]
    assert [run.num_tokens for run in step(scheduler).runs] == [1, 5, 2], "what is left out of a step leads the next"


def test_a_step_is_padded_where_filling_it_would_leave_out_most_of_the_prefills() -> None:
    scheduler = make_scheduler(budget=100, max_num_seqs=20, step_sizes=(8,))
    for index in range(7):
        scheduler.add(make_sequence([index]))
    assert step(scheduler).num_tokens == 7
    scheduler.add(make_sequence([9] * 6))
    assert [run.num_tokens for run in step(scheduler).runs] == [1] * 7 + [6]
