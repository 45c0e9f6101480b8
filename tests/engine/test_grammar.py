"""Constraints of every kind: what their masks allow, how they fail, and that one's failure is nobody else's."""

import itertools
import json
import threading
import time

import pytest

from engine.grammar import Grammars
from engine.states import SharedMatcher
from schemas.errors import ConstraintError
from schemas.records import Constraint, ConstraintKind
from tests.engine.fakes import END, VOCAB_SIZE, allowed_tokens, byte_tokenizer

TOKENIZER = byte_tokenizer()
ROUTE = {
    "type": "object",
    "properties": {"reason": {"type": "string", "maxLength": 8}, "label": {"enum": ["billing", "bug"]}},
    "required": ["reason", "label"],
    "additionalProperties": False,
}


def make_grammars(timeout_s: float = 20.0) -> Grammars:
    return Grammars(
        TOKENIZER, vocab_size=VOCAB_SIZE, end_token_ids=frozenset({END}), timeout_s=timeout_s, num_threads=1
    )


GRAMMARS = make_grammars()


def wait_for(grammars: Grammars, *keys: str, deadline_s: float = 60.0) -> None:
    """Poll until all keys have ended."""
    missing, end = set(keys), time.monotonic() + deadline_s
    while missing:
        missing -= set(grammars.poll())
        assert time.monotonic() < end, f"{missing} never ended"
        grammars.wait(0.01)


def compile_one(kind: str, source: str, grammars: Grammars | None = None) -> SharedMatcher:
    grammars = grammars or GRAMMARS
    constraint = Constraint(kind=ConstraintKind(kind), source=source)
    grammars.add(constraint)
    if (matcher := grammars.matcher(constraint.key)) is None:
        wait_for(grammars, constraint.key)
        matcher = grammars.matcher(constraint.key)
    assert matcher is not None
    return matcher


def json_matcher(schema: object) -> SharedMatcher:
    return compile_one("json_schema", json.dumps(schema))


def allowed(matcher: SharedMatcher, grammars: Grammars = GRAMMARS) -> set[int]:
    (tokens,) = allowed_tokens(grammars, [matcher])
    return tokens


def accepts(matcher: SharedMatcher, text: str) -> bool:
    """Whether the whole text may be written, then ended."""
    num_accepted = len(list(itertools.takewhile(matcher.accept, [*text.encode(), END])))
    matcher.rollback(num_accepted)
    return num_accepted > len(text.encode())


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", "[a-c]{2}|x", ["ab", "x"], ["a", "abc", ""]),
        ("ebnf", 'root ::= "(" root ")" | "."', [".", "((.))"], ["(", "(.", ""]),
        ("choice", '["cat", "category", "a \\"q\\" \\\\ \\n é"]', ["cat", "category", 'a "q" \\ \n é'], ["ca", "dog"]),
        ("json_schema", json.dumps(ROUTE), ['{"reason": "x", "label": "bug"}'], ['{"reason":"x","label":"bug"}', "{}"]),
    ],
)
def test_each_kind_accepts_its_texts_and_no_others(kind: str, source: str, good: list[str], bad: list[str]) -> None:
    matcher = compile_one(kind, source)
    assert all(accepts(matcher, text) for text in good)
    assert not any(accepts(matcher, text) for text in bad)


def test_the_end_token_is_allowed_only_when_the_grammar_can_end() -> None:
    matcher = compile_one("choice", '["cat", "category"]')
    for byte in b"ca":
        assert END not in allowed(matcher)
        matcher.accept(byte)
    matcher.accept(ord("t"))
    assert allowed(matcher) == {END, ord("e")}
    assert not matcher.is_at_end()
    for byte in b"egory":
        matcher.accept(byte)
    assert allowed(matcher) == {END}
    assert matcher.is_at_end()
    assert not matcher.is_terminated
    matcher.accept(END)
    assert matcher.is_terminated


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    assert max(allowed(compile_one("regex", "(.|\\n)*"))) == END


def test_rows_without_a_matcher_are_free_and_neighbours_do_not_mix() -> None:
    grammars = make_grammars()
    matchers = [compile_one("regex", "a+", grammars), None, compile_one("choice", '["b"]', grammars)]
    first, free, last = allowed_tokens(grammars, matchers)
    assert (first, last) == ({97}, {98})
    assert len(free) == VOCAB_SIZE
    assert grammars.fill([None, None]) is None


def test_a_text_that_no_token_can_write_allows_nothing() -> None:
    matcher = compile_one("choice", '["x~"]')
    assert allowed(matcher) == {ord("x")}
    assert matcher.accept(ord("x"))
    assert allowed(matcher) == set()
    assert not matcher.is_at_end()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": 3}'),
        ("json_schema", "false"),
        ("json_schema", '""'),
        ("regex", "a("),
        ("regex", "(?=a)b"),
        ("ebnf", 'root ::= "a"\nroot ::= "b"'),
        ("ebnf", ""),
        ("ebnf", "root ::= root"),
        ("ebnf", "\xff"),
        ("choice", "[]"),
        ("choice", "{"),
        ("regex", "a" * 2**21),
        ("json_schema", "[" * 100_000),
    ],
)
def test_a_malformed_constraint_is_an_error_and_the_next_one_works(kind: str, source: str) -> None:
    grammars = make_grammars()
    assert accepts(compile_one("regex", "a|b", grammars), "a")
    with pytest.raises(ConstraintError, match=f"the {kind} constraint cannot be compiled: ."):
        compile_one(kind, source, grammars)
    assert accepts(compile_one("regex", "c|d", grammars), "d")


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(ConstraintError, match="not sent before"):
        make_grammars().matcher("nope")


def slow_schema(depth: int) -> str:
    schema: dict[str, object] = {"type": "string", "maxLength": 30}
    for i in range(depth):
        branch = {"type": "object", "properties": {f"a{i}": schema}, "required": [f"a{i}"]}
        schema = {
            "oneOf": [branch, {"type": "array", "items": schema}, {"type": "object", "properties": {"b": schema}}]
        }
    return json.dumps(schema)


def test_a_compile_past_its_time_limit_fails_alone_and_threads_do_not_pile_up() -> None:
    grammars = make_grammars(timeout_s=0.001)
    keys = []
    before = threading.active_count()
    for i in range(20):
        constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=slow_schema(4) + " " * i)
        grammars.add(constraint)
        assert grammars.matcher(constraint.key) is None
        keys.append(constraint.key)
        assert threading.active_count() - before <= 10
    wait_for(grammars, *keys)
    errors = []
    for key in keys:
        with pytest.raises(ConstraintError) as caught:
            grammars.matcher(key)
        errors.append(str(caught.value))
    assert any("took more than 0.001 s" in error for error in errors)
    while grammars._num_runaways:  # they end by themselves: these are slow, not endless
        grammars.poll()
        grammars.wait(0.05)
    grammars._timeout_s = 20.0
    assert accepts(compile_one("regex", "a|b", grammars), "a")


def test_a_constraint_refused_because_the_compiler_is_busy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.grammar.MAX_RUNAWAYS", 0)
    with pytest.raises(ConstraintError, match="keep the compiler busy"):
        compile_one("regex", "a")


RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name"],
        }
    },
    "type": "array",
    "items": {"$ref": "#/$defs/node"},
}
OPTIONAL_ARRAYS = {
    "type": "object",
    "properties": {f"key_{i}": {"type": "array", "items": {"type": "string"}} for i in range(12)},
}


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (RECURSIVE, '[{"name": "a-b", "children": [{"name": "c"}]}]'),  # xgrammar#207: crashed the process
        (OPTIONAL_ARRAYS, '{"key_3": ["x"], "key_11": []}'),  # text-generation-inference#2681: hung for ever
    ],
)
def test_schemas_that_took_other_servers_down_compile_within_the_limit(schema: object, document: str) -> None:
    assert accepts(json_matcher(schema), document)


def test_equal_constraints_are_compiled_once() -> None:
    grammars = make_grammars()
    first = compile_one("regex", "a+", grammars)
    second = compile_one("regex", "a+", grammars)
    assert first is not second
    first.accept(97)
    assert END in allowed(first, grammars)
    assert END not in allowed(second, grammars)


def test_a_required_key_without_a_property_can_and_must_be_written() -> None:
    matcher = json_matcher({"type": "object", "required": ["a"]})
    assert accepts(matcher, '{"a": 1}')
    assert not accepts(matcher, "{}")


def test_keys_follow_the_order_of_the_schema() -> None:
    matcher = json_matcher(ROUTE)
    assert not accepts(matcher, '{"label": "bug", "reason": "x"}')
    assert not accepts(matcher, '{"reason": "x", "label": "bug", "more": 1}')


def test_no_blank_can_repeat_for_ever() -> None:
    matcher = json_matcher(ROUTE)
    prefix = b'{"reason":'
    assert all(matcher.accept(byte) for byte in prefix)
    assert matcher.accept(32)
    assert not matcher.accept(32)


def test_control_characters_stay_out_of_json_strings() -> None:
    for schema in ({"type": "string", "maxLength": 5}, {"type": "string"}, {}):
        matcher = json_matcher(schema)
        assert matcher.accept(ord('"'))
        assert min(allowed(matcher)) >= 0x20


def test_the_name_of_a_special_token_is_written_as_text_never_as_the_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, end_token_ids=frozenset({END}), timeout_s=9, num_threads=1)
    matcher = compile_one("choice", '["<x>"]', grammars)
    assert allowed(matcher, grammars) == {ord("<")}
    assert accepts(matcher, "<x>")


def test_a_tokenizer_without_an_end_token_cannot_be_constrained() -> None:
    grammars = Grammars(TOKENIZER, vocab_size=VOCAB_SIZE, end_token_ids=frozenset(), timeout_s=9, num_threads=1)
    with pytest.raises(ConstraintError, match="names no end token"):
        compile_one("regex", "a", grammars)


def test_a_choice_of_many_labels_with_shared_starts_is_exact() -> None:
    labels = ["".join(p) for p in itertools.product("ab", repeat=6)] + ["a", "ab"]
    matcher = compile_one("choice", json.dumps(labels))
    assert all(accepts(matcher, label) for label in labels)
    assert not accepts(matcher, "abab")


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 5, 4 * VOCAB_SIZE])
def test_the_padding_of_a_models_vocabulary_is_never_allowed_and_free_rows_are_left_alone(vocab_size: int) -> None:
    grammars = Grammars(TOKENIZER, vocab_size=vocab_size, end_token_ids=frozenset({END}), timeout_s=20, num_threads=1)
    matcher = compile_one("regex", "[^a]*", grammars)
    free, constrained = allowed_tokens(grammars, [None, matcher])
    assert free >= set(range(vocab_size))
    assert 100 < len(constrained) < VOCAB_SIZE
    assert max(constrained) < VOCAB_SIZE
