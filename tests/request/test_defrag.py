"""Whom an instance may preempt."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.ids import InstanceId
from mesh.request.defrag import victims


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    instance_id: InstanceId
    batch: int
    promised_bytes: int


def neighbour(name: str, batch: int, promised_bytes: int = 10) -> Neighbour:
    return Neighbour(instance_id=InstanceId(name), batch=batch, promised_bytes=promised_bytes)


def taken(*neighbours: Neighbour, batch: int = 4, missing_bytes: int = 10) -> str:
    found = victims(neighbours, batch=batch, missing_bytes=missing_bytes)
    return "".join(each.instance_id for each in found)


def test_the_smallest_batch_goes_first_and_ties_go_by_id() -> None:
    assert taken(neighbour("a", 3), neighbour("c", 1), neighbour("b", 1)) == "b"
    assert taken(neighbour("a", 3), neighbour("c", 1), neighbour("b", 1), missing_bytes=20) == "bc"


def test_equals_and_larger_ones_never_go() -> None:
    assert taken(neighbour("a", 4), neighbour("b", 5)) == ""
    assert taken(neighbour("a", 3), neighbour("b", 4), missing_bytes=11) == ""


def test_nobody_goes_in_vain() -> None:
    assert taken(neighbour("a", 1, 5), neighbour("b", 2, 10)) == "b"
    assert taken(neighbour("a", 1), missing_bytes=0) == ""


NEIGHBOURS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), max_size=6).map(
    lambda each: [neighbour(f"i{n}", batch, size) for n, (batch, size) in enumerate(each)]
)


@given(NEIGHBOURS, st.integers(1, 6), st.integers(1, 60))
def test_what_goes_is_enough_and_none_of_it_is_needless(
    neighbours: list[Neighbour], batch: int, missing_bytes: int
) -> None:
    found = victims(neighbours, batch=batch, missing_bytes=missing_bytes)
    freed = sum(each.promised_bytes for each in found)
    smaller = [each for each in neighbours if each.batch < batch]
    assert all(each in smaller for each in found)
    if not found:
        assert sum(each.promised_bytes for each in smaller) < missing_bytes
    else:
        assert freed >= missing_bytes
        assert all(freed - each.promised_bytes < missing_bytes for each in found)
