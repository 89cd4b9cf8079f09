"""JSON drawn by the schemas of a document: values that fit one, and values with something wrong.

It knows the keywords that pydantic writes, and takes some 0.1 ms for a body of a call; hypothesis
takes a thousand times as long for bodies with so many members. The same random numbers draw the
same values. Before: `/openapi.json`. After: `fuzz_http`, which asks.
"""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

DEPTH_MAX = 5
"""Within so many levels a value may have optional members, and lists items."""
ITEMS_MAX = 3
CHARS_MAX = 40
_NUMBERS = (2**31 - 1, 2**32, 2**53 + 1, 2**63, -(2**63), 10**18, 10**400)
_FLOATS = (0.5, -1.5, 1e-9, 1e300, 5e-324)
_WORDS = ("", "hi", "user", "assistant", "system", "tool", "a", "weather", "<|im_end|>", "\0")
_CHARS = 'aé\u200f𝄞\n"\\{}<| '
_HALF = "\ud800"
"""Half a character, for which a whole body is refused: one of a few hundred texts."""


class Drawing:
    """`words` are drawn among other texts: names that mean something to whom is asked."""

    def __init__(
        self, draw: random.Random, schemas: Mapping[str, Any], words: Sequence[str] = ()
    ) -> None:
        self._draw = draw
        self._schemas = schemas
        self._words = words

    def resolved(self, schema: Any) -> Any:
        """The schema that is meant, where one refers to another."""
        while isinstance(schema, Mapping) and "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def fitting(self, schema: Any, depth: int = 0) -> Any:
        """A value that the schema takes."""
        schema = self.resolved(schema)
        if not isinstance(schema, Mapping):
            return self.anything(depth)
        kinds = schema.get("anyOf", schema.get("oneOf"))
        if kinds is not None:
            told = [kind for kind in kinds if kind.get("type") != "null"]
            few = told if told and self._draw.random() < 0.8 else kinds
            return self.fitting(self._draw.choice(few), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._draw.choice(schema["enum"])
        match schema.get("type"):
            case "null":
                return None
            case "boolean":
                return self._draw.random() < 0.5
            case "integer":
                return self._within(schema, self._integer())
            case "number":
                return self._within(schema, self._number())
            case "string":
                return self.text(schema)
            case "array":
                least = schema.get("minItems", 0)
                most = max(least, 0 if depth >= DEPTH_MAX else ITEMS_MAX)
                count = self._draw.randint(least, min(most, schema.get("maxItems", most)))
                return [self.fitting(schema.get("items", True), depth + 1) for _ in range(count)]
            case "object":
                return self._object(schema, depth)
        return self.anything(depth)

    def members(self, schema: Any, names: Sequence[str]) -> dict[str, Any]:
        """These members of an object."""
        return {name: self.fitting(schema["properties"][name], 1) for name in names}

    def anything(self, depth: int = 0) -> Any:
        """A value of any type."""
        deeper = depth < DEPTH_MAX
        match self._draw.randrange(8 if deeper else 6):
            case 0:
                return None
            case 1:
                return self._draw.random() < 0.5
            case 2:
                return self._integer()
            case 3:
                return self._number()
            case 6:
                return [self.anything(depth + 1) for _ in range(self._draw.randint(0, ITEMS_MAX))]
            case 7:
                count = self._draw.randint(0, ITEMS_MAX)
                return {self.text(): self.anything(depth + 1) for _ in range(count)}
        return self.text()

    def damaged(self, value: Any) -> Any:
        """The value, in which one to three members or items are others, gone or more."""
        for _ in range(self._draw.randint(1, 3)):
            places = list(_places(value))
            if not places:
                return self.anything()
            inside, at = self._draw.choice(places)
            match self._draw.randrange(4):
                case 0:
                    del inside[at]
                case 1 if isinstance(inside, dict):
                    inside[self.text()] = self.anything(DEPTH_MAX - 1)
                case _:
                    inside[at] = self.anything(DEPTH_MAX - 2)
        return value

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        needed, known = schema.get("required", ()), schema.get("properties", {})
        share = 0.0 if depth >= DEPTH_MAX else self._draw.choice((0.1, 0.5))
        drawn = {
            name: self.fitting(one, depth + 1)
            for name, one in known.items()
            if name in needed or self._draw.random() < share
        }
        further = schema.get("additionalProperties", True)
        if further is not False and self._draw.random() < share:
            drawn[self.text() or "x"] = self.fitting(further, depth + 1)
        return drawn

    def _integer(self) -> int:
        if self._draw.random() < 0.8:
            return self._draw.randint(-2, 9)
        return self._draw.choice(_NUMBERS)

    def _number(self) -> float:
        if self._draw.random() < 0.5:
            return round(self._draw.uniform(0, 2), 2)
        return self._draw.choice((self._integer(), *_FLOATS))

    def _within(self, schema: Mapping[str, Any], number: Any) -> Any:
        """The number, or one at a bound of the schema that it does not keep."""
        least = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
        most = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        if number < least or (number == least and "exclusiveMinimum" in schema):
            return least + 1 if "exclusiveMinimum" in schema else least
        if number > most or (number == most and "exclusiveMaximum" in schema):
            return most - 1 if "exclusiveMaximum" in schema else most
        return number

    def text(self, schema: Mapping[str, Any] = MappingProxyType({})) -> str:
        most = min(schema.get("maxLength", CHARS_MAX), CHARS_MAX)
        length = self._draw.randint(min(schema.get("minLength", 0), most), most)
        drawn = "".join(self._draw.choices(_CHARS, k=length))
        fits = [
            word
            for word in (*_WORDS, *self._words)
            if re.search(schema.get("pattern", ""), word)
            and schema.get("minLength", 0) <= len(word) <= schema.get("maxLength", len(word))
        ]
        if "pattern" not in schema and self._draw.random() < 0.003:
            return _HALF
        if fits and ("pattern" in schema or self._draw.random() < 0.7):
            return self._draw.choice(fits)
        return drawn


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or object inside with each index or name in it."""
    if not isinstance(value, dict | list):
        return
    for at in value if isinstance(value, dict) else range(len(value)):
        yield value, at
        yield from _places(value[at])
