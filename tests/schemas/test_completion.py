"""The shortest way to an end, from every place: against brute force over short texts."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.completion import Place, TooComplex, Walker, shared
from schemas.constraints import language_of
from schemas.ebnf import parse_ebnf
from schemas.language import Language, from_ebnf, from_regex
from schemas.records import Constraint, ConstraintKind
from schemas.regex import parse_regex
from tests.schemas.test_regex import patterns

ALPHABET = "ab1. "
TEXTS = ["".join(chars) for length in range(5) for chars in itertools.product(ALPHABET, repeat=length)]


def start(pattern: str) -> Place:
    return Walker(Language(from_regex(parse_regex(pattern)))).start()


def check(place: Place, prefix: str, matching: list[str]) -> None:
    """Compare with all matching texts of the alphabet that begin with ``prefix``."""
    ends = [text[len(prefix) :] for text in matching if text.startswith(prefix)]
    if ends:
        assert place.length <= min(map(len, ends))
    assert place.is_end == (prefix in matching)


@settings(max_examples=150, deadline=None)
@given(patterns, st.sampled_from(TEXTS))
def test_the_shortest_end_of_a_regex_is_the_shortest(pattern: str, prefix: str) -> None:
    place = start(pattern).walk(prefix)
    matching = [text for text in TEXTS if re.fullmatch(pattern, text, re.ASCII)]
    check(place, prefix, matching)
    if place.length < float("inf"):
        assert re.fullmatch(pattern, prefix + place.completion(), re.ASCII)
        assert len(place.completion().encode()) == place.length


@settings(max_examples=60, deadline=None)
@given(patterns, patterns, st.sampled_from(TEXTS))
def test_the_shortest_end_of_an_intersection_is_in_both(first: str, second: str, prefix: str) -> None:
    trees = [from_regex(parse_regex(pattern)) for pattern in (first, second)]
    for included, excluded in (([trees[0], trees[1]], []), ([trees[0]], [trees[1]])):

        def fits(text: str, *, is_wanted: bool = not excluded) -> bool:
            is_in_second = re.fullmatch(second, text, re.ASCII) is not None
            return re.fullmatch(first, text, re.ASCII) is not None and is_in_second == is_wanted

        place = Walker(Language(shared(included, excluded))).start().walk(prefix)
        check(place, prefix, list(filter(fits, TEXTS)))
        if place.length < float("inf"):
            assert fits(prefix + place.completion())


@pytest.mark.parametrize(
    ("grammar", "prefix", "end"),
    [
        ('root ::= "(" root ")" | "."', "(((", ".)))"),
        ('root ::= "(" root ")" | "."', "((.", "))"),
        ('root ::= root "+" term | term\nterm ::= [0-9]+', "1+2+", "0"),
        ('root ::= item ("," item)* ";"\nitem ::= "long" | "é" "x"?', "é,", "éx"[:1] + ";"),
        ('root ::= a{3,5} "b"\na ::= "x" | "yy"', "yy", "xxb"),
        ('root ::= "" | "a"', "", ""),
        ('root ::= "ab" | "ac" root', "acac", "ab"),
    ],
)
def test_the_shortest_end_of_a_grammar(grammar: str, prefix: str, end: str) -> None:
    place = Walker(from_ebnf(parse_ebnf(grammar))).start().walk(prefix)
    assert (place.completion(), place.length) == (end, len(end.encode()))


def test_a_text_outside_the_language_has_no_end() -> None:
    place = start("ab+").walk("ac")
    assert place.is_dead
    assert place.length == float("inf")


def test_what_is_left_recursive_behind_an_empty_part_is_not_followed() -> None:
    walker = Walker(from_ebnf(parse_ebnf('root ::= b root "x" | "y"\nb ::= "" | "z"')))
    with pytest.raises(TooComplex):
        walker.start()


def test_rows_walk_through_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    walker = Walker(Language(from_regex(parse_regex("(ab)*c|a+d"))))
    first = walker.start().walk("abab")
    assert walker.start().walk("abab") is first
    assert walker.start().walk("ab") is first  # the same is left to be written
    monkeypatch.setattr("schemas.completion.MAX_KEPT", 5)
    assert walker.start().walk("ababab").completion() == "c"
    assert first.walk("ab").completion() == "c"


def test_ends_are_the_same_each_time() -> None:
    constraint = Constraint(kind=ConstraintKind.CHOICE, source=json.dumps(["no", "ok", "on", "of"]))
    ends = {Walker(language_of(constraint)).start().completion() for _ in range(50)}
    assert ends == {"of"} or len(ends) == 1


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"a": "', {}),  # anything may follow
        ('{"a": "xy",', {}),  # the choice is not near: ' "ok": ' stands before it
        ('{"a": "xy", "', {'ok": true, "b": ': False, 'ok": false, "b": ': False}),
        ('{"a": "xy", "ok": t', {}),  # nothing to choose
        ('{"a": "xy", "ok": true, "b": ', {"1}": True, "12}": True, "null}": True}),
        ('{"a": "xy", "ok": true, "b": 1', {"}": True, "2}": True}),
    ],
)
def test_the_ways_to_go_on_are_told_where_they_are_few_and_near(written: str, expected: dict[str, bool]) -> None:
    fields = {"a": {"type": "string"}, "ok": {"type": "boolean"}, "b": {"enum": [1, 12, None]}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema))
    place = Walker(language_of(constraint)).start().walk(written)
    assert place.alternatives(3) == expected
    assert len(expected) < 3 or place.alternatives(2) == {}


def test_a_text_that_may_end_goes_on_in_no_text_too() -> None:
    constraint = Constraint(kind=ConstraintKind.CHOICE, source=json.dumps(["cat", "cats", "dog"]))
    first = Walker(language_of(constraint)).start()
    assert first.alternatives(3) == {"cat": True, "cats": True, "dog": True}
    assert first.walk("cat").alternatives(3) == {"": True, "s": True}
