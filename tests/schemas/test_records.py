"""Records: frozen, strict, and identified by what they hold."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import (
    Constraint,
    ConstraintKind,
    InputFile,
    JobSpec,
    Message,
    ModelRef,
    Request,
    RowResult,
    RowStatus,
    Sampling,
    decode_json,
    encode_json,
    row_seed,
    short_hash,
)


def make_spec(**changes: Any) -> JobSpec:
    known: dict[str, Any] = {
        "name": "tickets",
        "inputs": (InputFile(uri="a.parquet", size_bytes=10, modified="1", num_rows=3),),
        "model": ModelRef(name="smollm2", digest="0123456789abcdef"),
        "constraint": Constraint(kind=ConstraintKind.CHOICE, source='["a", "b"]'),
    }
    return JobSpec(**{**known, **changes})


def test_a_spec_survives_its_file_with_the_same_identity() -> None:
    spec = make_spec(prompt_template="{{ text }}", sampling=Sampling(temperature=0.5, stop=("\n",)))
    read = decode_json(encode_json(spec), JobSpec)
    assert read == spec
    assert read.job_id == spec.job_id


def test_the_job_id_of_a_spec_never_changes() -> None:
    """A resumed job must find its directory: a change of this value needs a new format version."""
    assert make_spec().job_id == make_spec().job_id
    assert make_spec().job_id.startswith("tickets-")
    assert len(make_spec().job_id) == len("tickets-") + 12


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"prompt_template": "x"},
        {"output_column": "y"},
        {"limit": 5},
        {"sampling": Sampling(max_tokens=7)},
        {"constraint": Constraint(kind=ConstraintKind.CHOICE, source='["b", "a"]')},
        {"model": ModelRef(name="smollm2", digest="f" * 16)},
        {"inputs": (InputFile(uri="a.parquet", size_bytes=10, modified="2", num_rows=3),)},
    ],
)
def test_whatever_changes_the_answer_changes_the_job_id(change: dict[str, Any]) -> None:
    assert make_spec(**change).job_id != make_spec().job_id


def test_an_unknown_field_is_refused_by_name() -> None:
    data = encode_json(make_spec()).replace(b'"seed":0', b'"seeed":0')
    with pytest.raises(msgspec.ValidationError, match="seeed"):
        decode_json(data, JobSpec)


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        make_spec().seed = 1  # type: ignore[misc]


def test_a_constraint_key_depends_on_kind_and_source() -> None:
    pairs = [(ConstraintKind.REGEX, "a"), (ConstraintKind.REGEX, "b"), (ConstraintKind.EBNF, "a")]
    keys = {Constraint(kind=kind, source=source).key for kind, source in pairs}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("stop", ("",)),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="stop strings" if field == "stop" else field):
        Sampling(**{field: value})


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_request_has_exactly_one_prompt(count: int) -> None:
    prompts: dict[str, Any] = {"text": "a", "messages": (Message(role="user", content="a"),), "token_ids": (1,)}
    with pytest.raises(ValueError, match="exactly one"):
        Request(request_id="r", **dict(list(prompts.items())[:count]))


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_a_hash_separates_its_parts(parts: list[str]) -> None:
    assert short_hash(*parts) == short_hash(*parts)
    joined = "".join(parts)
    if len(parts) > 1 and "\0" not in joined:
        assert short_hash(*parts) != short_hash(joined)


@given(st.integers(0, 2**63 - 1), st.text(), st.integers(0, 9), st.integers(0, 9))
def test_row_seeds_fit_63_bits_and_differ_by_attempt(seed: int, key: str, index: int, attempt: int) -> None:
    found = row_seed(seed, key, index, attempt)
    assert 0 <= found < 2**63
    assert found != row_seed(seed, key, index, attempt + 1)


def test_key_order_of_a_value_survives_the_file() -> None:
    row = RowResult(row_index=0, status=RowStatus.OK, value={"reason": "x", "label": "y", "a": 1})
    assert list(decode_json(encode_json(row), RowResult).value) == ["reason", "label", "a"]
