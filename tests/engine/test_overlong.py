"""Prompts that are far too long are refused for sure, and without encoding much of them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from engine.overlong import CHARS_PER_TOKEN, Overlong, TooLong
from tests.demo_model import demo_model
from tests.tiny_models import tiny_tokenizer

LIMIT = 1000
TEXTS = st.text("ab c.\n 1é中😀<|im_end|>", max_size=400)


def make(backend: Tokenizer) -> tuple[Overlong, list[str]]:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return list(backend.encode(text, add_special_tokens=False).ids)

    return Overlong(backend, encode), encoded


def least_of(overlong: Overlong, text: str, max_tokens: int) -> int | None:
    try:
        overlong.refuse(text, max_tokens)
    except TooLong as error:
        return error.num_tokens
    return None


def composed() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", rstrip=True)])
    return tokenizer


def of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def of_one_byte() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    return tokenizer


def suffixed() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize("text", ["word " * 200_000, "x" * 1_000_000, "中文" * 300_000, "12 \n\n 7" * 150_000])
def test_a_megabyte_is_refused_after_encoding_a_small_part_of_it(text: str) -> None:
    overlong, encoded = make(tiny_tokenizer())
    with pytest.raises(TooLong, match=r"prompt is at least \d{4,} tokens"):
        overlong.refuse(text, LIMIT)
    assert sum(map(len, encoded)) <= CHARS_PER_TOKEN * LIMIT


@pytest.mark.parametrize("make_tokenizer", [tiny_tokenizer, composed, swallowing, of_words, of_one_byte, suffixed])
def test_no_text_is_refused_that_is_short_enough(make_tokenizer: Callable[[], Tokenizer]) -> None:
    backend = make_tokenizer()
    overlong, _ = make(backend)

    @given(TEXTS | TEXTS.map(lambda text: text + " " * 300) | st.just("e\u0301" * 90), st.integers(1, 40))
    def check(text: str, max_tokens: int) -> None:
        if (least := least_of(overlong, text, max_tokens)) is not None:
            assert max_tokens < least <= len(backend.encode(text).ids)

    check()


def test_bytes_that_the_tokenizer_drops_do_not_count() -> None:
    overlong, _ = make(of_one_byte())
    assert least_of(overlong, "x" * 1_000_000, LIMIT) is None
    assert least_of(overlong, "xa" * 500_000, LIMIT) == 500_000


def test_the_demo_models_tokenizer_is_known() -> None:
    files = demo_model()
    from engine.text import Text

    overlong, _ = make(Text(files).tokenizer.backend_tokenizer)
    assert least_of(overlong, "x\x06" * 1_000_000, LIMIT) == -(-1_000_000 // 81)
    assert least_of(overlong, "é\x06 " * 10_000, 3000) is not None


@pytest.mark.parametrize("make_tokenizer", [swallowing, of_words, suffixed])
def test_of_a_tokenizer_that_may_drop_text_nothing_is_known(make_tokenizer: Callable[[], Tokenizer]) -> None:
    overlong, encoded = make(make_tokenizer())
    overlong.refuse("x" * 1_000_000, LIMIT)
    assert encoded == []
