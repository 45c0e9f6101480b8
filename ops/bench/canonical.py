"""Documents as a grammar writes them: keys in the order of the schema's normal form. Judges nothing."""

import json
import re
from typing import Any

Node = Any
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": (int, float),
    "null": type(None),
}


class KeyOrder:
    """Reorders the keys of documents of one compiled schema (the text that a grammar engine is handed)."""

    def __init__(self, source: str) -> None:
        self._root = json.loads(source)
        self._defs = self._root.get("$defs", {}) if isinstance(self._root, dict) else {}

    def apply(self, document: Any) -> Any:
        """The same document, the keys that the schema names first and in its order."""
        return self._order(document, self._root)

    def _order(self, value: Any, node: Node) -> Any:
        if isinstance(value, list):
            options = [option for option in self._options(node) if option.get("type") == "array"]
            option = next((o for o in options if self._fits(value, o)), options[0] if options else {})
            return [self._order(item, _item_node(option, index)) for index, item in enumerate(value)]
        if isinstance(value, dict):
            options = [option for option in self._options(node) if option.get("type") == "object"]
            option = next((o for o in options if self._fits(value, o)), options[0] if options else {})
            named = [name for name in option.get("properties", {}) if name in value]
            names = [*named, *(name for name in value if name not in named)]
            return {name: self._order(value[name], _value_node(option, name)) for name in names}
        return value

    def _options(self, node: Node) -> list[dict[str, Any]]:
        if not isinstance(node, dict):
            return []
        if "$ref" in node:
            return self._options(self._defs[node["$ref"].removeprefix("#/$defs/")])
        if "anyOf" in node:
            return [option for each in node["anyOf"] for option in self._options(each)]
        return [node]

    def _fits(self, value: Any, node: dict[str, Any]) -> bool:
        """Whether a document has the shape of a node, its lengths, patterns and numbers aside."""
        if "enum" in node or "type" not in node:
            return value in node.get("enum", [value])
        if not isinstance(value, TYPES[node["type"]]) or (isinstance(value, bool) and node["type"] != "boolean"):
            return False
        if isinstance(value, dict):
            return set(node.get("required", ())) <= set(value) and all(
                self._fits_any(item, _value_node(node, name)) for name, item in value.items()
            )
        if isinstance(value, list):
            return all(self._fits_any(item, _item_node(node, index)) for index, item in enumerate(value))
        return True

    def _fits_any(self, value: Any, node: Node) -> bool:
        return node is not False and any(self._fits(value, option) for option in self._options(node))


def _value_node(node: dict[str, Any], name: str) -> Node:
    """What the value of a key must be; False: no such key."""
    if name in node.get("properties", {}):
        return node["properties"][name]
    for pattern, value in node.get("patternProperties", {}).items():
        if re.search(pattern, name):
            return value
    others = node.get("additionalProperties", {})
    return {} if others is True else others


def _item_node(node: dict[str, Any], index: int) -> Node:
    prefix = node.get("prefixItems", [])
    return prefix[index] if index < len(prefix) else node.get("items", {})
