"""The documents of a schema: at every place of a random walk, the engine takes the shortest end and no shorter one."""

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.completion import Place, Walker
from schemas.constraints import grammar_engine, language_of, load_constraint
from schemas.errors import ConstraintError
from schemas.plan import GrammarEngine
from schemas.records import Constraint, ConstraintKind
from tests.schemas.grammar_oracle import END, ByteMatcher, compile_grammar
from tests.schemas.test_json_grammar import schemas

STRUCTURE = b'"}]{[:,0123456789-.eE\\u'
SHORT = b'"}]{[:, 059-.aet\\'
MAX_BRUTE_BYTES = 3


def check_walk(constraint: Constraint, chance: random.Random, num_bytes: int) -> None:
    """Write random bytes and look at each place where a character ends."""
    matcher, place, text = (
        ByteMatcher(compile_grammar(constraint)),
        Walker(language_of(constraint)).start(),
        bytearray(),
    )
    open_bytes = b""
    for _ in range(num_bytes):
        if not open_bytes:
            check_place(matcher, place, bytes(text))
        allowed = [byte for byte in matcher.allowed() if 0x20 <= byte < END]
        likely = [byte for byte in allowed if byte in STRUCTURE]
        if not allowed:
            return
        byte = chance.choice(likely if likely and chance.random() < 0.6 else allowed)
        assert matcher.accept(byte)
        text.append(byte)
        open_bytes += bytes([byte])
        if not is_cut(open_bytes):
            place, open_bytes = place.walk(open_bytes.decode()), b""
        if b"\\u" in text:
            return  # half a surrogate pair is text to the engine, and no document


def is_cut(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return False


def check_place(matcher: ByteMatcher, place: Place, text: bytes) -> None:
    if text.endswith(b"-0"):
        return  # whether that is a number depends on bounds in ways of each engine
    assert place.length < float("inf"), text
    end = place.completion().encode()
    assert len(end) == place.length
    assert matcher.ends_with(end), (text, end)
    for num_bytes in range(min(len(end), MAX_BRUTE_BYTES)):
        assert not any_end(matcher, num_bytes), (text, end)


def any_end(matcher: ByteMatcher, num_bytes: int) -> bool:
    """Whether some text of so many bytes, out of a few, ends the document."""
    if num_bytes == 0:
        return matcher.can_end()
    for byte in SHORT:
        if matcher.accept(byte):
            found = any_end(matcher, num_bytes - 1)
            matcher.rollback(1)
            if found:
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(schemas, st.randoms(use_true_random=False))
def test_the_shortest_end_of_a_random_document_is_right(schema: Any, chance: random.Random) -> None:
    try:
        constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    except ConstraintError:
        return
    check_walk(constraint, chance, 40)


def test_the_shortest_end_of_real_documents_is_right(shared_data: Path) -> None:
    engines = set()
    for index, line in enumerate((shared_data / "schemas-dev.jsonl").read_text().splitlines()[::12]):
        constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(json.loads(line)["schema"]))
        if len(constraint.source) < 40_000:  # the engine takes seconds
            check_walk(constraint, random.Random(index), 60)
            engines.add(grammar_engine(constraint))
    assert engines == set(GrammarEngine)
