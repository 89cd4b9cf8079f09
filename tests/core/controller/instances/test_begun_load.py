"""What a load is expected to take as it begins."""

from dataclasses import replace
from math import inf

import pytest

from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.messages import LoadInstance
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadRate, LoadTier
from tests.core.cells import CellUnderTest, commands, deployment, hello, request

PATIENT = Slo(ttft_s=8.0)


def begun(*, shares_weights: bool, busy_load_factor: float) -> tuple[InstanceEntry, InstanceEntry]:
    """Loads of one model, 1 s, and 0.25 s with weights that are there: of `a`, as it begins, and of
    `b`, which waits for its end, as its caller does.
    """
    cell = CellUnderTest(*(deployment(name, slo=PATIENT) for name in ("a", "b")))
    tiers = ((LoadTier.DISK, 1.0), (LoadTier.HOST, 0.25))
    link, _ = cell.join(
        replace(
            hello(),
            shares_weights=shares_weights,
            busy_load_factor=busy_load_factor,
            load_rates=tuple((tier, LoadRate(fixed_s=s, bytes_per_s=inf)) for tier, s in tiers),
        )
    )
    (first,) = commands(cell.invoke(request("r1", of="a", max_tokens=400)), LoadInstance)
    cell.invoke(request("r2", of="b"))
    cell.now_s += 1.0
    (second,) = commands(cell.loaded(link, first.instance_id), LoadInstance)
    instances = cell.core.cell.instances
    return instances[first.instance_id], instances[second.instance_id]


def test_a_load_is_expected_beside_the_one_who_waited_for_the_load_before() -> None:
    first, second = begun(shares_weights=False, busy_load_factor=2.0)
    assert len(first.requests) == 1
    assert first.load_expected_s == pytest.approx(1.0)
    assert 1.1 < second.load_expected_s < 1.5, "its answer takes less time than the load"
    assert second.load_s == pytest.approx(2.0), "planned beside all along"


def test_a_load_takes_no_weights_of_its_own_instance() -> None:
    first, second = begun(shares_weights=True, busy_load_factor=1.0)
    assert first.load_expected_s == pytest.approx(1.0)
    assert second.load_expected_s == pytest.approx(0.25)
