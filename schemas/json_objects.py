"""Normal-form nodes of objects for ``json_grammar``: known keys, keys by pattern, other keys, and their number.

xgrammar keeps few of these together, llguidance nearly all; each rule is measured by the tests.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from schemas.automaton import Automaton
from schemas.json_leaves import ESCAPABLE, pattern_language
from schemas.json_nodes import Node, any_of
from schemas.json_patterns import finds
from schemas.json_schema import JsonSchema, Sub
from schemas.plan import Decision, GrammarEngine, PlanWriter
from schemas.regex import ANY, Alt, RegexError, Repeat, all_but, literal, print_regex
from schemas.regex import Node as Tree

DESCRIBING = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
NARROWED = re.compile(r"\\[DWsS]|\[\^[^\]]*\\[dw]")
"""Shorthands of which ``pattern_language`` matches less than the standard says."""


class Compiler(Protocol):
    """What is needed of the compiler."""

    document: JsonSchema
    engine: GrammarEngine
    plan: PlanWriter

    def compile(self, subs: tuple[Sub, ...], is_loose: bool) -> Node | None: ...

    def trial(self) -> "Compiler": ...

    def kept(self, subs: Sequence[Sub], *keywords: str) -> None: ...

    def checked(self, subs: Sequence[Sub], keyword: str, reason: str) -> None: ...


class RestKeys(NamedTuple):
    """The keys that no property names: values by pattern (False: forbidden), then of all others."""

    patterns: dict[str, Node | bool]
    others: Node | bool


class Counts(NamedTuple):
    """How many keys an object may have."""

    low: int
    high: int | None


class Keys(NamedTuple):
    """What a conjunction says about keys by name and by number."""

    names: list[str]
    required: list[str]
    counts: Counts


def object_node(flat: list[Sub], compiler: Compiler, is_loose: bool) -> Node | None:
    """The objects that a conjunction accepts."""
    names = _property_names(flat)
    required = list(dict.fromkeys(name for sub in flat for name in sub.required()))
    low = max([0, *(int(sub.get("minProperties") or 0) for sub in flat)])
    highs = [int(sub.schema["maxProperties"]) for sub in flat if sub.has("maxProperties")]
    counts = Counts(low, min(highs) if highs else None)
    make = _exact_object if compiler.engine is GrammarEngine.LLGUIDANCE else _plain_object
    return make(flat, Keys(names, required, counts), compiler, is_loose)


def _property_names(flat: list[Sub]) -> list[str]:
    """Keys in the order of the schema: declared ones first, then those that are only required."""
    declared = (name for sub in flat for name in sub.get("properties") or ())
    return list(dict.fromkeys([*declared, *(name for sub in flat for name in sub.required())]))


def _property_subs(flat: list[Sub], name: str, compiler: Compiler) -> tuple[Sub, ...] | None:
    """The subschemas that the value of property ``name`` must fit; None: the key itself is not allowed."""
    children: list[Sub] = []
    for sub in flat:
        before = len(children)
        if name in (sub.get("properties") or {}):
            children.append(sub.child("properties", name))
        matching = (pattern for pattern in sub.get("patternProperties") or {} if finds(pattern, name))
        children += [sub.child("patternProperties", pattern) for pattern in matching]
        if len(children) == before and sub.has("additionalProperties"):
            children.append(sub.child("additionalProperties"))
        if sub.has("propertyNames"):
            validator = compiler.document.validator_at(sub.child("propertyNames"))
            if not validator.is_valid(name):
                return None
    if not children and any(map(_forbids_unevaluated, flat)):
        return None
    return tuple(children)


def _is_closed(flat: list[Sub]) -> bool:
    return any(sub.get("additionalProperties") is False or _forbids_unevaluated(sub) for sub in flat)


def _forbids_unevaluated(sub: Sub) -> bool:
    """Whether keys that nothing describes are forbidden; beside additionalProperties there are none."""
    return sub.get("unevaluatedProperties") is False and not sub.has("additionalProperties")


def _kept_all(flat: list[Sub], compiler: Compiler) -> None:
    for sub in flat:
        others = (other for other in flat if other is not sub and id(sub.schema) not in other.seen_by)
        if any(other.has(keyword) for other in others for keyword in DESCRIBING):
            compiler.checked([sub], "unevaluatedProperties", "keys that it does not see are described elsewhere")
    compiler.kept(flat, "properties", "required", "additionalProperties", "patternProperties", "propertyNames")
    compiler.kept(flat, "unevaluatedProperties", "minProperties", "maxProperties")


# --- llguidance -------------------------------------------------------------------------------------------------


def _exact_object(flat: list[Sub], keys: Keys, compiler: Compiler, is_loose: bool) -> Node | None:
    names, required, counts = keys
    rest = _rest_keys(flat, compiler, is_loose)
    is_closed = rest.others is False and not rest.patterns
    properties: dict[str, Node | bool] = {}
    for name in names:
        children = _property_subs(flat, name, compiler)
        node = None if children is None else compiler.compile(children, is_loose)
        if node is not None:
            properties[name] = node
        elif name in required:
            return None
        elif not is_closed:
            properties[name] = False
    result: Node = {"type": "object", "properties": properties}
    if kept := [name for name in properties if name in required]:
        result["required"] = kept
    if rest.patterns:
        result["patternProperties"] = rest.patterns
    result["additionalProperties"] = rest.others
    counted = _exact_count(result, counts, flat, compiler)
    _kept_all(flat, compiler)
    if names and not any(sub.has(keyword) for sub in flat for keyword in OPENING) and flat[0].origin is None:
        compiler.plan.note(
            flat[0].path, OPENING[0], Decision.ENFORCED, "not said: other keys may be added, false forbids"
        )
    return counted


def _rest_keys(flat: list[Sub], compiler: Compiler, is_loose: bool) -> RestKeys:
    patterns = list(dict.fromkeys(pattern for sub in flat for pattern in sub.get("patternProperties") or ()))
    naming = [sub for sub in flat if sub.has("propertyNames")]
    is_closed = _is_closed(flat)
    others: Node | bool = False
    if not is_closed:
        subs = tuple(sub.child("additionalProperties") for sub in flat if sub.has("additionalProperties"))
        node = compiler.compile(subs, is_loose)
        others = False if node is None else node
        if any(isinstance(sub.get("unevaluatedProperties"), dict) for sub in flat):
            compiler.checked(flat, "unevaluatedProperties", "keys that other keywords describe are not tracked")
    values: dict[str, Node | bool] = {}
    for pattern in patterns:
        node = compiler.compile(_pattern_subs(flat, pattern), is_loose)
        values[pattern] = False if node is None else node
    if others is False and not any(value is not False for value in values.values()):
        values = {}
    if not naming:
        found = _disjoint(values, is_exact=others is not False)
    elif values:
        found = "names by pattern are not combined with patternProperties"
    elif others is False:
        found = {}
    else:
        found, others = _named_keys(naming, others, compiler)
    if isinstance(found, str):
        for keyword in ("patternProperties", "propertyNames", "additionalProperties"):
            compiler.checked(flat, keyword, found)
        return RestKeys({}, {})
    if others is False:
        found = {pattern: value for pattern, value in found.items() if value is not False}
    return RestKeys(found, others)


def _pattern_subs(flat: list[Sub], pattern: str) -> tuple[Sub, ...]:
    """What the value of a key must fit that matches just this pattern."""
    children = []
    for sub in flat:
        if pattern in (sub.get("patternProperties") or {}):
            children.append(sub.child("patternProperties", pattern))
        elif sub.has("additionalProperties"):
            children.append(sub.child("additionalProperties"))
    return tuple(children)


def _disjoint(values: Mapping[str, Node | bool], *, is_exact: bool) -> dict[str, Node | bool] | str:
    """The same under printed patterns, of which no two match one key; or why that is not known.

    ``is_exact``: other keys are allowed, so that a pattern must not match less than it says. Nor must one of several.
    """
    groups: list[tuple[list[Tree], Node | bool]] = []
    for pattern, value in values.items():
        tree = pattern_language(pattern, ESCAPABLE)
        if isinstance(tree, str):
            return tree
        if (is_exact or len(values) > 1) and NARROWED.search(pattern):
            return "keys beyond ASCII may match this pattern"
        for trees, known in groups:
            if known == value:
                trees.append(tree)
                break
        else:
            groups.append(([tree], value))
    joined = [(Alt(tuple(trees)) if len(trees) > 1 else trees[0], value) for trees, value in groups]
    try:
        automata = [Automaton(tree) for tree, _ in joined] if len(joined) > 1 else []
        if any(a.overlaps(b) for index, a in enumerate(automata) for b in automata[:index]):
            return "one key may match two patterns"
    except RegexError as error:
        return str(error)
    return {f"^({print_regex(tree)})$": value for tree, value in joined}


def _named_keys(
    naming: list[Sub], others: Node | bool, compiler: Compiler
) -> tuple[dict[str, Node | bool] | str, Node | bool]:
    """propertyNames as a pattern of all keys."""
    trial = compiler.trial()
    key = trial.compile(tuple(sub.child("propertyNames") for sub in naming), False)
    if key is None:
        return {}, False
    if trial.plan.num_checked:
        return "not expressible as one pattern of keys", others
    if key in ({}, {"type": "string"}):
        return {}, others
    pattern = _key_pattern(key)
    return ("not expressible as one pattern of keys", others) if pattern is None else ({pattern: others}, False)


def _key_pattern(key: Node) -> str | None:
    """The pattern of the strings of a node."""
    if set(key) == {"type", "pattern"}:
        return str(key["pattern"])
    if set(key) == {"enum"}:
        names = Alt(tuple(literal(name) for name in key["enum"] if isinstance(name, str)))
        return f"^({print_regex(names)})$"
    if set(key) <= {"type", "minLength", "maxLength"} and key["type"] == "string":
        return f"^{print_regex(Repeat(ANY, key.get('minLength', 0), key.get('maxLength')))}$"
    return None


def _exact_count(node: Node, counts: Counts, flat: list[Sub], compiler: Compiler) -> Node | None:
    """Number of keys: llguidance counts where no key is optional, or where one key is all that it must tell apart."""
    low, high = counts
    required = node.get("required", [])
    optional = [name for name, value in node["properties"].items() if name not in required and value is not False]
    is_closed = node["additionalProperties"] is False and "patternProperties" not in node
    most = len(required) + len(optional) if is_closed else None
    if (high is not None and high < max(low, len(required))) or (most is not None and most < low):
        return None
    needs_low = low > len(required)
    needs_high = high is not None and (most is None or high < most)
    if not needs_low and not needs_high:
        return node
    if high == len(required):
        return {"type": "object", "properties": {n: node["properties"][n] for n in required}, "required": required} | {
            "additionalProperties": False
        }
    limits = ({"minProperties": low} if needs_low else {}) | ({"maxProperties": high} if needs_high else {})
    if not optional or (is_closed and not required and low <= 1 and high in (None, 1)):
        return node | limits
    if low == 1 and not needs_high and "patternProperties" not in node:
        first = [node | {"required": [name]} for name in optional]
        pattern = f"^({print_regex(all_but(node['properties']))})$"
        keys = {"properties": {}, "patternProperties": {pattern: node["additionalProperties"]}}
        return any_of([*first, node | keys | {"additionalProperties": False, "minProperties": 1}])
    compiler.checked(flat, "minProperties", "the grammar does not count optional keys")
    compiler.checked(flat, "maxProperties", "the grammar does not count optional keys")
    return node


# --- xgrammar ---------------------------------------------------------------------------------------------------


def _plain_object(flat: list[Sub], keys: Keys, compiler: Compiler, is_loose: bool) -> Node | None:
    names, required, counts = keys
    patterns = [sub for sub in flat if sub.get("patternProperties")]
    if not names and (named := _map_node(flat, patterns, compiler, is_loose)) is not None:
        return _plain_count(named, counts)
    is_closed = not patterns and _is_closed(flat)
    properties: dict[str, Node] = {}
    for name in names:
        children = _property_subs(flat, name, compiler)
        node = None if children is None else compiler.compile(children, is_loose)
        if node is not None:
            properties[name] = node
        elif name in required:
            return None
        elif not is_closed:
            compiler.checked(flat, "properties", f"an open object may still have the forbidden key {name!r}")
    result: Node = {"type": "object", "properties": properties}
    if kept := [name for name in properties if name in required]:
        result["required"] = kept
    result["additionalProperties"] = False if is_closed else _plain_others(flat, patterns, compiler, is_loose)
    compiler.checked(patterns, "patternProperties", "the grammar engine keeps them only without other keys")
    if not is_closed:
        compiler.checked(flat, "properties", "kept, but an open object may repeat a key in an escaped spelling")
        compiler.checked(flat, "propertyNames", "the grammar engine keeps it only without other keywords")
        compiler.checked(flat, "unevaluatedProperties", "the object is open to other keys")
    _kept_all(flat, compiler)
    return _plain_count(result, counts)


def _map_node(flat: list[Sub], patterns: list[Sub], compiler: Compiler, is_loose: bool) -> Node | None:
    """An object without known keys whose other keys follow one pattern; None where the engine cannot keep that."""
    naming = [sub for sub in flat if sub.has("propertyNames")]
    open_subs = [sub for sub in flat if sub.get("additionalProperties") not in (None, False)]
    closed_subs = [sub for sub in flat if sub.get("additionalProperties") is False]
    result: Node = {"type": "object", "properties": {}}
    if len(patterns) == 1 and len(patterns[0].schema["patternProperties"]) == 1 and not naming and not open_subs:
        language = pattern_language(pattern := next(iter(patterns[0].schema["patternProperties"])))
        if isinstance(language, str) or not closed_subs or any(c not in patterns for c in closed_subs):
            return None
        value = compiler.compile((patterns[0].child("patternProperties", pattern),), is_loose)
        if value is not None:
            result["patternProperties"] = {print_regex(language): value}
        _kept_all(flat, compiler)
        return {**result, "additionalProperties": False}
    if naming and not patterns and not closed_subs and not any(sub.has("unevaluatedProperties") for sub in flat):
        trial = compiler.trial()
        key = trial.compile(tuple(sub.child("propertyNames") for sub in naming), is_loose)
        if key is None or set(key) != {"type", "pattern"} or trial.plan.num_checked:
            return None
        _kept_all(flat, compiler)
        values = _plain_others(flat, [], compiler, is_loose)
        return {**result, "propertyNames": key, "additionalProperties": values}
    return None


def _plain_others(flat: list[Sub], patterns: list[Sub], compiler: Compiler, is_loose: bool) -> Node | bool:
    """The schema of all other keys' values; anything where patternProperties decide about them."""
    subs = tuple(sub.child("additionalProperties") for sub in flat if sub.has("additionalProperties"))
    if patterns:
        compiler.checked(flat, "additionalProperties", "patternProperties beside it are checked")
        return True
    node = compiler.compile(subs, is_loose) if subs else {}
    return False if node is None else node or True


def _plain_count(node: Node, counts: Counts) -> Node | None:
    low, high = counts
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
