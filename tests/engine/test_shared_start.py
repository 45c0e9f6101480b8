"""Shared starts: the ids are the tokenizer's own, and the start of a template is encoded once."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.shared_start import MAX_STARTS, SharedStart, _num_shared, cuts_at_blanks
from tests.demo_model import demo_model

Encode = Callable[[str], list[int]]
WORDS = st.text("abc XY.,;:!?\"'{}0123456789 \n\t  é中", max_size=40)


@pytest.fixture(scope="module")
def encode() -> Encode:
    files = demo_model()
    from engine.text import Text

    backend = Text(files).tokenizer.backend_tokenizer
    assert cuts_at_blanks(backend)
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


@given(head=st.text("abc d.\n' 19", min_size=64, max_size=200), tails=st.lists(WORDS, min_size=2, max_size=6))
def test_ids_are_those_of_the_whole_text(encode: Encode, head: str, tails: list[str]) -> None:
    shared = SharedStart(encode)
    for tail in tails:
        assert shared.encode(head + tail) == encode(head + tail)


def test_a_shared_start_is_encoded_twice_at_most(encode: Encode) -> None:
    seen: list[str] = []

    def counting(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    shared = SharedStart(counting)
    head = "You label tickets. " * 20
    for number in range(50):
        shared.encode(f"{head}Ticket: {number} is broken.")
    assert sum(len(text) for text in seen) < 5 * len(head) + 50 * 40


def test_templates_may_take_turns(encode: Encode) -> None:
    shared = SharedStart(encode)
    heads = [f"Template {number}: read the following text and label it well. " * 3 for number in range(MAX_STARTS + 3)]
    for head in heads:
        for number in range(3):
            assert shared.encode(f"{head}row {number}") == encode(f"{head}row {number}")


def test_a_tokenizer_that_does_not_cut_as_promised_is_used_for_whole_texts() -> None:
    def odd(text: str) -> list[int]:
        return [len(text)]

    shared = SharedStart(odd)
    texts = ["a shared start that is long enough to be worth keeping, by far, " + tail for tail in ("x", "yy", "zzz")]
    assert [shared.encode(text) for text in texts] == [odd(text) for text in texts]


def test_a_tokenizer_without_byte_level_pieces_is_not_trusted() -> None:
    tokenizer = Tokenizer(models.BPE())
    assert not cuts_at_blanks(tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not cuts_at_blanks(tokenizer)


@given(one=st.text("ab", max_size=30), other=st.text("ab", max_size=30))
def test_the_common_start_equals_brute_force(one: str, other: str) -> None:
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert _num_shared(one, other) == expected
