"""The three systems that the constraints benchmark compares: ours, and each grammar engine handed the user's schema.

Each compiles one schema and walks documents token by token. Knows no plan and no oracle.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

import llguidance
import llguidance.hf
import torch
import xgrammar

from engine.grammar import Compilers, compile_constraint, make_compilers
from engine.guidance import GuidanceGrammar, GuidanceMasks
from schemas.errors import ConstraintError
from schemas.records import Constraint


class Walk(Protocol):
    """A grammar's state."""

    def fill(self) -> None:
        """Compute the mask of the next token."""

    def accept(self, token_id: int) -> bool:
        """Advance; False if the grammar does not allow it."""

    def can_end(self) -> bool:
        """Whether the document is complete."""


class System(Protocol):
    """A grammar engine with a vocabulary."""

    name: str

    def compile(self, schema: Any, constraint: Constraint | None) -> Any:
        """Compile one schema; raises if it is refused."""

    def start(self, compiled: Any) -> Walk:
        """Begin a document."""


class _XgrammarWalk:
    def __init__(self, compiled: xgrammar.CompiledGrammar, mask: torch.Tensor, end_id: int) -> None:
        self._native, self._mask, self._end_id = xgrammar.GrammarMatcher(compiled), mask, end_id

    def fill(self) -> None:
        self._native.fill_next_token_bitmask(self._mask)

    def accept(self, token_id: int) -> bool:
        return bool(self._native.accept_token(token_id))

    def can_end(self) -> bool:
        return bool(self._native.accept_token(self._end_id))


class _GuidanceWalk:
    """Plain llguidance."""

    def __init__(self, native: llguidance.LLMatcher, mask: torch.Tensor) -> None:
        self._native, self._mask = native, mask

    def fill(self) -> None:
        self._native.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.nbytes)

    def accept(self, token_id: int) -> bool:
        return self._native.try_consume_tokens([token_id]) == 1

    def can_end(self) -> bool:
        return self._native.is_accepting()


class _OurGuidanceWalk:
    def __init__(self, compiled: GuidanceGrammar, masks: GuidanceMasks, mask: torch.Tensor, end_id: int) -> None:
        self._matcher, self._masks, self._mask, self._end_id = compiled.start(), masks, mask, end_id

    def fill(self) -> None:
        self._masks.fill({0: self._matcher}, self._mask)

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept(token_id)

    def can_end(self) -> bool:
        return self._matcher.accept(self._end_id)


class Nightmill:
    """Our plan and our two engines."""

    name = "nightmill"

    def __init__(self, tokenizer: Any, num_tokens: int, end_id: int) -> None:
        self.compilers: Compilers = make_compilers(tokenizer, num_tokens, frozenset({end_id}))
        self._mask, self._end_id = _mask(num_tokens), end_id
        self._masks = GuidanceMasks(1)

    def compile(self, schema: Any, constraint: Constraint | None) -> Any:
        """Compile for the engine that the plan chose."""
        if constraint is None:
            raise ConstraintError("refused at submit")
        return compile_constraint(self.compilers, constraint)

    def start(self, compiled: Any) -> Walk:
        """Begin a document."""
        if isinstance(compiled, GuidanceGrammar):
            return _OurGuidanceWalk(compiled, self._masks, self._mask, self._end_id)
        return _XgrammarWalk(compiled, self._mask, self._end_id)


class PlainXgrammar:
    """xgrammar with its defaults and objects that are open, as measured by others."""

    name = "xgrammar"

    def __init__(self, tokenizer: Any, num_tokens: int, end_id: int) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=num_tokens, stop_token_ids=[end_id])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask, self._end_id = _mask(num_tokens), end_id

    def compile(self, schema: Any, constraint: Constraint | None) -> Any:
        """Compile the user's schema as it is."""
        return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

    def start(self, compiled: Any) -> Walk:
        """Begin a document."""
        return _XgrammarWalk(compiled, self._mask, self._end_id)


class PlainGuidance:
    """llguidance with its defaults."""

    name = "llguidance"

    def __init__(self, tokenizer: Any, num_tokens: int, end_id: int) -> None:
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=end_id)
        self._mask = _mask(num_tokens)

    def compile(self, schema: Any, constraint: Constraint | None) -> Any:
        """Compile the user's schema as it is."""
        native = llguidance.LLMatcher(
            self._tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0
        )
        if native.is_error():
            raise ConstraintError(native.get_error())
        return native

    def start(self, compiled: Any) -> Walk:
        """Begin a document."""
        return _GuidanceWalk(compiled.deep_copy(), self._mask)


def walk(system: System, compiled: Any, token_ids: Sequence[int], mask_seconds: list[float] | None = None) -> bool:
    """Whether the whole document can be generated; the time of each mask goes to ``mask_seconds`` if given."""
    state = system.start(compiled)
    for token_id in token_ids:
        if mask_seconds is not None:
            started = time.perf_counter()
            state.fill()
            mask_seconds.append(time.perf_counter() - started)
        if not state.accept(token_id):
            return False
    return state.can_end()


def _mask(num_tokens: int) -> torch.Tensor:
    return torch.zeros((1, -(-num_tokens // 32)), dtype=torch.int32)
