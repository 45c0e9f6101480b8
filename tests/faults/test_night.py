"""The fault suite in its short form; ``make faults`` is the long one."""

import json
import random
from pathlib import Path

import pytest

from jobs.job import Job
from jobs.prompts import Prompt, PromptBuilder
from schemas.records import row_seed
from tests.faults.long import table
from tests.faults.night import Labels, Plan, night

SHORT = Plan(num_chunks=110, chunk_rows=8, row_steps=20, step_s=0.03, num_last_chunks=4, visibility_s=1.5, hang_s=3.0)
KINDS = [
    "worker SIGKILL at: validated",
    "engine SIGKILL",
    "one rank SIGKILL",
    "Redis data lost",
    "worker SIGSTOP beyond its lease, SIGCONT",
    "clock steps forward",
    "clock steps back, worker SIGKILL",
    "part truncated",
]


def undisturbed_labels(job: Job) -> Labels:
    """What the fake engine answers, by its own rule."""
    builder, labels = PromptBuilder(job.spec, job.input_schema), Labels()
    for chunk in job.chunks:
        for row in job.read_rows(chunk, builder.columns):
            prompt = builder.build(row)
            assert isinstance(prompt, Prompt)
            seed = row_seed(job.spec.seed, prompt.content_key, 0, 0)
            labels[row["text"]] = (f"{row['text']}|{seed}|None", "ok")
    return labels


@pytest.mark.slow
def test_a_night_of_faults_loses_doubles_and_changes_no_row(tmp_path: Path) -> None:
    with night(tmp_path, SHORT) as wild:
        strikes = wild.run(random.Random(1), len(KINDS), KINDS)
        outcome = wild.finish(undisturbed_labels(wild.job), strikes)
    assert [strike.kind for strike in strikes] == KINDS
    assert (outcome.num_lost, outcome.num_doubled, outcome.num_wrong, outcome.problems) == (0, 0, 0, [])
    assert outcome.num_resumes == 1, "the truncated part needs a person, nothing else does"
    assert outcome.num_recomputed <= sum(strike.num_at_risk + SHORT.chunk_rows for strike in strikes)


def test_the_runbook_shows_the_results_as_they_were_measured(repo_root: Path) -> None:
    document = json.loads((repo_root / "ops/bench/results/faults.json").read_text())
    runbook = (repo_root / "ops" / "runbook.md").read_text()
    shown = runbook.partition("<!-- faults -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == table(document)
