"""The report: its numbers are those of the Parquet files, counted anew; a real browser shows it without complaint."""

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from jobs.job import Job
from jobs.report import ensure_report, find_previous, render_report, write_report
from jobs.report_sections import counted, draw_timelines, moment
from jobs.store import open_store
from schemas.records import Completion, Label, Request, Sampling, Thinking
from schemas.settings import JobsSettings, Settings
from tests.jobs.report_jobs import ROUTES, make_night, provenance
from tests.tiny_jobs import (
    YES_NO,
    Answer,
    ScriptedEngine,
    completion,
    json_schema,
    make_job,
    prompt_of,
    run_job,
    write_input,
)

SETTINGS = JobsSettings(gpu_hour_price=3.5, currency="EUR")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """The tables of a page: lists of rows of cell texts, by the heading or summary above them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: list[str] = []
        self._tags: list[str] = []
        self._title = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._tags.append(tag)
        if tag in ("h2", "h3", "summary"):
            self._title = ""
        elif tag == "table":
            while self._title in self.tables:
                self._title += "+"
            self.tables[self._title] = []
        elif tag == "tr":
            self.tables[self._title].append([])
        elif tag in ("td", "th"):
            self.tables[self._title][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._tags and self._tags.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if {"td", "th"} & set(self._tags):
            self.tables[self._title][-1][-1] += data
        elif {"h2", "h3", "summary"} & set(self._tags):
            self._title += data

    def facts(self, title: str) -> dict[str, str]:
        return {row[0]: row[1] for row in self.tables[title]}


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job]:
    """Last night and this one."""
    root = tmp_path_factory.mktemp("nights")
    return make_night(root, seed=1), make_night(root, seed=2)


@pytest.fixture(scope="module")
def page(nights: tuple[Job, Job]) -> Page:
    return Page(render_report(nights[1], SETTINGS, nights[0]))


def output_rows(job: Job) -> list[dict]:
    success = job.success()
    assert success is not None
    return [row for file in success.outputs for row in pq.read_table(file.uri).to_pylist()]


def labelled(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["label_status"] in ("ok", "closed")]


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"


def quantile(values: list[float], q: float) -> str:
    place = q * (len(values) - 1)
    low, high = sorted(values)[math.floor(place)], sorted(values)[math.ceil(place)]
    return f"{low + (high - low) * (place - math.floor(place)):.3f}"


def test_rows_by_status_are_those_of_the_output_and_add_up(nights: tuple[Job, Job], page: Page) -> None:
    rows = output_rows(nights[1])
    counts = Counter(row["label_status"] for row in rows)
    assert len(counts) >= 4
    shown = {status: (number, part) for status, number, part in page.tables["Rows"][1:]}
    assert shown == {status: (str(number), share(number, 600)) for status, number in counts.items()}
    assert any("600 in the job, 600 in its parts" in text and "they add up" in text for text in page.texts)


def test_label_shares_are_those_of_both_nights(nights: tuple[Job, Job], page: Page) -> None:
    before, now = (Counter(row["label"]["route"] for row in labelled(output_rows(job))) for job in nights)
    shown = {row[0]: row[1:] for row in page.tables["route: 4 values"][1:]}
    for route in ROUTES:
        now_share, before_share = now[route] / now.total(), before[route] / before.total()
        assert shown[route] == [
            str(now[route]),
            share(now[route], now.total()),
            share(before[route], before.total()),
            f"{100 * (now_share - before_share):+.1f} pp",
        ]
    assert len(page.tables["urgent: 2 values"]) == 3


def test_agreement_with_gold_is_that_of_the_output(nights: tuple[Job, Job], page: Page) -> None:
    rows = output_rows(nights[1])
    pairs = [(row["route"], row["label"]["route"]) for row in labelled(rows) if row["route"] is not None]
    num_equal = sum(gold == label for gold, label in pairs)
    (told,) = (text for text in page.texts if text.startswith("Accuracy"))
    assert told.startswith(
        f"Accuracy {share(num_equal, len(pairs))}: {num_equal} of {len(pairs)} labelled rows (always "
    )
    ((commonest, count),) = Counter(known for known, _ in pairs).most_common(1)
    assert f"(always {commonest!r}: {share(count, len(pairs))})" in told
    classes = {row[0]: row[1:] for row in page.tables["Beside the known labels (route)"][1:]}
    matrix = page.tables["Known (rows) and given (columns)"]
    for route in ROUTES:
        hits = pairs.count((route, route))
        known, given = (sum(pair[side] == route for pair in pairs) for side in (0, 1))
        precision, recall = hits / given, hits / known
        f1 = 2 * precision * recall / (precision + recall)
        assert classes[route] == [share(precision, 1), share(recall, 1), share(f1, 1), str(known), str(given)]
        cells = next(row for row in matrix if row[0] == route)[1:]
        assert cells == [str(pairs.count((route, name)) or "") for name in matrix[0][1:]]
    certain = [
        (row["label_confidence"], row["route"] == row["label"]["route"]) for row in labelled(rows) if row["route"]
    ]
    bins = [[pair for pair in certain if min(9, int(pair[0] * 10)) == index] for index in range(10)]
    error = sum(abs(sum(c for c, _ in b) - sum(right for _, right in b)) for b in bins) / len(certain)
    assert any(f"calibration error {error:.3f}" in text for text in page.texts)


def test_the_least_certain_rows_are_the_least_certain(nights: tuple[Job, Job], page: Page) -> None:
    certain = sorted((row["label_confidence"], row["text"]) for row in labelled(output_rows(nights[1])))
    shown = page.tables["The 20 least certain rows"][1:]
    assert [(row[0], row[2]) for row in shown] == [(f"{value:.3f}", text) for value, text in certain[:20]]


def test_what_several_rows_ask_is_shown_once_among_the_least_certain(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"text": ["a", "b", "a", "a"]})

    def answer(request: Request) -> Completion:
        label = Label(path="", text="yes", probability=0.4 if prompt_of(request) == "a" else 0.5)
        return msgspec.structs.replace(completion(request, "yes"), labels=(label,))

    job = run_job(make_job(tmp_path, [path], prompt_column="text", constraint=YES_NO), ScriptedEngine(answer))
    shown = Page(render_report(job, SETTINGS)).tables["The 2 least certain rows"][1:]
    assert [(row[0], row[2]) for row in shown] == [("0.400", "a"), ("0.500", "b")]


def test_a_job_of_seconds_has_timelines_that_can_be_seen() -> None:
    found = [provenance(0, [])]
    for seconds in (1.5, 5.0):
        figures = draw_timelines([msgspec.structs.replace(found[0], finished_s=found[0].started_s + seconds)])
        (running,) = (figure.svg for figure in figures if figure.title == "Sequences in the batch")
        points = re.findall(r"<use ", running.partition("clip-path")[2])
        assert len(points) >= int(seconds / 2), "no sample is drawn"


def test_moments_and_counts_are_written_for_people() -> None:
    assert moment("2026-12-01T01:12:49.366+01:00") == "2026-12-01 00:12:49 UTC"
    assert (counted(1, "file"), counted(1200, "file")) == ("1 file", "1,200 files")


def test_failures_are_counted_by_kind_with_examples(nights: tuple[Job, Job], page: Page) -> None:
    failed = [row for row in output_rows(nights[1]) if row["label_status"] not in ("ok", "closed")]
    kinds = Counter(row["label_status"] for row in failed)  # here each status has one reason
    titles = {title: rows for title, rows in page.tables.items() if title.split(" ", 1)[0].isdigit()}
    assert {title.split()[1].rstrip(":"): int(title.split()[0]) for title in titles} == kinds
    for title, rows in titles.items():
        examples = [row for row in failed if f" {row['label_status']}:" in title][:3]
        assert [row[3] for row in rows[1:]] == [row["label_error"] for row in examples]


def test_attempts_tokens_and_latencies_are_those_of_the_rows_asked(nights: tuple[Job, Job], page: Page) -> None:
    metas = [row["label_meta"] for row in output_rows(nights[1])]
    asked = [meta for meta in metas if meta["attempts"]]
    tries = Counter(meta["attempts"] for meta in asked)
    assert page.tables["Attempts and tokens"][1:] == [[str(n), str(tries[n])] for n in sorted(tries)]
    tokens = page.facts("Attempts and tokens+")
    prompts, outputs = (sum(meta[f"{kind}_tokens"] for meta in asked) for kind in ("prompt", "output"))
    cached = sum(meta["cached_tokens"] for meta in asked)
    assert tokens["prompt tokens"] == f"{prompts:,}, {share(cached, prompts)} found in the prefix cache"
    assert tokens["output tokens"].startswith(f"{outputs:,}, {outputs / len(asked):.1f} a row")
    latencies = {row[0]: row[1:] for row in page.tables["Speed+"][1:]}
    for title, name in (("to the first token", "first_token_seconds"), ("to the end", "seconds")):
        values = [meta[name] for meta in asked if meta[name] is not None]
        assert latencies[title] == [quantile(values, q) for q in (0.5, 0.95, 0.99, 1)]
    speed = page.facts("Speed")
    busy_s = 124  # six chunks of 24 s, begun every 20 s
    assert speed["rows asked"] == f"{len(asked)}, {len(asked) / busy_s:,.1f} a second"
    assert speed["output tokens"] == f"{outputs / busy_s:,.1f} a second"
    num_labelled = len(labelled(output_rows(nights[1])))
    cost = page.facts("Cost")
    assert cost["cost"].startswith(
        f"{busy_s / 3600 * 3.5:.4f} EUR, {busy_s / 3600 * 3500 / num_labelled:,.4f} per 1,000"
    )
    assert (
        cost["energy of the GPUs"] == f"{busy_s / 3600:.4f} kWh, {busy_s * 1000 / num_labelled:,.1f} J per labelled row"
    )


def test_lineage_names_model_versions_settings_and_kernels(nights: tuple[Job, Job], page: Page) -> None:
    facts = page.facts("Lineage")
    assert nights[1].spec.model.digest in facts["model digest"]
    assert ("torch 2.13" in facts["versions"], facts["engine settings"]) == (True, "max_num_seqs 512")
    assert page.tables["Kernels"][1:] == [["linear", "triton", "it is <fast>"]]
    assert any(row[0] == "enforced" for row in page.tables["How the constraint is kept"])


def test_lineage_tells_sampling_that_is_not_the_usual_one(tmp_path: Path) -> None:
    sampling = Sampling(thinking=Thinking(max_tokens=30), stop=("<",), top_k=5)
    facts = Page(render_report(make_job(tmp_path, sampling=sampling), SETTINGS)).facts("Lineage")
    thinking = '{"max_tokens": 30, "end": "</think>"}'
    assert facts["sampling"] == f'thinking {thinking}, temperature 0.0, top_k 5, stop ["<"]'


def test_the_night_before_is_the_last_ended_job_of_the_same_name(nights: tuple[Job, Job]) -> None:
    root = nights[1].root
    found = find_previous(nights[1], root)
    assert found is not None
    assert found.job_id == nights[0].job_id
    assert find_previous(nights[0], root) is None


def test_a_job_that_runs_an_empty_one_and_one_without_inputs_have_reports(tmp_path: Path) -> None:
    running = make_night(tmp_path, finish=False)
    assert "500 in its parts" in render_report(running, SETTINGS)
    Path(running.spec.inputs[0].uri).unlink()
    html = render_report(running, SETTINGS)
    assert "is gone since the job was submitted" in html
    assert "ticket 1 " not in html
    queued = make_job(tmp_path / "other")
    assert "No row has a label" in render_report(queued, JobsSettings())


SHAPES: dict[str, tuple[dict[str, object], Answer]] = {
    "a choice with gold": ({"constraint": YES_NO, "gold_column": "gold"}, "yes"),
    "several completions": ({"constraint": YES_NO, "num_completions": 3, "gold_column": "gold"}, "yes"),
    "free text with gold": ({"gold_column": "gold"}, lambda request: prompt_of(request)),
    "numbers": ({"constraint": json_schema({"type": "integer"}), "gold_column": "gold"}, "7"),
    "an array": ({"constraint": json_schema({"type": "array", "items": {"type": "integer"}})}, "[1, 2]"),
    "null": ({"constraint": json_schema({"type": ["string", "null"]}), "gold_column": "gold"}, "null"),
    "nothing valid": ({"constraint": YES_NO, "gold_column": "gold"}, "maybe"),
    "all skipped": ({"where": "text == 'none'", "gold_column": "gold"}, "yes"),
    "a system message and no chat": ({"system": "be <b>brief</b>", "chat": False}, "yes"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_jobs_of_every_shape_have_reports(tmp_path: Path, shape: str) -> None:
    fields, answer = SHAPES[shape]
    path = write_input(tmp_path / "in.parquet", {"text": ["a", "b", "c"], "gold": ["yes", "no", None]})
    job = run_job(make_job(tmp_path, [path], prompt_template="{{ text }}", **fields), ScriptedEngine(answer))
    assert "Rows: 3 in the job" in render_report(job, SETTINGS, job)


def test_free_text_is_no_class_and_a_report_is_written_once_unless_asked(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path, chunk_rows=100), ScriptedEngine(lambda request: f"text of {request.request_id}"))
    ensure_report(job, job.root, SETTINGS)
    assert "report.html" not in job.store.list()
    from jobs.finish import try_finish

    assert try_finish(job)
    ensure_report(job, job.root, JobsSettings(report=False))
    assert "report.html" not in job.store.list()
    ensure_report(job, job.root, SETTINGS)
    assert "10 values" not in job.store.read("report.html").decode()
    first = job.store.stat("report.html")
    ensure_report(job, job.root, SETTINGS)
    assert job.store.stat("report.html") == first
    write_report(job, job.root, SETTINGS)
    assert job.store.stat("report.html") != first


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_report_in_light_and_dark_without_a_word(
    browser, nights: tuple[Job, Job], tmp_path: Path, width: int
) -> None:
    file = tmp_path / "report.html"
    file.write_text(render_report(nights[1], SETTINGS, nights[0]))
    inks = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page, said = context.new_page(), []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("request", lambda request, said=said: request.url == file.as_uri() or said.append(request.url))
        page.goto(file.as_uri())
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
        charts = page.evaluate("[...document.querySelectorAll('figure svg')].map(e => [e.clientWidth, e.clientHeight])")
        assert len(charts) == 10
        assert all(250 < chart_width < width and height > 50 for chart_width, height in charts)
        ink = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ink != background
        inks.add(ink)
        context.close()
    assert len(inks) == 2


def test_the_verb_writes_into_the_job_or_elsewhere(nights: tuple[Job, Job], tmp_path: Path) -> None:
    from click.testing import CliRunner

    from jobs.report import main

    root = nights[1].root.locate("")
    result = CliRunner().invoke(main, [nights[1].job_id, "--jobs-root", root])
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.strip()).read_text().startswith("<!doctype html>")
    target = tmp_path / "there" / "page.html"
    assert CliRunner().invoke(main, [nights[1].job_id, "--to", str(target), "--jobs-root", root]).exit_code == 0
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
    assert open_store(Settings(jobs_root=root).jobs_root).list()
