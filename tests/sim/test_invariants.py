"""What holds of any cell: each rule fails when a cell is made to break it, and for nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import DeliverTokens, SendCommand
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import ResizeKv, UnloadInstance
from mesh.domain.model import Size
from mesh.domain.request import RequestTokens
from mesh.memory.station import ReservationKind
from mesh.sim.cell_checks import CellChecks, check_rest
from mesh.sim.checking import REST_S, FaultyRun
from mesh.sim.cluster import Arrival, VirtualCell
from mesh.sim.costs import NodeCosts
from mesh.sim.faults import FaultKind
from mesh.sim.invariants import RuleBroken, Watch, check_books, check_engine
from mesh.sim.scenario import plan
from tests.sim.scenarios import SMALL, scenario

pytestmark = pytest.mark.breaks_invariants
LONG = Arrival(0.0, "chat-1", 200, 900)


@pytest.fixture
def cell(tmp_path: Path) -> VirtualCell:
    """One that has an instance with a request on it."""
    cell = VirtualCell(plan(scenario(tmp_path)))
    cell.invoke(LONG)
    while not any(node.engine.has_requests() for node in cell.nodes):
        cell.clock.step()
    cell.clock.run_until(cell.clock.now_s() + 2.0)
    return cell


def in_use(cell: VirtualCell) -> NodeEntry:
    return next(node for node in cell.core.cell.nodes.values() if node.instances)


def promise_more(node: NodeEntry) -> None:
    node.station.promised = node.station.promised.plus(Size(1))


def track_less(node: NodeEntry) -> None:
    node.station.tracked = node.station.tracked.plus(Size(1), -1)


def forget(node: NodeEntry) -> None:
    node.instances.clear()


def load_for_nobody(node: NodeEntry) -> None:
    next(iter(node.instances.values())).state = InstanceState.LOADING


def hold_too_few(node: NodeEntry) -> None:
    (instance,) = node.instances.values()
    (held,) = instance.requests.values()
    instance.required_blocks = held.required_blocks = 1


def resize_unnoticed(node: NodeEntry) -> None:
    next(iter(node.instances.values())).kv_blocks += 1


@pytest.mark.parametrize(
    "breaks", [promise_more, track_less, forget, load_for_nobody, hold_too_few, resize_unnoticed]
)
def test_unbalanced_books_are_found(cell: VirtualCell, breaks: Callable[[NodeEntry], None]) -> None:
    node = in_use(cell)
    check_books(node)
    breaks(node)
    with pytest.raises(RuleBroken):
        check_books(node)


def test_an_engine_with_more_than_is_tracked_is_found(cell: VirtualCell) -> None:
    node = in_use(cell)
    (memory,) = (m for made in cell.nodes for m in made.engine.memory())
    check_engine(node, [memory])
    for wrong in (
        replace(memory, kv_held_bytes=memory.kv_held_bytes + 1),
        replace(memory, kv_blocks_used=memory.kv_blocks + 1),
    ):
        with pytest.raises(RuleBroken):
            check_engine(node, [wrong])


def test_operations_that_overlap_or_that_nobody_issued_are_found(cell: VirtualCell) -> None:
    node = in_use(cell)
    (instance,) = node.instances.values()
    name, link_id = instance.instance_id, node.link_id
    resize = SendCommand(link_id=link_id, command=ResizeKv(instance_id=name, kv_blocks=9))
    unload = SendCommand(link_id=link_id, command=UnloadInstance(instance_id=name))

    def watch() -> Watch:
        watch = Watch()
        watch.begin(cell.core)
        return watch

    with pytest.raises(RuleBroken, match="without the station"):
        watch().note(cell.core, None, [resize])
    watch().note(cell.core, None, [unload])
    size = instance.footprint.size(instance.promised_blocks + 1)
    unsent, told = watch(), watch()
    assert node.station.issue(ReservationKind.RESIZE, name, size, 0.0)
    with pytest.raises(RuleBroken, match="has started, and its node was sent"):
        unsent.look(cell.core, cell.clock.now_s())
    told.note(cell.core, None, [resize])
    node.station.done(name, size)
    assert node.station.issue(ReservationKind.RESIZE, name, size, 0.0)
    with pytest.raises(RuleBroken, match="overlaps"):
        told.note(cell.core, None, [resize])


def lose(cell: VirtualCell) -> None:
    """As if the controller had forgotten its request."""
    (instance,) = in_use(cell).instances.values()
    instance.requests.clear()
    instance.required_blocks = instance.tokens = 0
    instance.node.iteration_started_s = None
    instance.node.running = 0
    instance.node.touch()
    cell.core.cell.requests.clear()


def test_a_request_that_the_controller_lost_is_found(cell: VirtualCell) -> None:
    rules = CellChecks()
    rules.attach(cell)
    cell.clock.run_until(cell.clock.now_s() + 1.0)
    lose(cell)
    with pytest.raises(RuleBroken, match="requests"):
        cell.clock.run_until(cell.clock.now_s() + 1.0)


def test_a_request_that_nobody_waits_for_and_a_node_computes_is_found(cell: VirtualCell) -> None:
    rules = CellChecks()
    rules.attach(cell)
    (request_id,) = cell.callers.open_ids()
    cell.callers.cancel(request_id)
    lose(cell)
    with pytest.raises(RuleBroken, match="for nobody"):
        cell.clock.run_until(cell.clock.now_s() + 30.0)


def test_a_request_that_is_queued_for_too_long_is_found(tmp_path: Path) -> None:
    made = plan(scenario(tmp_path))
    slow = tuple(replace(node, costs=NodeCosts(load_s=20.0)) for node in made.nodes)
    cell = VirtualCell(replace(made, nodes=slow))
    cell.invoke(LONG)
    cell.clock.run_until(cell.clock.now_s() + 0.1)
    (queued,) = (held for d in cell.core.cell.deployments.values() for held in d.queue)
    CellChecks().attach(cell)
    assert queued.waits_for is not None
    queued.waits_for.expect_no_more(queued)
    queued.queued_at_s -= 1000.0
    with pytest.raises(RuleBroken, match="waits for 1000"):
        CellChecks().attach(cell)


def test_a_caller_finds_wrong_and_missing_tokens(cell: VirtualCell) -> None:
    (request_id,) = cell.callers.open_ids()
    (held,) = cell.core.cell.requests.values()
    told = RequestTokens(
        request_id=request_id,
        attempt=held.attempt,
        first_index=len(held.output_tokens),
        token_ids=(held.output_tokens[-1],),
        text="",
    )
    with pytest.raises(AssertionError, match="another request's"):
        cell.callers.deliver(DeliverTokens(outputs=told))
    with pytest.raises(AssertionError, match="lost, or came twice"):
        cell.callers.deliver(DeliverTokens(outputs=replace(told, first_index=0)))


def test_a_cell_that_does_not_come_to_rest_is_found(tmp_path: Path) -> None:
    run = FaultyRun(plan(scenario(tmp_path)), check=True)
    run.run([Arrival(0.0, "chat-1", 20, 5)])
    check_rest(run.cell)
    run.cell.nodes[0].crash(silently=True)
    with pytest.raises(RuleBroken, match="has not joined"):
        check_rest(run.cell)


def test_an_instance_that_is_just_being_unloaded_is_not_stuck(tmp_path: Path) -> None:
    text = SMALL.replace("memory_gib", "costs = { unload_s = 10.0 }\nmemory_gib")
    text = text.replace('"llama-2-7b"', '"llama-2-7b"\nscaling = { keep_alive_s = 1.0 }')
    run = FaultyRun(plan(scenario(tmp_path, text + "\n[limits]\nparked_s_max = 55\n")), check=True)
    (outcome,) = run.run([Arrival(0.0, "chat-1", 20, 5)])
    assert run.cell.clock.now_s() > outcome.ended_s + REST_S
    assert not any(node.instances for node in run.cell.core.cell.nodes.values())


def test_a_request_that_never_ends_is_found(tmp_path: Path) -> None:
    run = FaultyRun(plan(scenario(tmp_path)), check=True)
    for node in run.cell.nodes:
        node.engine_faults.strike(FaultKind.WRONG_PROFILE, 1e6)
    with pytest.raises(RuleBroken, match="stuck"):
        run.run([Arrival(0.0, "chat-1", 20, 5)])
