"""How far the labels of the same rows are from those of the night before: a canary set, asked anew every night.

A schedule's job whose input stays the same and which copies nothing is one. Knows no HTML.
"""

from typing import Any

from jobs.diff import Difference, compare
from jobs.job import Job
from jobs.report_sections import number, percent, shorten

MAX_ROWS = 100_000
"""A canary set is small; rows of larger jobs are compared by ``jobs.diff``, when somebody asks."""

MAX_FLIPS = 20


def measure_drift(job: Job, previous: Job | None) -> Difference | None:
    """Compare with the job before if both asked the same rows. Raises JobError for unusable files."""
    if previous is None or not job.spec.refresh or job.num_rows > MAX_ROWS or job.spec.inputs != previous.spec.inputs:
        return None
    return compare(previous, job)


def describe_drift(job: Job, previous: Job | None) -> dict[str, Any] | None:
    """A sentence and the labels that changed, most rows first; None where the job is no canary set."""
    found = measure_drift(job, previous)
    if found is None or previous is None:
        return None
    num_rows = found.num_equal + found.num_flipped
    sentence = (
        f"{number(found.num_flipped)} of {number(num_rows)} rows ({percent(found.num_flipped, num_rows)}) have another "
        f"label than in {previous.job_id}, which asked the same rows."
    )
    if found.changed:
        sentence += f" Changed since: {', '.join(found.changed)}."
    elif found.num_flipped and job.spec.model.deterministic:
        sentence += (
            " Nothing that was asked for changed, and batches cannot change a label of a batch-invariant job: the "
            "machine, a driver, a library or Nightmill did."
        )
    elif found.num_flipped:
        sentence += " Nothing that was asked for changed; without --deterministic near-ties fall either way."
    flips = [(number(rows), shorten(a), shorten(b)) for (a, b), rows in found.flips.most_common(MAX_FLIPS)]
    return {"sentence": sentence, "is_good": found.num_flipped == 0, "flips": flips}
