"""From a JSON Schema to the schema handed to the grammar engine, and what of it is enforced while decoding.

The user's schema is compiled into a small normal form whose every shape was measured to be kept exactly by xgrammar
0.2.9 (the tests measure it again); what does not fit is left out, and checked after decoding. Always a subset or a
superset by design, never a guess: ``PlanWriter`` gets one row per keyword. Knows no grammar engine.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jsonschema import Draft3Validator

from schemas.errors import ConstraintError
from schemas.json_leaves import JSON_TYPES, EnumValues, number_node, pattern_language, string_node, types_of
from schemas.json_nodes import Node, any_of, array_of, finish
from schemas.json_schema import (
    APPLICATORS,
    ARRAY_KEYWORDS,
    ASSERTIONS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
    JsonSchema,
    Sub,
)
from schemas.plan import Decision, PlanWriter
from schemas.regex import print_regex

MAX_NODES = 4_000
"""Nodes of the compiled schema; above it, alternatives beside other keywords are no longer multiplied out."""
MAX_BRANCH_WORK = 64
"""Alternatives that may be multiplied out at one place."""
DROPPED = {
    "not": "the grammar engine cannot exclude",
    "if": "the grammar engine has no conditions",
    "dependentSchemas": "the grammar engine has no conditions",
    "dependentRequired": "the grammar engine has no conditions",
    "dependencies": "the grammar engine has no conditions",
    "$dynamicRef": "dynamic references are not followed",
    "$recursiveRef": "dynamic references are not followed",
    "extends": "only draft 3 has it",
}
KEPT = "kept by the grammar"


class _TooLarge(Exception):
    """Multiplying out alternatives made the schema too large."""


def compile_schema(document: JsonSchema) -> tuple[str, PlanWriter]:
    """Return the engine's schema as text and the plan. Raises ConstraintError where no document can fit."""
    if document.draft is Draft3Validator:
        return _unplanned("draft 3 is validated only: any JSON is generated; write the schema for a later draft")
    for is_multiplying in (True, False):
        compiler = _Compiler(document, is_multiplying)
        try:
            node = compiler.compile((document.root,), False)
        except _TooLarge:
            continue
        except RecursionError:
            break
        node = None if node is None else finish(node, compiler.defs)
        if node is None:
            raise ConstraintError(
                "the JSON Schema accepts no finite document: two of its keywords contradict each other, or a required "
                "property refers back to its own schema; relax one of them"
            )
        return json.dumps(node, ensure_ascii=False), compiler.plan
    return _unplanned(f"the schema unfolds to more than {MAX_NODES} nodes: any JSON is generated")


def _unplanned(reason: str) -> tuple[str, PlanWriter]:
    plan = PlanWriter()
    plan.note("", "", Decision.CHECKED, reason)
    return "{}", plan


class _Compiler:
    """State of one compilation: the plan, the named nodes, the budget."""

    def __init__(self, document: JsonSchema, is_multiplying: bool) -> None:
        self.document = document
        self.is_multiplying = is_multiplying
        self.plan = PlanWriter()
        self.names: dict[Any, str] = {}
        self.defs: dict[str, Node | None] = {}
        self.num_nodes = 0
        self.enums = EnumValues(document)

    def note(self, subs: Sequence[Sub], keyword: str, decision: Decision, reason: str) -> None:
        for sub in subs:
            if sub.has(keyword):
                self.plan.note(sub.path, keyword, decision, reason)

    def kept(self, subs: Sequence[Sub], *keywords: str) -> None:
        for keyword in keywords:
            self.note(subs, keyword, Decision.ENFORCED, KEPT)

    def checked(self, subs: Sequence[Sub], keyword: str, reason: str) -> None:
        self.note(subs, keyword, Decision.CHECKED, reason)

    # --- conjunctions -------------------------------------------------------------------------------------------

    def compile(self, subs: tuple[Sub, ...], is_loose: bool) -> Node | None:
        """Compile the conjunction of ``subs``. Loose: something around it is left out, so it must not be narrowed."""
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise _TooLarge
        flat, has_ref = self.flatten(subs)
        if flat is None:
            return None
        if not has_ref:
            return self.conjunction(flat, is_loose)
        key = (frozenset((sub.path, id(sub.schema), sub.done) for sub in flat), is_loose)
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = f"n{len(self.names)}"
            self.defs[name] = self.conjunction(flat, is_loose)
        elif name in self.defs and self.defs[name] is None:
            return None
        return {"$ref": f"#/$defs/{name}"}

    def flatten(self, subs: Sequence[Sub]) -> tuple[list[Sub] | None, bool]:
        """Follow $ref and allOf, in place; None if one of them is ``false``. Also: whether there was a $ref."""
        flat: list[Sub] = []
        has_ref = False
        queue = list(subs)
        while queue:
            sub = queue.pop(0)
            if sub.schema is False:
                return None, has_ref
            if sub.schema is True or any(sub.schema is other.schema for other in flat):
                continue
            following: list[Sub] = []
            if isinstance(sub.get("$ref"), str):
                has_ref = True
                following.append(sub.target())
                self.kept((sub,), "$ref")
                if self.document.ignores_ref_siblings:
                    queue = following + queue
                    continue
            if sub.has("allOf"):
                following += [sub.child("allOf", index) for index in range(len(sub.schema["allOf"]))]
                self.kept((sub,), "allOf")
            flat.append(Sub(sub.schema, sub.path, sub.resolver, sub.done | {"$ref", "allOf"}))
            queue = following + queue
        return flat, has_ref

    def conjunction(self, flat: list[Sub], is_loose: bool) -> Node | None:
        if any(sub.has("enum") or (sub.has("const") and "const" in self.document.draft.VALIDATORS) for sub in flat):
            return self.enumeration(flat)
        for keyword in ("anyOf", "oneOf"):
            for position, sub in enumerate(flat):
                if sub.has(keyword):
                    return self.alternatives(flat, position, keyword, is_loose)
        types = types_of(flat)
        self.kept(flat, "type")
        for keyword, reason in DROPPED.items():
            present = [sub for sub in flat if sub.has(keyword)]
            if present and keyword == "not" and _excluded_types(present) is not None:
                types -= _excluded_types(present) or set()
                self.kept(present, keyword)
            elif present:
                self.checked(present, keyword, reason)
                is_loose = True
        return self.typed(flat, types, is_loose)

    def enumeration(self, flat: list[Sub]) -> Node | None:
        """An enum or const: its values that the whole conjunction accepts, so that every other keyword is kept too."""
        values, unprintable = self.enums.fitting(flat)
        for sub in flat:
            for keyword in sub.schema:
                if keyword in ASSERTIONS | APPLICATORS:
                    if unprintable and keyword in ("enum", "const"):
                        self.checked((sub,), keyword, "the grammar engine cannot write some of its numbers exactly")
                    else:
                        self.kept((sub,), keyword)
        if unprintable and not values:
            return {"type": "number"}
        return {"enum": values} if values else None

    def alternatives(self, flat: list[Sub], position: int, keyword: str, is_loose: bool) -> Node | None:
        """Multiply out one anyOf or oneOf: the rest of the conjunction goes into every branch."""
        sub = flat[position]
        rest = [*flat[:position], Sub(sub.schema, sub.path, sub.resolver, sub.done | {keyword}), *flat[position + 1 :]]
        branches = [sub.child(keyword, index) for index in range(len(sub.schema[keyword]))]
        has_more = any(other.has(k) for other in rest for k in ASSERTIONS | APPLICATORS - {"$ref", "allOf"})
        if has_more and (not self.is_multiplying or len(branches) > MAX_BRANCH_WORK):
            self.checked((sub,), keyword, "too large to be combined with the keywords beside it")
            return self.conjunction(rest, True)
        nodes = [self.compile((*rest, branch), is_loose) for branch in branches]
        if keyword == "oneOf" and not self.are_disjoint(branches, nodes):
            self.checked((sub,), keyword, "more than one branch may match, which the grammar engine does not exclude")
        else:
            self.kept((sub,), keyword)
        return any_of([node for node in nodes if node is not None])

    def are_disjoint(self, branches: list[Sub], nodes: list[Node | None]) -> bool:
        """Whether no document generated for one branch is accepted by another."""
        if len(branches) > MAX_BRANCH_WORK:
            return False
        return all(
            self.excludes(node, other)
            for i, node in enumerate(nodes)
            for j, other in enumerate(branches)
            if i != j and node is not None
        )

    def excludes(self, node: Node, branch: Sub) -> bool:
        """Whether ``branch`` surely rejects every document of ``node``."""
        node = self.resolve(node)
        if "anyOf" in node:
            return all(self.excludes(option, branch) for option in node["anyOf"])
        if "enum" in node:
            validator = self.document.validator_at(branch)
            return not any(validator.is_valid(value) for value in node["enum"])
        flat, _ = self.flatten((branch,))
        if flat is None or ("type" in node and not JSON_TYPES[node["type"]] & types_of(flat)):
            return True
        return node.get("type") == "object" and any(self.excludes_object(node, sub) for sub in flat)

    def excludes_object(self, node: Node, sub: Sub) -> bool:
        """Whether a key that every object of ``node`` has, or cannot have, makes ``sub`` reject them all."""
        properties = node["properties"]
        is_closed = node["additionalProperties"] is False and "patternProperties" not in node
        if is_closed and set(sub.required()) - set(properties):
            return True
        for name in node.get("required", ()):
            if name in (sub.get("properties") or {}):
                if self.excludes(self.resolve(properties[name]), sub.child("properties", name)):
                    return True
            elif sub.get("additionalProperties") is False and not sub.get("patternProperties"):
                return True
        return False

    def resolve(self, node: Node) -> Node:
        """Follow the normal form's own references."""
        seen = set()
        while "$ref" in node and node["$ref"] not in seen:
            seen.add(node["$ref"])
            node = self.defs.get(node["$ref"].removeprefix("#/$defs/")) or {}
        return node

    def typed(self, flat: list[Sub], types: frozenset[str], is_loose: bool) -> Node | None:
        """One node per type. A schema that names no type but has keywords of one is read as being of that type."""
        makers: dict[str, tuple[frozenset[str], Callable[[], Node | None]]] = {
            "object": (OBJECT_KEYWORDS, lambda: self.object_node(flat, is_loose)),
            "array": (ARRAY_KEYWORDS, lambda: self.array_node(flat, is_loose)),
            "string": (STRING_KEYWORDS, lambda: string_node(flat, self)),
            "number": (NUMBER_KEYWORDS, lambda: number_node(flat, self, is_integer="fraction" not in types)),
            "boolean": (frozenset(), lambda: {"type": "boolean"}),
            "null": (frozenset(), lambda: {"type": "null"}),
        }
        present = [name for name in makers if JSON_TYPES[name] & types]
        used = [name for name in present if any(sub.has(keyword) for sub in flat for keyword in makers[name][0])]
        if len(types) < len(JSON_TYPES["any"]) or (used and is_loose):
            return any_of([node for name in present if (node := makers[name][1]()) is not None])
        if not used:
            return {}
        narrowed = any_of([node for name in used if (node := makers[name][1]()) is not None])
        return narrowed or any_of([node for name in present if name not in used if (node := makers[name][1]())])

    # --- objects ------------------------------------------------------------------------------------------------

    def object_node(self, flat: list[Sub], is_loose: bool) -> Node | None:
        names = _property_names(flat)
        required = list(dict.fromkeys(name for sub in flat for name in sub.required()))
        low = max([0, *(int(sub.get("minProperties") or 0) for sub in flat)])
        highs = [int(sub.schema["maxProperties"]) for sub in flat if sub.has("maxProperties")]
        patterns = [sub for sub in flat if sub.get("patternProperties")]
        if not names and (named := self.map_node(flat, patterns, is_loose)) is not None:
            return self.count_properties(named, low, min(highs) if highs else None, flat)
        is_closed = self.is_closed(flat, names, low, is_loose)
        properties: dict[str, Node] = {}
        for name in names:
            children = self.property_subs(flat, name)
            node = None if children is None else self.compile(children, is_loose)
            if node is not None:
                properties[name] = node
            elif name in required:
                return None
            elif not is_closed:
                self.checked(flat, "properties", f"an open object may still have the forbidden key {name!r}")
        result: Node = {"type": "object", "properties": properties}
        if kept := [name for name in properties if name in required]:
            result["required"] = kept
        result["additionalProperties"] = False if is_closed else self.additional(flat, patterns, is_loose)
        self.note_object(flat, patterns, bool(names), is_closed)
        return self.count_properties(result, low, min(highs) if highs else None, flat)

    def map_node(self, flat: list[Sub], patterns: list[Sub], is_loose: bool) -> Node | None:
        """An object without known keys whose other keys follow one pattern; None where the engine cannot keep that."""
        naming = [sub for sub in flat if sub.has("propertyNames")]
        open_subs = [sub for sub in flat if sub.get("additionalProperties") not in (None, False)]
        closed_subs = [sub for sub in flat if sub.get("additionalProperties") is False]
        result: Node = {"type": "object", "properties": {}}
        if len(patterns) == 1 and len(patterns[0].schema["patternProperties"]) == 1 and not naming and not open_subs:
            language = pattern_language(pattern := next(iter(patterns[0].schema["patternProperties"])))
            if (
                isinstance(language, str)
                or (is_loose and not closed_subs)
                or any(c not in patterns for c in closed_subs)
            ):
                return None
            value = self.compile((patterns[0].child("patternProperties", pattern),), is_loose)
            if value is not None:
                result["patternProperties"] = {print_regex(language): value}
            self.kept(flat, "patternProperties", "additionalProperties", "unevaluatedProperties")
            self.kept(flat, "minProperties", "maxProperties")
            return {**result, "additionalProperties": False}
        if naming and not patterns and not closed_subs and not any(sub.has("unevaluatedProperties") for sub in flat):
            trial = _Compiler(self.document, self.is_multiplying)
            key = trial.compile(tuple(sub.child("propertyNames") for sub in naming), is_loose)
            if key is None or set(key) != {"type", "pattern"} or not trial.plan.is_enforced():
                return None
            self.kept(flat, "propertyNames", "additionalProperties", "minProperties", "maxProperties")
            values = self.additional(flat, [], is_loose)
            return {**result, "propertyNames": key, "additionalProperties": values}
        return None

    def is_closed(self, flat: list[Sub], names: list[str], low: int, is_loose: bool) -> bool:
        """Whether no other key is generated: demanded, or our choice where the schema leaves it open."""
        if any(sub.get("patternProperties") for sub in flat):
            return False
        if any(sub.get("additionalProperties") is False or sub.get("unevaluatedProperties") is False for sub in flat):
            return True
        says_open = any(sub.has("additionalProperties") or sub.has("unevaluatedProperties") for sub in flat)
        return bool(names) and not says_open and not is_loose and low <= len(names)

    def property_subs(self, flat: list[Sub], name: str) -> tuple[Sub, ...] | None:
        """The subschemas that the value of property ``name`` must fit; None: the key itself is not allowed."""
        children: list[Sub] = []
        for sub in flat:
            before = len(children)
            if name in (sub.get("properties") or {}):
                children.append(sub.child("properties", name))
            matching = (pattern for pattern in sub.get("patternProperties") or {} if re.search(pattern, name))
            children += [sub.child("patternProperties", pattern) for pattern in matching]
            if len(children) == before and sub.has("additionalProperties"):
                children.append(sub.child("additionalProperties"))
            if sub.has("propertyNames") and not self.document.validator_at(sub.child("propertyNames")).is_valid(name):
                return None
        if not children and any(sub.get("unevaluatedProperties") is False for sub in flat):
            return None
        return tuple(children)

    def additional(self, flat: list[Sub], patterns: list[Sub], is_loose: bool) -> Node | bool:
        """The schema of all other keys' values; anything where patternProperties decide about them."""
        subs = tuple(sub.child("additionalProperties") for sub in flat if sub.has("additionalProperties"))
        if patterns:
            self.checked(flat, "additionalProperties", "patternProperties beside it are checked")
            return True
        node = self.compile(subs, is_loose) if subs else {}
        return False if node is None else node or True

    def note_object(self, flat: list[Sub], patterns: list[Sub], has_names: bool, is_closed: bool) -> None:
        self.checked(patterns, "patternProperties", "the grammar engine keeps them only without other keys")
        if not is_closed:
            if has_names:
                reason = "kept, but an open object may repeat a key in an escaped spelling"
                self.checked(flat, "properties", reason)
            self.checked(flat, "propertyNames", "the grammar engine keeps it only without other keywords")
            self.checked(flat, "unevaluatedProperties", "the object is open to other keys")
        self.kept(flat, "properties", "required", "additionalProperties", "propertyNames", "unevaluatedProperties")
        self.kept(flat, "minProperties", "maxProperties")

    def count_properties(self, node: Node, low: int, high: int | None, flat: list[Sub]) -> Node | None:
        num_names, num_required = len(node["properties"]), len(node.get("required", ()))
        is_closed = node["additionalProperties"] is False and "patternProperties" not in node
        if high is not None and (high < low or high < num_required):
            return None
        if is_closed and low > num_names:
            return None
        if low > num_required:
            node["minProperties"] = low
        if high == 0:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        if high is not None and not (is_closed and high >= num_names):
            node["maxProperties"] = high
        return node

    # --- arrays -------------------------------------------------------------------------------------------------

    def array_node(self, flat: list[Sub], is_loose: bool) -> Node | None:
        for keyword, reason in {
            "contains": "the grammar engine cannot demand an item",
            "minContains": "the grammar engine cannot count items of a kind",
            "maxContains": "the grammar engine cannot count items of a kind",
            "uniqueItems": "the grammar engine does not compare items",
        }.items():
            present = [sub for sub in flat if sub.has(keyword) and sub.schema[keyword] is not False]
            self.checked(present, keyword, reason)
            is_loose |= bool(present) and keyword != "uniqueItems"
        low = max([0, *(int(sub.get("minItems") or 0) for sub in flat)])
        highs = [int(sub.schema["maxItems"]) for sub in flat if sub.has("maxItems")]
        high = min(highs) if highs else None
        num_prefix = max(len(sub.prefix_items()) for sub in flat)
        prefix: list[Node] = []
        for index in range(num_prefix if high is None else min(num_prefix, high)):
            node = self.compile(self.item_subs(flat, index), is_loose)
            if node is None:
                high = index
                break
            prefix.append(node)
        rest: Node | None = None
        if high is None or high > len(prefix):
            rest = self.compile(self.item_subs(flat, None), is_loose)
        if rest is None:
            high = len(prefix)
        self.kept(flat, "items", "prefixItems", "additionalItems", "minItems", "maxItems")
        self.checked(flat, "unevaluatedItems", "items that other keywords describe are not tracked")
        if high is not None and low > high:
            return None
        return array_of(prefix, rest, low, high)

    def item_subs(self, flat: list[Sub], index: int | None) -> tuple[Sub, ...]:
        """The subschemas of item ``index``; None: of the items after every prefix."""
        children = []
        for sub in flat:
            prefix = sub.prefix_items()
            if index is not None and index < len(prefix):
                children.append(prefix[index])
            elif (rest := sub.rest_items()) is not None:
                children.append(rest)
        return tuple(children)


def _property_names(flat: list[Sub]) -> list[str]:
    """Keys in the order of the schema: declared ones first, then those that are only required."""
    declared = (name for sub in flat for name in sub.get("properties") or ())
    return list(dict.fromkeys([*declared, *(name for sub in flat for name in sub.required())]))


def _excluded_types(subs: Sequence[Sub]) -> frozenset[str] | None:
    """What ``not`` keywords take away if each holds only a type; None where the grammar cannot follow."""
    schemas = [sub.schema["not"] for sub in subs]
    if not all(isinstance(schema, dict) and set(schema) == {"type"} for schema in schemas):
        return None
    excluded = frozenset(atom for sub in subs for atom in types_of([sub.child("not")]))
    return None if "integer" in excluded and "fraction" not in excluded else excluded
