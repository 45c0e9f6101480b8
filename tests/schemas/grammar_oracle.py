"""The grammar engines with a vocabulary of single bytes: what they really accept, for comparison with our plans."""

import json
from functools import lru_cache
from typing import Any

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
