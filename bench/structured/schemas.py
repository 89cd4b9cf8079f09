"""Schemas to answer by: those that check-jsonschema ships, and made-up ones.

The shipped ones are of real files (workflows, pipelines, manifests), each whole and each of its
definitions. The made-up ones are objects of a few members, as calls of tools have them.
"""

import json
import random
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

Schema = Mapping[str, Any]
_WORDS = ("name", "city", "count", "price", "tags", "owner", "state", "size", "date", "active")


def shipped(count: int, seed: int) -> list[tuple[str, Schema]]:
    """With the name of each; drawn from all."""
    found = list(_shipped())
    return random.Random(seed).sample(found, min(count, len(found)))


def _shipped() -> Iterator[tuple[str, Schema]]:
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".json"):
            continue
        whole = json.loads(file.read_text(encoding="utf-8"))
        yield file.name, whole
        for keyword in ("definitions", "$defs"):
            for name in whole.get(keyword, {}):
                part = {"$ref": f"#/{keyword}/{name}", keyword: whole[keyword]}
                yield f"{file.name}#{name}", part


def made_up(count: int, seed: int) -> list[tuple[str, Schema]]:
    rng = random.Random(seed)
    return [(f"made up {n}", _object(rng, depth=2)) for n in range(count)]


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": names[: rng.randint(1, len(names))],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    kinds: list[Schema] = [
        {"type": "string", "maxLength": rng.randint(4, 24)},
        {"type": "integer", "minimum": 0, "maximum": 10 ** rng.randint(1, 6)},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"][: rng.randint(1, 3)]},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2,8}$"}]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": rng.randint(1, 4)},
    ]
    if depth > 0:
        kinds.append(_object(rng, depth))
    return rng.choice(kinds)
