"""Reading schemas and judging documents: the official test suite is the oracle."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.constraints import load_constraint, make_validator
from schemas.errors import ConstraintError
from schemas.json_schema import JsonSchema, JsonValidator, load_json
from schemas.records import ConstraintKind

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


LEFT_OUT = {
    "pattern with Unicode property escape requires unicode mode": "Python's re has no \\p{}: refused",
    "patternProperties with Unicode property escape": "Python's re has no \\p{}: refused",
    "schema that uses custom metaschema with with no validation vocabulary": "a remote metaschema",
}


def check(schema: Any, text: str) -> tuple[Any, str | None]:
    return JsonValidator(JsonSchema(json.dumps(schema)).validator).check(text)


def suite_groups(shared_data: Path, draft: str) -> list[tuple[str, dict[str, Any]]]:
    files = sorted((shared_data / "json-schema-test-suite" / "tests" / draft).glob("*.json"))
    assert files
    return [(file.stem, group) for file in files for group in json.loads(file.read_text())]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_official_suite_is_judged_right(shared_data: Path, draft: str) -> None:
    wrong, needs_remote, num_tests = [], [], 0
    for stem, group in suite_groups(shared_data, draft):
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[draft], **schema}
        if schema is False or group["description"] in LEFT_OUT:
            continue  # `false` accepts no document and is refused
        try:
            validator = JsonValidator(JsonSchema(json.dumps(schema)).validator)
        except ConstraintError as error:
            if "not inside this document" in str(error):
                needs_remote.append(group["description"])
            elif "without describing any content" not in str(error) and "surrogate" not in str(error):
                wrong.append((stem, group["description"], str(error)))
            continue
        for test in group["tests"]:
            if "only an annotation by default" in test["description"]:
                continue  # we choose to check formats
            num_tests += 1
            value, message = validator.check(json.dumps(test["data"]))
            if (message is None) != test["valid"]:
                wrong.append((stem, group["description"], test["description"]))
            elif message is None:
                assert value == test["data"]
    assert wrong == []
    assert len(needs_remote) <= 20, "only schemas that point to the suite's remote files may be left out"
    assert num_tests > 800


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NaN", "NaN is no JSON number"),
        ("[Infinity]", "Infinity is no JSON number"),
        ("1e400", "beyond 64-bit floats"),
        ('{"a": 1, "a": 1}', "'a' stands twice"),
        ('{"a": 1, "\\u0061": 1}', "'a' stands twice"),
        ('"\\ud83d"', "lone surrogate"),
        ('{"\\udc00": 1}', "lone surrogate"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ('{"n": "A", "items": ["x", "y"', "not JSON"),
        ("```json\n{}\n```", "not JSON"),
        ('"a\tb"', "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "not JSON"),
    ],
)
def test_text_that_no_strict_reader_takes_is_not_json(text: str, reason: str) -> None:
    value, message = check(True, text)
    assert value is None
    assert message is not None
    assert reason in message


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda c: st.lists(c) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), c),
    )
)
def test_what_json_can_say_survives(value: Any) -> None:
    for ascii_only in (True, False):
        assert load_json(json.dumps(value, ensure_ascii=ascii_only)) == value


def test_integers_beyond_64_bits_keep_every_digit() -> None:
    number = 2**70 + 1
    assert check({"type": "integer", "minimum": 2**70}, str(number)) == (number, None)
    value, message = check({"type": "number", "multipleOf": 0.5}, "1" + "0" * 400)
    assert value == 10**400
    assert message is None or "cannot be validated" in message


def test_a_wrong_value_comes_back_with_a_message_that_has_its_path() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}}}}
    value, message = check(schema, '{"tags": ["a", "c"]}')
    assert value == {"tags": ["a", "c"]}
    assert message == "$.tags[1]: 'c' is not one of ['a', 'b']"


def test_a_message_about_a_huge_value_is_short() -> None:
    _, message = check({"type": "integer"}, json.dumps("x" * 100_000))
    assert message is not None
    assert len(message) < 300


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("date-time", "2024-13-01T00:00:00Z", "2024-01-01T00:00:00Z"),
        ("date", "2023-02-29", "2024-02-29"),
        ("email", "nobody", "a@b.de"),
        ("uri", "no uri", "https://a.example/b?c"),
        ("ipv4", "256.0.0.1", "10.0.0.1"),
        ("uuid", "123", "123e4567-e89b-12d3-a456-426614174000"),
        ("hostname", "-a-", "a.example"),
        ("duration", "1 day", "P1D"),
        ("json-pointer", "a", "/a"),
    ],
)
def test_formats_are_checked(name: str, wrong: str, right: str) -> None:
    assert check({"format": name}, json.dumps(right))[1] is None
    assert check({"format": name}, json.dumps(wrong))[1] is not None


def test_the_draft_decides_what_stands_beside_a_reference() -> None:
    schema = {"definitions": {"s": {"type": "string"}}, "$ref": "#/definitions/s", "maxLength": 1}
    assert check(schema, '"ab"')[1] is not None
    assert check({"$schema": DRAFTS["draft7"], **schema}, '"ab"')[1] is None


def test_unevaluated_and_dependent_keywords_of_2020_12_are_checked() -> None:
    assert check({"dependentRequired": {"a": ["b"]}}, '{"a": 1}')[1] is not None
    assert check({"properties": {"a": {}}, "unevaluatedProperties": False}, '{"b": 1}')[1] is not None


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ('{"type": "object",\n "a" 1}', ["line 2", "column 6"]),
        ("", ["empty"]),
        ("  \n", ["empty"]),
        ("[]", ["list", "must be an object"]),
        ("false", ["accepts no document"]),
        ('{"type": "object", "type": "array"}', ["'type' stands twice"]),
        ('{"type": "strin"}', ["/type", "strin"]),
        ('{"properties": {"a": {"minLength": "3"}}}', ["/properties/a/minLength"]),
        ('{"pattern": "("}', ["/pattern"]),
        ('{"required": "a"}', ["/required"]),
        ('{"$ref": "https://elsewhere.example/s.json"}', ["not inside this document", "$defs"]),
        ('{"$ref": "other.json"}', ["not inside this document"]),
        ('{"items": {"$ref": "#/$defs/gone"}}', ["/items", "points to nothing"]),
        ('{"$ref": "#"}', ["without describing any content"]),
        ('{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', ["refers back"]),
        ('{"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "items": {"$ref": "#/$defs/a"}}', ["refers back"]),
        ('{"not": {"$ref": "#"}}', ["refers back"]),
        ('{"properties": {"a": {"minItems": 1e9}}}', ["/properties/a/minItems", "limit 10000"]),
        ('{"minLength": 65536}', ["/minLength", "65536", "limit 10000"]),
        ('{"items": ' * 150 + "{}" + "}" * 150, ["deeper than 100"]),
        ('{"anyOf": [' + ", ".join(["{}"] * 10_000) + "]}", ["10001 objects", "limit 10000", "$defs"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"enum": ["\\ud800"]}', ["surrogate"]),
        ('{"const": "' + "x" * 2**20 + '"}', ["bytes", "limit 1048576"]),
    ],
)
def test_a_schema_that_cannot_work_is_refused_with_place_and_cure(source: str, parts: list[str]) -> None:
    with pytest.raises(ConstraintError) as caught:
        load_constraint(ConstraintKind.JSON_SCHEMA, source)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert len(str(caught.value)) < 500


def test_no_reference_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(ConstraintError, match="not inside this document"):
        load_constraint(ConstraintKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:9/x"}')


def test_a_metaschema_may_be_referred_to_without_a_network() -> None:
    source = json.dumps({"$ref": DRAFTS["draft2020-12"]})
    validator = JsonValidator(JsonSchema(source).validator)
    assert validator.check('{"type": "object"}')[1] is None
    assert validator.check('{"type": "nonsense"}')[1] is not None


def test_a_huge_upper_bound_is_checked_and_named_rather_than_refused() -> None:
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, '{"type": "string", "maxLength": 1000000}')
    assert make_validator(constraint).check('"a"')[1] is None


def test_real_documents_are_judged_right(shared_data: Path) -> None:
    wrong = []
    for line in (shared_data / "schemas-dev.jsonl").read_text().splitlines()[1::4]:
        entry = json.loads(line)
        validator = JsonValidator(JsonSchema(json.dumps(entry["schema"])).validator)
        for test in entry["tests"]:
            message = validator.check(json.dumps(test["data"]))[1]
            if (message is None) != test["valid"]:
                wrong.append((entry["id"], test["valid"], message))
    assert wrong == []


@pytest.mark.parametrize(
    ("factor", "text", "is_valid"),
    [
        (0.1, "0.3", True),
        (0.01, "4.35", True),
        (0.01, "4.355", False),
        (0.1, "9" * 4000, True),
        (1e-300, "9" * 4000, True),
        (3, "9" * 4000, True),
        (0.7, "1e300", False),
        (1e-8, "12391239123", True),
        (2.5, '"a"', True),
    ],
)
def test_a_multiple_is_one_by_its_decimal_digits(factor: float, text: str, is_valid: bool) -> None:
    assert (check({"multipleOf": factor}, text)[1] is None) is is_valid
