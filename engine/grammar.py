"""Constraints as grammars: compiled off the loop's thread, matched token by token, turned into masks for a batch.

The only module that imports xgrammar. A constraint that fails, or takes too long, is a ConstraintError for the rows
that use it and for nobody else. Knows no scheduling; whether a finished document is valid is checked elsewhere.
"""

from __future__ import annotations

import importlib.metadata
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import structlog
import torch
import xgrammar
from torch import Tensor

from engine.closing import Closer, make_closer
from engine.grammar_files import GrammarFiles
from engine.guidance import GuidanceCompiler, GuidanceGrammar, GuidanceMasks, GuidanceMatcher
from engine.masks import Masks, MaskTable
from engine.spelling import Encode
from engine.states import SharedMatcher, SharedStates
from engine.types import Matcher
from engine.vocabulary import Vocabulary, Words, pack_bits
from schemas.constraints import GrammarEngine, grammar_engine, grammar_source
from schemas.errors import ConstraintError
from schemas.records import Constraint, ConstraintKind, short_hash

log = structlog.get_logger()

CompiledGrammar: TypeAlias = xgrammar.CompiledGrammar | GuidanceGrammar

CPU = torch.device("cpu")

MAX_SOURCE_CHARS = 2**20
MAX_RUNAWAYS = 8
"""Native compiles past their time limit cannot be stopped; with so many of them alive, new grammars are refused."""

CACHE_BYTES = 2**30
"""Compiled grammars kept, least recently used out first. A limit at all answers CVE-2025-32381."""

KNOWN_CHARS = 2**26
"""Source of the constraints kept. Who sends one for each row must send it again once no unfinished row has it."""
MIN_KEPT_S = 0.05
"""Grammars that compile faster are not worth a file."""
FILE_VERSION = 1
"""Of how a constraint is compiled: options, dialects. The library's own version and the vocabulary count besides."""
MIN_THREADED = 32
"""Masks of one step from which on threads fill them; waking threads takes as long as a few masks."""
CHARS_PER_CONSTRAINT = 1024  # beside its source: the key, the tables, an error


class Compiled(NamedTuple):
    """A grammar, the states that its rows share, and what ends them in time."""

    grammar: CompiledGrammar
    states: SharedStates
    closer: Closer | None


class Grammars:
    """The constraints of one engine, by key. All methods belong to the loop's thread."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        end_token_ids: frozenset[int],
        timeout_s: float,
        num_threads: int,
        device: torch.device = CPU,
        directory: Path | None = None,
        encode: Encode | None = None,
    ) -> None:
        """``encode`` spells closed choices, which else may be spelled in any way."""
        self._tokenizer = tokenizer
        self._encode = encode
        # The model's padding is left out: xgrammar takes it for special tokens and searches them at every token.
        self._num_tokens = min(vocab_size, max(tokenizer.get_vocab().values()) + 1)
        self._end_token_ids = end_token_ids
        self._timeout_s = timeout_s
        self._num_compilers = max(1, num_threads // 2)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=max(1, num_threads))
        self._guidance = GuidanceMasks(max(1, num_threads))
        self._compilers: Compilers | None = None
        self._files = GrammarFiles(directory) if directory else None
        self._constraints: dict[str, Constraint] = {}
        self._num_known_chars = 0
        self._num_compiled_bytes = 0
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._errors: dict[str, str] = {}
        self._queue: deque[str] = deque()
        self._underway: dict[str, float] = {}  # key -> when its compile started, monotonic seconds
        self._num_runaways = 0
        self._results: SimpleQueue[tuple[str, tuple[CompiledGrammar, Closer | None] | Exception]] = SimpleQueue()
        self._has_result = threading.Event()
        self._not_end = ~pack_bits(sorted(end_token_ids), -(-self._num_tokens // 32))
        self._masks = MaskTable(self._num_tokens, -(-vocab_size // 32), device, self._fill_native)

    def add(self, constraint: Constraint) -> None:
        """Make a constraint known; it is compiled when a request first needs it."""
        if constraint.key not in self._constraints:
            self._constraints[constraint.key] = constraint
            self._num_known_chars += _weight(constraint)

    @property
    def is_crowded(self) -> bool:
        """Whether it is time to ``forget`` constraints that are not needed."""
        return self._num_known_chars > KNOWN_CHARS

    def forget(self, needed: set[str | None]) -> None:
        """Forget all constraints, and what is wrong with them, but those under way and those with ``needed`` keys."""
        kept = needed.union(self._underway, self._queue)
        self._constraints = {key: constraint for key, constraint in self._constraints.items() if key in kept}
        self._errors = {key: error for key, error in self._errors.items() if key in kept}
        self._num_known_chars = sum(map(_weight, self._constraints.values()))

    def matcher(self, key: str) -> SharedMatcher | None:
        """A matcher at the grammar's start, or None while it is being compiled: ``poll`` names it when it is not.

        Raises ConstraintError with the cause if the constraint is unknown, cannot be compiled, or took too long.
        """
        if (error := self._errors.get(key)) is not None:
            raise ConstraintError(error)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return SharedMatcher(self._compiled[key].states)
        if key not in self._constraints:
            raise ConstraintError(f"constraint {key} was not sent before the request that names it")
        if key not in self._underway and key not in self._queue:
            self._queue.append(key)  # poll starts it, so that poll reports it
        return None

    def closer(self, key: str, max_tokens: int) -> Closer | None:
        """What watches over the budget of a row that has a matcher; None if it needs none."""
        closer = self._compiled[key].closer
        return closer if closer and closer.is_needed(max_tokens) else None

    def spelling(self, key: str) -> tuple[Constraint, Seq[bytes]]:
        """A compiled constraint, and the vocabulary as the bytes that it is matched with."""
        assert self._compilers is not None, "a compiled grammar has a compiler"
        constraint = self._constraints[key]
        return constraint, self._compilers.target_of(constraint).vocabulary.tokens

    @cached_property
    def pieces(self) -> Seq[bytes]:
        """The vocabulary as the bytes of a text that shows special tokens by their names."""
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._num_tokens)
        pieces = list(info.decoded_vocab)
        for token_id, token in self._tokenizer.added_tokens_decoder.items():
            if token_id < len(pieces):  # some tokenizers have more than the model
                pieces[token_id] = token.content.encode()
        return pieces

    def poll(self) -> list[str]:
        """Start what is queued; return the keys whose compile ended, well or not, since the last call."""
        self._has_result.clear()
        ended = []
        while not self._results.empty():
            key, result = self._results.get()
            if key not in self._underway:
                self._num_runaways -= 1
                continue
            del self._underway[key]
            self._settle(key, result)
            ended.append(key)
        ended += self._abandon_runaways()
        return ended + self._start_compiles()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a compile has ended, at most ``timeout_s``."""
        self._has_result.wait(timeout_s)

    def fill(self, matchers: Seq[SharedMatcher | None]) -> Masks | None:
        """See MaskTable.fill."""
        return self._masks.fill(matchers)

    def _fill_native(self, matchers: list[Matcher], filled: Tensor) -> None:
        if len(matchers) < MIN_THREADED:
            for row, matcher in enumerate(matchers):
                assert isinstance(matcher, GrammarMatcher | GuidanceMatcher), "there are two grammar engines"
                matcher.fill(filled, row)
            return
        native = {row: m.native for row, m in enumerate(matchers) if isinstance(m, GrammarMatcher)}
        self._batch.batch_fill_next_token_bitmask(list(native.values()), filled, list(native))
        self._guidance.fill({row: m for row, m in enumerate(matchers) if isinstance(m, GuidanceMatcher)}, filled)

    def _start(self, constraint: Constraint, compiled: CompiledGrammar) -> Matcher:
        """A native matcher at the grammar's start."""
        if isinstance(compiled, GuidanceGrammar):
            return compiled.start()
        assert self._compilers is not None, "a compiled grammar has a compiler"
        vocabulary = self._compilers.target_of(constraint).vocabulary
        return GrammarMatcher(xgrammar.GrammarMatcher(compiled), vocabulary, self._not_end)

    def _settle(self, key: str, result: tuple[CompiledGrammar, Closer | None] | Exception) -> None:
        if isinstance(result, Exception):
            kind = self._constraints[key].kind
            self._errors[key] = f"the {kind} constraint cannot be compiled: {_first_line(result)}"
            return
        grammar, closer = result
        states = SharedStates(partial(self._start, self._constraints[key], grammar), self._end_token_ids, closer)
        self._compiled[key] = Compiled(grammar, states, closer)
        self._num_compiled_bytes += grammar.memory_size_bytes
        while len(self._compiled) > 1 and self._num_compiled_bytes > CACHE_BYTES:
            _, evicted = self._compiled.popitem(last=False)
            self._num_compiled_bytes -= evicted.grammar.memory_size_bytes

    def _abandon_runaways(self) -> list[str]:
        now = time.monotonic()
        late = [key for key, started in self._underway.items() if now - started > self._timeout_s]
        for key in late:
            del self._underway[key]
            self._num_runaways += 1
            self._errors[key] = (
                f"compiling the {self._constraints[key].kind} constraint took more than {self._timeout_s:g} s: "
                "simplify it (nested alternatives and long bounded repeats multiply) or raise engine.compile_timeout_s"
            )
        return late

    def _start_compiles(self) -> list[str]:
        """Start what the queue holds while there is room; return the keys that are refused."""
        refused = []
        while self._queue and len(self._underway) < self._num_compilers:
            key = self._queue.popleft()
            if self._num_runaways >= MAX_RUNAWAYS:
                self._errors[key] = f"{MAX_RUNAWAYS} constraints past their time limit keep the compiler busy"
                refused.append(key)
                continue
            self._underway[key] = time.monotonic()
            arguments = (self._constraints[key],)
            threading.Thread(target=self._compile, args=arguments, name=f"compile-{key}", daemon=True).start()
        return refused

    def _compile(self, constraint: Constraint) -> None:
        """Thread: compile one constraint and hand over the result, whatever it is."""
        result: tuple[CompiledGrammar, Closer | None] | Exception
        to_keep: xgrammar.CompiledGrammar | None = None
        try:
            compilers = self._get_compilers()
            grammar: CompiledGrammar | None = self._load(compilers, constraint)
            if grammar is None:
                started = time.monotonic()
                grammar = compile_constraint(compilers, constraint)
                is_slow = time.monotonic() - started > MIN_KEPT_S
                to_keep = grammar if is_slow and isinstance(grammar, xgrammar.CompiledGrammar) else None
            result = grammar, make_closer(constraint, compilers.target_of(constraint).vocabulary, self._encode)
        except Exception as error:  # noqa: BLE001 - the native compiler's errors have no common class; it is recorded
            result = error
        self._results.put((constraint.key, result))
        self._has_result.set()
        if self._files and to_keep:
            self._files.write(file_name(compilers, constraint), to_keep.serialize_json())

    def _load(self, compilers: Compilers, constraint: Constraint) -> xgrammar.CompiledGrammar | None:
        """What an earlier engine compiled."""
        if self._files is None or (text := self._files.read(file_name(compilers, constraint))) is None:
            return None
        try:
            return xgrammar.CompiledGrammar.deserialize_json(text, compilers.target_of(constraint).tokenizer)
        except RuntimeError as error:  # of another version of the library, whatever its file's name says
            log.warning("grammar_file_ignored", constraint=constraint.key, reason=_first_line(error))
            return None

    def _get_compilers(self) -> Compilers:
        """Made at the first constraint: a large vocabulary takes part of a second. Racing threads may make two."""
        if self._compilers is None:
            self._compilers = make_compilers(self._tokenizer, self._num_tokens, self._end_token_ids)
        return self._compilers


class GrammarMatcher:
    """A grammar's state after the output of one sequence."""

    memo = way = None

    def __init__(self, native: xgrammar.GrammarMatcher, vocabulary: Vocabulary, not_end: Words) -> None:
        self.native = native
        self._vocabulary = vocabulary
        self._not_end = not_end

    @property
    def is_terminated(self) -> bool:
        """Whether the end token was accepted."""
        return bool(self.native.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if the grammar does not allow it."""
        return self._vocabulary.has(token_id) and bool(self.native.accept_token(token_id))

    def can_end(self) -> bool:
        """Whether the text is whole."""
        return self.is_terminated or bool(self.native.is_completed())

    def is_at_end(self) -> bool:
        """Whether the end token is the only one allowed next."""
        if self.is_terminated or not self.native.is_completed():
            return self.is_terminated
        return not self._allows_any(self._not_end)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        self.native.rollback(num_tokens)

    def fork(self) -> GrammarMatcher:
        """A matcher in the same state that goes its own way."""
        return GrammarMatcher(self.native.fork(), self._vocabulary, self._not_end)

    def forced_text(self) -> str:
        """The text that every continuation begins with; "" where there is a choice."""
        return "" if self.is_terminated else str(self.native.find_jump_forward_string())

    def allows_longer(self, token_id: int) -> bool:
        """Whether a token is allowed whose bytes begin with, and go beyond, those of ``token_id``."""
        longer = self._vocabulary.longer_than(token_id)
        return longer is not None and self._allows_any(longer)

    def fill(self, masks: Tensor, row: int) -> None:
        """Write the mask of the next token into a row of int32 [L, W] on the host."""
        self.native.fill_next_token_bitmask(masks, row)

    def _allows_any(self, words: Words) -> bool:
        bitmask = torch.empty((1, len(words)), dtype=torch.int32)
        self.fill(bitmask, 0)
        return bool(np.any(bitmask.numpy()[0] & words))


class Target(NamedTuple):
    """A vocabulary and xgrammar's compiler for it."""

    vocabulary: Vocabulary
    tokenizer: xgrammar.TokenizerInfo
    compiler: xgrammar.GrammarCompiler


@dataclass(frozen=True)
class Compilers:
    """Compilers for JSON, one of each engine, and one for everything else, with the tokens that they know."""

    plain: Target
    json: Target
    guidance: GuidanceCompiler

    def target_of(self, constraint: Constraint) -> Target:
        """What a constraint is compiled for, whichever engine compiles it."""
        return self.json if constraint.kind is ConstraintKind.JSON_SCHEMA else self.plain


def make_compilers(tokenizer: Any, num_tokens: int, end_token_ids: frozenset[int]) -> Compilers:
    """Read a vocabulary as bytes. Special tokens have none: they would be matched by their names and then not decoded.

    For JSON, tokens with a control character have none either: xgrammar lets them into strings of bounded length,
    where JSON forbids them, and compact JSON has no other place for them.
    """
    if not end_token_ids:
        raise ConstraintError("the tokenizer names no end token, so a constrained text could never end")
    end_ids = sorted(end_token_ids)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=num_tokens, stop_token_ids=end_ids)
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocab = [b"" if token_id in special else token for token_id, token in enumerate(info.decoded_vocab)]
    printable = [b"" if any(byte < 0x20 for byte in token) else token for token in vocab]

    def make(tokens: list[bytes]) -> Target:
        tokenizer = xgrammar.TokenizerInfo(tokens, vocab_size=num_tokens, stop_token_ids=end_ids)
        compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
        return Target(Vocabulary(tokens, end_ids), tokenizer, compiler)

    def encode(text: str) -> list[int]:
        return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    for_json = make(printable)
    return Compilers(make(vocab), for_json, GuidanceCompiler(for_json.vocabulary, end_token_ids, encode))


def compile_constraint(compilers: Compilers, constraint: Constraint) -> CompiledGrammar:
    """Compile any kind. Raises ConstraintError for what is refused before, or whatever the native compiler raises."""
    if len(constraint.source) > MAX_SOURCE_CHARS:
        raise ConstraintError(f"{len(constraint.source)} characters, limit {MAX_SOURCE_CHARS}")
    source = grammar_source(constraint)
    if grammar_engine(constraint) is GrammarEngine.LLGUIDANCE:
        return compilers.guidance.compile(source)
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return compilers.json.compiler.compile_json_schema(source, any_whitespace=False, strict_mode=False)
    if constraint.kind is ConstraintKind.REGEX:
        return compilers.plain.compiler.compile_regex(source)
    return compilers.plain.compiler.compile_grammar(xgrammar.Grammar.from_ebnf(source))


def file_name(compilers: Compilers, constraint: Constraint) -> str:
    """A name for all that decides about a compiled grammar."""
    vocabulary = compilers.target_of(constraint).vocabulary
    version = importlib.metadata.version("xgrammar")
    return short_hash(
        str(FILE_VERSION), version, vocabulary.digest, constraint.kind, grammar_source(constraint), digits=32
    )


def _weight(constraint: Constraint) -> int:
    return len(constraint.source) + CHARS_PER_CONSTRAINT


def _first_line(error: Exception) -> str:
    """The message without the native source position in front of it."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return re.sub(r"^\[[\d:]+\] \S+\.(cc|h):\d+: ", "", text)
