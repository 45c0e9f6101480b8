"""``python -m jobs.diff JOB_A JOB_B``: which rows have another label in the second job than in the first.

Rows are matched by key columns, by what their prompts read, or by position. Reads parts and inputs only.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import msgspec

from jobs.cli import echo_json, verb
from jobs.job import Job
from jobs.labels import LabelledRow, read_labels
from jobs.prompts import PromptBuilder
from jobs.source import check_columns
from schemas.errors import InputDataError
from schemas.records import JobSpec
from schemas.settings import Settings

NOT_COMPARED = frozenset({"name", "inputs", "slot", "format_version"})
MATCHES = ("content", "row")
CURE = "name columns that together identify a row (--key is repeatable), or leave --key out"

Key = Callable[[LabelledRow], bytes]


@dataclass(frozen=True)
class Flip:
    """A row whose label changed. ``where`` is its place in the second job's inputs."""

    where: str
    inputs: dict[str, Any]
    before: str
    after: str


@dataclass
class Difference:
    """What ``compare`` found; grows while it runs. A label is text here, a status in brackets where there is none."""

    matched_by: str
    changed: tuple[str, ...]  # fields of the spec in which the jobs differ
    num_equal: int = 0
    num_only_first: int = 0
    num_only_second: int = 0
    num_repeated: int = 0  # rows of the second job whose key came before; matched in order
    flips: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[Flip] = field(default_factory=list)

    @property
    def num_flipped(self) -> int:
        """Rows that are in both jobs and have different labels."""
        return self.flips.total()


def compare(
    first: Job, second: Job, *, key: Sequence[str] = (), match: str | None = None, max_examples: int = 20
) -> Difference:
    """Match the committed rows of two jobs and count what changed. Memory: about 150 bytes a row.

    ``key`` names columns that identify a row: in neither job may one be null or occur twice. Else ``match`` is
    ``content`` (the columns that both jobs' prompts read) or ``row`` (file and row number), by default ``row`` where
    the jobs have the same input files; of equal rows, the n-th is matched with the n-th. Raises InputDataError for
    unknown columns and keys that name no row, JobError for unusable files.
    """
    matched_by, columns = _choose_match(first, second, key, match)
    difference = Difference(matched_by, changed_fields(first.spec, second.spec))
    make_keys = [
        _UniqueKey(job, key) if key else _by_columns(columns) if columns else _by_position for job in (first, second)
    ]
    before: defaultdict[bytes, list[str]] = defaultdict(list)
    texts: dict[str, str] = {}  # few labels, many rows
    for row in read_labels(first, columns):
        before[make_keys[0](row)].append(texts.setdefault(row.text, row.text))
    num_seen: Counter[bytes] = Counter()
    for row in read_labels(second, columns):
        row_key = make_keys[1](row)
        earlier, number = before.get(row_key, []), num_seen[row_key]
        num_seen[row_key] += 1
        difference.num_repeated += number > 0
        if number >= len(earlier):
            difference.num_only_second += 1
        elif earlier[number] == row.text:
            difference.num_equal += 1
        else:
            difference.flips[earlier[number], row.text] += 1
            if len(difference.examples) < max_examples:
                where = f"{second.spec.inputs[row.input_index].uri} row {row.row_index}"
                difference.examples.append(Flip(where, row.inputs, earlier[number], row.text))
    num_first = sum(map(len, before.values()))
    difference.num_only_first = num_first - difference.num_equal - difference.num_flipped
    return difference


def changed_fields(first: JobSpec, second: JobSpec) -> tuple[str, ...]:
    """The fields of two specs that differ, inputs and names apart."""
    return tuple(
        name
        for name in JobSpec.__struct_fields__
        if name not in NOT_COMPARED and getattr(first, name) != getattr(second, name)
    )


def _choose_match(first: Job, second: Job, key: Sequence[str], match: str | None) -> tuple[str, tuple[str, ...]]:
    """How rows are matched, in words, and the columns to read for it."""
    if key:
        for job in (first, second):
            check_columns(key, job.input_schema, f"--key ({job.job_id})")
        return f"key {', '.join(key)}", tuple(key)
    if match == "row" or (match is None and first.spec.inputs == second.spec.inputs):
        return "row", ()
    columns = [PromptBuilder(job.spec, job.input_schema).columns for job in (first, second)]
    shared = tuple(name for name in columns[0] if name in columns[1])
    if not shared:
        raise InputDataError(
            f"the prompts of {first.job_id} and {second.job_id} read no column in common: give --key, or --match row"
        )
    return f"content of {', '.join(shared)}", shared


def _by_columns(columns: Sequence[str]) -> Key:
    def make_key(row: LabelledRow) -> bytes:
        text = json.dumps([row.inputs[name] for name in columns], ensure_ascii=False, default=str)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    return make_key


class _UniqueKey:
    """The key of each row of one job by the user's columns; refuses a null and a key that came before."""

    def __init__(self, job: Job, columns: Sequence[str]) -> None:
        self._job = job
        self._columns = columns
        self._make_key = _by_columns(columns)
        self._seen: dict[bytes, tuple[int, int]] = {}

    def __call__(self, row: LabelledRow) -> bytes:
        """Raises InputDataError that names file and row."""
        place = (row.input_index, row.row_index)
        if empty := [name for name in self._columns if row.inputs[name] is None]:
            raise InputDataError(f"{self._locate(place)}: --key {empty[0]} is null, so the row has no key: {CURE}")
        key = self._make_key(row)
        if (earlier := self._seen.setdefault(key, place)) != place:
            values = ", ".join(f"{name} {row.inputs[name]!r}" for name in self._columns)
            raise InputDataError(
                f"{self._locate(place)} has the same --key as {self._locate(earlier)}, {values}: {CURE}"
            )
        return key

    def _locate(self, place: tuple[int, int]) -> str:
        return f"{self._job.spec.inputs[place[0]].uri} row {place[1]}"


def _by_position(row: LabelledRow) -> bytes:
    return msgspec.msgpack.encode((row.input_index, row.row_index))


@verb("diff")
@click.argument("job_a")
@click.argument("job_b")
@click.option("--key", multiple=True, metavar="COL", help="Column that identifies a row; repeatable.")
@click.option(
    "--match",
    type=click.Choice(MATCHES),
    help="Without --key: rows with the same prompt columns, or at the same place.  [default: row for the same files]",
)
@click.option("--examples", "max_examples", type=click.IntRange(0), default=10, show_default=True, help="Rows shown.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def main(
    settings: Settings,
    *,
    job_a: str,
    job_b: str,
    key: tuple[str, ...],
    match: str | None,
    max_examples: int,
    as_json: bool,
) -> None:
    """Show which labels changed from JOB_A to JOB_B, and what is new."""
    from jobs import api, show

    first, second = api.open_job(job_a, settings), api.open_job(job_b, settings)
    difference = compare(first, second, key=key, match=match, max_examples=max_examples)
    if as_json:
        flips = [{"before": a, "after": b, "rows": n} for (a, b), n in difference.flips.most_common()]
        fields = vars(difference) | {"flips": flips, "examples": [vars(flip) for flip in difference.examples]}
        echo_json({"job_a": first.job_id, "job_b": second.job_id, "num_flipped": difference.num_flipped, **fields})
        return
    show.print_facts(
        {
            "from": _describe(first),
            "to": _describe(second),
            "matched by": difference.matched_by,
            "changed": ", ".join(difference.changed) or "nothing but the input",
            "equal": difference.num_equal,
            "flipped": difference.num_flipped,
            "only in the first": difference.num_only_first,
            "only in the second": difference.num_only_second,
            "with a repeated key": difference.num_repeated or "",
        }
    )
    if difference.flips:
        click.echo()
        rows = [[f"{number:,}", *pair] for pair, number in difference.flips.most_common(max(1, max_examples))]
        show.print_table(["rows", "before", "after"], rows, num_whole=1)
    if difference.examples:
        click.echo()
        columns = list(difference.examples[0].inputs)[: show.MAX_SHOWN_COLUMNS]
        cells = [
            [flip.before, flip.after, *(show.cell(flip.inputs[name]) for name in columns), flip.where]
            for flip in difference.examples
        ]
        show.print_table(["before", "after", *columns, "where"], cells)


def _describe(job: Job) -> str:
    num_rows = sum(job.counts().values())
    return f"{job.job_id}, {num_rows:,} rows" + ("" if num_rows == job.num_rows else f" of {job.num_rows:,} so far")


if __name__ == "__main__":
    main()
