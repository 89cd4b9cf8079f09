"""Values are Structs that the standard library takes for dataclasses."""

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any

import pytest

from mesh.domain.values import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x_m: int
    name: str = ""
    tags: dict[str, int] = field(default_factory=dict)

    @property
    def doubled_m(self) -> int:
        return 2 * self.x_m


@dataclass(slots=True, eq=False)
class Counter:
    counted: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    size: int


def test_a_value_is_equal_hashed_and_shown_by_its_fields() -> None:
    one, same = Point(x_m=1), Point(x_m=1)
    assert (one, repr(one)) == (same, "Point(x_m=1, name='', tags={})")
    assert one != Point(x_m=2)
    assert one.tags is not same.tags
    assert one.doubled_m == 2
    assert copy.copy(one) == pickle.loads(pickle.dumps(one)) == one


def test_the_standard_library_takes_it_for_a_dataclass() -> None:
    one = Point(x_m=1, name="a")
    assert [each.name for each in dataclasses.fields(one)] == ["x_m", "name", "tags"]
    assert dataclasses.fields(Point)[0].type is int
    assert dataclasses.asdict(one) == {"x_m": 1, "name": "a", "tags": {}}
    assert dataclasses.is_dataclass(Point)
    assert dataclasses.replace(one, x_m=2).name == "a"


def test_replace_takes_both_kinds() -> None:
    assert replace(Point(x_m=1, name="a"), x_m=2) == Point(x_m=2, name="a")
    assert replace(Plain(size=1), size=2) == Plain(size=2)
    with pytest.raises(TypeError):
        replace(Point(x_m=1), y_m=2)  # type: ignore[call-arg]


def test_a_frozen_one_takes_no_assignment_and_another_does() -> None:
    point: Any = Point(x_m=1)
    with pytest.raises(AttributeError):
        point.x_m = 2
    counter = Counter()
    counter.counted += 1
    assert counter.counted == 1
    assert counter != Counter(1)


def test_what_a_struct_cannot_be_is_an_error() -> None:
    with pytest.raises(TypeError, match="no slots"):

        @dataclass(frozen=True)
        class Loose:
            size: int

    with pytest.raises(TypeError, match="a base with fields"):

        @dataclass(slots=True)
        class Further(Counter):
            size: int = 0

    with pytest.raises(TypeError, match="size"):

        @dataclass(slots=True)
        class Derived:
            size: int = field(init=False)
