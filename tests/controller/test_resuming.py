"""Calls with a key: what becomes of one that comes again, and of what cannot be meant."""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.controller.gateway import GAP_S_MAX, Gateway, _digest_of
from mesh.controller.invocation_checks import check_invocation
from mesh.controller.tenants import TenantMeter
from mesh.domain.access import Caller, Role, TenantLimits, TenantName
from mesh.domain.errors import (
    AlreadyExists,
    Cancelled,
    InvalidInput,
    MeshError,
    Refused,
    StandsBy,
    Unavailable,
)
from mesh.domain.events import InvokeRequested
from mesh.domain.ids import RequestId
from mesh.domain.invocation import (
    Accepted,
    Finished,
    Invocation,
    InvocationEvent,
    Resume,
    Tokens,
)
from mesh.domain.lifecycle import NodeState
from mesh.domain.limits import BREAKS_MAX
from mesh.domain.messages import AbortRequest, HeldRequest, InstanceReport, SubmitRequest
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import RequestOrder, RequestTokens
from mesh.sim.clock import HeapClock
from mesh.wire.access import _CALLER
from mesh.wire.client import Calls, MeshClient
from mesh.wire.resuming import CallMade, LeaderWatch, ResumedAnswer
from tests.controller.live import (
    FOOTPRINT,
    HELLO,
    MODEL,
    WAIT_S_MAX,
    FakeNode,
    LiveCell,
    asking,
    live_cell,
)

pytestmark = pytest.mark.own_cell
KEY = "this call"


def keyed(resume: Resume | None = None, **changes: Any) -> Invocation:
    return replace(asking(max_tokens=6), key=KEY, resume=resume, **changes)


def resume_of(*token_ids: int, age_s: float = 0.1) -> Resume:
    return Resume(next_index=len(token_ids), output_tokens=token_ids, age_s=age_s)


def tokens_of(events: Sequence[InvocationEvent]) -> list[tuple[int, str]]:
    return [(e.first_index, e.text) for e in events if isinstance(e, Tokens) and e.token_ids]


class Open:
    """A call that is read in a thread."""

    def __init__(self, cell: LiveCell, asked: Invocation) -> None:
        self.events: list[InvocationEvent] = []
        self.reading = asyncio.create_task(asyncio.to_thread(self._read, cell.address, asked))

    def _read(self, address: str, asked: Invocation) -> None:
        with MeshClient(address) as client:
            for event in client.invoke(asked):
                self.events.append(event)

    async def tokens(self, count: int) -> None:
        while sum(len(e.token_ids) for e in self.events if isinstance(e, Tokens)) < count:
            assert not self.reading.done(), self.reading
            await asyncio.sleep(0.01)


async def begun(cell: LiveCell, count: int) -> tuple[FakeNode, Open, RequestOrder]:
    """A call with the key that has so many tokens, and no more for now."""
    node = await cell.deployed(held=True)
    call = Open(cell, keyed())
    order = (await node.told(SubmitRequest)).order
    assert order.request.keyed
    await node.answer(order, 0, count, last=False)
    await call.tokens(count)
    return node, call, order


async def test_what_cannot_be_meant_is_told_with_a_hint(cell: LiveCell) -> None:
    node, call, order = await begun(cell, 3)
    for asked, error, what in (
        (keyed(), AlreadyExists, "a call with this key runs"),
        (keyed(resume_of(97, 97, 97, 97)), InvalidInput, "next_index is 4; the answer has 3"),
        (keyed(resume_of(97, 98)), InvalidInput, "token 1 is 98; the answer has 97"),
        (keyed(resume_of(97, 999)), InvalidInput, "output_tokens is 999"),
        (keyed(resume_of(*[97] * 7)), InvalidInput, "at most max_tokens, 6"),
        (keyed(Resume(next_index=2, output_tokens=(97,))), InvalidInput, "next_index is 2"),
        (keyed(resume_of(age_s=-1.0)), InvalidInput, "age_s is -1"),
        (keyed(resume_of(age_s=float("nan"))), InvalidInput, "age_s is nan"),
        (keyed(resume_of(age_s=1e9)), InvalidInput, "age_s is 1"),
        (keyed(resume_of(), prompt=asking(9).prompt), InvalidInput, "that of another call"),
        (keyed(resume_of(), temperature=1.0), InvalidInput, "that of another call"),
        (replace(keyed(), key="k" * 129), InvalidInput, "key is 129"),
    ):
        with pytest.raises(error, match=what):
            await cell.answer(asked)
    with pytest.raises(InvalidInput, match="without the key"):  # a client would give it one
        check_invocation(replace(keyed(resume_of()), key=""))
    await node.answer(order, 3, 3, last=True)
    await call.reading
    with pytest.raises(AlreadyExists, match="a call with this key has ended"):
        await cell.answer(keyed())


async def test_one_that_comes_again_takes_the_place_of_its_stream_and_has_each_token_once(
    cell: LiveCell,
) -> None:
    node, call, order = await begun(cell, 3)
    again = Open(cell, keyed(resume_of(97, 97)))
    with pytest.raises(Cancelled, match="has asked for it again by its key"):
        await call.reading
    await node.told(AbortRequest)

    def submits() -> list[SubmitRequest]:
        return [command for command in node.commands if isinstance(command, SubmitRequest)]

    await cell.until(lambda: len(submits()) == 2)
    later = submits()[1].order
    assert (later.output_tokens, later.request) == ((97, 97), order.request)
    await node.answer(later, 2, 4, last=True)
    await again.reading
    assert tokens_of(again.events) == [(n, "a") for n in range(2, 6)]
    finished = again.events[-1]
    assert isinstance(finished, Finished)
    assert finished.output_tokens == 6


async def test_one_that_had_all_of_its_answer_is_told_its_end(cell: LiveCell) -> None:
    await cell.deployed()
    events = await cell.answer(keyed(resume_of(*[97] * 6)))
    assert isinstance(events[0], Accepted)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.output_tokens) == (FinishReason.LENGTH, 6)
    assert not tokens_of(events)


def test_tenants_have_keys_of_their_own() -> None:
    def digest(tenant: str) -> bytes:
        caller = Caller(key_id="k", tenant=TenantName(tenant), role=Role.TENANT)
        token = _CALLER.set(caller)
        try:
            return _digest_of(KEY)
        finally:
            _CALLER.reset(token)

    assert len({digest("a"), digest("b"), digest("a")}) == 2


@pytest.mark.parametrize("client_first", [False, True])
@pytest.mark.parametrize("ended", [False, True])
async def test_what_a_node_has_computed_on_goes_to_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, client_first: bool, ended: bool
) -> None:
    """The controller is another one: it knows of the call from its node, or from its client."""
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", 0.1)  # of the first stream
    async with live_cell(tmp_path) as cell:
        node, call, order = await begun(cell, 3)
        instance_id = node.instance_id
        call.reading.cancel()
        cell.client.close()
    outputs = tuple(
        RequestTokens(
            request_id=order.request.request_id,
            attempt=order.attempt,
            first_index=n,
            token_ids=(97,),
            text="a",
            finish=FinishReason.LENGTH if ended and n == 5 else None,
        )
        for n in range(6 if ended else 5)
    )
    loaded = InstanceReport(
        instance_id=instance_id,
        deployment=order.request.deployment,
        model_id=MODEL.model_id,
        footprint=FOOTPRINT,
        kv_blocks=8,
        kv_blocks_used=1,
        context_tokens_max=MODEL.context_tokens_max,
        batch_max=8,
        batch=0 if ended else 1,
    )
    held = HeldRequest(instance_id=instance_id, order=replace(order, age_s=1.0), outputs=outputs)
    hello = replace(HELLO, instances=(loaded,), requests=(held,))
    async with live_cell(tmp_path) as cell:
        asked = keyed(resume_of(97, 97, 97))
        back = FakeNode(cell.address, hello)
        cell.nodes.append(back)
        if client_first:
            again = Open(cell, asked)
            await cell.until(lambda: bool(again.events))
            await back.join()
        else:
            await back.join()
            again = Open(cell, asked)
        if not ended:
            assert [(one.attempt, one.next_index) for one in back.adopted] == [(order.attempt, 5)]
            await again.tokens(2)
            await back.answer(order, 5, 1, last=True, instance_id=instance_id)
        await again.reading
        told = tokens_of(again.events)
        assert (told[0][0], "".join(text for _, text in told)) == (3, "aaa")
        assert isinstance(again.events[-1], Finished)
        assert not [c for c in back.commands if isinstance(c, SubmitRequest | AbortRequest)]


async def test_a_client_of_a_controller_that_never_was_is_told_at_once(tmp_path: Path) -> None:
    no_one = pytest.raises(Unavailable, match="no controller answers")
    with MeshClient("127.0.0.1:1") as client, no_one:
        await asyncio.to_thread(list, client.invoke(asking()))


@pytest.fixture
async def inner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[LiveCell, Gateway]]:
    """A controller with its gateway, for what two calls do in one turn of the loop."""
    made: list[Gateway] = []

    class Seen(Gateway):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            made.append(self)

    monkeypatch.setattr("mesh.controller.server.Gateway", Seen)
    async with live_cell(tmp_path) as cell:
        yield cell, made[0]


async def read(gateway: Gateway, asked: Invocation) -> list[InvocationEvent]:
    async with gateway.call(asked) as call:
        return [event async for event in call]


async def test_only_what_an_earlier_controller_may_have_accepted_is_accepted_unseen(
    inner: tuple[LiveCell, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, gateway = inner
    await (await cell.deployed()).leave()
    cell.nodes.clear()
    await cell.until(lambda: all(n.state is NodeState.LOST for n in cell.client.nodes()))
    posted: list[Any] = []
    post = gateway._post

    def seen(event: Any) -> None:
        posted.append(event)
        post(event)

    monkeypatch.setattr(gateway, "_post", seen)

    async def accepted(key: str, resume: Resume) -> bool:
        async with gateway.call(replace(keyed(resume), key=key)) as call:
            try:
                return isinstance(await anext(aiter(call)), Accepted)
            except Refused as refusal:
                return refusal.reason is not RefusalReason.NO_NODE

    assert not await accepted("fresh", resume_of(age_s=0.0))
    assert await accepted("old", resume_of(age_s=1000.0))
    assert await accepted("begun", resume_of(97, age_s=1000.0))
    *_, last = [e.resumed for e in posted if isinstance(e, InvokeRequested) and e.resumed]
    assert last.age_s == 1000.0
    since_s = gateway.now_s() - gateway._began_s
    assert last.queue_age_s is not None
    assert GAP_S_MAX <= last.queue_age_s <= GAP_S_MAX + since_s
    monkeypatch.setattr("mesh.controller.gateway.ACCEPTED_BEFORE_MAX", 2)
    assert not await accepted("third", resume_of(97, age_s=1000.0))
    monkeypatch.setattr("mesh.controller.gateway.ACCEPTED_BEFORE_S_MAX", 0.0)
    assert not await accepted("late", resume_of(97, age_s=1000.0))
    *_, last = [e.resumed for e in posted if isinstance(e, InvokeRequested) and e.resumed]
    assert last.queue_age_s == 0.0, "it is ahead of nobody"


async def test_a_cancel_of_the_stream_before_does_not_end_one_that_comes_again(
    inner: tuple[LiveCell, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", 0.1)  # of the first stream
    cell, gateway = inner
    node, call, order = await begun(cell, 3)
    node.held = False
    gateway.left(order.request.request_id)
    with pytest.raises(InvalidInput, match="next_index is 4; the answer has 3"):
        await read(gateway, keyed(resume_of(97, 97, 97, 97)))
    gateway.left(order.request.request_id)
    async with asyncio.timeout(WAIT_S_MAX):
        events = await read(gateway, keyed(resume_of(97, 97, 97)))
    assert isinstance(events[-1], Finished)
    call.reading.cancel()


async def test_each_token_is_charged_once_and_a_prompt_unless_it_was(cell: LiveCell) -> None:
    node, call, order = await begun(cell, 3)
    node.held = False
    await cell.answer(keyed(resume_of(97, 97)))
    await asyncio.gather(call.reading, return_exceptions=True)
    (usage,) = await cell.ask(cell.client.usage)
    prompt = len(order.request.prompt_tokens)
    assert (usage.prompt_tokens, usage.output_tokens) == (prompt, 6)
    await cell.answer(replace(keyed(resume_of(97)), key="invented"))
    (usage,) = await cell.ask(cell.client.usage)
    assert (usage.prompt_tokens, usage.output_tokens) == (2 * prompt, 11)


async def test_the_end_of_an_answer_is_told_as_it_was(cell: LiveCell) -> None:
    node = await cell.deployed()
    node.says = "abc"
    await cell.answer(keyed())
    *_, finished = await cell.answer(keyed(resume_of(97, 97, 97)))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.output_tokens) == (FinishReason.STOP, 3)
    assert len([c for c in node.commands if isinstance(c, SubmitRequest)]) == 1


async def test_one_that_comes_again_takes_the_place_that_a_tenant_has(
    inner: tuple[LiveCell, Gateway],
) -> None:
    cell, gateway = inner
    node = await cell.deployed(held=True)
    gateway._tenants = TenantMeter(
        lambda _: TenantLimits(running=1, requests_per_s=2.0), HeapClock()
    )
    _CALLER.set(Caller(key_id="k", tenant=TenantName("t"), role=Role.ADMIN))
    first = asyncio.create_task(read(gateway, keyed()))
    await node.answer((await node.told(SubmitRequest)).order, 0, 1, last=False)
    await cell.until(lambda: any(request.output_tokens for request in gateway.requests()))
    with pytest.raises(Refused, match="has 1 calls under way"):
        await read(gateway, replace(keyed(), key="other"))
    node.held = False
    for _ in range(4):  # more often than it may call in a second
        events = await read(gateway, keyed(resume_of(97, age_s=1.0)))
        assert isinstance(events[-1], Finished)
    with pytest.raises(Cancelled, match="by its key"):
        await first


class Script:
    """What each try of an answer tells, one after the other; then it ends as said."""

    def __init__(self, *tries: Sequence[Any]) -> None:
        self._tries = list(tries)
        self.asked: list[tuple[str, Invocation]] = []

    def cancel(self) -> None:
        """Nothing hangs here."""

    def __call__(self, address: str, asked: Invocation, left_s: float | None) -> CallMade:
        self.asked.append((address, asked))
        return self, self._told(self._tries.pop(0) if self._tries else [BROKEN])

    def _told(self, events: Sequence[Any]) -> Generator[InvocationEvent, None, None]:
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield event


class Reset(grpc.RpcError):
    """As gRPC tells that a connection broke."""

    def __init__(
        self,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        details: str = "Connection reset by peer",
    ) -> None:
        self._code, self._details = code, details

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def code(self) -> grpc.StatusCode:
        return self._code


BROKEN = Unavailable("the controller went away")
BROKEN.__cause__ = Reset()
ACCEPTED = Accepted(
    request_id=RequestId("k-1"), prompt_tokens=3, ttft_limit_s=1.0, tpot_limit_s=1.0, grace_s=0.0
)


def scripted(script: Script, addresses: Sequence[str] = ("a:1",)) -> ResumedAnswer:
    return ResumedAnswer(asking(), script, addresses, None, LeaderWatch(addresses))


def told(first: int, *token_ids: int) -> Tokens:
    return Tokens(first_index=first, token_ids=token_ids, text="".join(map(chr, token_ids)))


@pytest.mark.parametrize(
    ("code", "details", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer", Unavailable),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", Unavailable),
        (grpc.StatusCode.CANCELLED, "CANCELLED", Unavailable),
        (grpc.StatusCode.CANCELLED, "Channel closed!", Cancelled),
    ],
)
def test_a_stream_that_the_other_end_tears_is_not_one_that_its_client_has_cancelled(
    code: grpc.StatusCode, details: str, error: type[MeshError]
) -> None:
    class Torn:
        def __iter__(self) -> Iterator[Any]:
            yield "a message"
            raise Reset(code, details)

        def cancel(self) -> None:
            """It has ended."""

    stream: Any = Torn()
    with pytest.raises(error) as raised:
        list(Calls("127.0.0.1:1").stream(stream))
    assert type(raised.value) is error


def test_a_call_that_ends_each_controller_is_not_asked_for_without_an_end() -> None:
    script = Script(*[[ACCEPTED, BROKEN]] * 100)
    with pytest.raises(Unavailable, match="went away"):
        list(scripted(script).events())
    assert len(script.asked) == BREAKS_MAX + 1


def test_tokens_that_a_controller_begins_anew_come_once_and_others_are_an_error() -> None:
    begun = [ACCEPTED, told(0, 97, 98), BROKEN]
    script = Script(begun, [ACCEPTED, told(0, 97), told(1, 98, 99), told(3, 100), BROKEN])
    events = scripted(script).events()
    read = list(islice(events, 4))
    assert [(e.first_index, e.token_ids, e.text) for e in read if isinstance(e, Tokens)] == [
        (0, (97, 98), "ab"),
        (2, (99,), "c"),
        (3, (100,), "d"),
    ]
    for wrong in (told(3, 99), told(0, 98)):
        with pytest.raises(Unavailable, match="does not go on with the answer"):
            list(scripted(Script(begun, [ACCEPTED, wrong])).events())


def test_a_call_that_no_controller_has_heard_is_asked_anew() -> None:
    stopping = Refused("stops", reason=RefusalReason.SHUTTING_DOWN)
    script = Script([stopping], [ACCEPTED, BROKEN], [InvalidInput("enough")])
    with pytest.raises(InvalidInput):
        list(scripted(script).events())
    assert [asked.resume is None for _, asked in script.asked] == [True, True, False]


def test_calls_begin_where_the_last_one_was_served() -> None:
    addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    watch, script = LeaderWatch(addresses), Script([StandsBy("not here")], [ACCEPTED])
    list(ResumedAnswer(asking(), script, addresses, None, watch).events())
    list(ResumedAnswer(asking(), Script([ACCEPTED]), addresses, None, watch).events())
    assert [address for address, _ in script.asked] == addresses
    assert watch.at == 1


def test_an_answer_leaves_only_what_hangs() -> None:
    script = Script([Cancelled("left")], [ACCEPTED])
    answer = scripted(script, ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"])
    answer.leave_for(1, hung={1})
    answer.leave_for(2, hung={0, 1})
    list(answer.events())
    assert [address for address, _ in script.asked] == ["127.0.0.1:1", "127.0.0.1:3"]


@pytest.mark.parametrize("address", ["a:1,", "a:1,,b:1", "a:1, a:1", "a"])
def test_addresses_that_cannot_be_meant_are_told_at_once(address: str) -> None:
    with pytest.raises(InvalidInput, match=r"is no address|is named twice"):
        MeshClient(address)


async def test_one_that_drains_ends_at_once_where_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", 0.1)
    async with live_cell(tmp_path, grace_s=3600.0) as cell:
        _, call, _ = await begun(cell, 1)
        cell.stop.set()
        await cell.until(lambda: not cell.stop.is_set())
        await asyncio.sleep(0.1)
        assert not cell.serving.done(), "its answer has not ended"
        cell.stop.set()
        async with asyncio.timeout(WAIT_S_MAX):
            await cell.serving
        call.reading.cancel()
