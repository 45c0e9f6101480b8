"""The bench of masks times what the engine really does, on two sides that do the same but for the constraint."""

from ops.bench.masks import answer_in_turns, time_masks
from schemas.records import Constraint, ConstraintKind, Request, Sampling
from tests.engine.fakes import make_engine, run_all


def test_each_step_that_has_a_constrained_row_is_timed() -> None:
    engine = make_engine()
    constraint = Constraint(kind=ConstraintKind.REGEX, source="[a-z]{6}")
    engine.add_constraint(constraint)
    work = time_masks(engine)
    run_all(engine, [Request(request_id="free", text="x", sampling=Sampling(max_tokens=3))])
    assert work == ([], [])
    request = Request(request_id="held", text="x", constraint_key=constraint.key, sampling=Sampling(max_tokens=9))
    (completion,) = run_all(engine, [request]).values()
    assert len(work.whole_s) == len(completion.token_ids) == 6
    assert all(0 < filled_s <= whole_s for filled_s, whole_s in zip(*work, strict=True))


def test_free_rows_have_the_lengths_of_the_constrained_ones() -> None:
    constrained, free = (make_engine(max_num_seqs=2) for _ in range(2))
    constraint = Constraint(kind=ConstraintKind.REGEX, source="([a-z]{3}){1,5}!")
    constrained.add_constraint(constraint)
    requests = [
        Request(request_id=str(n), text=f"row {n}", constraint_key=constraint.key, sampling=Sampling(force_text=False))
        for n in range(6)
    ]
    answer_in_turns(constrained, free, requests[:1])  # compiles
    before = constrained.stats.num_batched_tokens, free.stats.num_batched_tokens
    (seconds, held), (free_seconds, unheld) = answer_in_turns(constrained, free, requests)
    lengths = [len(each.token_ids) for each in held]
    assert len(set(lengths)) > 1, "else they say nothing"
    assert [len(each.token_ids) for each in unheld] == lengths
    assert [each.text.endswith("!") for each in held] == [True] * 6
    assert min(seconds, free_seconds) > 0
    assert constrained.stats.num_batched_tokens - before[0] == free.stats.num_batched_tokens - before[1]
