"""JSON schemas as llguidance takes them, and whether anything finite fits one.

A schema that becomes part of another one keeps its references, which are resolved from its own
root. Before: a client's schema, as data. After: `grammars` and `tool_calls`, which write it.
"""

import re
from collections.abc import Iterator, Set
from typing import Any
from urllib.parse import unquote

FORMATS = frozenset(
    (
        *("date", "time", "date-time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "unknown"),
    )
)
"""Those that llguidance keeps to. JSON Schema has others ignored (draft 2020-12, section 7.2.1 of
its validation): pydantic writes `path`, `password` and more."""
UNENFORCED = frozenset(
    (
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas"),
        *("dependencies", "not", "if", "then", "else", "$recursiveRef", "$recursiveAnchor"),
    )
)
"""The keywords that llguidance refuses."""
_NEUTRAL = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""Values of those that ask for nothing."""
_UNREADABLE = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
"""What of a pattern an automaton cannot follow: looking around, and what was matched before."""
PASSES_MAX = 64
"""Over the references of a schema; one that needs more is taken to have an end."""
_MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
_DATA = frozenset(("const", "enum", "default", "examples", "example", "required"))
_NAMES = frozenset(("$id", "$anchor", "$dynamicAnchor", "$schema"))


def embedded(schema: Any, root: str = "#") -> Any:
    """The schema, to be found at `root`, a pointer: references lead there, and formats that mean
    nothing to llguidance are left out. Raises RecursionError.
    """
    names: dict[str, str] = {}
    for node, at, base, base_id in _nodes(schema, root, root, ""):
        if isinstance(own := node.get("$id"), str):
            names[own.rstrip("#")] = at
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := node.get(key), str):
                names[f"{base}#{anchor}"] = at
                if base_id:
                    names[f"{base_id}#{anchor}"] = at
    return _written(schema, root, root, names)


def loosened(schema: Any) -> Any:
    """The schema without what llguidance cannot keep to, so that more fits it: exactly one of
    several, which may overlap, becomes any of them. Raises RecursionError.
    """
    if not isinstance(schema, dict):
        return schema
    new = dict[str, Any]()
    for key, value in schema.items():
        unreadable = key == "pattern" and isinstance(value, str) and _UNREADABLE.search(value)
        if key in UNENFORCED or unreadable:
            continue
        if key in _DATA:
            new[key] = value
        elif key in _MAPS and isinstance(value, dict):
            new[key] = {name: loosened(one) for name, one in value.items()}
        elif isinstance(value, list):
            new[key] = [loosened(one) for one in value]
        else:
            new[key] = loosened(value)
    if "oneOf" in new:
        one_of, both = {"anyOf": new.pop("oneOf")}, new.get("allOf", [])
        if "anyOf" not in new:
            new |= one_of
        elif isinstance(both, list):
            new["allOf"] = [*both, one_of]
    return new


def can_end(schema: Any) -> bool:
    """Whether a finite value fits it, as far as its references tell. Raises RecursionError."""
    refs = {
        ref: _target(schema, ref)
        for node, *_ in _nodes(schema, "#", "#", "")
        if isinstance(ref := node.get("$ref"), str)
    }
    finite: set[str] = {ref for ref, target in refs.items() if target is None}
    for _ in range(PASSES_MAX):
        more = {r for r, target in refs.items() if r not in finite and _ends(target, finite)}
        if not more:
            return _ends(schema, finite)
        finite |= more
    return True


def _children(node: dict[str, Any], at: str) -> Iterator[tuple[str, str | int | None, Any, str]]:
    """Values of a schema's members that may be schemas: member, key in it, value, pointer."""
    for key, value in node.items():
        place = f"{at}/{_escaped(key)}"
        if key in _DATA:
            continue
        if key in _MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield key, name, one, f"{place}/{_escaped(name)}"
        elif isinstance(value, list):
            for n, one in enumerate(value):
                yield key, n, one, f"{place}/{n}"
        else:
            yield key, None, value, place


def _nodes(
    node: Any, at: str, base: str, base_id: str
) -> Iterator[tuple[dict[str, Any], str, str, str]]:
    """All schemas in one: each with its pointer, and pointer and id of what it counts from."""
    if not isinstance(node, dict):
        return
    if isinstance(own := node.get("$id"), str):
        base, base_id = at, own.rstrip("#")
    yield node, at, base, base_id
    for _, _, value, place in _children(node, at):
        yield from _nodes(value, place, base, base_id)


def _written(node: Any, at: str, base: str, names: dict[str, str]) -> Any:
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$id"), str):
        base = at
    new: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("$ref", "$dynamicRef") and isinstance(value, str):
            new["$ref"] = _moved(value, base, names)
        elif _means_nothing(key, value):
            continue
        elif key not in _NAMES or not isinstance(value, str):
            new[key] = value
            if isinstance(value, list | dict) and key not in _DATA:
                new[key] = value.copy()
    for key, name, value, place in _children(node, at):
        if isinstance(value, dict):
            written = _written(value, place, base, names)
            if name is None:
                new[key] = written
            else:
                new[key][name] = written
    return new


def _means_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    return key in _NEUTRAL and value is _NEUTRAL[key]


def _moved(ref: str, base: str, names: dict[str, str]) -> str:
    """A reference, counted from the whole."""
    resource, _, fragment = ref.partition("#")
    if resource:
        if resource not in names:
            return ref
        base = names[resource]
    if not fragment:
        return base
    if fragment.startswith("/"):
        return base + fragment
    return names.get(f"{base}#{fragment}", names.get(ref, ref))


def _target(schema: Any, ref: str) -> Any:
    """What a pointer leads to; `None` for what is no pointer, or leads nowhere."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    for step in unquote(ref).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return None
    return schema


def _ends(node: Any, finite: Set[str]) -> bool:
    if not isinstance(node, dict):
        return True
    if isinstance(ref := node.get("$ref"), str) and ref not in finite:
        return False
    if "const" in node or "enum" in node:
        return True
    for key in ("anyOf", "oneOf"):
        choices = node.get(key)
        if isinstance(choices, list) and not any(_ends(one, finite) for one in choices):
            return False
    needed = list(node["allOf"]) if isinstance(node.get("allOf"), list) else []
    if node.get("type") in ("object", ["object"]):
        members, required = node.get("properties"), node.get("required")
        if isinstance(members, dict) and isinstance(required, list):
            needed += [members[name] for name in required if str(name) in members]
    elif node.get("type") in ("array", ["array"]):
        least, first = node.get("minItems"), node.get("prefixItems")
        first = first if isinstance(first, list) else []
        if isinstance(least, int) and least > 0:
            needed += first[:least]
            needed += [node.get("items")] if least > len(first) else []
    return all(_ends(one, finite) for one in needed)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
