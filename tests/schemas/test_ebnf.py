"""Grammars in the engine's dialect: the engine and our recogniser are each other's oracle."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.constraints import load_constraint, make_validator
from schemas.ebnf import Recogniser, parse_ebnf
from schemas.errors import ConstraintError
from schemas.records import Constraint, ConstraintKind
from tests.schemas.grammar_oracle import accepts, compile_grammar

EXAMPLES = {
    'root ::= "a" | "b"': (["a", "b"], ["", "ab", "c"]),
    'root ::= "" | "a" root "b"': (["", "ab", "aabb"], ["aab", "ba"]),
    'root ::= root "a" | "b"': (["b", "baa"], ["a", ""]),
    'root ::= a a\na ::= a | "" | "x"': (["", "x", "xx"], ["xxx"]),
    'root ::= [a-z]+ "x"? (num | "-")*  # words\nnum ::= [0-9]{2}': (["ab", "abx", "ax12", "a-12-"], ["ax1", "1"]),
    'root ::= "a"{2,3} | "b"{2} | ("cd"){1,}': (["aa", "aaa", "bb", "cdcd"], ["a", "aaaa", "b", ""]),
    "root ::= [^a\\]\\n]": (["b", "é"], ["a", "]", "\n"]),
    'root ::= "é\\n\\"\\x41" [\\u00e0-\\u00ef]': (['é\n"Aé'], ["éA"]),
    'root ::=\n  "a"\n  | item\n\nitem ::= ("b" | "") "c"': (["a", "bc", "c"], ["b"]),
    'root ::= e\ne ::= e "+" e | [0-9]': (["1", "1+2+3"], ["1+", "+1"]),
}


def load(source: str) -> Constraint:
    return load_constraint(ConstraintKind.EBNF, source)


@pytest.mark.parametrize("source", EXAMPLES)
def test_engine_and_recogniser_agree_with_the_example(source: str) -> None:
    right, wrong = EXAMPLES[source]
    constraint = load(source)
    grammar, validator = compile_grammar(constraint), make_validator(constraint)
    for text in right:
        assert validator.check(text) == (text, None)
        assert accepts(grammar, text)
    for text in wrong:
        assert validator.check(text)[1] is not None
        assert not accepts(grammar, text)


elements = st.sampled_from(
    ['"a"', '"b"', '""', "[ab]", "[^a]", "one", "two", '"a"*', "one?", '("a" | two)+', '("b" one){1,2}']
)
rows = st.lists(st.lists(elements, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=3).map(" | ".join)
grammars = st.tuples(rows, rows, rows).map(lambda r: f'root ::= {r[0]}\none ::= {r[1]} | "a"\ntwo ::= {r[2]} | "b"\n')


@settings(max_examples=150, deadline=None)
@given(grammars, st.lists(st.text("abc", max_size=5), min_size=4, max_size=10))
def test_engine_and_recogniser_agree_on_random_grammars(source: str, candidates: list[str]) -> None:
    constraint = load(source)
    grammar, validator = compile_grammar(constraint), make_validator(constraint)
    for text in candidates:
        assert accepts(grammar, text) == (validator.check(text)[1] is None), (source, text)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("", ["empty"]),
        ('start ::= "a"', ["no rule `root`"]),
        ('root ::= "a"\nroot ::= "b"', ["line 2", "'root' is defined twice"]),
        ("root ::= item", ["'item'", "'root'", "not defined"]),
        ("root ::= root", ["'root' never ends"]),
        ('root ::= "a" | "b" loop\nloop ::= "x" loop', ["'loop' never ends"]),
        ('root ::= "a', ["line 1", "cannot read"]),
        ("root ::= [z-a]", ["ends swapped"]),
        ("root ::= [\\w]", ["unknown escape"]),
        ('root ::= ("a"', ["not closed"]),
        ('root ::= "a" | ', ["empty alternative"]),
        ('root ::= "a" (= "b")', ["look-ahead"]),
        ('root ::= TagDispatch(("a", b))', ["extension"]),
        ('root ::= "a"{3,2}', ["bounds swapped"]),
        ('root ::= "a"{99999}', ["limit of 10000"]),
        ('root ::= "\\x041"', ["hexadecimal"]),
        ('"a" ::= "b"', ["expected `rule ::= ...`"]),
        ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, ["nested too deeply"]),
    ],
)
def test_a_grammar_that_cannot_work_is_refused_with_place_and_cure(source: str, parts: list[str]) -> None:
    with pytest.raises(ConstraintError) as caught:
        load(source)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_misfit_is_named_by_its_position() -> None:
    recogniser = Recogniser(parse_ebnf('root ::= "ab" end\nend ::= "c"'))
    assert recogniser.first_error("abx") == 2
    assert recogniser.first_error("ab") == 2
    assert recogniser.first_error("abcd") == 3
    assert recogniser.first_error("abc") is None


def test_an_ambiguous_grammar_costs_no_cubic_time() -> None:
    for source, text in (
        ('root ::= root root | "a"', "a" * 2000),
        ('root ::= root "+" root | [0-9]', "1+" * 1000 + "1"),
    ):
        recogniser = Recogniser(parse_ebnf(source))
        assert recogniser.first_error(text) is None
        assert recogniser.first_error(text + "!") == len(text)


two_sided = st.sampled_from(
    [
        'root "+" root',
        "root root",
        'root root "+" root',
        'root "-"',
        '"-" root',
        '"(" root ")"',
        '"" root',
        '""',
        "other",
    ]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(two_sided, min_size=1, max_size=4), st.lists(st.text("a+-()b", max_size=6), min_size=4, max_size=10))
def test_engine_and_recogniser_agree_on_two_sided_rules(options: list[str], candidates: list[str]) -> None:
    constraint = load("root ::= " + " | ".join(options) + ' | "a"\nother ::= other "b" other | root "b" | "b"')
    grammar, validator = compile_grammar(constraint), make_validator(constraint)
    for text in candidates:
        assert accepts(grammar, text) == (validator.check(text)[1] is None), (options, text)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.lists(st.integers(0, 90), max_size=8))
def test_bounded_repeats_count_exactly(low: int, more: int, lengths: list[int]) -> None:
    source = f'root ::= [ab]{{{low},{low + more}}} "." ("xy"){{{more}}} "z"{{{low},}}'
    recogniser, oracle = (
        Recogniser(parse_ebnf(source)),
        re.compile(f"[ab]{{{low},{low + more}}}[.](xy){{{more}}}z{{{low},}}"),
    )
    for length in [low - 1, low, low + more, low + more + 1, *lengths]:
        for text in ("ab" * length)[: max(0, length)], "b" * max(0, length):
            whole = text + "." + "xy" * more + "z" * length
            assert (recogniser.first_error(whole) is None) == (oracle.fullmatch(whole) is not None)


def test_large_repeats_take_few_rules() -> None:
    grammar = parse_ebnf('root ::= ("a" [b-z]){9000,10000} "."')
    assert len(grammar) < 60
    misfit = Recogniser(grammar).first_error("ab" * 40)
    assert misfit is not None
    assert 74 < misfit <= 80


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), st.characters(exclude_categories=["Cs"])
)
def test_a_class_holds_its_characters_and_no_others(chars: set[str], other: str) -> None:
    codes = [f"\\U{ord(char):08x}" for char in sorted(chars)]
    recogniser = Recogniser(parse_ebnf(f"root ::= [{''.join(codes)}]"))
    assert [recogniser.first_error(char) for char in chars] == [None] * len(chars)
    assert (recogniser.first_error(other) is None) == (other in chars)
    literal = Recogniser(parse_ebnf(f'root ::= "{"".join(codes)}"'))
    assert literal.first_error("".join(sorted(chars))) is None


def test_thousands_of_labels_load_at_once() -> None:
    labels = [f"label '{index}' & more" for index in range(5000)]
    recogniser = Recogniser(parse_ebnf("root ::= " + " | ".join(f'"{label}" | "{label}!"' for label in labels)))
    assert [recogniser.first_error(label) for label in (labels[0], labels[-1], labels[7] + "!")] == [None] * 3
    assert recogniser.first_error("label '5000' & more") is not None
    assert recogniser.first_error(labels[0] + "!!") is not None


def test_threads_share_a_recogniser() -> None:
    recogniser = Recogniser(parse_ebnf('root ::= "(" root ")" root | ""'))
    texts = ["()" * n + ")" * (n % 3) for n in range(60)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(recogniser.first_error, texts))
    assert found == [None if n % 3 == 0 else 2 * n for n in range(60)]
