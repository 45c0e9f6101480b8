"""xgrammar with a vocabulary of single bytes: what the engine really accepts, for comparison with our plans."""

import json
from functools import lru_cache
from typing import Any

import xgrammar

from schemas.constraints import grammar_source
from schemas.records import Constraint, ConstraintKind

END = 256


@lru_cache(maxsize=1)
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b""]
    tokens = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


def compile_grammar(constraint: Constraint) -> xgrammar.CompiledGrammar:
    """Compile as the engine does: compact JSON, not strict."""
    source = grammar_source(constraint)
    if constraint.kind == ConstraintKind.JSON_SCHEMA:
        return compiler().compile_json_schema(source, any_whitespace=False, strict_mode=False)
    if constraint.kind == ConstraintKind.REGEX:
        return compiler().compile_regex(source)
    return compiler().compile_grammar(xgrammar.Grammar.from_ebnf(source))


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether the whole text can be generated."""
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(END))


def canonical(value: Any) -> str:
    """JSON as the engine writes it."""
    return json.dumps(value, ensure_ascii=False)
