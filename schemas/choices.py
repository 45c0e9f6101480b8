"""Where a finished text chose one of a closed set of labels: an enum, a const among others, a boolean, a choice.

A set is closed if all that the compiled constraint allows at that place, after the text before it, can be listed. Knows
no tokens and no probabilities.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from schemas.constraints import grammar_engine, grammar_source
from schemas.json_language import MAX_INTEGERS, written
from schemas.json_nodes import Node, resolve
from schemas.json_schema import escape_pointer
from schemas.plan import GrammarEngine
from schemas.records import Constraint, ConstraintKind

MAX_LABELS = 1_024
"""A larger set is taken for open."""


@dataclass(frozen=True)
class Choice:
    """One label, where it stands in the text, and all those that could stand there, as they would be written."""

    path: str  # JSON pointer; "" is the whole document
    start: int
    end: int
    labels: tuple[str, ...]  # at least two
    names: tuple[str, ...]  # of the labels: without the quotes of a JSON string, unless that makes two of them alike
    index: int  # of the one chosen


def find_choices(constraint: Constraint, text: str) -> tuple[Choice, ...]:
    """The choices that a valid ``text`` made, in order. What is open, or has more than MAX_LABELS, is none."""
    if constraint.kind == ConstraintKind.CHOICE:
        labels = tuple(json.loads(constraint.source))
        is_choice = text in labels and 2 <= len(labels) <= MAX_LABELS
        return (Choice("", 0, len(text), labels, labels, labels.index(text)),) if is_choice else ()
    if constraint.kind != ConstraintKind.JSON_SCHEMA:
        return ()
    root = _normal_form(constraint)
    reader = _Reader(text, root.get("$defs", {}), grammar_engine(constraint))
    try:
        reader.read(0, [root], "")
    except (ValueError, IndexError, RecursionError):  # not JSON, or too deep to be looked at
        return ()
    return tuple(reader.found)


@lru_cache(maxsize=64)
def _normal_form(constraint: Constraint) -> Node:
    """What the grammar engine was handed; see ``schemas.json_nodes``."""
    node: Node = json.loads(grammar_source(constraint))
    return node


class _Reader:
    """Walks a JSON text together with the nodes that it may follow."""

    def __init__(self, text: str, defs: Mapping[str, Node], engine: GrammarEngine) -> None:
        self.found: list[Choice] = []
        self._engine = engine
        self._text = text
        self._defs = defs
        self._decoder = json.JSONDecoder()

    def read(self, at: int, nodes: Sequence[Node], path: str) -> tuple[Any, int]:
        """Read the value at ``at``, which follows one of ``nodes``; returns it and where it ends."""
        options = self._options(nodes)
        labels = _labels(options, self._engine)
        if labels is not None or self._text[at] not in "{[":
            value, end = self._decoder.raw_decode(self._text, at)
            if labels is not None and 2 <= len(labels) <= MAX_LABELS:
                self._note(path, at, end, labels)
            return value, end
        return self._read_members(at, options, path)

    def _read_members(self, at: int, options: list[Node], path: str) -> tuple[Any, int]:
        is_object = self._text[at] == "{"
        options = [node for node in options if node.get("type") == ("object" if is_object else "array")]
        values: dict[Any, Any] = {}
        at = self._skip(at + 1)
        while self._text[at] not in "}]":
            key: Any = len(values)
            if is_object:
                key, at = scanstring(self._text, at + 1, True)
                at = self._skip(at)
            members = [_member(node, key) for node in options]
            values[key], at = self.read(at, members, f"{path}/{escape_pointer(str(key))}")
            options = [
                node
                for node, member in zip(options, members, strict=True)
                if any(_may_fit(values[key], option) for option in self._options([member]))
            ]
            at = self._skip(at)
        return (values if is_object else list(values.values())), at + 1

    def _note(self, path: str, start: int, end: int, labels: tuple[str, ...]) -> None:
        written = self._text[start:end]
        if written in labels:
            names = tuple(json.loads(label) if label.startswith('"') else label for label in labels)
            names = names if len(set(names)) == len(names) else labels
            self.found.append(Choice(path, start, end, labels, names, labels.index(written)))

    def _skip(self, at: int) -> int:
        """To the next key, value or end."""
        while self._text[at] in " \t\r\n,:":
            at += 1
        return at

    def _options(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes without references and unions; of a oneOf's branches, which the normal form has as a union, too."""
        options: list[Node] = []
        queue, seen = list(nodes), set()
        while queue:
            node = resolve(queue.pop(0), self._defs)
            if "anyOf" not in node:
                options.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                queue += node["anyOf"]
        return options


def _member(node: Node, key: str | int) -> Node:
    """What the value of a key, or the item of an index, follows; {} where that depends on more."""
    if isinstance(key, int):
        prefix = node.get("prefixItems", ())
        found = prefix[key] if key < len(prefix) else node["items"]
    elif key in node["properties"]:
        found = node["properties"][key]
    else:
        others = [*node.get("patternProperties", {}).values(), node["additionalProperties"]]
        allowed = [other for other in others if other is not False]
        found = allowed[0] if len(allowed) == 1 else {}
    return found if isinstance(found, dict) else {}


def _labels(options: Sequence[Node], engine: GrammarEngine) -> tuple[str, ...] | None:
    """All values that the options allow, as the engine writes them; None if they cannot be listed."""
    listed = [_values(node) for node in options]
    if not listed or None in listed:
        return None
    return tuple(dict.fromkeys(written(value, engine) for values in listed for value in values or ()))


def _values(node: Node) -> Sequence[Any] | None:
    if "enum" in node:
        values: Sequence[Any] = node["enum"]
        return None if any(isinstance(value, dict | list) for value in values) else values
    if node.get("type") == "boolean":
        return (True, False)
    if node.get("type") == "null":
        return (None,)
    if node.keys() == {"type", "minimum", "maximum"} and node["type"] == "integer":
        low, high = node["minimum"], node["maximum"]
        return range(low, high + 1) if high - low < MAX_INTEGERS else None
    return None


def _may_fit(value: Any, node: Node) -> bool:
    """Whether a value can be one of ``node``, by its enum or type; what lies deeper is not looked at."""
    if "enum" in node:
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in node["enum"])
    name = node.get("type")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return name is None or {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "number": is_number,
        "integer": is_number and value % 1 == 0,
    }.get(name, True)
