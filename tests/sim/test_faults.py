"""Which faults a run has, and that nothing breaks under them."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from mesh.domain.actions import DeliverTokens, SendCommand, WantInstances
from mesh.domain.errors import InvalidInput
from mesh.domain.events import InvokeRequested, NodeReported
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.messages import Heartbeat, InstanceLoaded, OfferKv, SubmitRequest
from mesh.domain.steps import LoadTier
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart
from mesh.sim.checking import FaultyRun
from mesh.sim.faults import LEASES, SHAPES, FaultKind, Faults, check_faults, occurrences
from mesh.sim.scenario import Scenario, arrivals, faults, plan, read_scenario
from tests.support.depth import DEEP

NODES = [NodeId("a"), NodeId("b"), NodeId("c")]
FAULTS = Faults(until_s=600.0, per_minute=dict.fromkeys(FaultKind, 3.0))


def test_they_follow_from_the_seed_and_a_further_kind_leaves_the_others_alone() -> None:
    drawn = occurrences(FAULTS, NODES, 5)
    assert drawn == occurrences(FAULTS, NODES, 5)
    assert drawn != occurrences(FAULTS, NODES, 6)
    fewer = replace(FAULTS, per_minute={FaultKind.CRASH: 3.0})
    assert list(occurrences(fewer, NODES, 5)) == [f for f in drawn if f.kind is FaultKind.CRASH]


def test_they_are_in_order_over_in_time_and_within_their_bounds() -> None:
    drawn = occurrences(FAULTS, NODES, 1)
    assert [f.at_s for f in drawn] == sorted(f.at_s for f in drawn)
    for fault in drawn:
        shape = SHAPES[fault.kind]
        assert 0 <= fault.at_s <= fault.until_s <= FAULTS.until_s
        assert fault.until_s - fault.at_s <= shape.lasts_s[1]
        assert shape.size[0] <= fault.size <= shape.size[1]
    assert {fault.node_id for fault in drawn} == set(NODES)


def test_there_are_as_many_as_the_scenario_says() -> None:
    counts = Counter(fault.kind for seed in range(20) for fault in occurrences(FAULTS, NODES, seed))
    assert all(500 < counts[kind] < 700 for kind in FaultKind), counts


def test_where_each_seed_has_its_own_mix_some_lack_a_kind_and_some_have_much_of_it() -> None:
    varied = replace(FAULTS, vary=True)
    crashes = [
        sum(f.kind is FaultKind.CRASH for f in occurrences(varied, NODES, seed))
        for seed in range(100)
    ]
    assert crashes.count(0) >= 10
    assert sum(count > 60 for count in crashes) >= 10


@pytest.mark.parametrize(
    "faults",
    [
        replace(FAULTS, until_s=0.0),
        replace(FAULTS, per_minute={FaultKind.CRASH: -1.0}),
        replace(FAULTS, per_minute={FaultKind.CRASH: float("nan")}),
    ],
)
def test_what_cannot_be_meant_is_refused(faults: Faults) -> None:
    with pytest.raises(InvalidInput, match="faults"):
        check_faults(faults)


SEEDS = int(os.environ.get("MESH_FAULT_SEEDS") or (20 if DEEP else 1))
FIRST = int(os.environ.get("MESH_FAULT_SEED") or 0)
MANY = 20
"""Runs in which every kind of fault has happened."""
WORKLOADS = Path(__file__).parents[2] / "workloads"
SCENARIO = WORKLOADS / "faults.toml"
TALKING = WORKLOADS / "fault_conversations.toml"
SHARING = WORKLOADS / "fault_sharing.toml"
SWAPPING = WORKLOADS / "fault_swaps.toml"
STANDBY = WORKLOADS / "fault_standby.toml"
TIERS = WORKLOADS / "fault_tiers.toml"


class Journalled:
    """A hash of all decisions."""

    def __init__(self) -> None:
        self.hash = sha256()

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        self.hash.update(f"{now_s!r} {event} {actions}".encode())


def _with(recorder: Recorder, start: ControllerStart) -> tuple[Recorder, ...]:
    return (recorder,)


def beginning(path: Path) -> Scenario:
    """The first minute of a scenario, or all of it where it has many seeds."""
    read = read_scenario(path)
    assert read.faults is not None
    if SEEDS > 1:
        return read
    workload = replace(read.workload, duration_s=60.0)
    return replace(read, workload=workload, faults=replace(read.faults, until_s=50.0))


def run_each_seed(read: Scenario, watching: Recorder) -> list[FaultyRun]:
    """A quarter of the seeds of a scenario, under all checks, all of them watched."""
    runs = []
    for seed in range(FIRST, FIRST + max(SEEDS // 4, 1)):
        scenario = replace(read, seed=seed)
        made = plan(scenario)
        started = partial(_with, watching)
        run = FaultyRun(made, faults(scenario, made), check=True, started=started)
        try:
            outcomes = run.run(arrivals(scenario))
        except Exception as error:
            error.add_note(f"{seed=} of {read.workload}")
            raise
        assert len(outcomes) == sum(1 for _ in arrivals(scenario)), f"seed {seed}"
        runs.append(run)
    return runs


@pytest.mark.timeout(3600)
def test_conversations_find_in_caches_what_faults_leave_of_them() -> None:
    hits = Hits()
    run_each_seed(beginning(TALKING), hits)
    assert 0.1 < hits.cached / hits.prompts < 1.0, "of prompt tokens"


@pytest.mark.timeout(3600)
def test_weights_that_instances_share_are_promised_once_whatever_fails() -> None:
    shared = SharedLoads()
    run_each_seed(read_scenario(SHARING), shared)
    assert shared.count > 5 * max(SEEDS // 4, 1)


@pytest.mark.timeout(3600)
def test_weights_swap_and_kv_blocks_move_whatever_fails() -> None:
    swaps = Swaps()
    run_each_seed(read_scenario(SWAPPING), swaps)
    assert swaps.out > 5 * max(SEEDS // 4, 1), "heartbeats with requests whose weights are out"
    assert swaps.offered >= max(SEEDS // 4, 1), "requests whose KV blocks were sent"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["polyserve-pd", "mesh-slo"])
def test_requests_of_several_classes_are_handed_over_whatever_fails(policy: str) -> None:
    tiers = Tiers()
    run_each_seed(replace(beginning(TIERS), policy=policy), tiers)
    assert tiers.offered > 5
    assert any(len({name for name, _ in went}) > 1 for went in tiers.went.values())
    both = any({paused for _, paused in went} == {False, True} for went in tiers.went.values())
    assert both, "a server that had computed prompts takes decodes, or the reverse"


@pytest.mark.timeout(3600)
def test_one_that_stands_by_follows_and_each_node_obeys_the_later_whatever_fails() -> None:
    plans = Plans()
    runs = run_each_seed(beginning(STANDBY), plans)
    assert all(run.cell.store.starts > 1 for run in runs)
    assert plans.changes > len(runs)


class Plans:
    """How often another number of instances was wanted."""

    def __init__(self) -> None:
        self.changes = 0

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        self.changes += sum(isinstance(action, WantInstances) for action in actions)


class Swaps:
    """What was seen of swaps, and of KV blocks that went from node to node."""

    def __init__(self) -> None:
        self.out = self.offered = 0

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, NodeReported) and isinstance(event.report, Heartbeat):
            self.out += any(i.out and i.batch for i in event.report.instances)
        sent = (action.command for action in actions if isinstance(action, SendCommand))
        self.offered += sum(isinstance(command, OfferKv) for command in sent)


class Tiers:
    """What came to each instance: of which classes, and whether to be computed or to be decoded
    alone, after its first token; and how often KV blocks were sent.
    """

    def __init__(self) -> None:
        self.offered = 0
        self.went: dict[InstanceId, set[tuple[str, bool]]] = {}

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case SendCommand(command=SubmitRequest(instance_id=there, order=order)):
                    self.went.setdefault(there, set()).add((order.slo.name, order.paused))
                case SendCommand(command=OfferKv()):
                    self.offered += 1
                case _:
                    pass


class SharedLoads:
    """Those that found the weights there."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, NodeReported) and isinstance(event.report, InstanceLoaded):
            self.count += event.report.tier is LoadTier.HOST


class Hits:
    """What answers begin with, of which so much was cached."""

    def __init__(self) -> None:
        self.cached = self.prompts = 0

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, DeliverTokens) and action.outputs.first_index == 0:
                self.cached += action.outputs.cached_tokens
        if isinstance(event, InvokeRequested):
            self.prompts += len(event.request.prompt_tokens)


@pytest.mark.timeout(7200)
def test_nothing_is_lost_doubled_or_stuck_and_a_seed_decides_the_same_twice() -> None:
    read = beginning(SCENARIO)
    done: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    hashes: list[str] = []
    for seed in (FIRST, *range(FIRST, FIRST + SEEDS)):
        scenario = replace(read, seed=seed)
        made = plan(scenario)
        journal = Journalled()
        run = FaultyRun(made, faults(scenario, made), check=True, started=partial(_with, journal))
        try:
            outcomes = run.run(arrivals(scenario))
        except Exception as error:
            error.add_note(f"{seed=} of {read.workload}")
            raise
        hashes.append(journal.hash.hexdigest())
        asked = sum(1 for _ in arrivals(scenario))
        assert len({o.request_id for o in outcomes}) == len(outcomes) == asked
        ends.update(str(o.end) for o in outcomes)
        done.update(dict(run.counts().faults))
    assert ends["stop"] + ends["length"] >= 25 * len(hashes), "the faults leave nothing of the work"
    assert hashes[0] == hashes[1]
    # No KV blocks travel here, and nobody stands by.
    kinds = set(FaultKind) - {FaultKind.TEAR, *LEASES}
    assert SEEDS < MANY or set(done) == {kind.value for kind in kinds}
