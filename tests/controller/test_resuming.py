"""Calls with a key: what becomes of one that comes again, and of what cannot be meant."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.controller.gateway import _digest_of
from mesh.controller.invocation_checks import check_invocation
from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.errors import AlreadyExists, Cancelled, InvalidInput, Unavailable
from mesh.domain.invocation import (
    Accepted,
    Finished,
    Invocation,
    InvocationEvent,
    Resume,
    Tokens,
)
from mesh.domain.messages import AbortRequest, HeldRequest, InstanceReport, SubmitRequest
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestOrder, RequestTokens
from mesh.wire.access import _CALLER
from mesh.wire.client import MeshClient
from tests.controller.live import FOOTPRINT, HELLO, MODEL, FakeNode, LiveCell, asking, live_cell

KEY = "this call"


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[LiveCell]:
    async with live_cell(tmp_path) as made:
        yield made


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
    node = await cell.deployed()
    node.held = True
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
