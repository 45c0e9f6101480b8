"""The long fault suite: ``make faults``. Hundreds of faults on real workers and a real Redis, and the table of them.

Goes on where it was interrupted: each finished night is a line of the state file, by commit.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ops.bench.measurement import RESULTS, commit, hardware, versions
from schemas.records import Constraint, ConstraintKind, Sampling
from tests.faults.night import Labels, Plan, RedisServer, Strike, night, summarise, undisturbed
from tests.tiny_models import write_tiny_model

FAKE = Plan()
SHIPPED = replace(FAKE, num_chunks=40, visibility_s=60.0, reconcile_s=15.0)
REAL = Plan(
    num_chunks=60,
    chunk_rows=96,
    app="worker",
    hang_s=10.0,
    num_ranks=1,
    spec={
        "sampling": Sampling(max_tokens=64),
        "constraint": Constraint(kind=ConstraintKind.REGEX, source="[a-z]{24,40}"),
    },
)
SOAK = replace(REAL, num_chunks=525)
FAULTS_BY_PLAN = {"fake": 1000, "real": 8, "shipped": 1}


def plan_of(number: int) -> str:
    """The first night has the shipped timeouts; every eighth has a real, tiny model."""
    return "shipped" if number == 0 else "real" if number % 8 == 4 else "fake"


def run_night(number: int, seed: int, references: dict[str, Labels]) -> dict[str, Any]:
    """One night, as a line of the state file."""
    name = plan_of(number)
    plan = {"fake": FAKE, "real": REAL, "shipped": SHIPPED}[name]
    started_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="nm-") as directory,
        night(Path(directory), plan, prepare(plan)) as one,
    ):
        kinds = ["worker SIGKILL"] if name == "shipped" else None
        chance = random.Random(f"{seed}:{number}")
        strikes = one.run(chance, FAULTS_BY_PLAN[name], kinds)
        outcome = one.finish(references[name], strikes)
    return {"night": number, "plan": name, "seconds": round(time.monotonic() - started_s), **asdict(outcome)}


def prepare(plan: Plan) -> Any:
    return (lambda path: path) if plan.is_fake else write_tiny_model


def references() -> dict[str, Labels]:
    """The labels of an undisturbed night of each kind; the shipped timeouts change none."""
    found = {}
    for name, plan in (("fake", replace(FAKE, step_s=0.002)), ("real", REAL)):
        with tempfile.TemporaryDirectory(prefix="nm-") as directory:
            found[name] = undisturbed(Path(directory), plan, prepare(plan))
    found["shipped"] = dict(list(found["fake"].items())[: SHIPPED.num_chunks * SHIPPED.chunk_rows])
    return found


@click.command()
@click.option("--faults", "num_faults", default=200, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, help="Draws the faults, with the night's number.")
@click.option("--soak", is_flag=True, help="Instead: 50,400 rows of a tiny model, a worker killed after each recovery.")
@click.option("--at-once", default=2, show_default=True, type=click.IntRange(1), help="Nights side by side.")
@click.option("--state", default=Path(".nightmill/faults.jsonl"), show_default=True, type=click.Path(path_type=Path))
@click.option("--result", default=RESULTS / "faults.json", show_default=True, type=click.Path(path_type=Path))
def main(num_faults: int, seed: int, soak: bool, at_once: int, state: Path, result: Path) -> None:
    """Run nights until enough faults were survived; exit code 1 if any row was lost, doubled or wrong."""
    if soak:
        sys.exit(run_soak(seed))
    key = {"commit": commit(), "seed": seed}
    state.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    nights = [line for line in lines if line["key"] == key]
    click.echo(f"{len(nights)} nights done at this commit; undisturbed runs first")
    known = references()
    todo = iter(number for number in range(10_000) if number not in {line["night"] for line in nights})
    lock, failures = threading.Lock(), list[BaseException]()

    def work() -> None:
        while not failures and sum(len(line["strikes"]) for line in nights) < num_faults:
            with lock:
                number = next(todo)
            try:
                line = {"key": key, **run_night(number, seed, known)}
            except BaseException as error:
                failures.append(error)
                raise
            with lock, state.open("a") as file:
                file.write(json.dumps(line) + "\n")
                nights.append(line)
                click.echo(describe(line))

    with ThreadPoolExecutor(at_once) as pool:
        workers = [pool.submit(work) for _ in range(at_once)]
    for worker in workers:
        worker.result()
    document = summary(nights, key)
    result.parent.mkdir(exist_ok=True)
    result.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(table(document))
    sys.exit(any(document[name] for name in ("rows_lost", "rows_doubled", "wrong_status", "problems")))


def run_soak(seed: int) -> bool:
    """Kill a worker whenever the last kill is overcome, to the end of a long job; True if anything is wrong."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nm-") as directory, night(Path(directory), SOAK, write_tiny_model) as one:
        strikes = one.run(random.Random(seed), 10_000, ["worker SIGKILL"])
        outcome = one.finish(None, strikes)
    bad = (outcome.num_lost, outcome.num_doubled, outcome.num_wrong)
    seconds = round(time.monotonic() - started_s)
    click.echo(f"{outcome.num_rows:,} rows, {len(strikes)} kills, {seconds} s: lost, doubled, wrong {bad}")
    click.echo("jobs.verify and leftovers: " + ("; ".join(outcome.problems) or "clean"))
    return bool(any(bad) or outcome.problems)


def describe(line: dict[str, Any]) -> str:
    kinds = ", ".join(strike["kind"] for strike in line["strikes"])
    bad = {name: line[f"num_{name}"] for name in ("lost", "doubled", "wrong")}
    return f"night {line['night']} ({line['plan']}, {line['seconds']} s): {bad} {line['problems'] or ''} [{kinds}]"


def summary(nights: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any]:
    strikes = [Strike(**strike) for line in nights for strike in line["strikes"]]
    return {
        "format_version": 1,
        "benchmark": "faults",
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **key,
        "faults": len(strikes),
        "rows_lost": sum(line["num_lost"] for line in nights),
        "rows_doubled": sum(line["num_doubled"] for line in nights),
        "wrong_status": sum(line["num_wrong"] for line in nights),
        "rows": sum(line["num_rows"] for line in nights),
        "rows_recomputed": sum(line["num_recomputed"] for line in nights),
        "rows_at_risk": sum(strike.num_at_risk for strike in strikes),
        "resumes": sum(line["num_resumes"] for line in nights),
        "nights": len(nights),
        "problems": [problem for line in nights for problem in line["problems"]],
        "seconds": sum(line["seconds"] for line in nights),
        "hardware": hardware(),
        "versions": versions() | {"redis-server": redis_version()},
        "by_fault": summarise(strikes),
    }


def redis_version() -> str:
    done = subprocess.run([RedisServer.binary(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition("v=")[2].partition(" ")[0]


def table(document: dict[str, Any]) -> str:
    """The table of the runbook, in Markdown. Rows are compared at the end of a night, not after each fault."""
    lines = ["| fault | times | rows computed again | seconds to recover: median, most |", "|---|---|---|---|"]
    for entry in document["by_fault"]:
        seconds = f"{entry['recovery_s_median']:.1f}, {entry['recovery_s_max']:.1f}"
        lines.append(f"| {entry['fault']} | {entry['times']} | {entry['rows_recomputed']} | {seconds} |")
    lines.append(f"| **all** | **{document['faults']}** | **{document['rows_recomputed']:,}** | |")
    counts = [document[name] for name in ("rows_lost", "rows_doubled", "wrong_status")]
    lines.append("")
    lines.append(
        f"Over {document['rows']:,} rows of {document['nights']} jobs: "
        f"**{counts[0]} lost, {counts[1]} doubled, {counts[2]} with another label or status** than undisturbed."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
