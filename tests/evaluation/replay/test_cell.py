"""The controller's counts beside the client's."""

from dataclasses import replace

from mesh.evaluation.replay.cell import CellCounts, counted
from tests.evaluation.replay.made import RESULTS

BEFORE = CellCounts(began_s=100.0, served={"chat": 5, "code": 1}, refused={"chat": 0, "code": 7})
AFTER = CellCounts(began_s=100.2, served={"chat": 8, "code": 2}, refused={"chat": 0, "code": 8})


def test_counts_that_agree_differ_by_nothing() -> None:
    found = counted(BEFORE, AFTER, RESULTS, ["chat", "code"])
    assert (found.difference, found.restarted) == (0.0, False)
    assert [(p.served, p.finished) for p in found.pairs] == [(3, 3), (1, 1)]
    assert [(p.refused, p.refused_seen) for p in found.pairs] == [(0, 0), (1, 1)]


def test_a_difference_is_a_share_of_what_was_counted() -> None:
    more = CellCounts(began_s=100.2, served={"chat": 13, "code": 2}, refused=AFTER.refused)
    found = counted(BEFORE, more, RESULTS, ["chat", "code"])
    assert [pair.difference for pair in found.pairs] == [5, 0]
    assert found.difference == 5 / 10


def test_a_controller_that_began_anew_is_noticed() -> None:
    anew = CellCounts(began_s=130.0, served={}, refused={})
    assert counted(BEFORE, anew, RESULTS, ["chat"]).restarted


def test_nothing_counted_differs_by_nothing() -> None:
    assert counted(BEFORE, BEFORE, (), ["chat"]).difference == 0.0


def test_what_the_prefix_cache_had_counts_from_the_replays_start() -> None:
    before = replace(BEFORE, prompt_tokens={"chat": 100}, cached_tokens={"chat": 90})
    after = replace(AFTER, prompt_tokens={"chat": 500}, cached_tokens={"chat": 190})
    chat, code = counted(before, after, RESULTS, ["chat", "code"]).pairs
    assert (chat.cached_share, code.cached_share) == (0.25, None)
