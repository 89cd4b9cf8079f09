"""Where agents run: those that run stay, nothing is started twice, and what is too many drains."""

from hypothesis import given
from hypothesis import strategies as st

from mesh_fleet.choosing import Place, Use, choose

PLACES = st.lists(
    st.builds(
        Place,
        machine=st.sampled_from("abcdef"),
        device=st.sampled_from(["cpu0", "gpu0", "gpu1"]),
        use=st.sampled_from(Use),
        since=st.integers(0, 9),
    ),
    unique_by=lambda place: place.name,
)


def at(machine: str, use: Use, since: int = 0) -> Place:
    return Place(machine=machine, device="cpu0", use=use, since=since)


@given(places=PLACES, wanted=st.integers(0, 9))
def test_as_many_are_kept_as_are_wanted_and_none_that_runs_is_left_alone(
    places: list[Place], wanted: int
) -> None:
    chosen = choose(places, wanted)
    count = {use: sum(place.use is use for place in places) for use in Use}
    running = count[Use.KEPT] + count[Use.FOUND]
    assert {place for place in places if place.use is Use.FOUND} <= set(chosen.keep)
    assert {place.use for place in chosen.keep} <= {Use.FOUND, Use.FREE}
    assert {place.use for place in chosen.drain} <= {Use.KEPT}
    assert len(chosen.drain) == max(count[Use.KEPT] - wanted, 0)
    started = sum(place.use is Use.FREE for place in chosen.keep)
    assert started == min(count[Use.FREE], max(wanted - running, 0))


def test_the_agents_that_came_last_are_drained() -> None:
    first, last = at("b", Use.KEPT, since=1), at("a", Use.KEPT, since=2)
    assert choose([last, first], 1).drain == (last,)


def test_a_found_agent_comes_before_a_free_machine() -> None:
    free, found = at("a", Use.FREE), at("b", Use.FOUND)
    assert choose([free, found], 1).keep == (found,)


def test_an_agent_that_drains_is_not_waited_for() -> None:
    leaving, free = at("a", Use.LEAVING, since=1), at("b", Use.FREE)
    assert choose([leaving, free], 1).keep == (free,)
