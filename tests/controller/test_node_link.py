"""Links as the controller keeps them: hello, names, malformed reports, breaks, silence."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from mesh.controller.node_link import NodeLinks
from mesh.domain.errors import AlreadyExists, InvalidInput, MeshError, Refused, Unavailable
from mesh.domain.events import ControllerEvent, NodeConnected, NodeDisconnected
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.invocation import Finished, Tokens
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import (
    AbortRequest,
    Heartbeat,
    ImportDone,
    ImportModel,
    InstanceLoaded,
    LoadInstance,
    NodeStarting,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.v1 import node_link_pb2 as pb
from mesh.v1.node_link_pb2_grpc import NodeLinkStub
from mesh.wire.channel import dial
from mesh.wire.codec import report_to_wire
from mesh.wire.errors import EndedCall, error_of
from mesh_nodes.announcing import Announcer
from tests.controller.live import (
    ASSETS,
    FOOTPRINT,
    HELLO,
    MODEL,
    QUICK,
    SPEC,
    FakeNode,
    LiveCell,
    asking,
    live_cell,
)
from tests.core.cells import instance_report


async def ending_of(call: Any) -> MeshError:
    """Why the controller ended a link. The reason comes after all that was said before it."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
    if await call.code() is grpc.StatusCode.OK:
        raise AssertionError("the controller ended the link without a reason")
    metadata = await call.trailing_metadata()
    error = grpc.aio.AioRpcError(await call.code(), metadata, metadata, await call.details(), None)
    return error_of(cast(EndedCall, error))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (report_to_wire(Heartbeat(rss_bytes=1)), "first report is Heartbeat"),
        (pb.NodeReport(), "holds nothing that this version knows"),
        (pb.NodeReport(hello=pb.NodeHello(node_id="n1", device="cpu")), "lacks run_id"),
        (pb.NodeReport(hello=pb.NodeHello(node_id="n", run_id="r", device="x")), "device is 'x'"),
    ],
)
async def test_a_malformed_hello_is_answered_as_invalid_input(
    cell: LiveCell, first: pb.NodeReport, said: str
) -> None:
    async with dial(cell.address) as channel:
        connect: Any = NodeLinkStub(channel).Connect
        call = connect()
        await call.write(first)
        error = await ending_of(call)
    assert isinstance(error, InvalidInput)
    assert said in error.message
    assert await cell.ask(cell.client.nodes) == ()


async def test_bytes_that_are_no_hello_are_answered_as_invalid_input(cell: LiveCell) -> None:
    async with dial(cell.address) as channel:
        connect: Any = channel.stream_stream(
            "/mesh.v1.NodeLink/Connect",
            request_serializer=lambda raw: raw,
            response_deserializer=pb.NodeCommand.FromString,
        )
        call = connect()
        await call.write(b"\xff\xff")
        assert isinstance(await ending_of(call), InvalidInput)


async def test_a_hello_that_does_not_come_is_waited_for_with_a_bound(
    cell: LiveCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.controller.node_link.HELLO_S_MAX", 0.1)
    async with dial(cell.address) as channel:
        connect: Any = NodeLinkStub(channel).Connect
        error = await ending_of(connect())
    assert (type(error), error.message) == (InvalidInput, "no hello within 0.1 s")


async def test_a_second_node_of_one_name_is_turned_away_and_the_first_stays(
    cell: LiveCell,
) -> None:
    first = await cell.deployed()
    second = FakeNode(cell.address, replace(HELLO, run_id="run-2"))
    await second.send(second.hello)
    error = await ending_of(second.call)
    await second.leave()
    assert isinstance(error, AlreadyExists)
    assert "'n1' is in this cell already" in error.message
    assert "--name" in error.hint
    assert isinstance((await cell.answer())[-1], Finished)
    assert first.commands


async def test_a_malformed_report_ends_the_link_and_requests_move(cell: LiveCell) -> None:
    """What the client already has is not repeated: the second node continues after it."""
    first = await cell.deployed(held=True)
    answer = asyncio.create_task(cell.answer(asking(max_tokens=3)))
    order = (await first.told(SubmitRequest)).order
    await first.answer(order, 0, 1, last=False)
    await cell.node(node_id=NodeId("n2"))
    await first.call.write(pb.NodeReport(instance_gone=pb.InstanceGone()))
    events = await answer
    texts = [(e.first_index, e.text) for e in events if isinstance(e, Tokens)]
    assert "".join(text for _, text in texts) == "aaa"
    assert texts[0] == (0, "a")
    second = cell.nodes[1]
    assert (await second.told(SubmitRequest)).order.output_tokens == (97,)
    assert [node.node_id for node in await cell.ask(cell.client.nodes)] == ["n2"]


async def test_unknown_words_of_an_import_fail_it_and_the_node_stays(cell: LiveCell) -> None:
    """And what it reports beside that says nothing."""
    node = await cell.node()
    node.importing = False
    deploying = asyncio.create_task(cell.ask(cell.client.deploy, SPEC))
    asked = await node.told(ImportModel)
    await node.call.write(pb.NodeReport.FromString(b"\xfa\x3f\x01x"))  # of kind 1023
    done = ImportDone(
        operation_id=asked.operation_id, model=MODEL, footprint=FOOTPRINT, text=ASSETS
    )
    message = report_to_wire(done)
    message.import_done.model.weights = "i2"
    await node.call.write(message)
    with pytest.raises(InvalidInput, match="weights is 'i2'; it must be one of i8"):
        await deploying
    node.importing = True
    assert (await cell.ask(cell.client.deploy, SPEC)).message == "deployed"


async def test_a_broken_link_is_noticed_at_once_and_the_node_may_come_back(
    cell: LiveCell,
) -> None:
    """It comes back with what it holds, and serves without another load."""
    node = await cell.deployed()
    await cell.answer()
    load = await node.told(LoadInstance)
    await node.leave()
    await cell.until(lambda: not cell.client.nodes())
    holds = instance_report(
        instance_id=load.instance_id,
        footprint=FOOTPRINT,
        deployment=SPEC.name,
        kv_blocks=load.kv_blocks,
        context_tokens_max=load.context_tokens_max,
        batch_max=load.batch_max,
    )
    back = await cell.node(instances=(holds,))
    back.commands.append(load)  # so that it knows its instance
    events = await cell.answer()
    assert isinstance(events[-1], Finished)
    assert [c for c in back.commands if isinstance(c, LoadInstance)] == [load]


@pytest.mark.parametrize("loop_turns", range(6))
async def test_a_break_that_is_an_end_and_a_cancellation_is_told_once(loop_turns: int) -> None:
    """gRPC does both when a node dies, in either order and any distance."""
    posted: list[ControllerEvent] = []
    came, died = asyncio.Event(), asyncio.Event()

    def post(event: ControllerEvent) -> None:
        posted.append(event)
        came.set()

    async def reports() -> AsyncIterator[pb.NodeReport]:
        yield report_to_wire(HELLO)
        await died.wait()

    context = SimpleNamespace(invocation_metadata=tuple)
    serving = asyncio.create_task(NodeLinks(post=post).Connect(reports(), context))
    await came.wait()
    died.set()
    for _ in range(loop_turns):
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait([serving])
    assert [type(event) for event in posted] == [NodeConnected, NodeDisconnected]


async def test_a_silent_node_is_lost_and_told_so(tmp_path: Path) -> None:
    async with live_cell(tmp_path, limits=QUICK) as cell:
        async with dial(cell.address) as channel:
            connect: Any = NodeLinkStub(channel).Connect
            call = connect()
            await call.write(report_to_wire(HELLO))
            error = await ending_of(call)
        assert isinstance(error, Unavailable)
        assert "the lease is 0.6 s" in error.message
        assert await cell.ask(cell.client.nodes) == ()


async def test_a_report_about_nothing_known_is_put_right(cell: LiveCell) -> None:
    """An instance that nobody wants is unloaded, a request that nobody has is no matter."""
    node = await cell.node()
    stray = InstanceId("stray-1")
    await node.send(
        InstanceLoaded(instance_id=stray, footprint=FOOTPRINT, kv_blocks=4, elapsed_s=0.1)
    )
    assert (await node.told(UnloadInstance)).instance_id == stray
    assert not any(isinstance(command, AbortRequest) for command in node.commands)


async def test_a_second_hello_on_a_link_ends_it(cell: LiveCell) -> None:
    node = await cell.node()
    await node.send(HELLO)
    await cell.until(lambda: not cell.client.nodes())
    assert node.listening is not None
    with pytest.raises(grpc.aio.AioRpcError, match="no later one"):
        await node.listening


STARTING = NodeStarting(
    node_id=NodeId("n1"),
    device=DeviceKind.CPU,
    hardware="none",
    cores=2,
    engine="fake",
    memory_bytes=1,
    phase="starts",
)


async def test_a_node_that_starts_is_shown_and_a_deploy_waits_for_it(cell: LiveCell) -> None:
    announcer = Announcer(cell.address, STARTING)
    announcer.say("measures precisions", 0.25)
    await cell.until(lambda: bool(cell.client.nodes()))
    (shown,) = await cell.ask(cell.client.nodes)
    assert (shown.node_id, shown.state) == ("n1", NodeState.STARTING)
    assert (shown.phase, shown.share) == ("measures precisions", 0.25)
    assert (await cell.status()).nodes == 0, "it is not in the cell yet"
    said: list[tuple[str, float]] = []

    def deploy() -> str:
        return cell.client.deploy(SPEC, lambda phase, share: said.append((phase, share))).text

    deploying = asyncio.create_task(asyncio.to_thread(deploy))
    await cell.until(lambda: bool(said))
    announcer.say("measures precisions", 0.5)
    waits = "waits for node n1, which measures precisions"
    await cell.until(lambda: (waits, 0.5) in said)
    assert said[0] == (waits, 0.25)
    await cell.node()
    (shown,) = await cell.ask(cell.client.nodes)
    assert (shown.state, shown.phase) == (NodeState.READY, ""), "it has joined"
    announcer.close()
    assert await deploying == "deployed"


async def test_a_node_that_goes_before_it_has_joined_is_forgotten(cell: LiveCell) -> None:
    announcer = Announcer(cell.address, STARTING)
    announcer.say("measures precisions", 0.0)
    await cell.until(lambda: bool(cell.client.nodes()))
    said: list[str] = []
    deploying = asyncio.create_task(
        asyncio.to_thread(cell.client.deploy, SPEC, lambda phase, share: said.append(phase))
    )
    await cell.until(lambda: bool(said))
    announcer.close()
    with pytest.raises(Unavailable, match="no cpu or gpu node is up"):
        await deploying
    assert await cell.ask(cell.client.nodes) == ()


async def test_a_deploy_waits_for_no_node_of_another_device(cell: LiveCell) -> None:
    announcer = Announcer(cell.address, replace(STARTING, device=DeviceKind.GPU))
    announcer.say("starts", 0.0)
    await cell.until(lambda: bool(cell.client.nodes()))
    with pytest.raises(Unavailable, match="no cpu node is up"):
        await cell.ask(cell.client.deploy, replace(SPEC, devices=(DeviceKind.CPU,)))
    announcer.close()


async def test_a_call_for_a_starting_node_is_told_what_that_one_does(cell: LiveCell) -> None:
    await (await cell.deployed()).leave()
    await cell.until(lambda: not cell.client.nodes())
    with pytest.raises(Refused, match=r"no cpu or gpu node is up$"):
        await cell.answer()
    announcer = Announcer(cell.address, STARTING)
    announcer.say("measures precisions", 0.25)
    await cell.until(lambda: bool(cell.client.nodes()))
    with pytest.raises(Refused, match="is up yet: one measures precisions, 25% done") as refused:
        await cell.answer()
    announcer.close()
    assert (refused.value.reason, refused.value.retry_after_s) == (RefusalReason.NO_NODE, 5.0)
    assert refused.value.hint.startswith("try again in 5.0 s; ")


async def test_a_node_whose_controller_knows_no_such_call_or_is_not_there_goes_on() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    older, absent = Announcer(address, STARTING), Announcer("127.0.0.1:1", STARTING)
    for announcer in (older, absent):
        announcer.say("measures precisions", 0.0)
        await asyncio.sleep(0.05)
        announcer.say("measures precisions", 0.5)
        announcer.close()
    await server.stop(None)
