"""Texts that surely have too many tokens, found out without encoding all of them: a megabyte takes a second or two.

Knows byte-level tokenizers; with any other kind no text is sure. Knows no requests.
"""

from collections.abc import Container
from typing import Any

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.shared_start import Encode, cuts_at_blanks, last_cut

CHARS_PER_TOKEN = 8
"""Real text has fewer, so a head of so many characters a token is too long itself where the text is far too long."""


class TooLong(Exception):
    """A prompt has too many tokens: ``num_tokens``, or more where not all of it was encoded."""

    def __init__(self, num_tokens: int, *, is_exact: bool = True) -> None:
        super().__init__(f"prompt is {'' if is_exact else 'at least '}{num_tokens} tokens")
        self.num_tokens = num_tokens


class Overlong:
    """The sure cases of one tokenizer."""

    def __init__(self, backend: Any, encode: Encode) -> None:
        """``backend`` is a tokenizers.Tokenizer, ``encode`` gives the ids of a text, special tokens not added."""
        self._encode = encode
        self._normalizer = backend.normalizer
        vocab, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder().values()
        self._is_known = _is_byte_level(backend) and not any(token.lstrip or token.rstrip for token in added)
        self._dropped = _dropped_bytes(vocab)
        # a byte-level token has one character for each of its bytes
        self._max_token_bytes = max([*map(len, vocab), *(len(token.content.encode()) for token in added)], default=1)

    def refuse(self, text: str, max_tokens: int) -> None:
        """Raise TooLong if ``text`` surely has more than ``max_tokens`` tokens."""
        head_chars = CHARS_PER_TOKEN * max_tokens
        if len(text) <= head_chars or not self._is_known:
            return
        normal = text if self._normalizer is None else self._normalizer.normalize_str(text)
        size_bytes = len(normal.encode("utf-8", "surrogatepass").translate(None, self._dropped))
        fewest = -(-size_bytes // self._max_token_bytes)
        if fewest <= max_tokens:
            fewest = len(self._encode(text[: max(0, last_cut(text, head_chars))]))
        if fewest > max_tokens:
            raise TooLong(fewest, is_exact=False)


def _is_byte_level(backend: Any) -> bool:
    """Whether the tokenizer's tokens are runs of bytes, and every byte that it knows comes out in one."""
    model = backend.model
    is_plain = isinstance(model, BPE) and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    return is_plain and cuts_at_blanks(backend)


def _dropped_bytes(vocab: Container[str]) -> bytes:
    """The bytes that a byte-level vocabulary has no token for, such as rare control characters: they vanish.

    A byte is written as the character of its number where that is visible, the others as those from 256 on, in order.
    """
    chars = sorted(ByteLevel.alphabet())
    visible = [ord(char) for char in chars if ord(char) < 256]
    others = [byte for byte in range(256) if byte not in visible]
    return bytes(byte for byte, char in zip([*visible, *others], chars, strict=True) if char not in vocab)
