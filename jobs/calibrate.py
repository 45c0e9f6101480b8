"""``python -m jobs.calibrate JOB``: fit the temperature at which a job's probabilities agree with known labels.

Temperature scaling (Guo et al. 2017): one number for each label of the output, by maximum likelihood. Needs the whole
distribution of each label (``--top-labels``). Writes a file that ``jobs.submit --calibration`` takes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from jobs.agreement import as_text, gold_at
from jobs.arrow_types import output_names
from jobs.cli import echo_json, verb
from jobs.confidence import general_path, scale
from jobs.job import Job
from jobs.labels import LABELLED, read_parts
from schemas.errors import InputDataError, JobError
from schemas.records import Calibration, encode_json
from schemas.settings import Settings

CALIBRATION_FILE = "calibration.json"
NUM_BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
NUM_HALVINGS = 50
SMALLEST = 1e-30  # what a probability of 0 counts as
MIN_SUM = 0.999


class Sample(NamedTuple):
    """One label with its distribution, the most probable first, and the place of the gold label in it."""

    probabilities: list[float]
    gold: int


class Quality(NamedTuple):
    """Negative log-likelihood per label in nats, and expected calibration error of the most probable label."""

    nll: float
    ece: float


@dataclass
class Samples:
    """The labels at one path that have a gold value, and how many have one that is none of the set."""

    known: list[Sample] = field(default_factory=list)
    num_unknown: int = 0


def read_samples(job: Job, gold_column: str) -> dict[str, Samples]:
    """Gather labels and gold values by path. Raises JobError: labels are not ranked, or not wholly."""
    names = output_names(job.spec.output_column)
    samples: defaultdict[str, Samples] = defaultdict(Samples)
    for _, part, rows in read_parts(job, [gold_column]):
        metas, statuses = part[names.meta].to_pylist(), part[names.status].to_pylist()
        for row, meta, status in zip(rows, metas, statuses, strict=True):
            if status in LABELLED and row[gold_column] is not None:
                for label in meta["labels"]:
                    _add_sample(samples, label, gold_at(row[gold_column], label["path"], gold_column, meta["labels"]))
    return dict(samples)


def _add_sample(samples: defaultdict[str, Samples], label: dict[str, Any], gold: Any) -> None:
    if gold is None:
        return
    path = general_path(label["path"])
    probabilities = [each["probability"] for each in label["ranked"]]
    if sum(probabilities) < MIN_SUM:
        raise JobError(
            f"only {len(probabilities)} labels are ranked at {path or '/'}: submit the job with a --top-labels "
            "that is not below the number of labels"
        )
    texts = [each["label"] for each in label["ranked"]]
    if (text := as_text(gold)) in texts:
        samples[path].known.append(Sample(probabilities, texts.index(text)))
    else:
        samples[path].num_unknown += 1


def fit_temperature(samples: Sequence[Sample]) -> float:
    """The temperature of least negative log-likelihood, within bounds: that is convex in 1 / temperature."""

    def slope(inverse: float) -> float:
        total = 0.0
        for sample in samples:
            logs = [math.log(max(p, SMALLEST)) for p in sample.probabilities]
            scaled = scale(sample.probabilities, 1 / inverse)
            total += sum(p * log for p, log in zip(scaled, logs, strict=True)) - logs[sample.gold]
        return total

    low, high = math.log(1 / MAX_TEMPERATURE), math.log(1 / MIN_TEMPERATURE)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if slope(math.exp(middle)) < 0:
            low = middle
        else:
            high = middle
    return math.exp(-(low + high) / 2)


def measure(samples: Sequence[Sample], temperature: float) -> Quality:
    """How well distributions at ``temperature`` tell the gold labels."""
    nll = 0.0
    bins: defaultdict[int, list[tuple[float, bool]]] = defaultdict(list)
    for sample in samples:
        scaled = scale(sample.probabilities, temperature)
        nll -= math.log(max(scaled[sample.gold], SMALLEST))
        bins[min(int(scaled[0] * NUM_BINS), NUM_BINS - 1)].append((scaled[0], sample.gold == 0))
    gaps = (abs(sum(p for p, _ in found) - sum(is_right for _, is_right in found)) for found in bins.values())
    return Quality(nll / len(samples), sum(gaps) / len(samples))


@verb("calibrate")
@click.argument("job")
@click.option("--gold", "gold_column", metavar="COL", help="Column of known labels.  [default: the job's --gold]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def main(settings: Settings, *, job: str, gold_column: str | None, as_json: bool) -> None:
    """Fit a temperature to each label of JOB from known labels and write them into the job's directory."""
    from jobs import api, show
    from jobs.source import check_columns
    from jobs.store import replace

    found = api.open_job(job, settings)
    column = gold_column or found.spec.gold_column
    if column is None:
        raise InputDataError(f"{found.job_id} has no gold column: name one with --gold")
    check_columns([column], found.input_schema, "--gold")
    if found.spec.calibration:
        raise JobError(f"{found.job_id} was calibrated itself: take the job that its calibration came from")
    samples = {path: each for path, each in read_samples(found, column).items() if each.known}
    if not samples:
        raise JobError(f"no row of {found.job_id} has both a ranked label and a gold value in {column!r} from its set")
    temperatures = {path: fit_temperature(each.known) for path, each in samples.items()}
    calibration = Calibration(job_id=found.job_id, gold_column=column, temperatures=temperatures)
    replace(found.store, CALIBRATION_FILE, encode_json(calibration))
    rows = [_describe(path, each, temperatures[path]) for path, each in samples.items()]
    location = found.store.locate(CALIBRATION_FILE)
    if as_json:
        echo_json({"job_id": found.job_id, "calibration": location, "labels": rows})
        return
    show.print_table(list(rows[0]), [[show.cell(value) for value in row.values()] for row in rows])
    click.echo(f"\nnext time: python -m jobs.submit ... --calibration {location}")


def _describe(path: str, samples: Samples, temperature: float) -> dict[str, Any]:
    before, after = measure(samples.known, 1.0), measure(samples.known, temperature)
    return {
        "path": path or "/",
        "rows": len(samples.known),
        "gold unknown": samples.num_unknown,
        "temperature": round(temperature, 4),
        "nll before": round(before.nll, 4),
        "nll after": round(after.nll, 4),
        "ece before": round(before.ece, 4),
        "ece after": round(after.ece, 4),
    }


if __name__ == "__main__":
    main()
