"""The bench of masks times what the engine really does."""

from ops.bench.masks import time_masks
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
