"""JSON Schema documents as users write them: read, resolve local references, validate finished JSON strictly.

Knows the drafts and the limits, not what the grammar engine can keep (``json_grammar`` does).
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator as SchemaValidator
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from schemas.errors import ConstraintError
from schemas.json_drafts import DRAFT_3, DRAFT_4, DRAFT_6, DRAFT_7, LATER, draft_of

MAX_SOURCE_BYTES = 2**20
MAX_DEPTH = 100
MAX_OBJECTS = 10_000
"""JSON objects in a schema: to check so many against the metaschema takes some seconds."""
MAX_MIN_ITEMS = 10_000
"""Largest minLength, minItems or minProperties: more than a model's context could hold."""

LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SINGLES = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "not", "propertyNames"),
    *("then", "unevaluatedItems", "unevaluatedProperties"),
)
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
OBJECT_KEYWORDS = frozenset(
    (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
        *("maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    )
)
ARRAY_KEYWORDS = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("minContains", "maxContains", "unevaluatedItems"),
    )
)
STRING_KEYWORDS = frozenset(("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"))
NUMBER_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
ASSERTIONS = OBJECT_KEYWORDS | ARRAY_KEYWORDS | STRING_KEYWORDS | NUMBER_KEYWORDS | {"type", "enum", "const", "extends"}
APPLICATORS = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "$recursiveRef"))
MINIMA = ("minLength", "minItems", "minProperties", "minContains")


@dataclass(frozen=True)
class Sub:
    """A subschema, where it stands, what its references resolve against, and keywords already taken care of.

    One that we derived from the user's keyword has that keyword's place in ``origin``.
    """

    schema: Any
    path: str  # JSON pointer from the root; "" is the root
    resolver: Any
    is_ref_alone: bool = False  # up to draft 7 what stands beside $ref means nothing, $id included
    done: frozenset[str] = frozenset()
    origin: tuple[str, str] | None = None  # path of its schema, keyword
    seen_by: frozenset[int] = frozenset()  # identities of the schemas whose unevaluated* know what this one describes

    def seen_from(self, holder: "Sub") -> "Sub":
        """The same subschema as applied in place by ``holder``."""
        return replace(self, seen_by=holder.seen_by | {id(holder.schema)})

    def without(self, *keywords: str) -> "Sub":
        """The same subschema with these keywords taken care of."""
        return replace(self, done=self.done | set(keywords))

    def derive(self, keyword: str, schema: Any) -> "Sub":
        """A subschema in the place of ``keyword``, made by us: what becomes of it becomes of the keyword."""
        return self._other(schema, self.path, self.resolver, self.origin or (self.path, keyword))

    def _other(self, schema: Any, path: str, resolver: Any, origin: tuple[str, str] | None) -> "Sub":
        return Sub(schema, path, resolver, self.is_ref_alone, origin=origin)

    def get(self, keyword: str) -> Any:
        """The keyword's value, None if absent or already taken care of."""
        return None if keyword in self.done or not isinstance(self.schema, dict) else self.schema.get(keyword)

    def has(self, keyword: str) -> bool:
        """Whether the keyword is there and not yet taken care of."""
        return isinstance(self.schema, dict) and keyword in self.schema and keyword not in self.done

    def child(self, *parts: str | int) -> "Sub":
        """The subschema at ``parts`` below this one."""
        schema = self.schema
        for part in parts:
            schema = schema[part]
        resolver = self.resolver
        is_only_ref = self.is_ref_alone and isinstance(schema, dict) and "$ref" in schema
        if isinstance(schema, dict) and isinstance(schema.get("$id"), str) and not is_only_ref:
            resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
        path = self.path + "".join("/" + escape_pointer(str(part)) for part in parts)
        return self._other(schema, path, resolver, self.origin)

    def required(self) -> list[str]:
        """Required keys (draft 3 has a boolean inside the property instead)."""
        value = self.get("required")
        return list(value) if isinstance(value, list) else []

    def prefix_items(self) -> list["Sub"]:
        """The positional items: prefixItems, or a list under items before draft 2020-12."""
        keyword = "items" if isinstance(self.get("items"), list) else "prefixItems"
        items = self.get(keyword)
        return [self.child(keyword, index) for index in range(len(items))] if isinstance(items, list) else []

    def rest_items(self) -> "Sub | None":
        """The schema of the items after the positional ones."""
        keyword = "additionalItems" if isinstance(self.get("items"), list) else "items"
        return self.child(keyword) if self.has(keyword) else None

    def target(self) -> "Sub":
        """What ``$ref`` points to. Raises ConstraintError if that is not inside the document."""
        ref = self.schema["$ref"]
        try:
            found = self.resolver.lookup(ref)
        except Unresolvable as error:
            what = "points to nothing" if ref.startswith("#") else "is not inside this document, and none is fetched"
            fix = "correct it" if ref.startswith("#") else "copy the schema it names into $defs"
            raise ConstraintError(f"schema at {self.path or '/'}: $ref {ref!r} {what}: {fix}") from error
        path = ref[1:] if ref == "#" or ref.startswith("#/") else f"<{ref}>"
        return self._other(found.contents, path, found.resolver, self.origin)


class JsonSchema:
    """A well-formed schema: its root, its draft and a compiled validator."""

    def __init__(self, source: str) -> None:
        """Raises ConstraintError that says what is malformed, where, and what to change."""
        self.schema = _parse_source(source)
        self.draft = draft_of(self.schema)
        _check_metaschema(self.draft, self.schema)
        specification = specification_with(str(self.draft.META_SCHEMA.get("$schema") or self.draft.META_SCHEMA["id"]))
        resource = specification.create_resource(self.schema)
        base = resource.id() or ""
        self.registry: Registry[Any] = REGISTRY.with_resource(base, resource)
        self.ignores_ref_siblings = self.draft in (DRAFT_3, DRAFT_4, DRAFT_6, DRAFT_7)
        self.later_keywords = LATER.get(self.draft, frozenset())
        self.ignored: list[tuple[str, str]] = []  # path and keyword of what only later drafts know
        self.root = Sub(self.schema, "", self.registry.resolver(base), self.ignores_ref_siblings)
        make: Callable[..., SchemaValidator] = self.draft
        self.validator = make(self.schema, registry=self.registry, format_checker=self.draft.FORMAT_CHECKER)
        _check_references(self)

    def validator_at(self, sub: Sub) -> SchemaValidator:
        """A validator for one subschema, its references resolved where it stands."""
        if sub.path.startswith("<") or sub.resolver is not self.root.resolver:
            return self.validator.evolve(schema=sub.schema, _resolver=sub.resolver)
        return self.validator.evolve(schema=sub.schema)


def _parse_source(source: str) -> Any:
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise ConstraintError(f"the JSON Schema has {size} bytes, limit {MAX_SOURCE_BYTES}: make it smaller")
    if not source.strip():
        raise ConstraintError("the JSON Schema is empty: write at least one keyword, such as type or enum")
    try:
        schema = load_json(source)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConstraintError(f"the JSON Schema is not JSON: {error.msg} at {where}") from error
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the JSON Schema is not JSON: {describe(error)}") from error
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"the JSON Schema is a {type(schema).__name__}: it must be an object")
    if schema is False:
        raise ConstraintError("the JSON Schema `false` accepts no document: describe what you want instead")
    _check_depth(schema, "", 0)
    num_objects = _num_objects(schema)
    if num_objects > MAX_OBJECTS:
        raise ConstraintError(
            f"the JSON Schema has {num_objects} objects, limit {MAX_OBJECTS}: move what repeats into $defs"
        )
    return schema


def _check_depth(node: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ConstraintError(f"the JSON Schema is nested deeper than {MAX_DEPTH} levels at {path[:80]}...: flatten it")
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        _check_depth(child, f"{path}/{key}", depth + 1)


def _num_objects(node: Any) -> int:
    if isinstance(node, dict):
        return 1 + sum(map(_num_objects, node.values()))
    return sum(map(_num_objects, node)) if isinstance(node, list) else 0


def _check_metaschema(draft: Any, schema: Any) -> None:
    try:
        draft.check_schema(schema)
    except SchemaError as error:
        path = "".join("/" + escape_pointer(str(part)) for part in error.absolute_path) or "/"
        what = error.message
        if error.validator == "format" and error.validator_value == "regex":
            what = f"{error.instance!r} is no regex of Python: write \\p{{...}} and the like as ranges"
        raise ConstraintError(f"invalid JSON Schema at {path}: {shorten(what)}") from error


def _check_references(document: JsonSchema) -> None:
    """Refuse references out of the document, pointless cycles and minima that no document could reach."""
    seen: set[int] = set()
    queue = [document.root]
    while queue:
        sub = queue.pop()
        if not isinstance(sub.schema, dict) or id(sub.schema) in seen:
            continue
        seen.add(id(sub.schema))
        if sub is not document.root and "$schema" in sub.schema and draft_of(sub.schema) is document.draft:
            del sub.schema["$schema"]  # jsonschema would go on with its own reading of the draft
        for keyword in document.later_keywords & sub.schema.keys():
            del sub.schema[keyword]
            document.ignored.append((sub.path, keyword))
        if isinstance(sub.schema.get("$ref"), str):
            queue.append(sub.target())
        _check_limits(sub)
        _check_cycle(sub, document.ignores_ref_siblings)
        queue += subschemas(sub)


def _check_limits(sub: Sub) -> None:
    for keyword in MINIMA:
        value = sub.schema.get(keyword)
        if isinstance(value, int | float) and value > MAX_MIN_ITEMS:
            raise ConstraintError(f"{keyword} at {sub.path}/{keyword} is {value}, limit {MAX_MIN_ITEMS}: lower it")


def _check_cycle(start: Sub, ignores_ref_siblings: bool) -> None:
    """Refuse a subschema that leads back to itself without describing any content."""
    seen: set[int] = set()
    queue = list(_in_place(start, ignores_ref_siblings))
    while queue:
        sub = queue.pop()
        if sub.schema is start.schema:
            where = start.path or "/"
            raise ConstraintError(
                f"the schema at {where} refers back to itself without describing any content: "
                "put the reference under a property or items, or remove it"
            )
        if isinstance(sub.schema, dict) and id(sub.schema) not in seen:
            seen.add(id(sub.schema))
            queue += _in_place(sub, ignores_ref_siblings)


def _in_place(sub: Sub, ignores_ref_siblings: bool) -> Iterator[Sub]:
    if isinstance(sub.schema.get("$ref"), str):
        yield sub.target()
        if ignores_ref_siblings:
            return
    for keyword in IN_PLACE:
        value = sub.schema.get(keyword)
        if keyword in LISTS and isinstance(value, list):
            yield from (sub.child(keyword, index) for index in range(len(value)))
        elif isinstance(value, dict):
            yield sub.child(keyword)


def subschemas(sub: Sub) -> Iterator[Sub]:
    """Every subschema directly inside ``sub``, definitions included, references not followed."""
    for keyword, value in sub.schema.items():
        if keyword in MAPS and isinstance(value, dict):
            yield from (sub.child(keyword, key) for key in value)
        elif (keyword in LISTS or keyword == "items") and isinstance(value, list):
            yield from (sub.child(keyword, index) for index in range(len(value)))
        elif keyword == "dependencies" and isinstance(value, dict):
            yield from (sub.child(keyword, key) for key, schema in value.items() if isinstance(schema, dict))
        elif (keyword in SINGLES or keyword == "items") and isinstance(value, dict):
            yield sub.child(keyword)


class JsonValidator:
    """Parses finished text strictly and validates it against one schema; compiled once, used for every row."""

    def __init__(self, validator: SchemaValidator) -> None:
        self._validator = validator

    def check(self, text: str) -> tuple[Any, str | None]:
        """Return (value, None) if valid, (value, message) if the schema forbids it, (None, message) if not JSON."""
        try:
            value = load_json(text)
        except (ValueError, RecursionError) as error:
            return None, f"not JSON: {describe(error)}"
        try:
            if self._validator.is_valid(value):
                return value, None
            worst = best_match(self._validator.iter_errors(value))
        except (RecursionError, OverflowError) as error:
            return value, f"cannot be validated: {describe(error)}"
        return value, f"{worst.json_path}: {shorten(worst.message)}" if worst else "not valid"


def load_json(text: str) -> Any:
    """Parse JSON. Raises ValueError also for NaN, numbers out of range, duplicate keys and lone surrogates."""
    value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float)
    if _MAYBE_SURROGATE.search(text) and _has_surrogate(value):
        raise ValueError("a lone surrogate, which no file can store")
    return value


_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shorten(repr(twice))} stands twice in one object")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {shorten(digits)} is beyond 64-bit floats")
    return value


def _has_surrogate(value: Any) -> bool:
    return any(0xD800 <= ord(char) <= 0xDFFF for char in json.dumps(value, ensure_ascii=False))


def describe(error: Exception) -> str:
    """A short message for an exception of the JSON parser or validator."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return shorten(str(error))


def shorten(text: str, limit: int = 200) -> str:
    """Cut ``text`` in its middle to about ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def escape_pointer(part: str) -> str:
    """One step of a JSON pointer."""
    return part.replace("~", "~0").replace("/", "~1")


def fragment(path: str) -> str:
    """A JSON pointer as a URI fragment for ``$ref``."""
    return "#" + quote(path, safe="/~")
