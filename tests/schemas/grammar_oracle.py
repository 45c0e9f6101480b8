"""The grammar engines with a vocabulary of single bytes: what they really accept, for comparison with our plans."""

import itertools
import json
from functools import lru_cache
from typing import Any

import numpy as np
import xgrammar

from engine.guidance import GuidanceCompiler, GuidanceGrammar
from engine.vocabulary import Vocabulary
from schemas.constraints import GrammarEngine, grammar_engine, grammar_source
from schemas.records import Constraint, ConstraintKind

END = 256
VOCABULARY = [bytes([byte]) for byte in range(256)] + [b""]


@lru_cache(maxsize=1)
def xgrammar_compiler() -> xgrammar.GrammarCompiler:
    tokens = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


@lru_cache(maxsize=1)
def guidance_compiler() -> GuidanceCompiler:
    return GuidanceCompiler(Vocabulary(VOCABULARY), frozenset({END}), lambda text: list(text.encode()))


def compile_json(engine: GrammarEngine, source: str) -> xgrammar.CompiledGrammar | GuidanceGrammar:
    """Compile a schema in the normal form as the engine does: compact JSON, not strict."""
    if engine is GrammarEngine.LLGUIDANCE:
        return guidance_compiler().compile(source)
    return xgrammar_compiler().compile_json_schema(source, any_whitespace=False, strict_mode=False)


def compile_grammar(constraint: Constraint) -> xgrammar.CompiledGrammar | GuidanceGrammar:
    """Compile as the engine does, for the grammar engine that the plan chooses."""
    source = grammar_source(constraint)
    if constraint.kind == ConstraintKind.JSON_SCHEMA:
        return compile_json(grammar_engine(constraint), source)
    if constraint.kind == ConstraintKind.REGEX:
        return xgrammar_compiler().compile_regex(source)
    return xgrammar_compiler().compile_grammar(xgrammar.Grammar.from_ebnf(source))


def accepts(grammar: xgrammar.CompiledGrammar | GuidanceGrammar, text: str) -> bool:
    """Whether the whole text can be generated."""
    if isinstance(grammar, GuidanceGrammar):
        guided = grammar.start()
        return all(map(guided.accept, text.encode())) and guided.accept(END)
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(END))


def canonical(value: Any) -> str:
    """JSON as the engines write it."""
    return json.dumps(value, ensure_ascii=False)


class ByteMatcher:
    """Either engine's matcher, byte by byte."""

    def __init__(self, grammar: xgrammar.CompiledGrammar | GuidanceGrammar) -> None:
        self._guided = grammar.start() if isinstance(grammar, GuidanceGrammar) else None
        self._native = None if isinstance(grammar, GuidanceGrammar) else xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))

    def allowed(self) -> list[int]:
        """The bytes, and END, that may come next."""
        if self._native:
            self._native.fill_next_token_bitmask(self._mask)
        elif self._guided:
            row = self._mask.numpy()[0]
            self._guided.native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        bits = np.unpackbits(self._mask.numpy().view(np.uint8), bitorder="little")
        return [int(token) for token in np.flatnonzero(bits) if token <= END]

    def accept(self, byte: int) -> bool:
        """See engine.types.Matcher."""
        return self._native.accept_token(byte) if self._native else bool(self._guided and self._guided.accept(byte))

    def rollback(self, num_bytes: int) -> None:
        """See engine.types.Matcher."""
        if num_bytes:
            (self._native or self._guided).rollback(num_bytes)

    def can_end(self) -> bool:
        """See engine.types.Matcher."""
        return self._native.is_completed() if self._native else bool(self._guided and self._guided.can_end())

    def ends_with(self, text: bytes) -> bool:
        """Whether ``text`` makes the document whole; changes nothing."""
        accepted = list(itertools.takewhile(self.accept, text))
        is_whole = len(accepted) == len(text) and self.can_end()
        self.rollback(len(accepted))
        return is_whole
