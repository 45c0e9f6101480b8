"""The engine's speeds beside a peer's, from result files: a table for README and a chart. Measures nothing."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ops.bench.measurement import RESULTS
from schemas.errors import InputDataError

README = RESULTS.parents[2] / "README.md"
START, END = "<!-- engine table:start -->\n", "<!-- engine table:end -->\n"
CHART = "engine.svg"
WORKLOADS = {
    "route": ("route: 3,080 questions, one of 77 labels in JSON, rows/s", "rows_per_s"),
    "extract": ("extract: 1,024 conversations, four bounded fields, rows/s", "rows_per_s"),
    "free": ("free: 256 prompts without a constraint, output tokens/s", "output_tokens_per_s"),
    "prefill": ("prefill: extract's prompts, one token each, rows/s", "rows_per_s"),
}
MODELS = ("Qwen3-0.6B", "Qwen3-8B", "DeepSeek-V2-Lite")


class Speed(NamedTuple):
    """One cell: a workload on a model, in the workload's unit."""

    workload: str
    model: str
    ours: float
    peers: float | None
    share_of_bound: float | None  # of the least time that the machine needs; see ops.bench.roofline
    commit: str


def read_speeds(results: Path = RESULTS) -> tuple[str, list[Speed]]:
    """The peer, and what was measured in the table's order; a workload without a result file is left out."""
    peers = _read(results / "engine-peers.json")
    return peers["system"], list(_speeds(results, peers))


def engine_table(speeds: list[Speed], peer: str) -> str:
    """Markdown."""
    lines = [f"| workload | model | Nightmill | {peer} | times | of the limit |", "|---|---|---|---|---|---|"]
    named: set[str] = set()
    for each in speeds:
        title = "" if each.workload in named else WORKLOADS[each.workload][0]
        named.add(each.workload)
        beside = (_number(each.peers), f"{each.ours / each.peers:.1f}") if each.peers else ("", "")
        share = f"{each.share_of_bound:.0%}" if each.share_of_bound else ""
        cells = (title, each.model, _number(each.ours), *beside, share)
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def engine_chart(speeds: list[Speed], peer: str) -> str:
    """SVG: how many times the peer's speed, for all that both have done."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    both = [(f"{each.workload}, {each.model}", each.ours / each.peers) for each in speeds if each.peers]
    names, ratios = zip(*both, strict=True)
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "nightmill", "font.size": 10}
    with mpl.rc_context(style):
        figure = Figure((7, 0.3 * len(names) + 0.9), layout="constrained")
        axes = figure.subplots()
        drawn = axes.barh(names, ratios, color=["#2a6f97" if ratio >= 1 else "#c1666b" for ratio in ratios])
        axes.bar_label(drawn, [f"{ratio:.1f}" for ratio in ratios], padding=3)
        axes.axvline(1, color="#444444", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_xlabel(f"speed, as a multiple of {peer}")
        axes.spines[["top", "right"]].set_visible(False)
        sink = io.StringIO()
        figure.savefig(sink, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


def write_table(readme: Path = README, results: Path = RESULTS) -> list[str]:
    """Put the table into README and the chart beside the results; returns the lines to print. Raises InputDataError."""
    peer, speeds = read_speeds(results)
    before, start, rest = readme.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise InputDataError(f"{readme} has no place for the table: lines {START.strip()} and {END.strip()}")
    table = engine_table(speeds, peer)
    readme.write_text(before + start + table + end + after)
    (results / CHART).write_text(engine_chart(speeds, peer))
    return [table, f"commits: {', '.join(sorted({each.commit for each in speeds}))}"]


def _speeds(results: Path, peers: dict[str, Any]) -> Iterator[Speed]:
    for workload, (_, unit) in WORKLOADS.items():
        for model in MODELS:
            path = results / f"engine-{model}-{workload}.json"
            if path.is_file():
                document = _read(path)
                (result,) = document["results"]
                share = result.get("roofline", {}).get("share_of_bound")
                beside = (each for each in peers["results"] if (each["model"], each["workload"]) == (model, workload))
                peers_speed: float | None = next((each.get(unit) for each in beside), None)
                yield Speed(workload, model, result[unit], peers_speed, share, document["commit"])


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
