"""Measuring over a real server: what the node is told, what the caller sees, what is kept."""

import asyncio
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, MeshError, NotFound
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.messages import CancelProfile, LoadInstance, ProfileFailed, ProfileInstance
from mesh.domain.views import ProfileView
from mesh.v1 import control_pb2 as pb
from mesh.v1.control_pb2_grpc import ControlStub
from mesh.wire.channel import dial
from tests.controller.live import HELLO, SPEC, FakeNode, LiveCell, live_cell
from tests.support.profiles import PROFILE

NODE = NodeId(HELLO.node_id)


def told_in_order(node: FakeNode) -> list[type]:
    """The commands of a measurement, as they came."""
    kinds = (LoadInstance, ProfileInstance)
    return [type(command) for command in node.commands if isinstance(command, kinds)]


async def test_a_model_is_loaded_and_measured_and_the_profile_is_known(cell: LiveCell) -> None:
    node = await cell.deployed()
    seen: list[tuple[str, float]] = []
    told = await cell.ask(
        cell.client.profile,
        SPEC.name,
        NODE,
        lambda phase, share: seen.append((phase, share)),
    )
    assert told
    assert ("measure", 0.5) in seen
    assert told_in_order(node) == [LoadInstance, ProfileInstance]
    known = await cell.ask(cell.client.profiles, SPEC.name)
    assert ProfileView(profile=PROFILE, nodes=(NODE,)) in known


async def test_a_profile_outlives_its_controller_and_its_deployment(tmp_path: Path) -> None:
    async with live_cell(tmp_path) as cell:
        await cell.deployed()
        await cell.ask(cell.client.profile, SPEC.name)
    async with live_cell(tmp_path) as cell:
        known = await cell.ask(cell.client.profiles, SPEC.name)
        assert PROFILE in [view.profile for view in known]
        node = await cell.node()
        await cell.ask(cell.client.delete, SPEC.name)
        await cell.ask(cell.client.deploy, SPEC)
        known = await cell.ask(cell.client.profiles, SPEC.name)
        assert ProfileView(profile=PROFILE, nodes=(node.hello.node_id,)) in known


async def test_an_instance_is_loaded_with_what_was_measured_before(cell: LiveCell) -> None:
    """On another node of equal hardware: they share profiles."""
    await cell.deployed()
    await cell.ask(cell.client.profile, SPEC.name)
    await cell.ask(cell.client.delete, SPEC.name)
    await cell.nodes[0].leave()
    other = await cell.deployed(node_id=NodeId("n2"))
    await cell.ask(cell.client.profile, SPEC.name, NodeId("n2"))
    assert (await other.told(LoadInstance)).profile == PROFILE


async def test_a_caller_that_vanishes_cancels_the_measurement(cell: LiveCell) -> None:
    node = await cell.deployed()
    node.measuring = False
    async with dial(cell.address) as channel:
        call = ControlStub(channel).Profile(pb.ProfileRequest(name=SPEC.name))
        order = await node.told(ProfileInstance)
        call.cancel()
        assert (await node.told(CancelProfile)).operation_id == order.operation_id


async def test_a_failed_measurement_comes_back_as_the_node_said_it(cell: LiveCell) -> None:
    node = await cell.deployed()
    node.measuring = False
    asked = asyncio.create_task(cell.ask(cell.client.profile, SPEC.name))
    order = await node.told(ProfileInstance)
    failed = ProfileFailed(
        operation_id=order.operation_id, error="EngineError", message="too hot", hint="cool it"
    )
    await node.send(failed)
    with pytest.raises(EngineError, match="too hot") as caught:
        await asked
    assert caught.value.hint == "cool it"
    known = await cell.ask(cell.client.profiles, SPEC.name)
    assert PROFILE not in [view.profile for view in known]


async def test_what_is_not_there_cannot_be_measured(cell: LiveCell) -> None:
    await cell.deployed()
    nobody = DeploymentName("nobody")
    for call in (cell.client.profile, cell.client.profiles):
        with pytest.raises(NotFound, match="no deployment 'nobody'") as caught:
            await cell.ask(call, nobody)
        assert "deployments: chat" in caught.value.hint
    with pytest.raises(MeshError, match="no node 'n9'"):
        await cell.ask(cell.client.profile, SPEC.name, NodeId("n9"))


async def test_measuring_is_told_to_those_who_watch(cell: LiveCell) -> None:
    await cell.deployed()
    await cell.ask(cell.client.profile, SPEC.name)
    events = await cell.ask(lambda: list(cell.client.watch(backlog=50)))
    lines = [(event.line.kind, event.line.text) for event in events]
    assert ("deployment", "measure a profile") in lines
    assert ("instance", "measure iteration times") in lines
    assert any(text.startswith(f"measured model {PROFILE.model_id}") for _, text in lines)
