"""Administrative calls over a real server: deploy, get, scale, delete, drain, status, watch."""

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from mesh import __version__
from mesh.controller.registry import SqliteRegistry, stored
from mesh.domain.deployment import Deployment, Scaling
from mesh.domain.errors import (
    Cancelled,
    EngineError,
    InvalidInput,
    MeshError,
    NotFound,
    Unavailable,
)
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.messages import (
    AbortRequest,
    CancelImport,
    CancelProfile,
    ImportFailed,
    ImportModel,
    ImportProgress,
    LoadInstance,
    ProfileFailed,
    ProfileInstance,
    SubmitRequest,
)
from mesh.domain.slo import Slo
from mesh.domain.views import CellEvent, ProfileView
from mesh.v1 import control_pb2 as pb
from mesh.v1 import model_pb2
from mesh.v1.control_pb2_grpc import ControlStub
from mesh.wire.channel import dial
from mesh.wire.codec import to_wire
from tests.cli.running import mesh
from tests.controller.live import (
    ASSETS,
    CLASSES,
    HELLO,
    MODEL,
    SPEC,
    WAIT_S_MAX,
    FakeNode,
    LiveCell,
    asking,
    live_cell,
)
from tests.support.profiles import PROFILE


async def test_deploy_shows_progress_and_the_deployment_is_there(cell: LiveCell) -> None:
    await cell.node()
    seen: list[tuple[str, float]] = []
    told = await cell.ask(
        cell.client.deploy, SPEC, lambda phase, share: seen.append((phase, share))
    )
    assert (told.message, seen) == ("deployed", [("read", 0.5)])
    found = await cell.ask(cell.client.get, SPEC.name)
    assert (found.spec, found.model, found.state) == (SPEC, MODEL, DeploymentState.READY)
    assert await cell.ask(cell.client.list) == (found,)
    assert (await cell.ask(cell.client.deploy, SPEC)).message == "unchanged"
    changed = replace(SPEC, slo=Slo(ttft_s=9.0))
    assert (await cell.ask(cell.client.deploy, changed)).message == "revision 2 serves"
    assert (await cell.ask(cell.client.get, SPEC.name)).spec == changed
    assert await cell.ask(cell.client.undo, SPEC.name) == "revision 3 serves"
    assert (await cell.ask(cell.client.get, SPEC.name)).spec == SPEC


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def test_a_stored_deployment_with_an_untried_chat_template_has_failed(tmp_path: Path) -> None:
    kept = Deployment(spec=SPEC, model=MODEL, context_tokens_max=512)
    with closing(SqliteRegistry(tmp_path / "controller")) as registry:
        registry.apply(stored(kept, replace(ASSETS, chat_template=LOOP)))
    async with live_cell(tmp_path, http="127.0.0.1:0") as cell:
        failed = DeploymentState.FAILED
        await cell.until(lambda: cell.client.get(SPEC.name).state is failed)
        why = (await cell.ask(cell.client.get, SPEC.name)).phase
        assert why.startswith("it takes no texts: the tokenizer and the chat template of ")

        def told(*verb: str) -> str:
            return mesh(*verb, environ={"MESH_CONTROLLER": cell.address}).out

        assert f"failed       {SPEC.name}: {why}" in await cell.ask(told, "status")
        as_json = json.loads(await cell.ask(told, "status", "-o", "json"))
        assert as_json["failed"] == {SPEC.name: why}
        url = f"http://{cell.http}/api/v1/cell"
        viewed = (await asyncio.to_thread(requests.get, url, timeout=WAIT_S_MAX)).json()
        assert viewed["deployments"][SPEC.name]["state"] == failed
        assert viewed["status"]["failed"] == as_json["failed"]
        described = (await cell.ask(told, "describe", SPEC.name)).splitlines()
        assert ["failure", why] in [line.split(maxsplit=1) for line in described]
        assert why in await cell.ask(told, "get")


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"name": "Chat"}, "no DNS label"),
    ({"name": "x" * 64}, "64 characters; at most 63"),
    ({"source": " "}, "source is empty"),
    ({"slo": Slo(ttft_s=0.0)}, "slo.ttft_s is 0"),
    ({"slo": Slo(tpot_s=float("nan"))}, "slo.tpot_s is nan"),
    ({"scaling": Scaling(replicas_min=3, replicas_max=2)}, "replicas_min is 3"),
    ({"scaling": Scaling(replicas_max=0)}, "replicas_max is 0"),
    ({"scaling": Scaling(keep_alive_s=float("inf"))}, "keep_alive_s is inf"),
    ({"devices": ()}, "devices is empty"),
    ({"context_tokens_max": 0}, "context_tokens_max is 0"),
    ({"scaling": Scaling(replicas_min=-1)}, "out of range"),
    ({"classes": CLASSES.classes * 2}, "classes has 'chat' twice"),
    ({"classes": CLASSES.classes, "class_default": "gold"}, "'gold' is none of the classes"),
    ({"classes": (replace(CLASSES.classes[1], tpot_s=1.0),)}, "is best effort, and its tpot_s"),
    ({"classes": (replace(SPEC.slo, name=""),)}, "class name '' is no DNS label"),
)


async def test_a_spec_is_checked_again_by_the_controller(cell: LiveCell) -> None:
    for changes, said in BAD:
        with pytest.raises(InvalidInput, match=said):
            await cell.ask(cell.client.deploy, replace(SPEC, **changes))
    assert await cell.ask(cell.client.list) == ()


async def test_a_failed_import_comes_back_as_the_node_said_it(cell: LiveCell) -> None:
    node = await cell.node()
    node.importing = False
    deploying = asyncio.create_task(cell.ask(cell.client.deploy, SPEC))
    order = await node.told(ImportModel)
    await node.send(
        ImportFailed(
            operation_id=order.operation_id, error="TornModel", message="cut", hint="fetch it"
        )
    )
    with pytest.raises(MeshError, match="cut") as caught:
        await deploying
    assert (type(caught.value).__name__, caught.value.hint) == ("TornModel", "fetch it")
    assert await cell.ask(cell.client.list) == ()


async def test_a_caller_that_vanishes_cancels_its_operation(cell: LiveCell) -> None:
    node = await cell.node()
    node.importing = False
    async with dial(cell.address) as channel:
        call = ControlStub(channel).Deploy(
            pb.DeployRequest(spec=to_wire(SPEC, model_pb2.DeploymentSpec))
        )
        order = await node.told(ImportModel)
        call.cancel()
        assert (await node.told(CancelImport)).operation_id == order.operation_id
    assert await cell.ask(cell.client.list) == ()


async def test_a_progress_callback_that_fails_cancels_the_deployment(cell: LiveCell) -> None:
    node = await cell.node()

    def stop(phase: str, share: float) -> None:
        raise KeyboardInterrupt

    node.importing = False
    deploying = asyncio.create_task(cell.ask(_interrupted, cell, stop))
    order = await node.told(ImportModel)
    await node.send(ImportProgress(operation_id=order.operation_id, phase="read", share=0.1))
    assert await deploying
    await node.told(CancelImport)


def _interrupted(cell: LiveCell, progress: object) -> bool:
    try:
        cell.client.deploy(SPEC, progress)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        return True
    return False


async def test_scale_changes_what_is_given_and_checks_the_whole(cell: LiveCell) -> None:
    await cell.deployed()
    await cell.ask(lambda: cell.client.scale(SPEC.name, replicas_max=2, keep_alive_s=5.0))
    scaling = (await cell.ask(cell.client.get, SPEC.name)).spec.scaling
    assert scaling == Scaling(replicas_min=0, replicas_max=2, keep_alive_s=5.0)
    for given, said in (
        ({"replicas_min": 3}, "replicas_min is 3, more than replicas_max, 2"),
        ({"keep_alive_s": float("nan")}, "keep_alive_s is nan"),
        ({}, "nothing to change"),
    ):
        with pytest.raises(InvalidInput, match=said):
            await cell.ask(lambda given=given: cell.client.scale(SPEC.name, **given))


async def test_what_is_not_there_is_not_found(cell: LiveCell) -> None:
    name = DeploymentName("nobody")
    client = cell.client
    for call in (client.get, client.delete, lambda n: client.scale(n, replicas_max=2)):
        with pytest.raises(NotFound, match="no deployment 'nobody'") as caught:
            await cell.ask(call, name)
        assert "nothing is deployed" in caught.value.hint
    with pytest.raises(NotFound, match="no node 'nobody'"):
        await cell.ask(client.drain, NodeId("nobody"))


async def test_a_client_gets_the_tokenizer_to_send_token_ids(cell: LiveCell) -> None:
    await cell.deployed()
    assert await cell.ask(cell.client.tokenizer, SPEC.name) == ASSETS
    with pytest.raises(NotFound, match="no deployment 'nil'"):
        await cell.ask(cell.client.tokenizer, DeploymentName("nil"))


async def test_a_deleted_deployment_is_gone(cell: LiveCell) -> None:
    await cell.deployed()
    assert await cell.ask(cell.client.delete, SPEC.name) == "deleted"
    assert await cell.ask(cell.client.list) == ()
    with pytest.raises(NotFound):
        await cell.answer()


async def test_drain_and_undo_change_the_nodes_state(cell: LiveCell) -> None:
    await cell.deployed()
    for undo, state in ((False, NodeState.DRAINING), (True, NodeState.READY)):
        await cell.ask(lambda undo=undo: cell.client.drain(HELLO.node_id, undo=undo))
        (node,) = await cell.ask(cell.client.nodes)
        assert node.state is state


@pytest.mark.own_cell
async def test_status_counts_what_there_is(cell: LiveCell, tmp_path: Path) -> None:
    await cell.deployed()
    await cell.answer()
    status = await cell.status()
    assert (status.nodes_ready, status.nodes, status.deployments, status.instances) == (1, 1, 1, 1)
    assert (status.served, status.queued, status.running) == (1, 0, 0)
    assert (status.version, status.refused) == (__version__, ())
    assert status.state_path == str(tmp_path / "controller")
    assert status.uptime_s > 0


@pytest.mark.own_cell
async def test_watch_tells_the_past_and_then_what_happens(cell: LiveCell) -> None:
    """Without `follow` it ends; with it, it goes on until the controller stops."""
    await cell.node()
    events: list[CellEvent] = await cell.ask(lambda: list(cell.client.watch(backlog=10)))
    assert any(e.line.kind == "node" and e.line.subject == "n1" for e in events)
    assert all(e.age_s >= 0 for e in events)
    following = asyncio.create_task(
        cell.ask(lambda: list(cell.client.watch(backlog=0, follow=True)))
    )
    await asyncio.sleep(0.1)
    await cell.ask(cell.client.deploy, SPEC)
    cell.stop.set()
    lines = [event.line for event in await following]
    assert any(line.subject == "chat" and "deploy" in line.text for line in lines)
    assert lines[-1].text == "stopping"


async def test_health_and_reflection_answer(cell: LiveCell) -> None:
    async with dial(cell.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "mesh.v1.Inference", "inference.GRPCInferenceService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    def services() -> list[str]:
        with grpc.insecure_channel(cell.address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    ours = {"mesh.v1.Inference", "mesh.v1.Control", "inference.GRPCInferenceService"}
    assert ours <= set(await cell.ask(services))


async def test_a_deployment_outlives_the_controller(tmp_path: Path) -> None:
    """A new controller on the same folder has it, with its tokenizer; request ids go on apart."""
    async with live_cell(tmp_path) as cell:
        await cell.deployed()
        first = await cell.accepted(asking())
    async with live_cell(tmp_path) as cell:
        assert (await cell.ask(cell.client.get, SPEC.name)).spec == SPEC
        await cell.node()
        again = await cell.accepted(asking())
    assert first.request_id != again.request_id


async def test_without_a_node_nothing_can_be_deployed(cell: LiveCell) -> None:
    with pytest.raises(Unavailable, match="no cpu or gpu node is up"):
        await cell.ask(cell.client.deploy, SPEC)


async def test_open_requests_are_listed_and_one_is_cancelled(cell: LiveCell) -> None:
    node = await cell.deployed(held=True)
    asked = asyncio.create_task(cell.answer(asking(max_tokens=4)))
    order = (await node.told(SubmitRequest)).order
    await node.answer(order, 0, 2, last=False)
    await cell.until(lambda: [r.output_tokens for r in cell.client.requests()] == [2])
    (open_,) = await cell.ask(cell.client.requests)
    assert (open_.request_id, open_.deployment) == (order.request.request_id, SPEC.name)
    assert (open_.phase, open_.prompt_tokens, open_.output_tokens_max) == ("answering", 3, 4)
    assert 0.0 < open_.age_s < WAIT_S_MAX
    await cell.ask(cell.client.cancel, open_.request_id)
    with pytest.raises(Cancelled, match="cancelled by an operator"):
        await asked
    assert (await node.told(AbortRequest)).request_id == open_.request_id
    await cell.idle()
    assert await cell.ask(cell.client.requests) == ()
    with pytest.raises(NotFound, match="no open request") as caught:
        await cell.ask(cell.client.cancel, open_.request_id)
    assert "mesh requests" in caught.value.hint


async def test_a_deploy_says_that_a_chat_template_cannot_be_compiled(cell: LiveCell) -> None:
    node = await cell.node()
    node.text = replace(ASSETS, chat_template="a\n{% if %}")
    said = await cell.ask(cell.client.deploy, SPEC)
    assert said.message == "deployed"
    assert said.amiss.startswith("its chats are refused: ")
    assert "cannot be compiled" in said.amiss
    assert "line 2" in said.amiss
    assert said.text == f"deployed; {said.amiss}"


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


@pytest.mark.own_cell
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


@pytest.mark.own_cell
async def test_measuring_is_told_to_those_who_watch(cell: LiveCell) -> None:
    await cell.deployed()
    await cell.ask(cell.client.profile, SPEC.name)
    events = await cell.ask(lambda: list(cell.client.watch(backlog=50)))
    lines = [(event.line.kind, event.line.text) for event in events]
    assert ("deployment", "measure a profile") in lines
    assert ("instance", "measure iteration times") in lines
    assert any(text.startswith(f"measured model {PROFILE.model_id}") for _, text in lines)
