"""When too many rows fail for a job to go on: limits by status, and the one rule that compares. Knows no queue.

A night that fails should fail in its first minutes: the worker looks while rows come in, ``--canary`` after its rows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from schemas.errors import InputDataError
from schemas.records import Record, RowStatus

if TYPE_CHECKING:
    from jobs.job import Job

LIMITED = tuple(status for status in RowStatus if status not in (RowStatus.OK, RowStatus.CLOSED, RowStatus.SKIPPED))
CANARY_LIMITS = {RowStatus.INVALID: 0.1, RowStatus.TRUNCATED: 0.1}


class Thresholds(Record):
    """The largest share of each status among the rows that were asked, looked at from ``min_rows`` rows on."""

    max_share: dict[RowStatus, float]
    min_rows: int = 200
    canary_rows: int | None = None  # of the first chunk, which is judged alone before the others begin

    def __post_init__(self) -> None:
        checks = {
            f"a limit can be set for {', '.join(LIMITED)}": self.max_share.keys() <= set(LIMITED),
            "a limit is a share from 0 to 1": all(0 <= share <= 1 for share in self.max_share.values()),
            "min_rows must be at least 1": self.min_rows >= 1,
        }
        if failed := [text for text, holds in checks.items() if not holds]:
            raise ValueError("; ".join(failed))


def parse_thresholds(
    limits: Iterable[str], min_rows: int | None = None, canary_rows: int | None = None
) -> Thresholds | None:
    """Read ``invalid=2%`` or ``invalid=0.02``; None if there are no limits. A canary has some of its own.

    Raises InputDataError.
    """
    shares: dict[RowStatus, float] = {} if canary_rows is None else dict(CANARY_LIMITS)
    for limit in limits:
        status, _, share = limit.partition("=")
        try:
            shares[RowStatus(status.strip())] = float(share.rstrip("% ")) / (100 if "%" in share else 1)
        except ValueError as error:
            raise InputDataError(f"{limit!r} is no limit: write STATUS=SHARE, such as invalid=2% ({error})") from error
    try:
        options = {} if min_rows is None else {"min_rows": min_rows}
        return Thresholds(max_share=shares, canary_rows=canary_rows, **options) if shares else None
    except ValueError as error:
        raise InputDataError(f"the limits {', '.join(limits)} cannot be used: {error}") from error


def find_breach(thresholds: Thresholds, counts: Mapping[RowStatus, int], num_copied: int = 0) -> str | None:
    """Say which limit the rows are beyond, or None. Rows that were skipped or copied were not asked."""
    num_asked = sum(counts.values()) - counts.get(RowStatus.SKIPPED, 0) - num_copied
    if num_asked < thresholds.min_rows:
        return None
    for status, limit in thresholds.max_share.items():
        share = counts.get(status, 0) / num_asked
        if share > limit:
            return f"{share:.1%} of the first {num_asked:,} rows are {status}, the limit is {limit:.1%}"
    return None


def find_job_breach(job: "Job", running: Mapping[RowStatus, int] | None = None) -> str | None:
    """Say which of its limits a job is beyond: with the rows committed, and those of a ``running`` chunk.

    A canary that is committed is judged by the rows it has.
    """
    if job.thresholds is None or job.is_unlimited():
        return None
    thresholds = job.thresholds
    if thresholds.canary_rows is not None and running is None:
        thresholds = msgspec.structs.replace(thresholds, min_rows=1)
    return find_breach(thresholds, Counter(job.counts()) + Counter(running), job.num_copied())
