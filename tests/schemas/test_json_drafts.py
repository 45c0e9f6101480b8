"""What each draft keeps, against a second validator."""

import json
from typing import Any

import jsonschema_rs
import pytest

from schemas.constraints import Decision, enforcement_plan, grammar_source, load_constraint, make_validator
from schemas.json_drafts import DRAFT_4, DRAFT_2020_12, LATER, draft_of, is_read_alike
from schemas.records import ConstraintKind

URIS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
SCHEMAS: list[dict[str, Any]] = [
    {"const": 1},
    {"contains": {"type": "integer"}, "minContains": 2},
    {"propertyNames": {"maxLength": 1}},
    {"if": {"type": "string"}, "then": {"maxLength": 1}},
    {"dependencies": {"a": ["b"]}},
    {"dependencies": {"a": {"required": ["b"]}}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"unevaluatedProperties": False, "properties": {"a": True}},
    {"$ref": "#/definitions/x", "maxLength": 1, "definitions": {"x": {"type": "string"}}},
    {"multipleOf": 0.1},
    {"type": "string", "contentEncoding": "base64"},
    {"type": "string", "contentMediaType": "application/json"},
    {"type": "string", "contentEncoding": "base64", "contentMediaType": "application/json"},
    {"format": "date"},
    {"format": "time"},
    {"format": "uuid"},
]
DOCUMENTS: list[Any] = [
    *(1, 2, 0.3, 0.35, True, None, [], [1, 2], ["a", 1], {}, {"a": 1}, {"a": 1, "b": 2}, {"ab": 1}),
    *("", "a", "abc", "aGVsbG8=", "e30=", "{}", "2024-02-30", "2024-02-29", "12:00:00Z"),
    "123e4567-e89b-12d3-a456-426614174000",
]


@pytest.mark.parametrize("draft", URIS)
def test_a_keyword_means_in_each_draft_what_another_validator_takes_it_for(draft: int) -> None:
    for schema in SCHEMAS:
        named = {"$schema": URIS[draft], **schema}
        try:
            oracle = jsonschema_rs.validator_for(named, validate_formats=True, offline=True)
        except ValueError:
            continue  # draft 4 has no boolean schemas
        ours = make_validator(load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(named)))
        for document in DOCUMENTS:
            expected = oracle.is_valid(document)
            assert (ours.check(json.dumps(document))[1] is None) == expected, (named, document)


FORMATS = {
    "email": ["a@b", "a@b.c", "@", "a@", "a b@c.de", ".a@b.co", "a..b@c.de", "a@-b.de", '"a b"@c.de', "é@b.de"],
    "idn-email": ["é@b.de", "a@é.de", "@b", "a@b c.de", "mailto:a@b.c"],
    "hostname": ["a-b.c", "a.", "-a.b", "a\n", "٠", "a_b.c"],
    "idn-hostname": ["é.de", "a."],
    "duration": ["P1D", "-P1D", "P1.5D", "PT", "P1W2D"],
    "uri": ["http://a", "http://a\n", "a/b", "http://a b"],
    "uri-reference": ["a/b", "a\n", "http://a b"],
    "uri-template": ["/{a}", "/{", "a b", "http://a/\\", "%zz", "<a>"],
    "iri": ["http://日本.jp/ü", "a", "http://a b", "ü:x"],
    "iri-reference": ["ü/日本", "a b", "1a:b", "http://[a]"],
    "date-time": ["2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z\n", "2024-01-01t00:00:00z"],
    "relative-json-pointer": ["1/a", "٠", "/a"],
    "regex": ["[a-z]", "[a", "\\Z", "\\\\Z"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_another_validator_takes_it_for(name: str) -> None:
    oracle = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    checker = DRAFT_2020_12.FORMAT_CHECKER
    assert {text: checker.conforms(text, name) for text in FORMATS[name]} == {
        text: oracle.is_valid(text) for text in FORMATS[name]
    }


def test_a_keyword_of_a_later_draft_is_named_as_ignored_and_does_not_narrow() -> None:
    schema = {
        "$schema": URIS[4],
        "properties": {"a": {"const": 3, "type": "integer"}},
        "propertyNames": {"maxLength": 1},
    }
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    ignored = {row.path for row in enforcement_plan(constraint) if row.decision is Decision.IGNORED}
    assert ignored == {"/properties/a/const", "/propertyNames"}
    assert "3" not in grammar_source(constraint)
    assert make_validator(constraint).check('{"a": 4, "long": 1}')[1] is None


def test_a_subschema_of_another_draft_is_checked_unless_it_is_read_alike() -> None:
    def decisions(inner: dict[str, Any]) -> set[Decision]:
        schema = {"properties": {"a": {"$schema": URIS[4], **inner}}}
        constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
        return {row.decision for row in enforcement_plan(constraint)}

    assert decisions({"type": "string", "maxLength": 3}) == {Decision.ENFORCED}
    assert Decision.CHECKED in decisions({"const": 3})
    assert not is_read_alike({"items": [{"type": "string"}]})


def test_a_subschema_that_repeats_the_draft_is_read_as_the_document() -> None:
    schema = {"$schema": URIS[7], "properties": {"a": {"$schema": URIS[7], "multipleOf": 0.1}}}
    validator = make_validator(load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    assert validator.check('{"a": 0.3}')[1] is None


def test_an_unknown_draft_is_the_newest() -> None:
    assert draft_of({"$schema": "https://example.com/x"}) is DRAFT_2020_12
    assert draft_of({"$schema": "https://json-schema.org/draft-04/schema"}) is DRAFT_4
    assert set(LATER) == {draft_of({"$schema": uri}) for uri in URIS.values()}
