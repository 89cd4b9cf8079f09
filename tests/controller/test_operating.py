"""What an operator and a tenant may do with deployments, replays among it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mesh.controller import operating, replaying, server, viewed
from mesh.controller.gateway import Gateway
from mesh.controller.operating import Operating
from mesh.controller.operations import Operations
from mesh.controller.recent import Recent
from mesh.controller.replaying import Replaying
from mesh.controller.viewed import Viewed, ViewedCell
from mesh.domain.access import Caller, Role, TenantLimits, TenantName
from mesh.domain.actions import ReplyProgress
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import AlreadyExists, InvalidInput, Unavailable
from mesh.domain.events import (
    ControllerEvent,
    DeleteRequested,
    DeploymentStored,
    NodeDisconnected,
)
from mesh.domain.ids import DeploymentName, ModelId, NodeId, OperationId
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import NodeStarting, SubmitRequest
from mesh.domain.model import Task
from mesh.domain.request import RequestOrder
from mesh.domain.source_rules import SourceRules
from mesh.domain.views import CellSnapshot, InstancePlan
from mesh.http.exchange import Bodies
from mesh.http.operating import OperateAll
from mesh.report.calls import CallBook
from mesh.runtime import turns
from mesh.sim.clock import HeapClock
from mesh.wire import access
from mesh.wire.work_threads import WorkThreads
from tests.cli.views import CHAT_SMALL, NODE
from tests.controller.live import CLASSES, EMBEDS, SPEC, FakeNode, LiveCell, asking, live_cell
from tests.core.cells import CellUnderTest, deployment, hello

A = TenantName("a")
STARTING = NodeStarting(
    node_id=NodeId("cpu0"),
    device=NODE.device,
    hardware="none",
    cores=2,
    engine="fake",
    memory_bytes=1,
    phase="measures",
)


@pytest.fixture
def as_caller() -> Iterator[Any]:
    token = access._CALLER.set(Caller())
    yield access._CALLER.set
    access._CALLER.reset(token)


class Within(LiveCell):
    gateway: Gateway
    book: CallBook
    replaying: Replaying


@pytest.fixture
async def within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_caller: Any
) -> AsyncIterator[Within]:
    """A live cell with what its controller is made of."""
    made: list[tuple[Gateway, CallBook, Replaying]] = []

    def kept(gateway: Gateway, book: CallBook) -> Replaying:
        made.append((gateway, book, Replaying(gateway, book)))
        return made[0][2]

    monkeypatch.setattr(server, "Replaying", kept)
    monkeypatch.setattr(replaying, "DRAWN_AHEAD_S", 0.0)
    async with live_cell(tmp_path) as cell:
        found = cast(Within, cell)
        found.gateway, found.book, found.replaying = made[0]
        yield found


async def test_a_deploy_looks_again_whose_a_name_is_after_its_wait(
    monkeypatch: pytest.MonkeyPatch, as_caller: Any
) -> None:
    monkeypatch.setattr(operating, "STARTING_POLL_S", 0.0)
    posted: list[ControllerEvent] = []
    empty = CellSnapshot(deployments=(), nodes=(), queued=0, running=0, served=0, refused=())
    theirs = replace(CHAT_SMALL, spec=replace(CHAT_SMALL.spec, tenant="b"))
    cells = [empty]

    async def acknowledged(_: object) -> str:
        return ""

    desk = Operating(
        operations=Operations(post=posted.append, epoch=1),
        seen=tuple,
        whole=lambda: cells[0],
        clock=HeapClock(),
        limits=lambda _: TenantLimits(),
        acknowledged=acknowledged,
        starting=lambda: [STARTING],
        sources=SourceRules(),
        replaying=cast(Replaying, None),
        foreseen=lambda spec: None,
        planned=lambda name, calls: cast(InstancePlan, None),
        writable=lambda: None,
    )
    as_caller(Caller(role=Role.TENANT, tenant=A))
    replies = desk.deploy(CHAT_SMALL.spec)
    assert isinstance(await anext(replies), ReplyProgress)
    cells[0] = replace(empty, deployments=(theirs,), nodes=(NODE,))
    with pytest.raises(AlreadyExists, match="is taken"):
        await anext(replies)
    assert not posted


async def test_a_later_answer_does_not_go_to_another_model(within: Within) -> None:
    await within.deployed()
    async with within.gateway.call(asking(), answers=2) as first:
        first.model_id = ModelId("another")
        with pytest.raises(Unavailable, match="another model"):
            async with within.gateway.call(asking(), first=first):
                pass


async def test_a_replay_keeps_classes_and_own_limits(within: Within) -> None:
    node = await within.deployed(CLASSES)
    await within.answer(replace(asking(1, 2, 3), slo_class="batch"))
    await within.answer(replace(asking(1, 2, 3), slo_ttft_s=60.0))
    told = await within.replaying.replay(SPEC.name, SPEC.name)
    assert told.startswith("2 of 2 calls")
    slos = [one.order.slo for one in node.commands if isinstance(one, SubmitRequest)]
    assert {slo.name for slo in slos[2:]} == {"batch", ""}
    assert {slo.ttft_limit_s(9) for slo in slos[2:]} >= {60.0}


async def test_a_replay_judges_calls_that_the_book_forgets_and_says_what_it_lacks(
    within: Within,
) -> None:
    within.book.stories = deque(maxlen=1)
    node = await within.deployed()
    await within.answer()
    node.held = True
    waiting = asyncio.create_task(within.answer())
    await within.until(lambda: sum(isinstance(c, SubmitRequest) for c in node.commands) == 2)
    node.held = False
    told = await within.replaying.replay(SPEC.name, SPEC.name)
    assert "not taken" not in told
    assert "not remembered any more" in told
    order = [c.order for c in node.commands if isinstance(c, SubmitRequest)][1]
    await node.answer(order, 0, 4, last=True)
    await waiting


async def test_a_replay_runs_beside_those_of_others_and_says_why_calls_were_refused(
    within: Within, as_caller: Any
) -> None:
    node = await within.deployed()
    await within.answer()
    node.held = True
    first = asyncio.create_task(within.replaying.replay(SPEC.name, SPEC.name))
    await within.until(lambda: sum(isinstance(c, SubmitRequest) for c in node.commands) == 2)
    with pytest.raises(Unavailable, match="another replay"):
        await within.replaying.replay(SPEC.name, SPEC.name)
    as_caller(Caller(tenant=A))
    within.gateway.stop()
    told = await within.replaying.replay(SPEC.name, SPEC.name)
    assert "not taken 2 (the controller is stopping)" in told
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_no_replay_of_what_generates_no_text(within: Within) -> None:
    await within.node(node_id=NodeId("n2"), run_id="run-2", embeds=True)
    await within.ask(within.client.deploy, replace(SPEC, name=EMBEDS, task=Task.EMBED))
    with pytest.raises(InvalidInput, match="task embed"):
        await within.replaying.replay(EMBEDS, EMBEDS)


async def test_an_error_that_nobody_foresaw_is_told_by_name_and_ends_nothing() -> None:
    async def fails(spec: DeploymentSpec) -> str:
        raise ValueError(spec.name)

    told: Any = await OperateAll(fails, Bodies(), WorkThreads())._tried(SPEC)
    assert (told["name"], told["error"]["message"]) == ("chat", "an internal error")


def viewed_of(cell: ViewedCell, clock: HeapClock, recent: Recent | None = None) -> Viewed:
    return Viewed(
        cell=cell,
        clock=clock,
        log=cast(Any, None),
        recent=recent or Recent(),
        book=cast(Any, None),
        cancel=cast(Any, None),
        used_since=cast(Any, None),
        threads=cast(Any, None),
    )


def test_the_nodes_that_are_shown_as_lost_are_those_lost_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewed, "LOST_MAX", 1)
    clock = HeapClock()
    seen = viewed_of(cast(Any, None), clock)
    late, early, drained = (replace(NODE, node_id=NodeId(n)) for n in ("late", "early", "drained"))
    drained = replace(drained, state=NodeState.DRAINING)
    for nodes in ([late, early], [late, drained], []):
        clock.advance(1.0)
        seen._see(nodes)
    assert [node.node_id for node in seen._with_lost(())] == ["late"]


async def test_a_large_cell_is_looked_at_while_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is lost and a deployment goes amid the look."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    cell = CellUnderTest(*(deployment(f"chat-{n}") for n in range(10)))
    cell.join(hello("n1"))
    link, _ = cell.join(hello("n2"))
    seen = viewed_of(cell.core, HeapClock())
    (before,) = await seen.pictures([Caller()])
    looking = asyncio.create_task(seen.pictures([Caller()]))
    await asyncio.sleep(0)
    assert not looking.done()
    deleted = DeleteRequested(operation_id=OperationId("o1"), name=DeploymentName("chat-9"))
    cell.tell(deleted)
    cell.tell(DeploymentStored(operation_id=deleted.operation_id))
    cell.tell(NodeDisconnected(link_id=link, reason="gone"))
    (after,) = await looking
    assert [len(one.deployments) for one in (before, after)] == [10, 9]
    assert [one.state for one in after.nodes] == [NodeState.READY, NodeState.LOST]


async def test_a_second_without_a_picture_has_the_gauges_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewed, "SAMPLE_S", 0.0)
    cell, clock, recent = CellUnderTest(deployment("chat")), HeapClock(), Recent()
    cell.join(hello("n1"))
    seen = viewed_of(cell.core, clock, recent)
    await seen.pictures([Caller()])
    sampling = asyncio.create_task(seen.sampling())
    ready = []
    for _ in range(3):
        clock.advance(1.0)
        await asyncio.sleep(0)
        ready.append(recent.samples[-1].nodes_ready)
    sampling.cancel()
    assert ready == [1, 1, None]


async def submitted(within: Within, node: FakeNode, count: int) -> list[RequestOrder]:
    def orders() -> list[RequestOrder]:
        return [one.order for one in node.commands if isinstance(one, SubmitRequest)]

    await within.until(lambda: len(orders()) == count)
    return orders()


async def test_nobody_comes_between_the_answers_of_a_call(within: Within) -> None:
    node = await within.deployed()
    async with AsyncExitStack() as opened:
        first = await opened.enter_async_context(within.gateway.call(asking(), answers=2))
        other = await opened.enter_async_context(within.gateway.call(asking()))
        second = await opened.enter_async_context(within.gateway.call(asking(), first=first))
        asked = [one.request_id for one in (other, first, second)]
        orders = await submitted(within, node, 3)
        assert [order.request.request_id for order in orders] == asked


async def test_an_answer_whose_client_left_before_the_last_had_come_is_not_asked_for(
    within: Within,
) -> None:
    node = await within.deployed()
    async with AsyncExitStack() as opened:
        first = await opened.enter_async_context(within.gateway.call(asking(), answers=3))
        async with within.gateway.call(asking(), first=first) as second:
            pass
        third = await opened.enter_async_context(within.gateway.call(asking(), first=first))
        orders = await submitted(within, node, 2)
        asked = [order.request.request_id for order in orders]
        assert asked == [first.request_id, third.request_id], second.request_id
