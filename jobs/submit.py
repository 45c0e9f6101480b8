"""``python -m jobs.submit data.parquet --schema route.json``: check everything, write the job, queue it, wait for it.

A thin cover of jobs.api: turns options into a Submission and results into text.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jobs.cli import split_names, verb
from schemas.errors import ConstraintError, InputDataError, NightmillError
from schemas.records import (
    THINKING_END,
    Calibration,
    Constraint,
    ConstraintKind,
    Priority,
    RetryPolicy,
    Sampling,
    Thinking,
    decode_json,
)
from schemas.settings import Settings

if TYPE_CHECKING:
    from jobs.api import Submission

CONSTRAINT_KINDS = [str(kind) for kind in ConstraintKind]


def read_argument(value: str) -> str:
    """The text of an argument: of the file behind ``@``, else as it is. Raises InputDataError."""
    return load_text(value[1:]) if value.startswith("@") else value


def load_text(location: str) -> str:
    """A small UTF-8 text file or object. Raises InputDataError naming it."""
    from jobs.store import open_input

    try:
        with open_input(location) as file:
            return bytes(file.read()).decode("utf-8")
    except (NightmillError, UnicodeDecodeError) as error:
        raise InputDataError(f"cannot read {location}: {error}") from error


def load_calibration(location: str) -> dict[str, float]:
    """The temperatures of a calibration file. Raises InputDataError."""
    try:
        return decode_json(load_text(location), Calibration).temperatures
    except msgspec.MsgspecError as error:
        raise InputDataError(f"{location} is no calibration that jobs.calibrate wrote: {error}") from error


def make_constraint(
    schema: str | None, regex: str | None, ebnf: str | None, choices: Sequence[str]
) -> Constraint | None:
    """The constraint that at most one of the four options names. Raises ConstraintError, InputDataError."""
    from schemas.constraints import load_constraint

    given = [
        (ConstraintKind.JSON_SCHEMA, schema),
        (ConstraintKind.REGEX, regex),
        (ConstraintKind.EBNF, ebnf),
        (ConstraintKind.CHOICE, json.dumps(_split_choices(choices), ensure_ascii=False) if choices else None),
    ]
    chosen = [(kind, value) for kind, value in given if value is not None]
    if len(chosen) > 1:
        raise ConstraintError("give only one of --schema, --regex, --ebnf and --choice")
    if not chosen:
        return None
    kind, value = chosen[0]
    return load_constraint(kind, _read_source(kind, value))


def _read_source(kind: ConstraintKind, value: str) -> str:
    """Schemas and grammars are files unless they are written out; regexes and choices are text."""
    is_inline = {
        ConstraintKind.JSON_SCHEMA: value.lstrip().startswith("{"),
        ConstraintKind.EBNF: "::=" in value,
    }
    if value.startswith("@"):
        return read_argument(value)
    return value if is_inline.get(kind, True) else load_text(value)


def _split_choices(values: Sequence[str]) -> list[str]:
    """``a,b`` and ``@labels.txt`` (one a line) to labels without doubles, in the given order."""
    labels: list[str] = []
    for value in values:
        labels += read_argument(value).splitlines() if value.startswith("@") else value.split(",")
    return list(dict.fromkeys(label.strip() for label in labels if label.strip()))


@verb("submit")
@click.argument("inputs", nargs=-1, required=True, metavar="DATA...")
@click.option(
    "--schema", metavar="FILE", help="JSON Schema that every label must satisfy (a file, or the JSON itself)."
)
@click.option("--regex", metavar="REGEX", help="Regular expression that the whole label matches (text or @FILE).")
@click.option("--ebnf", metavar="FILE", help="EBNF grammar of the label (a file, or the grammar itself).")
@click.option(
    "--choice", "choices", multiple=True, metavar="A,B,...", help="The labels; repeatable, or @FILE, one a line."
)
@click.option(
    "--constraint-column", metavar="COL", help="Column of each row's constraint: text, or structs of kind and source."
)
@click.option(
    "--constraint-kind",
    type=click.Choice(CONSTRAINT_KINDS),
    help="Of a text column's constraints.  [default: json_schema]",
)
@click.option("--column", "prompt_column", metavar="COL", help="Column that is the prompt.")
@click.option("--prompt", metavar="TEMPLATE", help="Jinja2 template over the row's columns (text or @FILE).")
@click.option("--messages-column", metavar="COL", help="Column of chat messages (list of role and content).")
@click.option("--body-column", metavar="COL", help="Column of OpenAI request bodies.  [default: those of batch files]")
@click.option("--system", metavar="TEXT", help="System message (text or @FILE).")
@click.option("--chat/--no-chat", default=True, help="--no-chat: plain completion, without the chat template.")
@click.option("--model", default="smollm2", show_default=True, help="Demo alias, directory, .gguf file or hub name.")
@click.option("--revision", help="Revision of a hub model.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
@click.option("--quantization", type=click.Choice(["none", "fp8"]), default="none", show_default=True)
@click.option("--load-format", type=click.Choice(["auto", "random"]), default="auto", hidden=True)
@click.option(
    "--max-model-len", type=click.IntRange(16), default=4096, show_default=True, help="Prompt plus output, tokens."
)
@click.option("--deterministic", is_flag=True, help="Same answer whatever shares a batch, to the bit; slower.")
@click.option(
    "--out", "output_column", default="label", show_default=True, metavar="COL", help="Name of the new column."
)
@click.option("--output", metavar="DIR", help="Where final files go.  [default: the job's directory]")
@click.option(
    "--gold", "gold_column", metavar="COL", help="Column of known labels: never shown to the model, compared."
)
@click.option(
    "--columns", callback=split_names, metavar="A,B", help="Input columns kept in the output.  [default: all]"
)
@click.option("--where", metavar="EXPR", help="Rows for which this is false come back as `skipped`.")
@click.option("--limit", type=click.IntRange(1), metavar="ROWS", help="Only the first rows of the input.")
@click.option(
    "--max-tokens", type=int, help="Tokens of an answer.  [default: what the constraint's longest text needs, else 256]"
)
@click.option(
    "--thinking-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Think first, freely, in at most so many tokens; --max-tokens counts them too.",
)
@click.option(
    "--thinking-end",
    metavar="TEXT",
    help=f"What ends the thinking, written by the model or for it.  [default: {THINKING_END}]",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, default=0, help="0: off.")
@click.option("--top-p", type=float, default=1.0, help="1: off.")
@click.option("--min-p", type=float, default=0.0, help="0: off.")
@click.option("--repetition-penalty", type=float, default=1.0, help="1: off.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text; repeatable.")
@click.option(
    "--top-labels", type=click.IntRange(0), default=0, metavar="K", help="Rank each label's set; the K best are told."
)
@click.option("--calibration", metavar="FILE", help="What jobs.calibrate wrote: labels get calibrated probabilities.")
@click.option("--n", "num_completions", type=click.IntRange(1), default=1, show_default=True, help="Completions a row.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--max-attempts", type=click.IntRange(1), default=3, show_default=True, help="Tries a row.")
@click.option("--refresh", is_flag=True, help="Ask again what an earlier job has answered.")
@click.option("--chunk-rows", type=click.IntRange(1), help="Rows a chunk.  [default: jobs.chunk_rows of the settings]")
@click.option(
    "--priority",
    type=click.Choice([priority.value for priority in Priority]),
    default=Priority.INTERACTIVE.value,
    show_default=True,
    help="nightly: its chunks wait while interactive jobs have any.",
)
@click.option("--name", help="The job's name.  [default: the first file's stem]")
@click.option(
    "--abort", "limits", multiple=True, metavar="STATUS=SHARE", help="Stop the job beyond it: invalid=2%; repeatable."
)
@click.option(
    "--abort-min-rows", type=click.IntRange(1), metavar="ROWS", help="Look from so many rows on.  [default: 200]"
)
@click.option(
    "--canary",
    "canary_rows",
    type=click.IntRange(1),
    metavar="ROWS",
    help="Run so many rows first; go on only within --abort.  [default: invalid=10%, truncated=10%]",
)
@click.option("--wait/--no-wait", "wait", default=None, help="[default: wait, unless a broker is configured]")
@click.option("--dry-run", is_flag=True, help="Show what would be done and how long it would take; do nothing.")
@click.option(
    "--sample",
    "num_rehearsed",
    type=click.IntRange(1),
    metavar="ROWS",
    help="With --dry-run: run so many rows first, to measure how fast it is here.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout, for programs.")
def main(
    settings: Settings, *, wait: bool | None, dry_run: bool, num_rehearsed: int | None, as_json: bool, **options: Any
) -> int:
    """Label every row of Parquet, Arrow, JSON lines or CSV files with a language model.

    \b
    python -m jobs.submit data.parquet --schema route.json
    python -m jobs.submit 'shards/*.parquet' --choice yes,no --prompt 'Is this spam? {{ text }}' --gold is_spam
    """
    from jobs import api, show
    from jobs.dry_run import run_dry
    from jobs.follow import follow

    if num_rehearsed is not None and not dry_run:
        raise click.UsageError("--sample goes with --dry-run")
    prepared = api.prepare(make_submission(**options), settings)
    if dry_run:
        run_dry(prepared, settings, num_rehearsed=num_rehearsed, as_json=as_json)
        return 0
    show.show_checked_keywords(prepared, as_json=as_json)
    job = api.submit(prepared, settings)
    return follow(job, settings, wait=wait, as_json=as_json)


def make_submission(
    *,
    schema: str | None,
    regex: str | None,
    ebnf: str | None,
    choices: Sequence[str],
    constraint_kind: str | None,
    prompt: str | None,
    system: str | None,
    max_attempts: int,
    priority: str,
    calibration: str | None,
    limits: tuple[str, ...],
    abort_min_rows: int | None,
    canary_rows: int | None,
    **options: Any,
) -> "Submission":
    """The submission that the options of the command line ask for, files read. Raises NightmillError."""
    from jobs.api import Submission
    from jobs.thresholds import parse_thresholds

    return Submission(
        prompt_template=None if prompt is None else read_argument(prompt),
        system=None if system is None else read_argument(system),
        constraint=make_constraint(schema, regex, ebnf, choices),
        constraint_column_kind=None if constraint_kind is None else ConstraintKind(constraint_kind),
        sampling=_pop_sampling(options),
        retry=RetryPolicy(max_attempts=max_attempts),
        priority=Priority(priority),
        calibration={} if calibration is None else load_calibration(calibration),
        thresholds=parse_thresholds(limits, abort_min_rows, canary_rows),
        **options,
    )


def _pop_sampling(options: dict[str, Any]) -> Sampling:
    """Take the sampling options out of ``options``. Raises click.BadParameter naming the bad one."""
    num_thinking, end = options.pop("thinking_tokens"), options.pop("thinking_end")
    if end is not None and num_thinking is None:
        raise click.BadParameter("--thinking-end goes with --thinking-tokens")
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "top_labels")
    try:
        thinking = None if num_thinking is None else Thinking(max_tokens=num_thinking, end=end or THINKING_END)
        given = {name: options.pop(name) for name in names}
        return Sampling(stop=tuple(options.pop("stop")), thinking=thinking, **given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


if __name__ == "__main__":
    main()
