"""Generate a few texts and say what came of them: ``python -m engine.offline --model MODEL --ep N --dp N --cp N``.

A first look at a model, a topology or a new kernel: texts, token counts, speed, the perplexity of given texts through
the decode path, and whether constraints hold. Knows no jobs and no queue.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from engine.frames import Heartbeat
from engine.llm import LLM, SamplingParams
from schemas.errors import InputDataError, NightmillError
from schemas.log import configure_logging
from schemas.records import Completion, FinishReason


@dataclass(frozen=True)
class Sample:
    """A prompt, and how a good model would go on."""

    prompt: str
    continuation: str


SAMPLES = (
    Sample("The capital of France is", " Paris. The capital of Italy is Rome, and the capital of Spain is Madrid."),
    Sample("One, two, three, four,", " five, six, seven, eight, nine, ten, eleven, twelve."),
    Sample("Water boils at 100 degrees Celsius and freezes at", " 0 degrees Celsius under normal pressure."),
    Sample("To be, or not to be,", " that is the question: Whether 'tis nobler in the mind to suffer"),
)

_TICKET = {
    "type": "object",
    "properties": {
        "route": {"enum": ["billing", "bug", "other"]},
        "urgent": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 40},
    },
    "required": ["route", "urgent", "summary"],
    "additionalProperties": False,
}
STRUCTURED_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "regex": ("The order number is ", {"schema_type": "regex", "schema": "[A-Z]{3}-[0-9]{4}"}),
    "json": ("I was charged twice for my order! As JSON: ", {"schema_type": "json", "schema": _TICKET}),
    "ebnf": (
        "A sum of small numbers: ",
        {"schema_type": "ebnf", "schema": 'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]?'},
    ),
}
MAX_STRUCTURED_TOKENS = 200

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def perplexity(logprobs: Sequence[float]) -> float:
    """The exponential of the mean negative log-probability."""
    return math.exp(-sum(logprobs) / len(logprobs))


def read_samples(path: Path) -> list[Sample]:
    """Read lines of ``{"prompt": ..., "continuation": ...}``. Raises InputDataError with the line."""
    samples = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            samples.append(msgspec.json.decode(line, type=Sample))
        except msgspec.DecodeError as error:
            raise InputDataError(
                f'{path}, line {number}: {error}: want {{"prompt": text, "continuation": text}}'
            ) from error
    if not samples:
        raise InputDataError(f"{path} has no lines")
    return samples


def show_texts(llm: LLM, samples: Sequence[Sample], params: SamplingParams) -> None:
    """Continue all prompts and print each text with its counts."""
    start_s = time.perf_counter()
    done = llm.generate([sample.prompt for sample in samples], params)
    seconds = time.perf_counter() - start_s
    for sample, completion in zip(samples, done, strict=True):
        click.echo(f"\n{json.dumps(sample.prompt, ensure_ascii=False)}")
        click.echo(f"  -> {json.dumps(completion.text, ensure_ascii=False)}")
        click.echo(f"  {describe(completion)}")
    num_tokens = sum(len(completion.token_ids) for completion in done)
    click.echo(f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s")


def describe(completion: Completion) -> str:
    """Counts and end of one completion."""
    counts = (
        f"{completion.num_prompt_tokens} prompt tokens ({completion.num_cached_tokens} cached), "
        f"{len(completion.token_ids)} output tokens, {completion.finish_reason}"
    )
    return f"{counts}: {completion.error}" if completion.error else counts


def show_perplexity(llm: LLM, samples: Sequence[Sample], token_ids: Sequence[Sequence[int]]) -> None:
    """Force the given continuations through the decode path, drafts included, and print what they were given."""
    params = [SamplingParams(golden_token_ids=ids, logprobs=True) for ids in token_ids]
    done = llm.generate([sample.prompt for sample in samples], params)
    logprobs = [logprob for completion in done for logprob in completion.logprobs or ()]
    click.echo(f"decode perplexity of {len(logprobs)} given tokens: {perplexity(logprobs):.4f}")


def check_structured_output(llm: LLM) -> bool:
    """Generate under each kind of constraint; whether all ended by themselves with a valid text."""
    from schemas.constraints import make_validator

    params = {
        name: SamplingParams(temperature=0.0, max_tokens=MAX_STRUCTURED_TOKENS, so_args=so_args)
        for name, (_, so_args) in STRUCTURED_CASES.items()
    }
    done = llm.generate([prompt for prompt, _ in STRUCTURED_CASES.values()], list(params.values()))
    is_good = True
    for (name, each), completion in zip(params.items(), done, strict=True):
        assert each.constraint is not None
        error = completion.error or make_validator(each.constraint).check(completion.text)[1]
        has_ended = completion.finish_reason is FinishReason.STOP
        verdict = "ok" if has_ended and error is None else f"FAILED: {error or completion.finish_reason}"
        click.echo(f"structured output, {name:<5}: {json.dumps(completion.text, ensure_ascii=False)}  {verdict}")
        is_good = is_good and verdict == "ok"
    return is_good


def show_engine(llm: LLM) -> None:
    """Print where it runs, with which kernels, and what it counted."""
    click.echo(f"engine: {llm.hello.device}, longest sequence {llm.hello.max_model_len} tokens")
    for operation, backend, reason in llm.hello.kernels:
        click.echo(f"  {operation}: {backend} ({reason})")
    if stats := llm.settled_stats():
        click.echo(f"drafts: {describe_drafts(stats)}")
        counts = {name: value for name, value in msgspec.structs.asdict(stats).items() if value}
        click.echo("  " + ", ".join(f"{name} {value}" for name, value in counts.items()))


def describe_drafts(stats: Heartbeat) -> str:
    """Acceptance, by position in the draft too, and what came of it."""
    if not stats.num_draft_tokens:
        return "none were verified"
    each = zip(stats.accepted_by_position, stats.drafts_by_position, strict=True)
    shares = ", ".join(f"{accepted / verified:.0%}" for accepted, verified in each)
    return (
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} verified tokens accepted, by position {shares}; "
        f"{stats.num_output_tokens / stats.num_draws:.2f} output tokens per sequence and step"
    )


def tokenize(model: str, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of plain texts, which continue another one: without tokens that open a text."""
    from engine.text import Text
    from schemas.model_files import resolve_model

    encode = Text(resolve_model(model)).tokenizer.encode
    return [encode(text, add_special_tokens=False) for text in texts]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--model", default="smollm2", show_default=True, help="Demo model, directory, .gguf file or hub name.")
@click.option("--dp", default=1, show_default=True, type=click.IntRange(1), help="Replicas.")
@click.option("--ep", default=1, show_default=True, type=click.IntRange(1), help="Ranks that share experts.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1), help="Ranks that share each matrix.")
@click.option("--cp", default=1, show_default=True, type=click.IntRange(1), help="Ranks that share a prefill's rows.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16")
@click.option("--load-format", default="auto", show_default=True, type=click.Choice(["auto", "random"]))
@click.option("--max-model-len", default=4096, show_default=True, type=click.IntRange(16))
@click.option(
    "--num-draft-tokens", type=click.IntRange(0), help="Guessed and verified in one step; default: as many as pay."
)
@click.option("--draft-model", help="Directory or hub name of what guesses blocks of tokens for the model (DSpark).")
@click.option("--max-tokens", default=32, show_default=True, type=click.IntRange(1), help="Of each text.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0))
@click.option(
    "--samples", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON lines: prompt, continuation."
)
@click.option(
    "--check-structured-output", "checks", is_flag=True, help="Also: regex, JSON and EBNF. Exit code 1 if one fails."
)
def main(
    *,
    model: str,
    dp: int,
    ep: int,
    tp: int,
    cp: int,
    max_tokens: int,
    temperature: float,
    samples: Path | None,
    checks: bool,
    **options: Any,
) -> None:
    """Load a model, continue some prompts, force given texts through it, and check constraints."""
    configure_logging("WARNING")
    degrees: dict[str, Any] = {
        "data_parallel": dp,
        "expert_parallel": ep,
        "tensor_parallel": tp,
        "context_parallel": cp,
    }
    is_good = True
    try:
        given = read_samples(samples) if samples else SAMPLES
        token_ids = tokenize(model, [sample.continuation for sample in given])
        with LLM(model, **degrees, **options) as llm:
            show_texts(llm, given, SamplingParams(temperature=temperature, max_tokens=max_tokens))
            show_perplexity(llm, given, token_ids)
            if checks:
                is_good = check_structured_output(llm)
            show_engine(llm)
    except NightmillError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
