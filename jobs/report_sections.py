"""The sections of a report as the plain values that its template shows: numbers in, text and charts out.

Knows no HTML and no files.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jobs import charts
from jobs.job import Job, Success
from jobs.labels import LABELLED
from jobs.progress import format_duration
from jobs.prompts import system_text
from jobs.provenance import Provenance, Throughput, device_seconds, measure_energy, merge_samples
from jobs.statistics import NUM_FAILURE_KINDS, OTHER, Example, Gold, Statistics
from schemas.records import JobSpec, RowStatus, Sampling
from schemas.settings import JobsSettings

MAX_CHARTED_CLASSES = 50  # distinct values of a label's field; with more, or one for every other row, it is free text
MAX_BARS = 15
MAX_MATRIX_CLASSES = 20
MAX_SHOWN_CHARS = 240
MAX_SHOWN_INPUTS = 100
MAX_BINS, MIN_BIN_S = 60, 2.0  # of a timeline: a machine is looked at once a second
NUM_CALIBRATION_BINS = 10
QUANTILES = (0.5, 0.95, 0.99, 1.0)
J_PER_KWH = 3.6e6


class Figure(NamedTuple):
    """A chart with its caption; the names of its two series if it has two."""

    title: str
    svg: str
    first: str = ""
    second: str = ""


def describe_counts(job: Job, found: Statistics, success: Success | None) -> dict[str, Any]:
    """Rows by status, and whether job, parts and output files have equally many."""
    rows = [(str(s), number(found.statuses[s]), percent(found.statuses[s], found.num_rows)) for s in RowStatus]
    numbers = {"the job": job.num_rows, "its parts": found.num_rows, "the table": found.statuses.total()}
    if success is not None:
        numbers |= {
            "its output files": sum(file.num_rows for file in success.outputs),
            "its success file": sum(success.counts.values()),
        }
    adds_up = len(set(numbers.values())) == 1
    listed = ", ".join(f"{number(count)} in {place}" for place, count in numbers.items())
    verdict = "they add up" if adds_up else "the job has not ended" if success is None else "they do not add up"
    return {
        "rows": [row for row in rows if row[1] != "0"],
        "adds_up": adds_up or success is None,
        "sentence": f"Rows: {listed}: {verdict}."
        + (f" {number(found.num_copied)} were copied from rows that asked the same." if found.num_copied else ""),
    }


def describe_labels(
    labels: Mapping[str, Counter[str]], before: Mapping[str, Counter[str]]
) -> tuple[list[Figure], list[dict[str, Any]]]:
    """A chart and a table for each field of the label that has few values; last night's shares beside them."""
    figures, tables = [], []
    for name, counts in labels.items():
        if len(counts) > min(MAX_CHARTED_CLASSES, max(2, counts.total() // 2)):
            continue
        earlier = before.get(name, Counter())
        shares = {text: count / earlier.total() for text, count in earlier.items()}
        ordered = dict(counts.most_common())
        shown = dict(list(ordered.items())[:MAX_BARS])
        if rest := counts.total() - sum(shown.values()):
            shown[OTHER] = rest
        title = name or "label"
        figures.append(Figure(title, charts.bars(shown, shares), "this job", "last night" if shares else ""))
        texts = [*ordered, *(text for text in earlier if text not in ordered)]
        rows = [_label_row(text, counts, earlier) for text in texts]
        head = ["value", "rows", "share", "last night", "change"]
        tables.append({"title": f"{title}: {len(texts)} values", "head": head, "rows": rows})
    return figures, tables


def _label_row(text: str, counts: Counter[str], earlier: Counter[str]) -> tuple[str, ...]:
    share = counts[text] / max(1, counts.total())
    if not earlier:
        return shorten(text), number(counts[text]), f"{share:.1%}", "", ""
    before = earlier[text] / earlier.total()
    return shorten(text), number(counts[text]), f"{share:.1%}", f"{before:.1%}", f"{100 * (share - before):+.1f} pp"


def describe_gold(column: str, gold: Gold) -> dict[str, Any]:
    """Accuracy, precision and recall by label, the confusion matrix and how far confidence can be trusted."""
    known, given = Counter[str](), Counter[str]()
    for (expected, label), count in gold.pairs.items():
        known[expected] += count
        given[label] += count
    names = [name for name, _ in known.most_common()] + sorted(given.keys() - known.keys())
    classes = [_class_row(name, gold.pairs[name, name], known[name], given[name]) for name in names]
    few = names if len(names) <= MAX_MATRIX_CLASSES else []
    matrix = [
        (
            shorten(row),
            [
                {
                    "text": number(gold.pairs[row, name]) if gold.pairs[row, name] else "",
                    "share": round(70 * gold.pairs[row, name] / max(1, known[row])),
                }
                for name in few
            ],
        )
        for row in few
    ]
    share = percent(gold.num_equal, gold.num_compared)
    return {
        "column": column,
        "sentence": f"Accuracy {share}: {number(gold.num_equal)} of {number(gold.num_compared)} labelled rows"
        f"{_describe_constant(known)}; {number(gold.num_unlabelled)} rows with a known label got none.",
        "classes": classes[:MAX_CHARTED_CLASSES],
        "names": [shorten(name) for name in few],
        "matrix": matrix,
        **_describe_calibration(gold),
    }


def _describe_constant(known: Counter[str]) -> str:
    """What always the same answer would reach, where known labels are few: no model is worth less than that."""
    if not 1 < len(known) <= known.total() // 2:
        return ""
    name, count = known.most_common(1)[0]
    return f" (always {shorten(name)!r}: {percent(count, known.total())})"


def _class_row(name: str, both: int, known: int, given: int) -> tuple[str, ...]:
    precision, recall = both / given if given else None, both / known if known else None
    f1 = 2 * both / (known + given)
    shares = [f"{share:.1%}" if share is not None else "" for share in (precision, recall, f1)]
    return shorten(name), *shares, number(known), number(given)


def _describe_calibration(gold: Gold) -> dict[str, Any]:
    if not gold.confidences:
        return {"calibration": None}
    confidences, outcomes = np.array(gold.confidences), np.array(gold.outcomes, dtype=float)
    bins = np.minimum((confidences * NUM_CALIBRATION_BINS).astype(int), NUM_CALIBRATION_BINS - 1)
    filled = np.unique(bins)
    means = [confidences[bins == index].mean() for index in filled]
    shares = [outcomes[bins == index].mean() for index in filled]
    weights = [(bins == index).mean() for index in filled]
    error = sum(w * abs(m - s) for w, m, s in zip(weights, means, shares, strict=True))
    return {
        "calibration": Figure("How often labels of some confidence are right", charts.calibration(means, shares)),
        "calibration_sentence": f"Expected calibration error {error:.3f}, in {NUM_CALIBRATION_BINS} equal bins.",
    }


def describe_confidence(found: Statistics) -> Figure | None:
    """The histogram of confidences; None if labels have none."""
    if not len(found.confidences):
        return None
    svg = charts.histogram(found.confidences, "confidence", np.linspace(0, 1, 21))
    return Figure(f"Confidence of {number(len(found.confidences))} rows", svg)


def list_least_certain(job: Job, found: Statistics) -> list[tuple[str, ...]]:
    """The rows that a person should look at first."""
    return [(f"{e.confidence:.3f}", shorten(e.text), _asked(e), _where(job, e)) for e in found.least_certain]


def list_failures(job: Job, found: Statistics) -> tuple[list[dict[str, Any]], int]:
    """Failures by kind, the commonest first, with examples; and how many kinds are not shown."""
    kinds = sorted(found.failures.values(), key=lambda kind: (-kind.num_rows, kind.status, kind.reason))
    shown = [
        {
            "rows": number(kind.num_rows),
            "status": kind.status,
            "reason": shorten(kind.reason),
            "examples": [(_where(job, e), _asked(e), shorten(e.text), shorten(e.error or "")) for e in kind.examples],
        }
        for kind in kinds[:NUM_FAILURE_KINDS]
    ]
    return shown, len(kinds) - len(shown)


def describe_tokens(found: Statistics) -> tuple[list[tuple[str, str]], list[Figure]]:
    """Token sums and histograms over the rows that were asked."""
    if not found.num_asked():
        return [], []
    prompts, cached, outputs = (found.asked[f"{name}_tokens"] for name in ("prompt", "cached", "output"))
    facts = [
        ("prompt tokens", f"{number(prompts.sum())}, {percent(cached.sum(), prompts.sum())} found in the prefix cache"),
        ("output tokens", f"{number(outputs.sum())}, {outputs.mean():.1f} a row, {number(outputs.max())} at most"),
    ]
    figures = [
        Figure("Prompt tokens of a row", charts.histogram(prompts, "prompt tokens")),
        Figure("Output tokens of a row", charts.histogram(outputs, "output tokens")),
    ]
    return facts, figures


def list_attempts(found: Statistics) -> list[tuple[str, str]]:
    """How many rows took how many tries."""
    tries = Counter(int(value) for value in found.asked["attempts"])
    return [(number(value), number(tries[value])) for value in sorted(tries)]


def describe_speed(throughput: Throughput | None) -> list[tuple[str, str]]:
    """Rates over the time in which chunks ran."""
    if throughput is None or not throughput.busy_s:
        return [("rate", "not known: no part says how it was computed")]
    busy_s, verified, accepted = throughput.busy_s, throughput.num_draft_tokens, throughput.num_accepted_tokens
    drafts = f"{number(accepted)} of {number(verified)} verified: {accepted / verified:.1%}" if verified else "none"
    return [
        ("time in which chunks ran", format_duration(busy_s)),
        ("rows asked", f"{number(throughput.num_asked)}, {throughput.num_asked / busy_s:,.1f} a second"),
        ("output tokens", f"{throughput.num_output_tokens / busy_s:,.1f} a second"),
        ("prompt tokens", f"{throughput.num_prompt_tokens / busy_s:,.1f} a second, cached ones included"),
        ("draft tokens accepted", drafts),
        ("machines", f"{counted(throughput.num_workers, 'worker')} on {throughput.hardware}"),
    ]


def list_latencies(found: Statistics) -> list[tuple[str, ...]]:
    """Quantiles of the time to a row's first drawn token and of the whole row, from when the batch took it in."""
    rows = []
    for title, name in (("to the first token", "first_token_seconds"), ("to the end", "seconds")):
        values = found.asked[name]
        values = values[~np.isnan(values)]
        if len(values):
            rows.append((title, *(f"{np.quantile(values, share):.3f}" for share in QUANTILES)))
    return rows


def draw_timelines(chunks: Sequence[Provenance]) -> list[Figure]:
    """Rows a second, and what engine and GPUs did meanwhile, over the time from the first chunk to the last."""
    chunks = [chunk for chunk in chunks if chunk.finished_s > chunk.started_s]
    if not chunks:
        return []
    start, end = min(c.started_s for c in chunks), max(c.finished_s for c in chunks)
    num_bins = int(min(MAX_BINS, max(1.0, (end - start) / MIN_BIN_S)))
    edges = np.linspace(start, end, num_bins + 1)
    rates = np.zeros(num_bins)
    for chunk in chunks:
        overlap = np.minimum(edges[1:], chunk.finished_s) - np.maximum(edges[:-1], chunk.started_s)
        rates += np.maximum(0, overlap) * chunk.num_asked / (chunk.finished_s - chunk.started_s)
    minutes = (edges - start) / 60
    per_second = rates / (edges[1] - edges[0])
    line = (minutes, np.append(per_second, per_second[-1]))
    figures = [Figure("Rows a second", charts.timeline({"rows": line}, "rows/s", has_steps=True))]
    series = {
        "gpu_share": ("GPU in use", "share of time", True),
        "power_w": ("Power of the GPUs", "W", False),
        "memory_gib": ("Memory of the GPUs", "GiB", False),
        "num_running": ("Sequences in the batch", "sequences", False),
    }
    for field, (title, unit, is_share) in series.items():
        if (values := _sampled(chunks, field, edges)) is not None:
            svg = charts.timeline({title: ((minutes[:-1] + minutes[1:]) / 2, values)}, unit, is_share=is_share)
            figures.append(Figure(title, svg))
    return figures


def _sampled(chunks: Sequence[Provenance], field: str, edges: np.ndarray) -> np.ndarray | None:
    """A sample field in each bin: the mean of a worker's samples; shares are averaged over workers, the rest summed."""
    per_worker = []
    for samples in merge_samples(chunks).values():
        known = [(s.at_s, value) for s in samples if (value := getattr(s, field)) is not None]
        if known:
            times, values = np.array(known).T
            sums, _ = np.histogram(times, edges, weights=values)
            counts, _ = np.histogram(times, edges)
            per_worker.append(np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0))
    if not per_worker:
        return None
    stacked = np.array(per_worker)
    total = np.where(np.isnan(stacked), 0.0, stacked).sum(axis=0)
    num_known = (~np.isnan(stacked)).sum(axis=0)
    total = np.where(num_known > 0, total, np.nan)
    return total / np.maximum(1, num_known) if field == "gpu_share" else total


def describe_cost(
    chunks: Sequence[Provenance], found: Statistics, settings: JobsSettings
) -> tuple[list[tuple[str, str]], str]:
    """Device hours, price and energy, also per labelled row; and the price alone, "" if there is none."""
    hours = device_seconds(chunks) / 3600
    num_labelled = sum(found.statuses[status] for status in LABELLED)
    facts = [("device-hours", f"{hours:,.4f} (a GPU, or a whole machine without one)")]
    price = ""
    if settings.gpu_hour_price:
        amount = hours * settings.gpu_hour_price
        price = f"{amount:,.4f} {settings.currency}"
        each = f", {1000 * amount / num_labelled:,.4f} per 1,000 labelled rows" if num_labelled else ""
        facts.append(("cost", f"{price}{each}, at {settings.gpu_hour_price:g} {settings.currency} a device-hour"))
    else:
        facts.append(("cost", "set NIGHTMILL_JOBS__GPU_HOUR_PRICE to see it"))
    energy = measure_energy(chunks)
    if energy is None:
        facts.append(("energy", "not told by this hardware"))
    else:
        each = f", {energy / num_labelled:,.1f} J per labelled row" if num_labelled else ""
        facts.append(("energy of the GPUs", f"{energy / J_PER_KWH:,.4f} kWh{each}"))
    return facts, price


def describe_lineage(job: Job, chunks: Sequence[Provenance], success: Success | None) -> list[tuple[str, str]]:
    """Everything that made the labels what they are, and the machines that made them."""
    spec, model = job.spec, job.spec.model
    usual = msgspec.to_builtins(Sampling())
    sampling = {
        name: value
        for name, value in msgspec.to_builtins(spec.sampling).items()
        if value != usual[name] or name == "temperature"
    }
    size_bytes = sum(file.size_bytes for file in spec.inputs)
    facts = [
        ("model", model.name),
        ("model digest", f"{model.digest}, {model.dtype}, quantisation {model.quantization}"),
        ("batch-invariant", "yes" if model.deterministic else "no: near-ties may fall otherwise in other batches"),
        ("longest sequence", f"{number(model.max_model_len)} tokens"),
        ("constraint", f"{spec.constraint.kind} {spec.constraint.key}" if spec.constraint else "none for all rows"),
        ("sampling", _pairs(sampling)),
        ("seed, tries", f"{spec.seed}, {spec.retry.max_attempts}"),
        ("prompt", _describe_prompt(spec)),
        ("input", f"{counted(len(spec.inputs), 'file')}, {number(size_bytes)} bytes, {counted(job.num_rows, 'row')}"),
        ("submitted", moment(job.created)),
        ("ended", moment(success.finished) if success else "not yet"),
        ("workers", ", ".join(sorted({chunk.worker for chunk in chunks}))),
        ("devices", ", ".join(sorted({f"{chunk.device} ({chunk.hardware})" for chunk in chunks}))),
        ("versions", "; ".join(sorted({_pairs(chunk.versions) for chunk in chunks}))),
        ("engine settings", "; ".join(sorted({_pairs(chunk.settings) for chunk in chunks}))),
    ]
    return [(name, value) for name, value in facts if value]


def list_kernels(chunks: Sequence[Provenance]) -> list[tuple[str, str, str]]:
    """The kernels that were chosen, and why."""
    return sorted({kernel for chunk in chunks for kernel in chunk.kernels})


def list_sources(job: Job) -> list[tuple[str, str]]:
    """Long texts behind the labels, by name."""
    spec = job.spec
    files = [f"{file.uri}  {file.num_rows:,} rows" for file in spec.inputs[:MAX_SHOWN_INPUTS]]
    hidden = len(spec.inputs) - len(files)
    texts = {
        "Prompt template": spec.prompt_template,
        "System message": system_text(spec),
        "Constraint": spec.constraint.source if spec.constraint else None,
        "Input files": "\n".join(files) + (f"\nand {hidden:,} more" if hidden else ""),
    }
    return [(name, text) for name, text in texts.items() if text]


def number(value: float) -> str:
    """A whole number for people."""
    return f"{int(value):,}"


def counted(value: float, noun: str) -> str:
    """A number of things."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def moment(text: str) -> str:
    """A time of ISO 8601 for people, to the second."""
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def percent(part: float, whole: float) -> str:
    """A share for people; nothing of nothing is none."""
    return f"{part / whole:.1%}" if whole else ""


def shorten(text: str) -> str:
    """A text on one line, cut."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def _asked(example: Example) -> str:
    values = example.inputs.values()
    if len(values) == 1:
        return shorten(str(next(iter(values))))
    return shorten("; ".join(f"{name}: {value}" for name, value in example.inputs.items()))


def _where(job: Job, example: Example) -> str:
    file = job.spec.inputs[job.chunks[example.place.chunk_index].input_index]
    return f"{file.uri.rsplit('/', 1)[-1]}, row {example.place.row_index:,}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )


def _describe_prompt(spec: JobSpec) -> str:
    if spec.prompt_template is not None:
        return "a template over the row's columns"
    if spec.messages_column is not None:
        return f"the conversation in {spec.messages_column}"
    return f"column {spec.prompt_column}" if spec.prompt_column else "all columns"
