"""The one door to all kinds of constraints: choices, plans, the example schema, agreement of engine and check."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.constraints import Decision, enforcement_plan, grammar_source, load_constraint, make_validator
from schemas.errors import ConstraintError
from schemas.records import Constraint, ConstraintKind
from tests.schemas.grammar_oracle import accepts, compile_grammar

labels = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1, unique=True
)


def load_choices(choices: object) -> Constraint:
    return load_constraint(ConstraintKind.CHOICE, json.dumps(choices))


@settings(max_examples=60, deadline=None)
@given(labels, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_exactly_the_choices_are_generated_and_accepted(choices: list[str], other: str) -> None:
    constraint = load_choices(choices)
    grammar, validator = compile_grammar(constraint), make_validator(constraint)
    for choice in choices:
        assert validator.check(choice) == (choice, None)
        assert accepts(grammar, choice)
    assert (validator.check(other)[1] is None) == (other in choices)
    assert accepts(grammar, other) == (other in choices)


def test_a_choice_may_be_the_start_of_another() -> None:
    constraint = load_choices(["cat", "category", "dog"])
    grammar = compile_grammar(constraint)
    assert [text for text in ("cat", "category", "dog", "categ", "") if accepts(grammar, text)] == [
        "cat",
        "category",
        "dog",
    ]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('["a", "b", "a"]', "'a' stands twice"),
        ("[]", "non-empty strings"),
        ('["a", ""]', "non-empty strings"),
        ('["a", 1]', "non-empty strings"),
        ('{"a": 1}', "non-empty strings"),
        ("a, b", "not a JSON list"),
        ("", "not a JSON list"),
    ],
)
def test_bad_choices_are_refused(source: str, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        load_constraint(ConstraintKind.CHOICE, source)


def test_one_malformed_constraint_after_a_good_one_harms_no_other() -> None:
    first = load_constraint(ConstraintKind.EBNF, 'root ::= "a" | "b"')
    with pytest.raises(ConstraintError):
        load_constraint(ConstraintKind.EBNF, 'root ::= "a"\nroot ::= "b"')
    assert make_validator(first).check("a") == ("a", None)
    assert make_validator(load_constraint(ConstraintKind.EBNF, 'root ::= "c"')).check("c") == ("c", None)


def test_a_kind_may_be_given_by_its_name() -> None:
    assert load_constraint("regex", "a+").kind is ConstraintKind.REGEX  # type: ignore[arg-type]


def test_the_source_is_kept_as_the_user_wrote_it() -> None:
    source = '{ "type" :  "integer" }'
    assert load_constraint(ConstraintKind.JSON_SCHEMA, source).source == source


@pytest.mark.parametrize(
    ("kind", "source"),
    [(ConstraintKind.REGEX, "a+"), (ConstraintKind.EBNF, 'root ::= "a"'), (ConstraintKind.CHOICE, '["a"]')],
)
def test_text_constraints_are_enforced_as_a_whole(kind: ConstraintKind, source: str) -> None:
    plan = enforcement_plan(load_constraint(kind, source))
    assert [row.decision for row in plan] == [Decision.ENFORCED]


def test_the_plan_names_path_keyword_and_reason() -> None:
    source = json.dumps({"type": "object", "properties": {"a b": {"type": "array", "uniqueItems": True}}})
    plan = {row.path: row for row in enforcement_plan(load_constraint(ConstraintKind.JSON_SCHEMA, source))}
    row = plan["/properties/a b/uniqueItems"]
    assert (row.keyword, row.decision) == ("uniqueItems", Decision.CHECKED)
    assert "compare" in row.reason


def test_the_example_schema_is_fully_enforced(repo_root: Path) -> None:
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, (repo_root / "schemas" / "route.json").read_text())
    assert {row.decision for row in enforcement_plan(constraint)} == {Decision.ENFORCED}
    grammar, validator = compile_grammar(constraint), make_validator(constraint)
    for text in ('{"reason": "asks for a refund", "route": "billing"}', '{"route": "bug"}', '{"route": "other"}'):
        assert accepts(grammar, text)
        assert validator.check(text) == (json.loads(text), None)
    assert not accepts(grammar, '{"route": "sales"}')
    assert list(json.loads(grammar_source(constraint))["properties"]) == ["reason", "route"]
