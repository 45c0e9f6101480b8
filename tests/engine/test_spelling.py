"""Spellings of closed choices: one for each text, up to where it is the only one left, and no guess beyond."""

import numpy as np
import pytest

from engine.spelling import Spellings, Way, find_spellings
from engine.vocabulary import Vocabulary, pack_bits

TOKENS = [b"", b"c", b"a", b"t", b"s", b"cat", b"do", b"g", b"dog", b"gs", b'"', b'",']
END, *_ = range(len(TOKENS))
VOCABULARY = Vocabulary(TOKENS, [END])
SPELLED = {"cat": (5,), "cats": (5, 4), "dog": (6, 7), 'cat"': (5, 10), 'cats"': (5, 4, 10), "do": (6,)}


def spell(texts: dict[str, bool]) -> Spellings | None:
    return find_spellings(texts, (), lambda _, text: SPELLED[text], VOCABULARY)


def test_each_text_has_one_spelling_up_to_where_it_is_alone() -> None:
    spellings = spell({"cat": True, "cats": True, "dog": True})
    assert spellings is not None
    assert spellings.following == {(): {5: True, 6: True}, (5,): {END: True, 4: True}}
    way = Way(spellings)
    assert way.only is None
    assert way.step(5) == Way(spellings, (5,))
    assert way.step(6) is None  # a dog for sure
    assert way.step(8) is None  # in another spelling


@pytest.mark.parametrize("texts", [{"cat": False, "cats": False}, {"do": False, "dog": True}], ids=str)
def test_a_text_that_begins_another_is_told_from_it_by_what_follows_or_not_at_all(texts: dict[str, bool]) -> None:
    assert spell(texts) is None
    assert spell({'cat"': False, 'cats"': False}) is not None


def test_texts_that_the_tokenizer_cannot_write_have_no_spelling() -> None:
    assert find_spellings({"cat": True, "cow": True}, (), lambda _, text: (5,), VOCABULARY) is None


def test_a_mask_keeps_spellings_only() -> None:
    spellings = spell({'cat"': False, "dog": True})
    assert spellings is not None
    mask = pack_bits([1, 5, 6, 8], 1)
    assert Way(spellings).narrow(mask)
    assert np.array_equal(mask, pack_bits([5, 6], 1))


@pytest.mark.parametrize("allowed", [[1, 5], [1, 5, 6, 8]], ids=["one is missing", "a longer one may come"])
def test_a_mask_in_which_spellings_are_not_sure_stays_as_it_is(allowed: list[int]) -> None:
    spellings = spell({"cat": True, "do": False})
    assert spellings is not None
    mask = pack_bits(allowed, 1)
    assert not Way(spellings).narrow(mask)
    assert np.array_equal(mask, pack_bits(allowed, 1))
