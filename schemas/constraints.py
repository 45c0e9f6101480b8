"""Constraints: refused before a job starts or loaded, planned per keyword, turned into a grammar, validated.

The one door to ``json_schema``, ``json_grammar``, ``regex`` and ``ebnf``. Knows no grammar engine and no torch.
"""

import json
import math
from collections import Counter
from functools import lru_cache
from typing import Any, Protocol

from schemas.automaton import Automaton
from schemas.ebnf import Recogniser, parse_ebnf
from schemas.errors import ConstraintError
from schemas.json_grammar import compile_schema
from schemas.json_language import json_language
from schemas.json_schema import JsonSchema, JsonValidator, describe, load_json, shorten
from schemas.language import Either, Language, from_ebnf, from_regex
from schemas.plan import Decision, GrammarEngine, KeywordDecision, PlanWriter
from schemas.records import Constraint, ConstraintKind
from schemas.regex import NOTHING, RegexError, complement, parse_regex, print_regex, restrict, whole

__all__ = [
    "Decision",
    "GrammarEngine",
    "KeywordDecision",
    "Validator",
    "enforcement_plan",
    "grammar_engine",
    "grammar_source",
    "language_of",
    "load_constraint",
    "make_validator",
    "max_bytes",
]

MAX_PATTERN_CHARS = 20_000
MAX_CHOICES_CHARS = 2**20


class Validator(Protocol):
    """Judges finished text against a constraint, independently of the grammar engine."""

    def check(self, text: str) -> tuple[Any, str | None]:
        """Return (value, None) if valid; else (the parsed value or None, a short message with the path)."""


def load_constraint(kind: ConstraintKind, source: str) -> Constraint:
    """Check a constraint's source. Raises ConstraintError: what is malformed or refused, where, what to change."""
    kind = ConstraintKind(kind)
    constraint = Constraint(kind=kind, source=source)
    grammar_source(constraint)
    return constraint


def grammar_engine(constraint: Constraint) -> GrammarEngine:
    """Which engine ``grammar_source`` is written for. Raises as load_constraint does."""
    return _compile(constraint)[2]


def grammar_source(constraint: Constraint) -> str:
    """What the grammar engine compiles: JSON Schema text, a regex, or an EBNF grammar.

    Choices become an EBNF grammar. Raises ConstraintError as load_constraint does.
    """
    return _compile(constraint)[0]


def language_of(constraint: Constraint) -> Language:
    """The texts that the grammar engine can write. Raises as load_constraint does."""
    if constraint.kind == ConstraintKind.JSON_SCHEMA:
        return json_language(grammar_source(constraint), grammar_engine(constraint))
    if constraint.kind == ConstraintKind.REGEX:
        return Language(from_regex(parse_regex(grammar_source(constraint))))
    if constraint.kind == ConstraintKind.EBNF:
        return from_ebnf(parse_ebnf(constraint.source))
    return Language(Either(tuple(_parse_choices(constraint.source))))


@lru_cache(maxsize=256)
def max_bytes(constraint: Constraint) -> int | None:
    """Bytes of UTF-8, and so tokens, that no text of the constraint exceeds; None if there is no such bound.

    None too for a constraint that cannot be compiled.
    """
    try:
        longest = language_of(constraint).longest
    except (ConstraintError, RecursionError):
        return None
    return None if longest == math.inf else int(longest)


def enforcement_plan(constraint: Constraint) -> tuple[KeywordDecision, ...]:
    """What is enforced while decoding and what is checked after it, per keyword. Raises as load_constraint does."""
    return _compile(constraint)[1]


def make_validator(constraint: Constraint) -> Validator:
    """Compile the independent check of finished text: once, for all rows. Raises as load_constraint does."""
    if constraint.kind == ConstraintKind.JSON_SCHEMA:
        return JsonValidator(JsonSchema(constraint.source).validator)
    if constraint.kind == ConstraintKind.REGEX:
        return _TextValidator(_compile_regex(constraint.source)[1], "match the regex")
    if constraint.kind == ConstraintKind.EBNF:
        return _TextValidator(Recogniser(parse_ebnf(constraint.source)), "follow the grammar")
    return _ChoiceValidator(_parse_choices(constraint.source))


@lru_cache(maxsize=64)
def _compile(constraint: Constraint) -> tuple[str, tuple[KeywordDecision, ...], GrammarEngine]:
    if constraint.kind == ConstraintKind.JSON_SCHEMA:
        compiled = compile_schema(JsonSchema(constraint.source))
        return compiled.source, compiled.plan.rows(), compiled.engine
    engine = GrammarEngine.XGRAMMAR
    plan = PlanWriter()
    plan.note("", constraint.kind.value, Decision.ENFORCED, f"kept by {engine}")
    if constraint.kind == ConstraintKind.REGEX:
        return _compile_regex(constraint.source)[0], plan.rows(), engine
    if constraint.kind == ConstraintKind.EBNF:
        parse_ebnf(constraint.source)
        return constraint.source, plan.rows(), engine
    choices = " | ".join(_ebnf_literal(choice) for choice in _parse_choices(constraint.source))
    return f"root ::= {choices}\n", plan.rows(), engine


def _compile_regex(source: str) -> tuple[str, Automaton]:
    if not source:
        raise ConstraintError("the regex is empty: it would accept only the empty text; write what a row may say")
    if len(source) > MAX_PATTERN_CHARS:
        raise ConstraintError(f"the regex has {len(source)} characters, limit {MAX_PATTERN_CHARS}: use EBNF or choices")
    try:
        tree = restrict(whole(parse_regex(source)), complement(()))
        automaton = Automaton(tree)
        printed = print_regex(tree)
    except (RegexError, RecursionError) as error:
        raise ConstraintError(f"invalid regex: {describe(error)}") from error
    if tree == NOTHING:
        raise ConstraintError(f"the regex {shorten(source)!r} matches no text at all")
    return printed, automaton


def _parse_choices(source: str) -> list[str]:
    if len(source) > MAX_CHOICES_CHARS:
        raise ConstraintError(f"the choices have {len(source)} characters, limit {MAX_CHOICES_CHARS}: offer fewer")
    try:
        choices = load_json(source)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the choices are not a JSON list of strings: {describe(error)}") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ConstraintError('the choices must be a JSON list of non-empty strings, such as ["yes", "no"]')
    most_common, count = Counter(choices).most_common(1)[0]
    if count > 1:
        raise ConstraintError(f"the choice {most_common!r} stands twice in the list: remove one")
    return choices


def _ebnf_literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _TextValidator:
    def __init__(self, recogniser: Recogniser | Automaton, verb: str) -> None:
        self._recogniser = recogniser
        self._verb = verb

    def check(self, text: str) -> tuple[Any, str | None]:
        position = self._recogniser.first_error(text)
        if position is None:
            return text, None
        return None, f"does not {self._verb} from character {position} on: {shorten(text)!r}"


class _ChoiceValidator:
    def __init__(self, choices: list[str]) -> None:
        self._choices = frozenset(choices)

    def check(self, text: str) -> tuple[Any, str | None]:
        return (text, None) if text in self._choices else (None, f"is none of the choices: {shorten(text)!r}")
