"""From a JSON Schema to the schema handed to a grammar engine, and what of it is enforced while decoding.

The user's schema is compiled into a small normal form whose every shape was measured to be kept exactly by the engine
chosen for it (the tests measure it again); what does not fit is left out, and checked after decoding. Always a subset
or a superset by design, never a guess: ``PlanWriter`` gets one row per keyword. Runs no grammar engine.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from schemas.errors import ConstraintError
from schemas.json_branches import excludes
from schemas.json_drafts import DRAFT_3, draft_of, is_read_alike
from schemas.json_leaves import JSON_TYPES, EnumValues, number_node, string_node, types_of
from schemas.json_negation import negate
from schemas.json_nodes import Node, any_of, array_of, finish
from schemas.json_objects import object_node
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
from schemas.plan import Decision, GrammarEngine, PlanWriter

MAX_NODES = 4_000
"""Nodes of the compiled schema; above it, alternatives beside other keywords are no longer multiplied out."""
MAX_XGRAMMAR_CHARS = 20_000
"""Longer schemas go to llguidance where it keeps as much: it compiles in milliseconds."""
MAX_BRANCH_WORK = 64
"""Alternatives that may be multiplied out at one place."""
MAX_OPPOSITES = 4
"""Branches of a oneOf that are excluded from one of its other branches."""
MAX_DEPENDENCIES = 4
"""Conditions on one object that are multiplied out."""
CONDITIONS = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies")
NOT_FOLLOWED = {
    "$dynamicRef": "dynamic references are not followed",
    "$recursiveRef": "dynamic references are not followed",
    "extends": "only draft 3 has it",
}


class _TooLarge(Exception):
    """Multiplying out alternatives made the schema too large."""


class CompiledSchema(NamedTuple):
    """What an engine is handed, and what becomes of each keyword."""

    engine: GrammarEngine
    source: str
    plan: PlanWriter
    is_narrow: bool = False  # leaves out documents that people write

    @property
    def is_slow(self) -> bool:
        """Whether the engine would need seconds to compile it."""
        return self.engine is GrammarEngine.XGRAMMAR and len(self.source) > MAX_XGRAMMAR_CHARS


def compile_schema(document: JsonSchema) -> CompiledSchema:
    """Compile for the engine that keeps most, xgrammar if both keep all. Raises ConstraintError: no document fits."""
    if document.draft is DRAFT_3:
        return _unplanned("draft 3 is validated only: any JSON is generated; write the schema for a later draft")
    compiled = [compile_for(engine, document) for engine in (GrammarEngine.XGRAMMAR, GrammarEngine.LLGUIDANCE)]
    return min(compiled, key=lambda result: (result.plan.num_checked, result.is_narrow, result.is_slow))


def compile_for(engine: GrammarEngine, document: JsonSchema) -> CompiledSchema:
    for is_multiplying in (True, False):
        compiler = _Compiler(document, engine, is_multiplying)
        for path, keyword in document.ignored:
            compiler.plan.note(path, keyword, Decision.IGNORED, "the draft that $schema names does not know it")
        try:
            node = compiler.compile((document.root,), False)
        except _TooLarge:
            continue
        except RecursionError:
            break
        if node is not None:
            node = finish(node, compiler.defs, can_forbid=engine is GrammarEngine.LLGUIDANCE)
        if node is None:
            raise ConstraintError(
                "the JSON Schema accepts no finite document: two of its keywords contradict each other, or a required "
                "property refers back to its own schema; relax one of them"
            )
        return CompiledSchema(engine, json.dumps(node, ensure_ascii=False), compiler.plan, compiler.is_narrow)
    return _unplanned(f"the schema unfolds to more than {MAX_NODES} nodes: any JSON is generated")


def _unplanned(reason: str) -> CompiledSchema:
    plan = PlanWriter()
    plan.note("", "", Decision.CHECKED, reason)
    return CompiledSchema(GrammarEngine.XGRAMMAR, "{}", plan)


class _Compiler:
    """State of one compilation: the plan, the named nodes, the budget."""

    def __init__(self, document: JsonSchema, engine: GrammarEngine, is_multiplying: bool) -> None:
        self.document = document
        self.engine = engine
        self.is_multiplying = is_multiplying
        self.plan = PlanWriter()
        self.names: dict[Any, str] = {}
        self.defs: dict[str, Node | None] = {}
        self.num_nodes = 0
        self.enums = EnumValues(document, engine)
        self.is_narrow = False
        self.made: dict[tuple[int, str, str], Any] = {}

    def note(self, subs: Sequence[Sub], keyword: str, decision: Decision, reason: str) -> None:
        for sub in subs:
            if sub.has(keyword) and (sub.origin is None or decision is not Decision.ENFORCED):
                self.plan.note(*(sub.origin or (sub.path, keyword)), decision, reason)

    def kept(self, subs: Sequence[Sub], *keywords: str) -> None:
        for keyword in keywords:
            self.note(subs, keyword, Decision.ENFORCED, f"kept by {self.engine}")

    def checked(self, subs: Sequence[Sub], keyword: str, reason: str) -> None:
        self.note(subs, keyword, Decision.CHECKED, reason)

    def narrowed(self) -> None:
        """Remember that documents that people write are left out."""
        self.is_narrow = True

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
        key = (frozenset((sub.path, id(sub.schema), sub.done, sub.seen_by) for sub in flat), is_loose)
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
                following.append(sub.target().seen_from(sub))
                self.kept((sub,), "$ref")
                if self.document.ignores_ref_siblings:
                    queue = following + queue
                    continue
            if sub.has("allOf"):
                following += [sub.child("allOf", index).seen_from(sub) for index in range(len(sub.schema["allOf"]))]
                self.kept((sub,), "allOf")
            flat.append(sub.without("$ref", "allOf"))
            queue = following + queue
        return flat, has_ref

    def conjunction(self, flat: list[Sub], is_loose: bool) -> Node | None:
        if foreign := [sub for sub in flat if self.is_of_another_draft(sub)]:
            self.checked(foreign, "$schema", "another draft than that of the document")
            return {}
        if any(sub.has("enum") or (sub.has("const") and "const" in self.document.draft.VALIDATORS) for sub in flat):
            return self.enumeration(flat)
        for keyword in ("anyOf", "oneOf"):
            for position, sub in enumerate(flat):
                if sub.has(keyword):
                    return self.alternatives(flat, position, keyword, is_loose)
        for position, sub in enumerate(flat):
            for keyword in CONDITIONS:
                if keyword not in self.document.draft.VALIDATORS:
                    continue  # an annotation: nothing checks it
                if sub.has(keyword) and (keyword != "not" or _excluded_types([sub]) is None):
                    return self.condition(flat, position, keyword, is_loose)
        types = types_of(flat)
        self.kept(flat, "type")
        negations = [sub for sub in flat if sub.has("not")]
        types -= _excluded_types(negations) or frozenset()
        self.kept(negations, "not")
        for keyword, reason in NOT_FOLLOWED.items():
            present = [sub for sub in flat if sub.has(keyword)]
            self.checked(present, keyword, reason)
            is_loose |= bool(present)
        return self.typed(flat, types, is_loose)

    def is_of_another_draft(self, sub: Sub) -> bool:
        """Whether the validator reads ``sub`` by another draft; at the root ``$schema`` names the document's own."""
        return sub.has("$schema") and draft_of(sub.schema) is not self.document.draft and not is_read_alike(sub.schema)

    def enumeration(self, flat: list[Sub]) -> Node | None:
        """An enum or const: its values that the whole conjunction accepts, so that every other keyword is kept too."""
        values, unprintable = self.enums.fitting(flat)
        for sub in flat:
            for keyword in sub.schema:
                if keyword in ASSERTIONS | APPLICATORS:
                    if unprintable and keyword in ("enum", "const"):
                        self.checked((sub,), keyword, "the grammar engine cannot write some of its values exactly")
                    else:
                        self.kept((sub,), keyword)
        if unprintable and not values:
            return {"type": "number"} if all(isinstance(value, int | float) for value in unprintable) else {}
        if self.engine is GrammarEngine.XGRAMMAR and any(value and isinstance(value, dict | list) for value in values):
            self.narrowed()  # xgrammar leaves out the blanks in them
        return {"enum": values} if values else None

    def alternatives(self, flat: list[Sub], position: int, keyword: str, is_loose: bool) -> Node | None:
        """Multiply out one anyOf or oneOf: the rest of the conjunction goes into every branch."""
        sub = flat[position]
        rest = [*flat[:position], sub.without(keyword), *flat[position + 1 :]]
        branches = [sub.child(keyword, index).seen_from(sub) for index in range(len(sub.schema[keyword]))]
        has_more = any(other.has(k) for other in rest for k in ASSERTIONS | APPLICATORS - {"$ref", "allOf"})
        if has_more and (not self.is_multiplying or len(branches) > MAX_BRANCH_WORK):
            self.checked((sub,), keyword, "too large to be combined with the keywords beside it")
            return self.conjunction(rest, True)
        nodes = [self.compile((*rest, branch), is_loose) for branch in branches]
        if keyword == "oneOf":
            nodes = self.exclusive(sub, rest, nodes, is_loose)
        self.kept((sub,), keyword)
        return any_of([node for node in nodes if node is not None])

    def exclusive(self, sub: Sub, rest: list[Sub], nodes: list[Node | None], is_loose: bool) -> list[Node | None]:
        """Narrow the nodes of a oneOf's branches to what no other branch accepts."""
        branches = [sub.child("oneOf", index).seen_from(sub) for index in range(len(nodes))]
        result = []
        for branch, node in zip(branches, nodes, strict=True):
            others = [other for other in branches if other is not branch]
            if len(nodes) > MAX_BRANCH_WORK:
                overlapping = others
            else:
                overlapping = [other for other in others if node is not None and not excludes(self, node, other)]
            opposites = [self.opposites(other) for other in overlapping] if self.is_multiplying else [None]
            if overlapping and (None in opposites or len(overlapping) > MAX_OPPOSITES):
                self.checked((sub,), "oneOf", "more than one branch may match, which the grammar does not exclude")
                result.append(node)
            elif overlapping:
                without = (sub.derive("oneOf", opposite) for opposite in opposites)
                result.append(self.compile((*rest, branch, *without), is_loose))
            else:
                result.append(node)
        return result

    def condition(self, flat: list[Sub], position: int, keyword: str, is_loose: bool) -> Node | None:
        """Multiply out one keyword that depends on the document: the union of the cases that it allows."""
        sub = flat[position]
        rest = [*flat[:position], sub.without(keyword), *flat[position + 1 :]]
        cases = self.cases(sub, keyword) if self.is_multiplying else None
        if cases is None:
            self.checked((sub,), keyword, "its condition is not expressible in the grammar")
            return self.conjunction(rest, True)
        nodes = [self.compile((*rest, *case), is_loose) for case in cases]
        self.kept((sub,), keyword)
        return any_of([node for node in nodes if node is not None])

    def cases(self, sub: Sub, keyword: str) -> list[tuple[Sub, ...]] | None:
        """What must hold beside the rest of ``sub`` in each case that ``keyword`` allows; None if that is not known."""
        if keyword == "not":
            opposite = self.opposites(sub.child("not"))
            return None if opposite is None else [(sub.derive("not", opposite),)]
        if keyword == "if":
            then, otherwise = (
                (sub.child(branch).seen_from(sub),) if branch in sub.schema else () for branch in ("then", "else")
            )
            if not then and not otherwise:
                return [()]
            opposite = self.opposites(sub.child("if"))
            return (
                None
                if opposite is None
                else [(sub.child("if").seen_from(sub), *then), (sub.derive("if", opposite), *otherwise)]
            )
        needs: dict[str, Any] = sub.schema[keyword]
        if len(needs) > MAX_DEPENDENCIES:
            return None
        cases: list[tuple[Sub, ...]] = [()]
        for name, need in needs.items():
            names = [need] if isinstance(need, str) else need if isinstance(need, list) else []
            branches = {"present": {"required": [name, *names]}, "absent": {"properties": {name: False}}}
            made = self.derived((id(sub.schema), keyword, name), branches)
            present, absent = (sub.derive(keyword, branch) for branch in made.values())
            following = () if isinstance(need, list | str) else (sub.child(keyword, name).seen_from(sub),)
            cases = [
                *((*case, present, *following) for case in cases),
                *((*case, absent) for case in cases),
            ]
        return cases

    def opposites(self, sub: Sub) -> Any:
        """One schema that accepts what ``sub`` rejects; None where there is none to be generated."""
        return self.derived((id(sub.schema), "", ""), negate(sub, self.document))

    def derived(self, key: tuple[int, str, str], schema: Any) -> Any:
        """Keep a schema of ours, or return the one kept before: schemas are known by identity, so recursion ends."""
        return self.made.setdefault(key, schema)

    def trial(self) -> "_Compiler":
        """A compiler whose notes do not count."""
        return _Compiler(self.document, self.engine, self.is_multiplying)

    def typed(self, flat: list[Sub], types: frozenset[str], is_loose: bool) -> Node | None:
        """One node per type. A schema that names no type but has keywords of one is read as being of that type."""
        makers: dict[str, tuple[frozenset[str], Callable[[], Node | None]]] = {
            "object": (OBJECT_KEYWORDS, lambda: object_node(flat, self, is_loose)),
            "array": (ARRAY_KEYWORDS, lambda: self.array_node(flat, is_loose)),
            "string": (STRING_KEYWORDS, lambda: string_node(flat, self)),
            "number": (NUMBER_KEYWORDS, lambda: number_node(flat, self, is_integer="fraction" not in types)),
            "boolean": (frozenset(), lambda: {"type": "boolean"}),
            "null": (frozenset(), lambda: {"type": "null"}),
        }
        present = [name for name in makers if JSON_TYPES[name] & types]
        used = [name for name in present if _limits(flat, makers[name][0])]
        if len(types) < len(JSON_TYPES["any"]) or (used and is_loose):
            return any_of([node for name in present if (node := makers[name][1]()) is not None])
        if not used:
            return {}
        narrowed = any_of([node for name in used if (node := makers[name][1]()) is not None])
        return narrowed or any_of([node for name in present if name not in used if (node := makers[name][1]())])

    # --- arrays -------------------------------------------------------------------------------------------------

    def array_node(self, flat: list[Sub], is_loose: bool) -> Node | None:
        for keyword, reason in {
            "contains": "the grammar engine cannot demand an item",
            "minContains": "the grammar engine cannot count items of a kind",
            "maxContains": "the grammar engine cannot count items of a kind",
            "uniqueItems": "the grammar engine does not compare items",
        }.items():
            present = [
                sub for sub in flat if sub.has(keyword) and (keyword, sub.schema[keyword]) != ("uniqueItems", False)
            ]
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


def _limits(flat: list[Sub], keywords: frozenset[str]) -> bool:
    """Whether one of the keywords is there and forbids anything."""
    return any(
        sub.has(keyword) and (keyword in ("contains", "uniqueItems") or not _is_empty(sub.get(keyword)))
        for sub in flat
        for keyword in keywords
    )


def _is_empty(value: Any) -> bool:
    return value is True or value in ({}, [])


def _excluded_types(subs: Sequence[Sub]) -> frozenset[str] | None:
    """What ``not`` keywords take away if each holds only a type; None where the grammar cannot follow."""
    schemas = [sub.schema["not"] for sub in subs]
    if not all(isinstance(schema, dict) and set(schema) == {"type"} for schema in schemas):
        return None
    excluded = frozenset(atom for sub in subs for atom in types_of([sub.child("not")]))
    return None if "integer" in excluded and "fraction" not in excluded else excluded
