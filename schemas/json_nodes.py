"""The normal form that the grammar engine is handed: its few shapes, joined, cut and finished.

A node is ``{}`` (anything), a leaf, ``anyOf``, an object with all its keywords spelled out, an array, or a ``$ref`` to
a named node. None in a node's place: no document fits; False in the place of a key's value: no such key. Knows nothing
of the schemas it came from.
"""

from collections.abc import Mapping
from typing import Any

Node = dict[str, Any]
PREFIX = "#/$defs/"


def finish(root: Node, defs: Mapping[str, Node | None], *, can_forbid: bool) -> Node | None:
    """Cut what no finite document can reach and attach the named nodes that are still used; None if nothing is left.

    ``can_forbid``: the engine knows False in a property's place, for a key that an open object must not have.
    """
    finite: set[str] = set()
    while True:
        left = {name: node for name, node in defs.items() if name not in finite and node is not None}
        more = {name for name, node in left.items() if _prune(node, finite, can_forbid) is not None}
        if not more:
            break
        finite |= more
    result = _prune(root, finite, can_forbid)
    if result is None:
        return None
    used: dict[str, Node | None] = {}
    queue = _references(result)
    while queue:
        name = queue.pop()
        if name not in used:
            used[name] = _prune(defs[name] or {}, finite, can_forbid)
            queue += _references(used[name])
    return {**result, "$defs": used} if used else result


def _prune(node: Node, finite: set[str], can_forbid: bool) -> Node | None:
    """Rebuild a node without the parts that lead to unfinished names; None if nothing is left."""
    if "$ref" in node:
        return node if node["$ref"].removeprefix("#/$defs/") in finite else None
    if "anyOf" in node:
        return any_of([kept for option in node["anyOf"] if (kept := _prune(option, finite, can_forbid)) is not None])
    if node.get("type") == "object":
        return _prune_object(node, finite, can_forbid)
    if node.get("type") == "array":
        prefix: list[Node] = []
        for item in node.get("prefixItems", ()):
            kept = _prune(item, finite, can_forbid)
            if kept is None:
                return array_of(prefix, None, node.get("minItems", 0), len(prefix))
            prefix.append(kept)
        rest = None if node["items"] is False else _prune(node["items"], finite, can_forbid)
        return array_of(
            prefix, rest, node.get("minItems", 0), node.get("maxItems") if rest is not None else len(prefix)
        )
    return node


def _prune_object(node: Node, finite: set[str], can_forbid: bool) -> Node | None:
    pruned, by_pattern = (
        {key: value and _prune(value, finite, can_forbid) for key, value in node.get(keyword, {}).items()}
        for keyword in ("properties", "patternProperties")
    )
    properties, named = (
        {key: value for key, value in values.items() if isinstance(value, dict)} for values in (pruned, by_pattern)
    )
    if any(name not in properties for name in node.get("required", ())):
        return None
    others = node["additionalProperties"]
    if isinstance(others, dict):
        others = False if (kept := _prune(others, finite, can_forbid)) is None else kept
    if others is False and not named and node.get("minProperties", 0) > len(properties):
        return None
    result = {**node, "properties": properties, "additionalProperties": others}
    if "patternProperties" in node:
        result["patternProperties"] = named
    if can_forbid and (others is not False or named):
        for keyword, values in (("properties", pruned), ("patternProperties", by_pattern)):
            if values:
                result[keyword] = {key: result[keyword].get(key, False) for key in values}
    return result


def array_of(prefix: list[Node], rest: Node | None, low: int, high: int | None) -> Node | None:
    if high is not None and low > high:
        return None
    node: Node = {"type": "array"}
    if prefix:
        node["prefixItems"] = prefix
    node["items"] = False if rest is None or high == len(prefix) else rest
    if low:
        node["minItems"] = low
    if high is not None and node["items"] is not False:
        node["maxItems"] = high
    return node


def any_of(nodes: list[Node]) -> Node | None:
    """The union of nodes: enums become one, nested unions flat."""
    options: list[Node] = []
    values: list[Any] = []
    for node in (option for n in nodes for option in (n["anyOf"] if set(n) == {"anyOf"} else (n,))):
        if set(node) == {"enum"}:
            if not values:
                options.append({"enum": values})
            values += node["enum"]
        elif node not in options:
            options.append(node)
    if not options:
        return None
    return options[0] if len(options) == 1 else {"anyOf": options}


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _references(item)]
    if not isinstance(node, dict) or isinstance(node.get("enum"), list):
        return []
    if isinstance(node.get("$ref"), str):
        return [node["$ref"].removeprefix("#/$defs/")]
    found = [name for key, value in node.items() if key != "properties" for name in _references(value)]
    return found + [name for value in (node.get("properties") or {}).values() for name in _references(value)]


def resolve(node: Node, defs: Mapping[str, Node | None]) -> Node:
    """Follow the normal form's own references; a circle of them allows anything."""
    seen = set()
    while "$ref" in node and node["$ref"] not in seen:
        seen.add(node["$ref"])
        node = defs.get(node["$ref"].removeprefix(PREFIX)) or {}
    return node
