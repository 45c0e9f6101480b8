"""The fault suite in its short form; ``make faults`` is the long one."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.night import Plan, night, undisturbed

SHORT = Plan(num_chunks=90, chunk_rows=8, row_steps=20, step_s=0.03, num_last_chunks=6, visibility_s=1.5, hang_s=3.0)
KINDS = [
    "worker SIGKILL at: validated",
    "engine SIGKILL",
    "Redis data lost",
    "worker SIGSTOP beyond its lease, SIGCONT",
    "part deleted",
    "worker SIGKILL",
    "part truncated",
    "connections cut",
]


@pytest.mark.slow
def test_a_night_of_faults_loses_doubles_and_changes_no_row(tmp_path: Path) -> None:
    calm = undisturbed(tmp_path / "calm", replace(SHORT, step_s=0.001))
    with night(tmp_path / "wild", SHORT) as wild:
        strikes = wild.run(random.Random(1), len(KINDS), KINDS)
        outcome = wild.finish(calm, strikes)
    assert [strike.kind for strike in strikes] == KINDS
    assert (outcome.num_lost, outcome.num_doubled, outcome.num_wrong, outcome.problems) == (0, 0, 0, [])
    assert outcome.num_resumes == 1, "the truncated part needs a person, nothing else does"
    assert outcome.num_recomputed <= sum(strike.num_at_risk + SHORT.chunk_rows for strike in strikes)
