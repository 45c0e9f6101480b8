"""Pieces between special tokens are encoded one by one: the tokenizer's own ids are the oracle."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from engine.encoder import LONGEST_PIECE_KEPT, Encoder
from tests.tiny_models import tiny_tokenizer

NAMES = ["<s>", "<|r|>", "<|l|>", "<n>", "<w>", "<s><s>"]
FLAGS: list[dict[str, bool]] = [
    {"normalized": False},
    {"rstrip": True},
    {"lstrip": True},
    {"normalized": True},
    {"single_word": True},
    {"normalized": False},
]


def sentencepiece(scheme: str | None) -> Tokenizer:
    """Like Llama 2's: blanks become letters, and a text's start may get one. None: by the old normalizer."""
    letters = [*"abcdefghijklmnopqrstuvwxyz \n|<>_\ufdd0", "▁a", "ab"]
    vocab = {piece: index for index, piece in enumerate(["<unk>", "▁", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>"))
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([AddedToken(n, special=True, **f) for n, f in zip(NAMES, FLAGS, strict=True)])
    return tokenizer


def control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}


TOKENIZERS: dict[str, Tokenizer] = {
    "byte level": tiny_tokenizer(),
    "first": sentencepiece("first"),
    "always": sentencepiece("always"),
    "never": sentencepiece("never"),
    "normalizer": sentencepiece(None),
}
texts = st.lists(
    st.sampled_from([*NAMES, "<|im_start|>", "<|im_end|>", "ab", " ", "\n", "  b", "ab\n", "|<", "_", "▁", "\ufdd0"]),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=texts.map(lambda text: text.replace("\ufdd0", "")))
def test_the_pieces_add_up_to_the_tokenizers_own_ids(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    encoder = Encoder(tokenizer, control_ids(tokenizer))
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_protected_text_holds_no_control_token_whatever_it_says(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    encoder = Encoder(tokenizer, control_ids(tokenizer))
    ids = encoder.encode(encoder.protect(text))
    assert not set(ids) & set(control_ids(tokenizer).values())


def test_shared_pieces_are_encoded_once_and_long_ones_are_not_kept() -> None:
    calls: list[str] = []

    class Counting:
        def __init__(self) -> None:
            self._tokenizer = tiny_tokenizer()

        def to_str(self) -> str:
            return self._tokenizer.to_str()

        def encode(self, text: str, **options: Any) -> Any:
            calls.append(text)
            return self._tokenizer.encode(text, **options)

    encoder = Encoder(Counting(), control_ids(tiny_tokenizer()))
    calls.clear()
    long = "x" * (LONGEST_PIECE_KEPT + 1)
    for own in ("one", "two", long, long):
        encoder.encode(f"<|im_start|>shared<|im_end|>{own}")
    assert len(calls) == 5
