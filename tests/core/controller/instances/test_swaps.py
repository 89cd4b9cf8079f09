"""Nodes that swap weights, in the controller's books: which of them may, and what a copy takes."""

from dataclasses import replace

import pytest

from mesh.core.controller.instances.node_schedule import forecast_on
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import TellAccepted
from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import Heartbeat, KvResized, LoadInstance, NodeHello, ResizeKv
from mesh.domain.reasons import DeviceKind, Verdict
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadRate, LoadTier
from mesh.memory.station import ReservationKind
from mesh.policy.rules.swapping import SWAPPING
from tests.core.cells import (
    FOOTPRINT,
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    request,
)

WEIGHTS_BYTES = FOOTPRINT.weights_bytes
I1 = InstanceId("i1")
STATED = ((LoadTier.HOST, LoadRate(fixed_s=0.0, bytes_per_s=float(WEIGHTS_BYTES))),)


def on_gpus(slo: Slo | None = None) -> Deployment:
    made = deployment() if slo is None else deployment(slo=slo)
    return replace(made, spec=replace(made.spec, devices=(DeviceKind.GPU,)))


def gpu() -> NodeHello:
    """It has an instance whose weights are out."""
    out = instance_report(instance_id=I1, kv_blocks=16, out=True)
    known = replace(hello(), device=DeviceKind.GPU, swaps=True, load_rates=STATED)
    return replace(known, instances=(out,))


def entry(cell: CellUnderTest) -> NodeEntry:
    return cell.core.cell.nodes[NodeId("n1")]


@pytest.mark.parametrize("device", DeviceKind)
def test_a_node_swaps_if_its_device_is_a_gpu(device: DeviceKind) -> None:
    cell = CellUnderTest(on_gpus(), rule="mesh")
    cell.join(replace(hello(), device=device, swaps=True))
    assert entry(cell).swaps == bool(entry(cell).rule.swap_bytes) == (device is DeviceKind.GPU)


def test_a_copy_takes_as_long_as_the_node_s_swaps_have() -> None:
    cell = CellUnderTest(on_gpus(), rule="mesh")
    link_id, _ = cell.join(gpu())
    assert entry(cell).copy_s(WEIGHTS_BYTES) == 1.0
    told = Heartbeat(rss_bytes=0, instances=gpu().instances, swapped_bytes=WEIGHTS_BYTES)
    cell.report(link_id, replace(told, swapped_s=3.0))
    assert entry(cell).copy_s(2 * WEIGHTS_BYTES) == pytest.approx(6.0)


@pytest.mark.parametrize(("swaps", "parts"), [(False, False), (True, False), (True, True)])
def test_nodes_are_told_of_parts_where_their_engine_moves_them(swaps: bool, parts: bool) -> None:
    """Others may be of a version that knows no parts."""
    cell = CellUnderTest(on_gpus(), rule="mesh")
    cell.join(replace(gpu(), instances=(), swaps=swaps, swaps_parts=parts))
    assert entry(cell).rule.turn.parameters == ((("parts", SWAPPING.parts),) if parts else ())


@pytest.mark.parametrize("on_device", [False, True])
def test_a_load_has_its_node_make_room_for_weights_where_its_engine_needs_it(
    on_device: bool,
) -> None:
    cell = CellUnderTest(on_gpus(), rule="mesh")
    cell.join(replace(gpu(), instances=(), loads_on_device=on_device))
    (command,) = commands(cell.invoke(), LoadInstance)
    size = FOOTPRINT.size(command.kv_blocks)
    assert command.swapped_bytes == (size.bytes if on_device else size.kv_bytes)


@pytest.mark.breaks_invariants
@pytest.mark.parametrize(("swapping", "copies_s"), [(False, 1.0), (True, 0.25)])
def test_validation_has_the_weights_come_first(swapping: bool, copies_s: float) -> None:
    """A copy takes 1 s, or a quarter of that yet where it should have ended; the prompt 0.04 s."""
    cell = CellUnderTest(on_gpus(Slo(ttft_s=60.0)), rule="mesh")
    link_id, _ = cell.join(gpu())
    told = replace(gpu().instances[0], swapping=swapping)
    cell.report(link_id, Heartbeat(rss_bytes=0, instances=(told,)))
    cell.now_s += 1.0
    instance = cell.core.cell.instances[I1]
    cell.invoke(request("r1"))
    (asked,) = instance.requests.values()
    instance.remove(asked)
    seen = forecast_on(instance, asked, now_s=cell.now_s, limits=CellLimits())
    assert seen.verdict is Verdict.PASSES
    assert seen.first_token_s - cell.now_s == pytest.approx(copies_s, abs=0.15)


def grown(cell: CellUnderTest, link_id: int, kv_blocks: int, seconds: float) -> None:
    """The KV cache of the instance has grown to so many blocks in so long."""
    entry(cell).station.issue(ReservationKind.RESIZE, I1, FOOTPRINT.size(kv_blocks), 0.0)
    cell.report(link_id, KvResized(instance_id=I1, kv_blocks=kv_blocks, elapsed_s=seconds))


def test_a_kv_cache_grows_for_as_long_as_others_have() -> None:
    cell = CellUnderTest(on_gpus(), rule="mesh")
    link_id, _ = cell.join(gpu())
    assert entry(cell).grow_s(FOOTPRINT.kv_block_bytes) == 0.0
    grown(cell, link_id, 32, 0.4)
    assert entry(cell).grow_s(64 * FOOTPRINT.kv_block_bytes) == pytest.approx(0.8)


def test_validation_waits_for_resizes() -> None:
    cell = CellUnderTest(on_gpus(Slo(ttft_s=60.0)), rule="mesh")
    link_id, _ = cell.join(gpu())
    grown(cell, link_id, 32, 4.0)
    cell.invoke(request("r1"))
    instance = cell.core.cell.instances[I1]
    (asked,) = instance.requests.values()
    instance.remove(asked)

    def first_s(grow_s: float = 0.0) -> float:
        limits, now_s = CellLimits(), cell.now_s
        return forecast_on(instance, asked, now_s=now_s, limits=limits, grow_s=grow_s).first_token_s

    alone_s = first_s()
    assert first_s(2.0) - alone_s == pytest.approx(2.0, abs=0.01)
    instance.add(asked, blocks=1, now_s=cell.now_s)
    entry(cell).station.issue(ReservationKind.RESIZE, I1, FOOTPRINT.size(64), 0.0)
    assert first_s() - alone_s == pytest.approx(8.0, abs=0.2)


@pytest.mark.parametrize(
    ("ttft_s", "swapping", "taken"), [(1.8, False, True), (1.8, True, False), (1.2, False, True)]
)
def test_only_its_own_load_and_copy_make_a_request_late(
    ttft_s: float, swapping: bool, taken: bool
) -> None:
    """Its load takes 0.5 s, and a copy 1 s, as does that of others that may be under way."""
    other = replace(deployment("b", slo=Slo(ttft_s=ttft_s)), context_tokens_max=256)
    other = replace(other, spec=replace(other.spec, devices=(DeviceKind.GPU,)))
    cell = CellUnderTest(on_gpus(), other, rule="mesh")
    link_id, _ = cell.join(gpu())
    told = replace(gpu().instances[0], swapping=swapping, swaps_to=float(swapping))
    cell.report(link_id, Heartbeat(rss_bytes=0, instances=(told,)))
    (shown,) = cell.core.snapshot(cell.now_s).nodes[0].instances
    assert (shown.resident_share, shown.swaps_to) == (0.0, 1.0 if swapping else None)
    said = of_kind(cell.invoke(request("r1", of="b")), TellAccepted)
    assert [told.grace_s > 0.0 for told in said] == [ttft_s < 1.5] * taken


def test_a_kv_cache_gets_what_there_is_of_what_is_wanted() -> None:
    """Four requests need 20 blocks, for which 25 are wanted; there is room for 22."""
    cell = CellUnderTest(on_gpus(Slo(ttft_s=60.0, tpot_s=10.0)), rule="mesh")
    cell.join(replace(gpu(), memory_bytes=WEIGHTS_BYTES + 22 * FOOTPRINT.kv_block_bytes))
    said = [a for n in range(4) for a in cell.invoke(request(f"r{n}", max_tokens=500))]
    assert [resize.kv_blocks for resize in commands(said, ResizeKv)] == [22]
