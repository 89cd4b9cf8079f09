"""A CPU node that stands still for a second takes requests as before soon after; one whose
neighbours come and go keeps its promises; one whose profile has taken up what its factor explained
takes as many requests as before.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.compute.learned_correction import LearnedCorrection
from mesh.compute.refining import Refinement
from mesh.domain.ids import NodeId
from mesh.domain.outcome import Outcome
from mesh.domain.profile import Grid, Profile
from mesh.sim.checking import FaultyRun
from mesh.sim.cluster import Arrival
from mesh.sim.faults import Fault, FaultKind
from mesh.sim.scenario import plan
from tests.sim.scenarios import scenario

NODE = """
[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 256

[workload]
duration_s = 100
requests_per_s = 1.0
input_tokens = [1, 1]
output_tokens = [1, 1]
"""
RESIDENT = """
[[deployments]]
name = "{}"
model = "{}"
context_tokens_max = 2048
scaling = {{ replicas_min = 1, replicas_max = 1 }}
slo = {{ ttft_s = {}, tpot_s = {} }}
"""
CHAT = RESIDENT.format("chat", "llama-2-7b", 2.0, 0.15)
"""A decode takes 0.1 s."""
TWO = RESIDENT.format("a", "llama-3.2-3b", 2.0, 0.25) + RESIDENT.format(
    "b", "llama-3.2-3b", 3.0, 0.4
)
AT_S, FREEZE_S, BACK_S = 20.0, 1.0, 3.0
TOLD_S, SLOWER = 15.0, 1.4


def run(
    folder: Path, deployments: str, faults: list[Fault], calls: list[Arrival]
) -> tuple[FaultyRun, tuple[Outcome, ...]]:
    even = replace(scenario(folder, NODE + deployments), ideal=True)
    faulty = FaultyRun(plan(even), faults, check=True)
    return faulty, faulty.run(calls)


def admitted(
    faulty: FaultyRun, outcomes: tuple[Outcome, ...], after_s: float
) -> tuple[int, int, int]:
    """Counts those that arrived so long after the start: all, the admitted, and those of them in
    time.
    """
    known = [o for o in outcomes if o.arrival_s >= faulty.cell.started_s + after_s]
    taken = [outcome for outcome in known if outcome.tokens_s]
    return len(known), len(taken), sum(o.finished and o.late_s <= 0 for o in taken)


def fault(kind: FaultKind, at_s: float, lasts_s: float, size: float) -> Fault:
    return Fault(
        at_s=at_s, kind=kind, node_id=NodeId("cpu"), until_s=at_s + lasts_s, size=size, chance=0.0
    )


@pytest.mark.parametrize("gap_s", [0.5, 1.0])
def test_admissions_are_back_to_normal_three_seconds_after_a_freeze_of_one(
    tmp_path: Path, gap_s: float
) -> None:
    freeze = fault(FaultKind.FREEZE, AT_S, lasts_s=5.0, size=FREEZE_S)
    calls = [Arrival(5.0 + gap_s * n, "chat", 100, 20) for n in range(round(40 / gap_s))]
    faulty, outcomes = run(tmp_path, CHAT, [freeze], calls)
    assert faulty.counts().faults == (("freeze", 1),)
    (instance,) = faulty.cell.core.cell.instances.values()
    assert instance.stalls.count == 1
    assert instance.stalls.longest_s == pytest.approx(FREEZE_S)
    known, taken, met = admitted(faulty, outcomes, AT_S + FREEZE_S + BACK_S)
    assert known == taken == met > 20


def test_promises_are_kept_beside_a_neighbour_that_comes_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every twelve seconds, the neighbour takes a third of the speed for five. It has been there
    for two when the first of the requests come that count. Promises that rest on what is true now
    are not kept.
    """
    spells = [fault(FaultKind.WRONG_PROFILE, 15.0 + 12.0 * n, 5.0, 1.5) for n in range(6)]
    draw, at_s = random.Random(1), 5.0
    calls: list[Arrival] = []
    while at_s < 95.0:
        at_s += draw.expovariate(3.0)
        of, together = draw.choice("ab"), draw.choice((1, 2, 3, 6))
        sizes = [(draw.randint(32, 400), draw.randint(10, 100)) for _ in range(together)]
        calls += [Arrival(at_s, of, *size) for size in sizes]
    known, taken, met = admitted(*run(tmp_path, TWO, spells, calls), after_s=17.0)
    assert known / 3 < taken < known * 2 / 3, "more is offered than it can do"
    assert met >= taken * 0.995

    monkeypatch.setattr(LearnedCorrection, "planned", LearnedCorrection.factor)
    _, taken_at_once, met_at_once = admitted(*run(tmp_path, TWO, spells, calls), after_s=17.0)
    assert taken_at_once - met_at_once > 2 * (taken - met)


def test_as_many_are_taken_after_a_refined_profile_was_told_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is slower for good, until all of that goes from the factor into the profile."""
    calls = [Arrival(5.0 + n, "chat", 100, 20) for n in range(30)]
    told: list[float] = []

    def slower(grid: Grid) -> Grid:
        seconds = tuple(tuple(point_s * SLOWER for point_s in row) for row in grid.seconds)
        return replace(grid, seconds=seconds)

    def once(self: Refinement, now_s: float, factor: float) -> Profile | None:
        profile = self._profile
        if told or now_s < TOLD_S:
            return None
        told.append(now_s)
        return replace(profile, prefill=slower(profile.prefill), decode=slower(profile.decode))

    def taken() -> int:
        lasts = fault(FaultKind.WRONG_PROFILE, 1.0, 200.0, SLOWER)
        return admitted(*run(tmp_path, CHAT, [lasts], calls), after_s=TOLD_S)[1]

    monkeypatch.setattr(Refinement, "refined", once)
    taken_after = taken()
    assert taken_after > 15
    assert len(told) == 1
    told.clear()
    monkeypatch.setattr(LearnedCorrection, "refined", lambda *_: None)
    assert taken() < taken_after / 2, "what is counted twice"
