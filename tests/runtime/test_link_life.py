"""When a node dials anew, and after which end it does not."""

import random

from mesh.runtime.link_life import LinkLife, LinkLimits


def life(seed: int = 1) -> LinkLife:
    return LinkLife(random.Random(seed), LinkLimits())


def test_pauses_double_are_bounded_and_spread() -> None:
    pauses = []
    for seed in range(50):
        made = life(seed)
        pauses.append([made.end("Unavailable") or 0.0 for _ in range(12)])
    assert all(0.1 <= dials[0] <= 0.2 for dials in pauses), "one failure has doubled it once"
    assert all(2.5 <= dials[-1] <= 5.0 for dials in pauses)
    assert len({dials[3] for dials in pauses}) > 40


def test_a_welcome_begins_anew() -> None:
    made = life()
    for _ in range(9):
        made.end("Unavailable")
    made.welcome()
    pause_s = made.end("Unavailable")
    assert pause_s is not None
    assert pause_s <= 0.1
    assert not made.welcomed


def test_what_waiting_does_not_heal_ends_it_before_a_welcome_alone() -> None:
    for error in ("AlreadyExists", "InvalidInput", "Unauthenticated", "Forbidden"):
        made = life()
        assert made.end(error) is None
        made.welcome()
        assert made.end(error) is not None
