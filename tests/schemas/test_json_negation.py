"""The opposite of a schema accepts just what the schema rejects; jsonschema is the oracle."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.json_negation import negate
from schemas.json_schema import JsonSchema
from tests.schemas.test_json_grammar import documents, schemas


def opposite_of(schema: Any) -> Any:
    document = JsonSchema(json.dumps(schema))
    opposite = negate(document.root, document)
    return {"not": {}} if opposite is False else opposite


@settings(max_examples=120, deadline=None)
@given(schemas.filter(lambda schema: isinstance(schema, dict)), st.lists(documents, min_size=4, max_size=8))
def test_a_document_fits_a_schema_or_its_opposite_and_never_both(schema: Any, candidates: list[Any]) -> None:
    opposite = opposite_of(schema)
    assume(opposite is not None)
    validator, other = JsonSchema(json.dumps(schema)).validator, JsonSchema(json.dumps(opposite)).validator
    for document in candidates:
        assert validator.is_valid(document) is not other.is_valid(document), (schema, opposite, document)


@pytest.mark.parametrize("schema", [{"pattern": "a"}, {"type": "integer"}, {"items": {}}, {"enum": [1]}])
def test_what_has_no_opposite_that_a_grammar_keeps_says_so(schema: Any) -> None:
    assert opposite_of(schema) is None
