"""JSON Schemas as grammars of llguidance, for the schemas that xgrammar does not keep exactly.

The only module that imports llguidance. Objects may have keys beyond the known ones here, patterns and lengths are kept
together, and each string has one spelling. Knows no plan: ``schemas`` decides which engine a schema is written for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import llguidance
import numpy as np
import torch
from torch import Tensor

from engine.vocabulary import Vocabulary, Words, pack_bits
from schemas.errors import ConstraintError

OPTIONS: llguidance._lib.JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',  # no \u: a second spelling of a key would be a second key
}
NUM_BYTES = 2**16
"""What a compiled grammar is taken to weigh: llguidance does not say."""


class GuidanceCompiler:
    """Compiles for one vocabulary."""

    def __init__(
        self, vocabulary: Vocabulary, end_token_ids: frozenset[int], encode: Callable[[str], list[int]]
    ) -> None:
        self._vocabulary = vocabulary
        self._end_token_ids = end_token_ids
        end_ids = sorted(end_token_ids)
        wrapped = llguidance.TokenizerWrapper(_Tokens(vocabulary.tokens, end_ids[0], encode))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=end_ids)

    def compile(self, source: str) -> GuidanceGrammar:
        """Compile a schema in the normal form. Raises ConstraintError with llguidance's reason."""
        grammar = llguidance.LLMatcher.grammar_from_json_schema(source, overrides=OPTIONS)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        native = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if native.is_error():
            raise ConstraintError(native.get_error())
        return GuidanceGrammar(native, self._vocabulary, self._end_token_ids)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: Seq[bytes], end_id: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id
        self.special_token_ids = [token_id for token_id, token in enumerate(tokens) if not token]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text is wanted")  # this is how llguidance finds out
        return self._encode(text)


class GuidanceMasks:
    """Fills masks with threads."""

    def __init__(self, num_threads: int) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, matchers: Mapping[int, GuidanceMatcher], masks: Tensor) -> None:
        """Write masks of the next token into rows of ``masks``, int32 [L, W] on the host; all zeros in a dead end."""
        for row, matcher in matchers.items():
            if matcher.is_dead:
                masks[row] = 0
        live = [(m.native, row) for row, m in matchers.items() if not m.is_dead]
        if live:
            num_rows, num_words = masks.shape
            self._executor.unsafe_compute_mask_ptr(live, masks.data_ptr(), num_words * 4, num_rows)


class GuidanceGrammar:
    """A compiled grammar: the state that each matcher starts from."""

    memory_size_bytes = NUM_BYTES

    def __init__(self, native: llguidance.LLMatcher, vocabulary: Vocabulary, end_token_ids: frozenset[int]) -> None:
        self._native = native
        self._vocabulary = vocabulary
        self._end_token_ids = end_token_ids
        self._not_end = ~pack_bits(sorted(end_token_ids), vocabulary.num_words)

    def start(self) -> GuidanceMatcher:
        """A matcher at the start."""
        return GuidanceMatcher(self._native.deep_copy(), self._vocabulary, self._end_token_ids, self._not_end)


class GuidanceMatcher:
    """A grammar's state after the output of one sequence.

    End tokens are counted here: llguidance takes none where no text is left to write.
    """

    memo = way = None

    def __init__(
        self, native: llguidance.LLMatcher, vocabulary: Vocabulary, end_token_ids: frozenset[int], not_end: Words
    ) -> None:
        self.native = native
        self.is_terminated = False
        self._vocabulary = vocabulary
        self._end_token_ids = end_token_ids
        self._not_end = not_end

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if the grammar does not allow it."""
        if self.is_terminated:
            return False
        if token_id in self._end_token_ids:
            self.is_terminated = self.native.is_accepting()
            return self.is_terminated
        return self._vocabulary.has(token_id) and self.native.try_consume_tokens([token_id]) == 1

    def can_end(self) -> bool:
        """Whether the text is whole."""
        return self.is_terminated or bool(self.native.is_accepting())

    def is_at_end(self) -> bool:
        """Whether the end token is the only one allowed next."""
        if self.is_terminated or not self.native.is_accepting():
            return self.is_terminated
        return self.native.is_stopped() or not self._allows_any(self._not_end)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        self.native.rollback(num_tokens - self.is_terminated)
        self.is_terminated = False

    def fork(self) -> GuidanceMatcher:
        """A matcher in the same state that goes its own way."""
        fork = GuidanceMatcher(self.native.deep_copy(), self._vocabulary, self._end_token_ids, self._not_end)
        fork.is_terminated = self.is_terminated
        return fork

    def forced_text(self) -> str:
        """The text that every continuation begins with; "" where there is a choice."""
        if self.native.is_stopped():
            return ""
        return self.native.compute_ff_bytes().decode("utf-8", "ignore")  # a character may be forced in part

    def allows_longer(self, token_id: int) -> bool:
        """Whether a token is allowed whose bytes begin with, and go beyond, those of ``token_id``."""
        longer = self._vocabulary.longer_than(token_id)
        return longer is not None and self._allows_any(longer)

    @property
    def is_dead(self) -> bool:
        """Whether no token is allowed."""
        return self.is_terminated or bool(self.native.is_error())

    def fill(self, masks: Tensor, row: int) -> None:
        """Write the mask of the next token into a row of int32 [L, W] on the host."""
        mask = masks[row]
        if self.is_dead:
            mask.zero_()
        else:
            self.native.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)

    def _allows_any(self, words: Words) -> bool:
        mask = torch.empty((1, len(words)), dtype=torch.int32)
        self.fill(mask, 0)
        return bool(np.any(mask.numpy()[0] & words))
