"""The regular expressions that two engines read alike: ``re`` and the grammar engine are each other's oracle."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.constraints import load_constraint, make_validator
from schemas.errors import ConstraintError
from schemas.json_leaves import PLAIN
from schemas.plan import GrammarEngine
from schemas.records import Constraint, ConstraintKind
from schemas.regex import (
    ANY,
    NOTHING,
    Chars,
    complement,
    intersection,
    lengths,
    parse_regex,
    print_regex,
    restrict,
    union,
    whole,
)
from tests.schemas.grammar_oracle import accepts, compile_grammar, compile_json

atoms = st.sampled_from(
    [
        "a",
        "b",
        "é",
        "\\d",
        "\\w",
        "\\s",
        "\\S",
        "\\W",
        ".",
        "[a-c]",
        "[^a]",
        "[^\\d\\n]",
        "\\.",
        "-",
        "\\/",
        "[\\]\\-^]",
    ]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "+?"])).map(
            lambda t: f"(?:{t[0]}){t[1]}"
        ),
    ),
    max_leaves=6,
)
texts = st.text(st.sampled_from("abcdé1. -\n\t]^/_ü٣"), max_size=6)


def load(pattern: str) -> Constraint:
    return load_constraint(ConstraintKind.REGEX, pattern)


@settings(max_examples=150, deadline=None)
@given(patterns, st.lists(texts, min_size=3, max_size=8))
def test_engine_check_and_re_agree_on_any_text(pattern: str, candidates: list[str]) -> None:
    constraint = load(pattern)
    grammar, validator = compile_grammar(constraint), make_validator(constraint)
    for text in candidates:
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        assert (validator.check(text)[1] is None) == expected
        assert accepts(grammar, text) == expected


@settings(max_examples=100, deadline=None)
@given(patterns, st.data())
def test_what_the_pattern_generates_passes_both(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    assume("\0" not in text and len(text) < 200)
    constraint = load(pattern)
    assert make_validator(constraint).check(text) == (text, None)
    assert accepts(compile_grammar(constraint), text)


@settings(max_examples=150, deadline=None)
@given(patterns, st.lists(st.text("ab1 -_.c", max_size=6), min_size=8, max_size=16))
def test_a_pattern_inside_a_schema_means_the_same(pattern: str, texts: list[str]) -> None:
    tree = restrict(whole(parse_regex(pattern)), PLAIN)
    assume(tree != NOTHING)
    printed = print_regex(tree)
    grammar = compile_json(GrammarEngine.XGRAMMAR, json.dumps({"type": "string", "pattern": printed}))
    for text in texts:
        assert accepts(grammar, json.dumps(text)) == (re.fullmatch(printed, text, re.ASCII) is not None)


@given(patterns)
def test_printing_loses_nothing(pattern: str) -> None:
    printed = print_regex(whole(parse_regex(pattern)))
    assert print_regex(whole(parse_regex(printed))) == printed


@given(patterns, st.data())
def test_lengths_bound_every_match(pattern: str, data: st.DataObject) -> None:
    low, high = lengths(whole(parse_regex(pattern)))
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    assert low <= len(text)
    assert high is None or len(text) <= high


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)).map(lambda t: (t[0], t[0] + t[1]))), st.integers(1, 400)
)
def test_range_algebra_is_set_algebra(ranges: list[tuple[int, int]], codepoint: int) -> None:
    def has(found: tuple[tuple[int, int], ...]) -> bool:
        return any(low <= codepoint <= high for low, high in found)

    merged = union(ranges)
    assert has(merged) == any(low <= codepoint <= high for low, high in ranges)
    assert has(complement(merged)) != has(merged)
    assert has(intersection(merged, ((1, 100),))) == (has(merged) and codepoint <= 100)
    assert all(after[0] > before[1] + 1 for before, after in pairwise(merged))


@pytest.mark.parametrize("pattern", ["^abc$", "abc", "^(abc)$", "^abc|^abc$", "(?P<n>abc)", "(?<n>abc)", "a(?:b)c"])
def test_anchors_and_group_names_change_nothing(pattern: str) -> None:
    validator = make_validator(load(pattern))
    assert validator.check("abc") == ("abc", None)
    assert validator.check("xabc")[0] is None
    assert validator.check("abc\n")[1] is not None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", "empty"),
        ("(?=a)b", "look-ahead"),
        ("(?!a)b", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "look-behind"),
        ("(a)\\1", "back-reference"),
        ("(?P<x>a)(?P=x)", "back-reference"),
        ("(?i)abc", "inline flag"),
        ("(?i:abc)", "inline flag"),
        ("\\bword\\b", "word boundary"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("\\p{L}", "escape \\p"),
        ("\\Aabc\\Z", "escape \\A"),
        ("a$b", "only at the two ends"),
        ("(^a)+", "only at the two ends"),
        ("^*", "repeated anchor"),
        ("a{3,2}", "bounds swapped"),
        ("a{1,99999}", "limit of 10000"),
        ("a**", "multiple repeat"),
        ("*a", "nothing to repeat"),
        ("(a", "missing ')'"),
        ("a)", "unbalanced"),
        ("[a", "ends too early"),
        ("[]", "empty class"),
        ("[z-a]", "bad range"),
        ("[[:alpha:]]", "class operator"),
        ("\\", "ends too early"),
        ("\\x4", "malformed"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
        ("a" * 30_000, "limit 20000"),
    ],
)
def test_what_engines_read_differently_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        load(pattern)
    assert reason in str(caught.value)


def test_a_pattern_for_python_matches_a_subset_of_what_python_does() -> None:
    for pattern, text in [
        (r"\D", "٣"),
        (r"\W", "é"),
        (r"\S", "\u2003"),
        (r"[^\d]", "٣"),
        (r"[^\w]", "é"),
        (r"[^\s]", "\xa0"),
    ]:
        assert re.fullmatch(pattern, text) is None
        assert re.fullmatch(print_regex(parse_regex(pattern, ascii_only=False)), text) is None


def test_any_is_everything_but_nul_and_surrogates() -> None:
    assert isinstance(ANY, Chars)
    assert not any(low <= 0xD800 <= high or low == 0 for low, high in ANY.ranges)


def test_nested_repetition_does_not_hang_the_check() -> None:
    assert make_validator(load("^(a+)+b$")).check("a" * 20_000)[1] is not None
