"""A virtual cell end to end: requests are served, refused and repeated to the letter."""

import hashlib
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.compute.times import Times
from mesh.core.controller.core import ControllerCore
from mesh.domain.errors import InvalidInput
from mesh.domain.events import InvokeRequested, NodeConnected, NodeReported
from mesh.domain.limits import PREFILL_TOKENS_MAX
from mesh.domain.messages import TokensReport
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.policy.registry import policy
from mesh.runtime.journal import Journal, read_journal, replay
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.costs import GivenCosts, NodeCosts, Resizing
from mesh.sim.scenario import arrivals, plan
from mesh.sim.testbed import known_model
from tests.sim.scenarios import SMALL, scenario

CPU_ONLY = SMALL.replace("count = 2\n", "").replace('device = "gpu"', 'device = "cpu"')


@pytest.fixture
def made(tmp_path: Path) -> CellPlan:
    return plan(scenario(tmp_path))


def journal_of(folder: Path, seed: int) -> str:
    """The controller's whole journal of a run."""
    read = replace(scenario(folder), seed=seed)
    written = io.StringIO()
    cell = VirtualCell(plan(read), recorders=(Journal(written, plan(read).start()),))
    cell.run(arrivals(read))
    return written.getvalue()


def test_the_same_seed_gives_the_same_journal_to_the_letter(tmp_path: Path) -> None:
    first, again, other = (journal_of(tmp_path, seed) for seed in (3, 3, 4))
    assert len(first.splitlines()) > 100
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (first, again, other)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_joules_are_those_of_the_watts_by_the_time_that_nodes_computed(tmp_path: Path) -> None:
    text = SMALL.replace("memory_gib = 64\n", 'memory_gib = 64\nwatts = "100:300"\n')
    read = scenario(tmp_path, text)
    links, told_s = dict[int, str](), dict[str, float]()

    class Told:
        def record(self, now_s: float, event: object, actions: object) -> None:
            if isinstance(event, NodeConnected):
                links[event.link_id] = event.hello.node_id
            elif isinstance(event, NodeReported) and isinstance(event.report, TokensReport):
                name = links[event.link_id]
                told_s[name] = told_s.get(name, 0.0) + sum(event.report.busy_s)

    cell = VirtualCell(plan(read), recorders=(Told(),))
    outcomes = cell.run(arrivals(read))
    cell.clock.run_until(cell.clock.now_s() + 2.5)
    now_s, seen = cell.clock.now_s(), cell.core.snapshot(cell.clock.now_s())
    for node, virtual in zip(seen.nodes, cell.nodes, strict=True):
        power = virtual.plan.power
        assert power is not None
        assert power.busy_watts == (300 if node.node_id == "cpu" else 230)
        joules = (node.energy.idle_j or 0.0) + (node.energy.busy_j or 0.0)
        computed_s = told_s.get(node.node_id, 0.0)
        assert 0.9 * virtual.computing_s <= computed_s <= virtual.computing_s, "but for resizes"
        reckoned_j = power.joules(now_s, computed_s)
        assert 0 <= reckoned_j - joules < 2 * power.idle_watts, "but what the last beat lacks"
        assert node.energy.busy_j == pytest.approx(power.busy_watts * computed_s)
    assert len(told_s) > 1
    charged = [one.energy for one in seen.deployments]
    assert sum(one.busy_j or 0.0 for one in charged) == pytest.approx(seen.energy.busy_j)
    assert seen.energy.requests == sum(outcome.finished for outcome in outcomes)
    assert seen.energy.output_tokens == sum(len(outcome.tokens_s) for outcome in outcomes)


def test_a_journal_of_a_simulation_replays_like_a_live_one(tmp_path: Path, made: CellPlan) -> None:
    path = tmp_path / "journal"
    path.write_text(journal_of(tmp_path, 3))
    _, decisions = read_journal(path)
    core = ControllerCore(
        epoch=1,
        deployments=made.deployments,
        limits=made.limits,
        policy=policy(made.policy),
        profiles=made.profiles,
    )
    assert replay(core, decisions) is None


def test_every_request_ends_once_with_its_tokens(tmp_path: Path, made: CellPlan) -> None:
    asked = list(arrivals(scenario(tmp_path)))
    outcomes = VirtualCell(made).run(asked)
    assert len(outcomes) == len(asked)
    assert len({o.request_id for o in outcomes}) == len(asked)
    by_number = {int(o.request_id.removeprefix("r-")): o for o in outcomes}
    for number, arrival in enumerate(asked, start=1):
        outcome = by_number[number]
        assert outcome.arrival_s == pytest.approx(1.0 + arrival.at_s)
        if outcome.finished:
            assert len(outcome.tokens_s) == arrival.output_tokens
    assert sum(o.met for o in outcomes) > len(asked) / 2


def test_a_lone_request_takes_what_its_tables_say(tmp_path: Path) -> None:
    """On a loaded instance: its prompt in chunks, then a decode a token, and a link there and back;
    on one that is not, the load before that.
    """
    made = plan(scenario(tmp_path, CPU_ONLY))
    costs = NodeCosts(resize_s=0.0, resize_bytes_per_s=1e18)
    cell = VirtualCell(replace(made, nodes=(replace(made.nodes[0], costs=costs),)))
    cold, warm = cell.run([Arrival(0.0, "chat-1", 300, 20), Arrival(8.0, "chat-1", 300, 20)])
    times = Times(known_model("llama-2-7b").costs["xeon-32"].profile)
    rest = 300 - PREFILL_TOKENS_MAX
    first_s = times.prefill_s(PREFILL_TOKENS_MAX, 0) + times.prefill_s(rest, PREFILL_TOKENS_MAX)
    assert warm.ttft_s is not None
    assert warm.ttft_s == pytest.approx(first_s + 2 * made.link_delay_s, abs=1e-6)
    assert warm.tpot_s == pytest.approx(times.decode_s(1, 312), rel=0.01)
    assert cold.ttft_s is not None
    assert cold.ttft_s > warm.ttft_s + 1.0, "the first one waited for 13 GB"
    assert cold.met
    assert cold.grace_s == 0.0, "its load counts, and it is in time"


def test_a_slow_node_is_slow_and_the_controller_learns_it(tmp_path: Path, made: CellPlan) -> None:
    node = made.nodes[0]
    slow = replace(node, costs=replace(node.costs, factor=2.0))
    work = [Arrival(0.0, "chat-1", 32, 60)]
    (quick,) = VirtualCell(replace(made, nodes=(node,))).run(work)
    (late,) = VirtualCell(replace(made, nodes=(slow,))).run(work)
    assert quick.tpot_s is not None
    assert late.tpot_s == pytest.approx(2 * quick.tpot_s, rel=0.02)


def test_more_than_the_cell_can_do_is_refused_and_the_rest_is_in_time(made: CellPlan) -> None:
    """Caches grow in no time: validation does not count the half second that 11 GB take."""
    quick = GivenCosts({"resize": Resizing.MAPS, "resize_bytes_per_s": math.inf})
    nodes = tuple(replace(node, costs=quick.onto(node.costs)) for node in made.nodes)
    flood = [Arrival(n * 0.01, f"chat-{n % 3 + 1}", 500, 60) for n in range(150)]
    outcomes = VirtualCell(replace(made, nodes=nodes)).run(flood)
    served = [o for o in outcomes if o.finished]
    assert 100 < len(served) < len(flood)
    assert all(o.met for o in served)
    assert all(isinstance(o.end, RefusalReason) for o in outcomes if not o.finished)


def test_a_cache_that_is_too_small_grows_under_its_requests(made: CellPlan) -> None:
    """Long answers nobody expected: blocks run out, the cache grows, no token is lost."""
    limits = replace(made.limits, kv_tokens_least=64)
    cell = VirtualCell(replace(made, nodes=made.nodes[:1], limits=limits))
    outcomes = cell.run([Arrival(n * 0.1, "chat-1", 20, 900) for n in range(4)])
    assert [o.end for o in outcomes] == [FinishReason.STOP] * 4
    assert all(len(o.tokens_s) == 900 for o in outcomes)


class Events:
    """What a controller is told, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[float, object]] = []

    def record(self, now_s: float, event: object, actions: object) -> None:
        self.all.append((now_s, event))


def test_until_an_answer_ends_nothing_tells_how_long_it_is(made: CellPlan) -> None:
    told: list[list[tuple[float, object]]] = []
    for tokens in (30, 500):
        events = Events()
        (outcome,) = VirtualCell(made, recorders=(events,)).run(
            [Arrival(0.0, "chat-1", 300, tokens)]
        )
        assert (outcome.end, len(outcome.tokens_s)) == (FinishReason.STOP, tokens)
        told.append(events.all)
    short, long = told
    last = next(n for n, (a, b) in enumerate(zip(short, long, strict=False)) if a != b)
    assert "finish=<FinishReason.STOP" in repr(short[last])
    assert sum("TokensReport" in repr(event) for _, event in short[:last]) >= 29
    (asked,) = (event for _, event in short if isinstance(event, InvokeRequested))
    assert asked.request.sampling.max_tokens == 4096 - 300


@pytest.mark.parametrize(
    ("changed", "asked", "end", "tokens"),
    [
        ({"output_tokens_max": 20}, 20, FinishReason.LENGTH, 20),
        ({"output_tokens_max": 64}, 64, FinishReason.STOP, 30),
        ({"lengths_told": True}, 30, FinishReason.LENGTH, 30),
        ({}, 4096 - 300, FinishReason.STOP, 30),
    ],
)
def test_callers_ask_for_what_they_would_take(
    made: CellPlan, changed: dict[str, Any], asked: int, end: FinishReason, tokens: int
) -> None:
    events = Events()
    cell = VirtualCell(replace(made, **changed), recorders=(events,))
    (outcome,) = cell.run([Arrival(0.0, "chat-1", 300, 30)])
    (told,) = (event for _, event in events.all if isinstance(event, InvokeRequested))
    assert told.request.sampling.max_tokens == asked
    assert (outcome.end, len(outcome.tokens_s)) == (end, tokens)
    assert not cell.callers.lengths, "nothing is kept of an answer that has ended"


def test_nodes_jitter_each_for_itself_and_alike_for_the_same_seed(tmp_path: Path) -> None:
    """Two nodes, each with a request of its own that computes what the other's does."""
    text = SMALL.replace('name = "cpu"\n', 'name = "cpu"\ncount = 2\n').replace("= 40\n", "= 1\n")
    work = [Arrival(0.0, f"chat-{n}", 20, 50) for n in (1, 2)]

    def gaps_s(seed: int) -> list[tuple[float, ...]]:
        read = replace(scenario(tmp_path, text.replace("= 64", "= 20")), seed=seed)
        ended = VirtualCell(plan(read)).run(work)
        return [
            tuple(b - a for a, b in zip(o.tokens_s, o.tokens_s[1:], strict=False))
            for o in sorted(ended, key=lambda o: o.request_id)
        ]

    first, second = gaps_s(1)
    assert first != second
    assert [first, second] == gaps_s(1) != gaps_s(2)


def test_use_is_counted_by_node(made: CellPlan) -> None:
    cell = VirtualCell(made)
    cell.run([Arrival(0.0, "chat-1", 20, 50)])
    busy = [node.busy_s for node in cell.nodes]
    assert sum(seconds > 0 for seconds in busy) == 1
    assert max(node.computing_s for node in cell.nodes) <= max(busy)


@pytest.mark.parametrize(
    "workload",
    [
        [Arrival(1.0, "chat-1", 5, 5), Arrival(0.5, "chat-1", 5, 5)],
        [Arrival(1.0, "nobody", 5, 5)],
        [Arrival(1.0, "chat-1", 0, 5)],
    ],
)
def test_a_wrong_workload_is_refused(made: CellPlan, workload: list[Arrival]) -> None:
    with pytest.raises(InvalidInput):
        VirtualCell(made).run(workload)
