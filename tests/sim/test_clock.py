"""The virtual clock: order, ties, and calls that make calls."""

from mesh.sim.clock import HeapClock


def test_calls_are_made_in_the_order_of_their_times_and_ties_as_they_were_asked() -> None:
    clock = HeapClock()
    made: list[tuple[str, float]] = []
    for name, at_s in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.call_at(at_s, lambda name=name: made.append((name, clock.now_s())))  # type: ignore[misc]
    while clock.step():
        pass
    assert made == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_time_never_goes_back() -> None:
    clock = HeapClock()
    seen: list[float] = []
    clock.call_at(5.0, lambda: clock.call_at(1.0, lambda: seen.append(clock.now_s())))
    while clock.step():
        pass
    assert seen == [5.0]


def test_run_until_leaves_later_calls_and_stands_at_its_time() -> None:
    clock = HeapClock()
    made: list[float] = []
    clock.call_at(1.0, lambda: made.append(1.0))
    clock.call_at(3.0, lambda: made.append(3.0))
    clock.run_until(2.0)
    assert (made, clock.now_s()) == ([1.0], 2.0)
