"""Compiled grammars on disk: an engine reads what an earlier one wrote, and nothing that is damaged or foreign."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from engine import grammar, grammar_files
from engine.grammar import Grammars, file_name, make_compilers
from engine.grammar_files import GrammarFiles
from schemas.constraints import grammar_engine
from schemas.plan import GrammarEngine
from schemas.records import Constraint, ConstraintKind
from tests.engine.fakes import END, VOCAB_SIZE, allowed_tokens, byte_tokenizer, start_matcher

TOKENIZER = byte_tokenizer()
CONSTRAINTS = [
    Constraint(kind=ConstraintKind.REGEX, source="([a-z]{4} ){5,40}"),
    Constraint(kind=ConstraintKind.CHOICE, source='["cat", "category"]'),
    Constraint(kind=ConstraintKind.EBNF, source='root ::= "(" root ")" | "."'),
    Constraint(
        kind=ConstraintKind.JSON_SCHEMA,
        source=json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}),
    ),
]


@pytest.fixture(autouse=True)
def _everything_is_worth_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MIN_KEPT_S", -1.0)


def test_files_are_of_the_grammars_that_one_engine_can_write_down() -> None:
    assert {grammar_engine(constraint) for constraint in CONSTRAINTS} == {GrammarEngine.XGRAMMAR}


def masks(directory: Path | None, end_token_id: int = END) -> list[set[int]]:
    """The masks of each constraint's first tokens, from an engine of its own."""
    grammars = Grammars(
        TOKENIZER,
        vocab_size=VOCAB_SIZE,
        end_token_ids=frozenset({end_token_id}),
        timeout_s=20,
        num_threads=1,
        directory=directory,
    )
    found = []
    for constraint in CONSTRAINTS:
        matcher = start_matcher(grammars, constraint)
        for _ in range(4):
            found += allowed_tokens(grammars, [matcher])
            if matcher.is_at_end() or not matcher.accept(min(found[-1])):
                break
    for thread in threading.enumerate():
        if thread.name.startswith("compile-"):
            thread.join()  # the file is written last
    return found


def test_an_engine_reads_what_another_one_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = masks(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(CONSTRAINTS)

    def refuse(*_: Any) -> None:
        raise AssertionError("it lies on the disk")

    monkeypatch.setattr(grammar, "compile_constraint", refuse)
    assert masks(tmp_path) == compiled


def damage(path: Path, name: str) -> None:
    content = path.read_bytes()
    damaged = {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "changed": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        "of something else": b"{}",
    }
    path.write_bytes(damaged[name])


@pytest.mark.parametrize("name", ["cut", "empty", "changed", "of something else"])
def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path, name: str) -> None:
    compiled = masks(tmp_path)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        damage(path, name)
    assert masks(tmp_path) == compiled
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"__VERSION__": "v1"}'])
def test_a_file_that_the_library_does_not_know_is_compiled_anew(tmp_path: Path, text: str) -> None:
    compiled = masks(tmp_path)
    for path in tmp_path.iterdir():
        GrammarFiles(tmp_path).write(path.stem, text)
    assert masks(tmp_path) == compiled


def test_another_vocabulary_has_other_files(tmp_path: Path) -> None:
    for end_token_id in (END, ord("~")):
        masks(tmp_path, end_token_id)
    assert len(list(tmp_path.iterdir())) == 2 * len(CONSTRAINTS)
    compilers = make_compilers(TOKENIZER, END + 1, frozenset({END}))
    names = {file_name(compilers, constraint) for constraint in CONSTRAINTS}
    assert names <= {path.stem for path in tmp_path.iterdir()}


def test_a_directory_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(masks(tmp_path / "file" / "below")) == len(masks(None))


def test_the_least_recently_used_files_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_files, "MAX_FILES", 3)
    files = GrammarFiles(tmp_path)
    for age, name in enumerate("abc"):
        files.write(name, name)
        os.utime(tmp_path / f"{name}.grammar", (age, age))
    assert files.read("a") == "a"
    files.write("d", "d")
    assert [files.read(name) for name in "abcd"] == ["a", None, "c", "d"]
