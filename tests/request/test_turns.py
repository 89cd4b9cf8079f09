"""Least headroom first."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.ids import InstanceId
from mesh.request.turns import next_turn


@dataclass(frozen=True)
class Waiting:
    instance_id: InstanceId
    headroom: float | None

    def least_headroom_s(self, now_s: float) -> float | None:
        return self.headroom


HEADROOMS = st.lists(st.none() | st.floats(-10, 10), max_size=8)


@given(HEADROOMS)
def test_the_turn_goes_to_the_least_headroom_and_never_to_one_without_work(
    headrooms: list[float | None],
) -> None:
    instances = [Waiting(InstanceId(f"i{n}"), h) for n, h in enumerate(headrooms)]
    chosen = next_turn(instances, 0.0)
    working = [i for i in instances if i.headroom is not None]
    if not working:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.headroom == min(i.headroom for i in working if i.headroom is not None)


def test_ties_go_to_the_smaller_id_whatever_the_order() -> None:
    a, b = Waiting(InstanceId("a"), 1.0), Waiting(InstanceId("b"), 1.0)
    assert next_turn([b, a], 0.0) is a
    assert next_turn([a, b], 0.0) is a
