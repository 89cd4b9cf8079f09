"""Limits of tenants by a clock that the test moves."""

import pytest

from mesh.controller.tenants import TenantMeter
from mesh.domain.access import NOBODY, TenantLimits, TenantName
from mesh.domain.errors import Refused
from mesh.sim.clock import HeapClock

A, B = TenantName("a"), TenantName("b")


def metered(limits: TenantLimits) -> tuple[TenantMeter, HeapClock]:
    clock = HeapClock()
    return TenantMeter(lambda tenant: limits if tenant == A else TenantLimits(), clock), clock


def calls(meter: TenantMeter, count: int, tenant: TenantName = A, tokens: int = 0) -> int:
    """How many of so many were admitted, one after the other."""
    admitted = 0
    for _ in range(count):
        try:
            with meter.call(tenant) as taken:
                taken.tokens = tokens
                admitted += 1
        except Refused:
            pass
    return admitted


def test_calls_in_a_second_are_limited_and_others_are_not() -> None:
    meter, clock = metered(TenantLimits(requests_per_s=4.0))
    assert calls(meter, 50) == 4
    clock.advance(0.5)
    assert calls(meter, 50) == 2
    clock.advance(100.0)
    assert calls(meter, 50) == 4, "what was not used is not saved up"
    assert calls(meter, 50, B) == calls(meter, 50, NOBODY) == 50


def test_who_has_used_a_minutes_tokens_waits_until_some_are_there_again() -> None:
    meter, clock = metered(TenantLimits(tokens_per_min=600.0))
    assert calls(meter, 5, tokens=400) == 2, "the second overdraws"
    with pytest.raises(Refused, match="limit is 600") as raised, meter.call(A):
        pass
    clock.advance(raised.value.retry_after_s)
    assert calls(meter, 1) == 1


def test_a_call_that_ends_makes_room_for_the_next() -> None:
    meter, _ = metered(TenantLimits(running=1))
    with meter.call(A):
        assert calls(meter, 3) == 0
    assert calls(meter, 3) == 3
