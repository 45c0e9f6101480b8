"""Jobs that stay open: the same object while the directory holds the same job, never one that is gone."""

from pathlib import Path

import pytest

from jobs.open_jobs import MAX_OPEN, OpenJobs
from jobs.store import LocalDirectory, open_store
from schemas.errors import JobNotFound, NotFound
from tests.tiny_jobs import make_job


def test_a_job_is_opened_once_and_forgotten_when_it_is_gone(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    jobs = OpenJobs(open_store(str(tmp_path / "jobs")))
    first = jobs.find(job.job_id)
    assert jobs.find(job.job_id) is first
    job.store.remove()
    for wrong in (job.job_id, "../elsewhere"):
        with pytest.raises(JobNotFound):
            jobs.find(wrong)


def test_a_job_that_was_submitted_anew_is_another(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    jobs = OpenJobs(open_store(str(tmp_path / "jobs")))
    first = jobs.find(job.job_id)
    job.store.remove()
    again = make_job(tmp_path)
    assert again.created != first.created
    assert jobs.find(job.job_id).created == again.created


def test_only_the_last_few_stay_open(tmp_path: Path) -> None:
    made = [make_job(tmp_path, name=f"job-{number}") for number in range(MAX_OPEN + 1)]
    jobs = OpenJobs(open_store(str(tmp_path / "jobs")))
    first = jobs.find(made[0].job_id)
    last = [jobs.find(job.job_id) for job in made[1:]]
    assert jobs.find(made[-1].job_id) is last[-1]
    assert jobs.find(made[0].job_id) is not first


def test_a_job_submitted_while_somebody_looks_is_not_taken_for_others(tmp_path: Path) -> None:
    job = make_job(tmp_path)

    class SubmittedLate(LocalDirectory):
        """The first read comes before the job's file is there."""

        num_reads = 0

        def read(self, key: str) -> bytes:
            self.num_reads += 1
            if self.num_reads == 1:
                raise NotFound(key)
            return super().read(key)

    jobs = OpenJobs(SubmittedLate(tmp_path / "jobs"))
    assert jobs.find(job.job_id).job_id == job.job_id
    for wrong in ("unheard-of", "../elsewhere"):
        with pytest.raises(JobNotFound):
            jobs.find(wrong)
