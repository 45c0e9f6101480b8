"""The linear-time matcher; ``re`` is its oracle."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.automaton import Automaton
from schemas.constraints import load_constraint
from schemas.errors import ConstraintError
from schemas.records import ConstraintKind
from schemas.regex import parse_regex, whole
from tests.schemas.test_regex import patterns, texts


@settings(max_examples=200, deadline=None)
@given(patterns, st.lists(texts, min_size=3, max_size=8))
def test_it_agrees_with_re(pattern: str, candidates: list[str]) -> None:
    automaton = Automaton(whole(parse_regex(pattern)))
    for text in candidates:
        assert (automaton.first_error(text) is None) == (re.fullmatch(pattern, text, re.ASCII) is not None)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "a*a*a*a*a*b", "(a*)*b"])
def test_no_pattern_takes_more_than_linear_time(pattern: str) -> None:
    assert Automaton(whole(parse_regex(pattern))).first_error("a" * 20_000) == 20_000


def test_the_first_misfit_is_named() -> None:
    automaton = Automaton(whole(parse_regex("ab{2,3}")))
    assert automaton.first_error("abx") == 2
    assert automaton.first_error("ab") == 2
    assert automaton.first_error("abbbb") == 4


def test_repetitions_that_multiply_are_refused() -> None:
    with pytest.raises(ConstraintError, match="unfold to more than 50000"):
        load_constraint(ConstraintKind.REGEX, "((a{100}){100}){100}")
