"""Charts of the report as SVG text for one HTML page, drawn by matplotlib.

Colours are CSS variables of the page (``--ink``, ``--muted``, ``--grid``, ``--first``, ``--second``), so that dark mode
is the page's business; text stays text. Knows no jobs.
"""

import io
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import PercentFormatter

INK, MUTED, GRID, FIRST, SECOND = COLOURS = ("#010101", "#020202", "#030303", "#040404", "#050505")
VARIABLES = dict(zip(COLOURS, ("--ink", "--muted", "--grid", "--first", "--second"), strict=True))
WIDTH_IN, HEIGHT_IN = 5.0, 2.6  # inches of 72 CSS pixels: about a phone's width
BAR_IN = 0.3  # height of one bar of a list
MAX_TEXT = 28
MIN_LINE_VALUES = 20  # fewer are dots as well: one alone makes no line
HEADROOM = 1.08

_DRAWING = threading.Lock()
"""matplotlib's settings belong to the process."""


def bars(counts: Mapping[str, int], before: Mapping[str, float] | None = None) -> str:
    """Shares of named things as horizontal bars, in the given order; ``before`` are other shares beside them."""
    names, total = list(counts), max(1, sum(counts.values()))
    height = BAR_IN * len(names) * (1.5 if before else 1.0) + 0.6
    with _axes(height=height) as (axes, svg):
        thickness = 0.38 if before else 0.7
        places = np.arange(len(names))
        axes.barh(places - (thickness / 2 if before else 0), [counts[n] / total for n in names], thickness, color=FIRST)
        if before:
            axes.barh(places + thickness / 2, [before.get(n, 0.0) for n in names], thickness, color=SECOND)
        axes.set_yticks(places, [cut(name) for name in names])
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(_percent())
        axes.grid(axis="x")
    return "".join(svg)


def histogram(values: np.ndarray, title: str, edges: np.ndarray | None = None) -> str:
    """How often values fall into each bin; without ``edges`` at most 30 bins of whole numbers."""
    if edges is None:
        low, high = np.floor(values.min()), np.ceil(values.max()) + 1
        edges = np.arange(low, high + 1, max(1, np.ceil((high - low) / 30)))
        edges = np.append(edges, edges[-1] + 1) if edges[-1] < high else edges
    with _axes() as (axes, svg):
        axes.hist(values, edges.tolist(), color=FIRST, rwidth=0.9)
        axes.set_xlabel(title)
        axes.set_ylabel("rows")
        axes.grid(axis="y")
    return "".join(svg)


def timeline(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]], title: str, *, is_share: bool = False, has_steps: bool = False
) -> str:
    """Values over minutes since the start, one or two lines."""
    with _axes() as (axes, svg):
        for (name, (minutes, values)), colour in zip(lines.items(), (FIRST, SECOND), strict=False):
            marker = "." if len(values) < MIN_LINE_VALUES else ""
            style = "steps-post" if has_steps else "default"
            axes.plot(minutes, values, color=colour, label=name, drawstyle=style, marker=marker)
        axes.set_xlabel("minutes since the start")
        axes.set_ylabel(title)
        highest = max((float(np.nanmax(values, initial=0.0)) for _, values in lines.values()), default=0.0)
        axes.set_ylim(bottom=0, top=1.05 if is_share or not highest else HEADROOM * highest)
        if is_share:
            axes.yaxis.set_major_formatter(_percent())
        if len(lines) > 1:
            axes.legend(frameon=False, labelcolor=INK)
        axes.grid(axis="y")
    return "".join(svg)


def calibration(confidences: Sequence[float], shares: Sequence[float]) -> str:
    """How often labels of some confidence were right; on the diagonal, confidence can be taken at its word."""
    with _axes() as (axes, svg):
        axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--")
        axes.plot(confidences, shares, color=FIRST, marker="o")
        axes.set_xlabel("confidence")
        axes.set_ylabel("right")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(_percent())
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.05)
        axes.grid()
    return "".join(svg)


def cut(text: str) -> str:
    """A text short enough for an axis, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _percent() -> "PercentFormatter":
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


@contextmanager
def _axes(height: float = HEIGHT_IN) -> "Iterator[tuple[Axes, list[str]]]":
    """Yield axes to draw on and a list that holds the SVG once the block has ended."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "nightmill",
        "font.size": 10,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "text.parse_math": False,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    result: list[str] = []
    with _DRAWING, mpl.rc_context(style):
        figure = Figure((WIDTH_IN, height), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        yield axes, result
        sink = io.StringIO()
        figure.savefig(sink, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        result.append(_inline(sink.getvalue()))


def _inline(svg: str) -> str:
    """Make a file's SVG part of a page: no prologue, no fixed size, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every chart, and an id is a page's only once
    return re.sub("|".join(COLOURS), lambda match: f"var({VARIABLES[match[0]]})", svg)
