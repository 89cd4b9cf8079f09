"""What one client is told, in which order, of what the core says of its request."""

import asyncio
from dataclasses import replace

import pytest

from mesh.controller.stream import ClientStream, Told
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.errors import Refused
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens, Waiting
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import RequestTokens, TokenLogprobs
from mesh.domain.slo import Slo
from tests.core.cells import request

SLO = Slo(ttft_s=2.0, tpot_s=0.25)
R1 = RequestId("r1")
LOADING = TellWaiting(request_id=R1, phase="weights", share=0.5)
LATE = TellAccepted(request_id=R1, grace_s=1.2)


def tokens(first: int, count: int, finish: FinishReason | None = None) -> DeliverTokens:
    outputs = RequestTokens(
        request_id=R1, attempt=1, first_index=first, token_ids=(97,) * count, finish=finish
    )
    return DeliverTokens(outputs=outputs, node_id=NodeId("n1") if finish else None)


async def test_log_probabilities_stay_with_their_tokens_when_a_client_lags() -> None:
    told = [TokenLogprobs(logprob=-0.5 * n, top=((4, -0.5), (n, -2.0))) for n in range(1, 4)]
    first, second = tokens(0, 1).outputs, tokens(1, 2, FinishReason.LENGTH).outputs
    events = await said(
        stream(),
        DeliverTokens(outputs=replace(first, logprobs=tuple(told[:1]))),
        DeliverTokens(outputs=replace(second, logprobs=tuple(told[1:]))),
    )
    assert isinstance(events[0], Tokens)
    assert events[0].logprobs == tuple(told)


def stream(join_s: float = 0.0) -> ClientStream:
    return ClientStream(request=request(R1), slo=SLO, arrived_s=10.0, told_max=8, join_s=join_s)


async def test_tokens_that_come_within_the_time_go_out_together_and_the_last_takes_all() -> None:
    client = stream(join_s=0.05)
    assert client.tell(LATE, 10.0)
    assert client.tell(tokens(0, 1), 10.5)
    assert len(await client.events()) == 2, "the first token waits for nobody"
    assert client.tell(tokens(1, 1), 10.51)
    assert client.tell(tokens(2, 1), 10.52)
    begun_s = asyncio.get_running_loop().time()
    assert await client.events() == [Tokens(first_index=1, token_ids=(97,) * 2, text="")]
    assert 0.03 < asyncio.get_running_loop().time() - begun_s < 5.0
    assert client.tell(tokens(3, 1), 10.551)
    assert client.tell(tokens(4, 1, FinishReason.LENGTH), 10.552)
    events = await asyncio.wait_for(client.events(), 0.02)
    assert [type(event) for event in events] == [Tokens, Finished]
    assert events[0] == Tokens(first_index=3, token_ids=(97,) * 2, text="")


async def test_a_token_that_is_due_or_comes_alone_is_joined_with_none() -> None:
    client = stream(join_s=0.2)
    for one in (LATE, tokens(0, 1)):
        assert client.tell(one, 10.5)
    await client.events()
    assert client.tell(tokens(1, 1), 10.75), "later than the time after the one before"
    assert len(await asyncio.wait_for(client.events(), 0.02)) == 1
    # Due 2.0 + 1.2 + 2 * 0.25 s after its arrival.
    assert client.tell(tokens(2, 1), 13.69)
    assert len(await asyncio.wait_for(client.events(), 0.02)) == 1
    assert client.tell(tokens(3, 1), 13.7)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.events(), 0.02)


async def test_who_reads_nothing_is_told_of_it_while_tokens_are_joined() -> None:
    client = stream(join_s=1.0)
    assert client.tell(tokens(0, 1), 10.5)
    assert [client.tell(tokens(n, 1), 10.5) for n in range(1, 9)] == [True] * 7 + [False]


async def said(of: ClientStream, *told: Told) -> list[InvocationEvent]:
    for number, one in enumerate(told):
        assert of.tell(one, 11.0 + number)
    return await of.events()


ACCEPTED = Accepted(
    request_id=R1, prompt_tokens=3, ttft_limit_s=2.0, tpot_limit_s=0.25, grace_s=1.2
)


async def test_a_client_learns_that_it_will_be_late_as_soon_as_it_has_a_place() -> None:
    client = stream()
    assert await said(client, LOADING) == [Waiting(phase="weights", share=0.5)]
    assert await said(client, LATE, LOADING) == [ACCEPTED, Waiting(phase="weights", share=0.5)]
    assert not client.ended


async def test_a_client_that_lags_gets_all_of_it_in_its_order_and_tokens_as_one() -> None:
    client = stream()
    events = await said(
        client, LOADING, LATE, tokens(0, 1), tokens(1, 2), tokens(3, 1, FinishReason.LENGTH)
    )
    assert [type(event) for event in events] == [Waiting, Accepted, Tokens, Finished]
    assert events[2] == Tokens(first_index=0, token_ids=(97,) * 4, text="")
    end = events[3]
    assert isinstance(end, Finished)
    assert (end.grace_s, end.node_id, end.output_tokens) == (1.2, "n1", 4)
    assert end.ttft_s == 3.0
    assert end.tpot_s == pytest.approx(2 / 3)
    assert client.finished


@pytest.mark.parametrize("before", [(), (LOADING,), (LATE,)])
async def test_a_refusal_comes_last_and_says_what_helps(before: tuple[Told, ...]) -> None:
    client = stream()
    if before:
        await said(client, *before)
    full = RefuseRequest(
        request_id=R1, reason=RefusalReason.MEMORY_FULL, message="full", retry_after_s=1.5
    )
    with pytest.raises(Refused) as caught:
        await said(client, full)
    assert caught.value.reason is RefusalReason.MEMORY_FULL
    assert caught.value.hint.startswith("try again in 1.5 s; ")
    assert client.ended
