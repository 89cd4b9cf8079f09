"""The node's end of the link: welcome, both directions, reconnecting, giving up, stopping."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.domain.errors import AlreadyExists, InvalidInput, Unavailable
from mesh.domain.ids import InstanceId, OperationId
from mesh.domain.messages import (
    Heartbeat,
    ImportDone,
    ImportFailed,
    NodeCommand,
    NodeReport,
    UnloadInstance,
)
from mesh.domain.node_rule import CELL_RULE, NodeRule, RuleName
from mesh.domain.text import TextAssets
from mesh.runtime.link_life import CellEpoch, LinkLimits
from mesh.v1 import node_link_pb2 as pb
from mesh.v1.node_link_pb2_grpc import NodeLinkServicer, add_NodeLinkServicer_to_server
from mesh.wire.channel import bind, server_options
from mesh.wire.codec import command_to_wire, report_from_wire, welcome
from mesh.wire.link import NodeLink
from mesh.wire.serving import Guard
from tests.controller.live import FOOTPRINT, MODEL, WAIT_S_MAX
from tests.core.cells import hello

HELLO = hello(memory_bytes=1)
UNLOAD = UnloadInstance(instance_id=InstanceId("i1"))
QUICK = LinkLimits(welcome_s_max=WAIT_S_MAX, pause_s_min=0.01, pause_s_max=0.05)
"""The welcome may be late on a machine that is busy with other things."""
Script = Callable[["Controller", Any, Any], Awaitable[None]]
RULE = NodeRule(
    swap_bytes=1 << 33,
    turn=RuleName(name="swap", parameters=(("passed_max", 5),)),
    overestimate=1.25,
    chunk_tokens_max=512,
    turn_s_max=0.25,
)


class Controller(NodeLinkServicer, health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers each connection by the next of its scripts, the last one for ever."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.reports: list[NodeReport] = []
        self.connections = 0
        self.address = "127.0.0.1:0"
        self.looked_from: list[str] = []
        """Where looks whether it leads came from."""
        self.leads = False
        self.changed = asyncio.Event()

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        script = self.scripts[min(self.connections, len(self.scripts) - 1)]
        self.connections += 1
        self.changed.set()
        await script(self, request_iterator, context)

    async def Start(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """A controller of an earlier version does not know it."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.looked_from.append(context.peer())
        self.changed.set()
        return health_pb2.HealthCheckResponse(status="SERVING" if self.leads else "NOT_SERVING")

    async def hear(self, reports: Any, count: int) -> None:
        for _ in range(count):
            self.note(await anext(reports))

    def note(self, report: pb.NodeReport) -> None:
        self.reports.append(report_from_wire(report))
        self.changed.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = grpc.aio.server(options=server_options(), interceptors=[Guard()])
        add_NodeLinkServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        self.address = bind(server, self.address)
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)


async def take(self: Controller, reports: Any, context: Any) -> None:
    """Take the node, command once, then listen to it."""
    await self.hear(reports, 1)
    await context.write(welcome(1.0, RULE))
    await context.write(command_to_wire(UNLOAD))
    async for report in reports:
        self.note(report)


async def take_and_close(self: Controller, reports: Any, context: Any) -> None:
    await self.hear(reports, 1)
    await context.write(welcome(1.0, RULE))


async def take_of_old(self: Controller, reports: Any, context: Any) -> None:
    """As a controller did whose version knew no rules of turns."""
    await self.hear(reports, 1)
    await context.write(pb.NodeCommand(welcome=pb.Welcome(heartbeat_s=1.0)))


async def take_by_lot(self: Controller, reports: Any, context: Any) -> None:
    await self.hear(reports, 1)
    await context.write(pb.NodeCommand(welcome=pb.Welcome(heartbeat_s=1.0, turns="lot")))


async def take_to_swap(self: Controller, reports: Any, context: Any) -> None:
    await self.hear(reports, 1)
    rule = pb.Welcome(heartbeat_s=1.0, turns=CELL_RULE.turn.name, swap_bytes=1)
    await context.write(pb.NodeCommand(welcome=rule))


async def say_nothing(self: Controller, reports: Any, context: Any) -> None:
    await asyncio.sleep(WAIT_S_MAX)


async def refuse_name(self: Controller, reports: Any, context: Any) -> None:
    await self.hear(reports, 1)
    raise AlreadyExists("a node named 'n1' is here", hint="use another name")


async def refuse_hello(self: Controller, reports: Any, context: Any) -> None:
    """After it has come: where a call ends while its message is sent, gRPC's asyncio client tells
    of it as INTERNAL, after which a link dials on.
    """
    await self.hear(reports, 1)
    raise InvalidInput("that is no hello")


async def command_nonsense(self: Controller, reports: Any, context: Any) -> None:
    await self.hear(reports, 1)
    await context.write(welcome(1.0, RULE))
    await context.write(pb.NodeCommand())
    await asyncio.sleep(WAIT_S_MAX)


async def ask_for_2_bits(self: Controller, reports: Any, context: Any) -> None:
    """As a later version might, and for something else after it."""
    await self.hear(reports, 1)
    await context.write(welcome(1.0, RULE))
    asked = pb.ImportModel(operation_id="op", source="pkg://x/y", weights="i2")
    await context.write(pb.NodeCommand(import_model=asked))
    await context.write(command_to_wire(UNLOAD))
    await self.hear(reports, 1)
    await asyncio.sleep(WAIT_S_MAX)


async def until(changed: asyncio.Event, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while not condition():
            changed.clear()
            await changed.wait()


class Ends:
    """What the link told its agent, and ways to wait for it."""

    def __init__(self, address: str, limits: LinkLimits = QUICK) -> None:
        self.opened = 0
        self.rules: list[NodeRule] = []
        self.commands: list[NodeCommand] = []
        self.closed: list[str] = []
        self._changed = asyncio.Event()
        self.link = NodeLink(
            address=address,
            hello=lambda: HELLO,
            rng=random.Random(1),
            on_open=self._on_open,
            on_command=self._on_command,
            on_close=self._on_close,
            limits=limits,
        )
        self.running = asyncio.create_task(self.link.run())

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(self._changed, condition)

    async def stop(self) -> None:
        self.link.stop()
        async with asyncio.timeout(WAIT_S_MAX):
            await self.running

    def _on_open(self, rule: NodeRule) -> None:
        self.opened += 1
        self.rules.append(rule)
        self._changed.set()

    def _on_command(self, command: NodeCommand) -> None:
        self.commands.append(command)
        self._changed.set()

    def _on_close(self, reason: str) -> None:
        self.closed.append(reason)
        self._changed.set()


async def test_reports_go_up_and_commands_come_down_in_order() -> None:
    controller = Controller(take)
    async with controller.serving():
        ends = Ends(controller.address)
        await ends.until(lambda: ends.commands == [UNLOAD])
        assert ends.opened == 1
        beats = [Heartbeat(rss_bytes=n) for n in range(200)]
        for beat in beats:
            ends.link.send(beat)
        await until(controller.changed, lambda: len(controller.reports) == 201)
        await ends.stop()
    assert controller.reports == [HELLO, *beats]
    assert ends.closed == ["the node is stopping"]


async def test_a_broken_link_is_dialled_again_and_each_opening_is_closed_once() -> None:
    controller = Controller(take_and_close, command_nonsense, take)
    async with controller.serving():
        ends = Ends(controller.address)
        await ends.until(lambda: ends.commands == [UNLOAD])
        await ends.stop()
    assert (ends.opened, len(ends.closed)) == (3, 3)
    assert "closed the link" in ends.closed[0]
    assert "holds nothing that this version knows" in ends.closed[1]
    assert controller.connections == 3


async def test_a_controller_that_says_nothing_is_dialled_again() -> None:
    controller = Controller(say_nothing, take)
    async with controller.serving():
        ends = Ends(controller.address, replace(QUICK, welcome_s_max=0.3))
        await ends.until(lambda: ends.commands == [UNLOAD])
        await ends.stop()
    assert (ends.opened, ends.closed) == (1, ["the node is stopping"])
    assert controller.connections > 1


async def test_a_command_with_an_unknown_word_is_refused_and_the_link_goes_on() -> None:
    controller = Controller(ask_for_2_bits)
    async with controller.serving():
        ends = Ends(controller.address)
        await ends.until(lambda: ends.commands == [UNLOAD])
        await until(controller.changed, lambda: len(controller.reports) == 2)
        await ends.stop()
    refused = controller.reports[1]
    assert isinstance(refused, ImportFailed)
    assert (refused.operation_id, ends.closed) == ("op", ["the node is stopping"])


async def test_a_report_that_does_not_fit_its_message_fails_alone_and_the_link_goes_on() -> None:
    controller = Controller(take)
    done = ImportDone(
        operation_id=OperationId("op"),
        model=replace(MODEL, context_tokens_max=10**18),
        footprint=FOOTPRINT,
        text=TextAssets(tokenizer_json=b"{}"),
    )
    async with controller.serving():
        ends = Ends(controller.address)
        await ends.until(lambda: ends.opened == 1)
        ends.link.send(done)
        ends.link.send(Heartbeat(rss_bytes=-1))
        ends.link.send(Heartbeat(rss_bytes=1))
        await until(controller.changed, lambda: len(controller.reports) == 3)
        await ends.stop()
    failed, beat = controller.reports[1:]
    assert isinstance(failed, ImportFailed)
    assert (failed.operation_id, failed.error) == ("op", "ModelError")
    assert "Value out of range: 1000000000000000000" in failed.message
    assert (beat, ends.closed) == (Heartbeat(rss_bytes=1), ["the node is stopping"])


async def test_the_welcome_says_who_computes_next_and_an_old_one_means_headroom() -> None:
    controller = Controller(take_and_close, take_of_old)
    async with controller.serving():
        ends = Ends(controller.address)
        await ends.until(lambda: ends.opened == 2)
        await ends.stop()
    assert ends.rules[:2] == [RULE, CELL_RULE]


async def test_a_controller_that_comes_back_is_found_again() -> None:
    controller = Controller(take)
    async with controller.serving():
        ends = Ends(controller.address)
        await ends.until(lambda: ends.opened == 1)
    await ends.until(lambda: len(ends.closed) == 1)
    ends.link.send(Heartbeat(rss_bytes=1))  # dropped: nobody is there
    async with controller.serving():
        await ends.until(lambda: ends.opened == 2)
        await ends.stop()
    assert [r for r in controller.reports if isinstance(r, Heartbeat)] == []


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (refuse_name, AlreadyExists),
        (refuse_hello, InvalidInput),
        (take_by_lot, InvalidInput),
        (take_to_swap, InvalidInput),
    ],
)
async def test_what_does_not_heal_ends_the_link(script: Script, kind: type[Exception]) -> None:
    controller = Controller(script)
    async with controller.serving():
        ends = Ends(controller.address)
        with pytest.raises(kind):
            await asyncio.wait_for(ends.running, WAIT_S_MAX)
    assert (ends.opened, ends.closed, controller.connections) == (0, [], 1)


async def test_too_many_waiting_reports_break_the_link() -> None:
    controller = Controller(take)
    limits = replace(QUICK, reports_max=10)
    async with controller.serving():
        ends = Ends(controller.address, limits)
        await ends.until(lambda: ends.opened == 1)
        for n in range(12):  # in one go: the writer gets no turn in between
            ends.link.send(Heartbeat(rss_bytes=n))
        await ends.until(lambda: ends.opened == 2)
        await ends.stop()
    assert "10 reports wait to be sent, which is the limit" in ends.closed[0]


async def test_stopping_without_a_controller_is_prompt() -> None:
    ends = Ends("127.0.0.1:1", LinkLimits(pause_s_min=600.0, pause_s_max=600.0))
    await asyncio.sleep(0.2)
    await ends.stop()
    assert (ends.opened, ends.closed) == (0, [])


async def test_stopping_while_the_controller_keeps_silent_is_prompt() -> None:
    controller = Controller(say_nothing)
    async with controller.serving():
        ends = Ends(controller.address, LinkLimits(welcome_s_max=600.0))
        await until(controller.changed, lambda: controller.connections == 1)
        await ends.stop()
    assert (ends.opened, ends.closed) == (0, [])


async def test_a_failing_agent_ends_the_link_with_its_error() -> None:
    """A command that the agent chokes on is a fault of ours: it must not be retried silently."""

    class Choking(Ends):
        def _on_command(self, command: NodeCommand) -> None:
            raise RuntimeError("choked")

    controller = Controller(take)
    async with controller.serving():
        ends = Choking(controller.address)
        with pytest.raises(RuntimeError, match="choked"):
            await asyncio.wait_for(ends.running, WAIT_S_MAX)
    assert len(ends.closed) == 1


def take_at(epoch: int, cell: str = "a") -> Any:
    """Take the node as a leader of this epoch."""

    async def script(self: Controller, reports: Any, context: Any) -> None:
        await self.hear(reports, 1)
        await context.write(welcome(1.0, RULE, CellEpoch(epoch, cell)))
        async for report in reports:
            self.note(report)

    return script


async def stand_by(self: Controller, reports: Any, context: Any) -> None:
    raise Unavailable("this controller stands by")


@pytest.mark.parametrize(
    "refused", [take_at(3), take_at(9, "b")], ids=["an earlier one", "one of another cell"]
)
async def test_of_several_controllers_the_one_that_leads_has_the_node_and_no_other(
    refused: Any,
) -> None:
    first, second = Controller(stand_by), Controller(take_at(4), refused, take_at(5))
    async with first.serving():
        async with second.serving():
            ends = Ends(f"{first.address},{second.address}")
            await ends.until(lambda: ends.opened == 1)
            assert (first.connections, second.connections) == (1, 1)
        await ends.until(lambda: len(ends.closed) == 1)
        async with second.serving():
            await ends.until(lambda: ends.opened == 2)
            assert second.connections == 3, "it obeyed not the one between"
            await ends.stop()


async def test_looks_at_one_that_stands_by_share_a_connection() -> None:
    first, second = Controller(take_at(4)), Controller(stand_by)
    async with first.serving(), second.serving():
        ends = Ends(f"{first.address},{second.address}")
        await until(second.changed, lambda: len(second.looked_from) >= 3)
        await ends.stop()
    assert len(set(second.looked_from)) == 1


async def test_a_node_that_is_given_the_controllers_of_two_cells_is_in_one_at_a_time_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Controller(take_at(4)), Controller(take_at(4))
    first.leads = second.leads = True
    async with second.serving():
        async with first.serving():
            ends = Ends(f"{first.address},{second.address}")
            await ends.until(lambda: ends.opened == 1)
            await until(second.changed, lambda: len(second.looked_from) >= 4)
            assert (first.connections, second.connections) == (1, 0)
        await ends.until(lambda: ends.opened == 2)
        assert (len(ends.closed), second.connections) == (1, 1)
        await ends.stop()
    said = [one.message for one in caplog.records if "two cells" in one.message]
    assert len(said) == 1
    assert first.address in said[0]
    assert second.address in said[0]


async def test_an_answer_that_is_older_than_the_link_to_who_gave_it_is_no_second_leader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hanging(Controller):
        async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
            await asyncio.sleep(WAIT_S_MAX)

    class Following(Controller):
        async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
            self.leads = bool(self.looked_from)
            return await super().Check(request, context)

    async def take_until_followed(self: Controller, reports: Any, context: Any) -> None:
        await take_and_close(self, reports, context)
        await until(second.changed, lambda: len(second.looked_from) == 2)

    first, second, third = Controller(take_until_followed), Following(take), Hanging(stand_by)
    async with first.serving(), second.serving(), third.serving():
        ends = Ends(",".join(one.address for one in (first, second, third)))
        await ends.until(lambda: ends.opened == 2)
        await until(first.changed, lambda: len(first.looked_from) == 1)
        await ends.stop()
    assert not [one.message for one in caplog.records if "two cells" in one.message]


async def test_each_reason_why_there_is_no_link_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse_cell(self: Controller, reports: Any, context: Any) -> None:
        raise Unavailable("this node is of the cell a")

    first, second = Controller(stand_by), Controller(refuse_cell)
    async with first.serving(), second.serving():
        ends = Ends(f"{first.address},{second.address}")
        await until(second.changed, lambda: second.connections == 3)
        await ends.stop()
    said = [one.getMessage() for one in caplog.records if "no link to" in one.getMessage()]
    assert len(said) == 2
    assert f"{first.address} yet: this controller stands by" in said[0]
    assert f"{second.address} yet: this node is of the cell a" in said[1]
