"""Whether branches of a oneOf can match the same document, seen from the normal form of what is generated.

Only sure answers count: False means not known. Knows no grammar engine.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from schemas.json_leaves import JSON_TYPES, types_of
from schemas.json_nodes import Node, resolve
from schemas.json_schema import JsonSchema, Sub


class Compiler(Protocol):
    """What is needed of the compiler."""

    document: JsonSchema

    @property
    def defs(self) -> Mapping[str, Node | None]: ...

    def flatten(self, subs: Sequence[Sub]) -> tuple[list[Sub] | None, bool]: ...


def excludes(compiler: Compiler, node: Node, branch: Sub) -> bool:
    """Whether ``branch`` surely rejects every document of ``node``."""
    node = resolve(node, compiler.defs)
    if "anyOf" in node:
        return all(excludes(compiler, option, branch) for option in node["anyOf"])
    if "enum" in node:
        validator = compiler.document.validator_at(branch)
        return not any(validator.is_valid(value) for value in node["enum"])
    flat, _ = compiler.flatten((branch,))
    if flat is None or ("type" in node and not JSON_TYPES[node["type"]] & types_of(flat)):
        return True
    return node.get("type") == "object" and any(_excludes_object(compiler, node, sub) for sub in flat)


def _excludes_object(compiler: Compiler, node: Node, sub: Sub) -> bool:
    """Whether a key that every object of ``node`` has, or cannot have, makes ``sub`` reject them all."""
    properties = node["properties"]
    is_closed = node["additionalProperties"] is False and "patternProperties" not in node
    if is_closed and set(sub.required()) - set(properties):
        return True
    for name in node.get("required", ()):
        if name in (sub.get("properties") or {}):
            if excludes(compiler, properties[name], sub.child("properties", name)):
                return True
        elif sub.get("additionalProperties") is False and not sub.get("patternProperties"):
            return True
    return False
