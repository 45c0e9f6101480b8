"""Plans: the worst decision about a keyword stays, in the order in which keywords were met."""

from schemas.plan import Decision, PlanWriter


def test_the_worst_of_several_decisions_stays() -> None:
    plan = PlanWriter()
    plan.note("/a", "pattern", Decision.CHECKED, "first")
    plan.note("/b", "type", Decision.ENFORCED, "kept")
    plan.note("/a", "pattern", Decision.ENFORCED, "second")
    assert [(row.path, row.decision, row.reason) for row in plan.rows()] == [
        ("/a/pattern", Decision.CHECKED, "first"),
        ("/b/type", Decision.ENFORCED, "kept"),
    ]
    assert plan.num_checked == 1
