"""Invocations over a real loopback server: streaming, limits, cancelling, and every bad input."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from mesh.controller.gateway import GatewayLimits
from mesh.domain.errors import (
    DeadlineExceeded,
    InvalidInput,
    MeshError,
    NotFound,
    Refused,
    Unavailable,
)
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import (
    Accepted,
    ChatPrompt,
    Finished,
    Invocation,
    TextPrompt,
    TokenPrompt,
    Tokens,
    Waiting,
)
from mesh.domain.messages import AbortRequest, LoadInstance, SubmitRequest
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.text import ChatMessage
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceStub
from mesh.wire.channel import dial
from mesh.wire.codec import invocation_to_wire
from tests.controller.live import (
    ASSETS,
    CLASSES,
    MODEL,
    QUICK,
    SPEC,
    WAIT_S_MAX,
    LiveCell,
    asking,
    live_cell,
)


@asynccontextmanager
async def called(cell: LiveCell, asked: Invocation, **how: Any) -> AsyncIterator[Any]:
    """The call itself, for tests that end it in their own way."""
    async with dial(cell.address) as channel:
        yield InferenceStub(channel).Invoke(invocation_to_wire(asked), **how)


async def test_limits_of_its_own_are_those_that_it_is_told(cell: LiveCell) -> None:
    await cell.deployed()
    asked = replace(asking(1, 2, 3, max_tokens=2), slo_ttft_s=60.0)
    (accepted,) = (e for e in await cell.answer(asked) if isinstance(e, Accepted))
    assert (accepted.ttft_limit_s, accepted.tpot_limit_s) == (60.0, SPEC.slo.tpot_s)
    with pytest.raises(InvalidInput, match=r"slo_tpot_s is 0\.0; it must be above 0"):
        await cell.answer(replace(asked, slo_tpot_s=0.0))


async def test_a_class_is_asked_for_by_name_and_told_back(cell: LiveCell) -> None:
    node = await cell.deployed(CLASSES)
    named = replace(asking(1, 2, 3, max_tokens=2), slo_class="batch")
    accepted = [
        next(e for e in await cell.answer(asked) if isinstance(e, Accepted))
        for asked in (replace(named, slo_class=""), named)
    ]
    assert [told.slo_class for told in accepted] == ["chat", "batch"]
    assert accepted[0].tpot_limit_s == CLASSES.slo.tpot_s
    slos = [c.order.slo for c in node.commands if isinstance(c, SubmitRequest)]
    assert slos == list(CLASSES.classes)
    (found,) = await cell.ask(cell.client.list)
    assert [(view.name, view.served, view.met) for view in found.classes] == [
        ("chat", 1, 1),
        ("batch", 1, 1),
    ]
    with pytest.raises(InvalidInput, match="'chat' has no SLO class 'gold'") as caught:
        await cell.answer(replace(named, slo_class="gold"))
    assert caught.value.hint == "name one of chat, batch"
    with pytest.raises(InvalidInput, match="best effort: it keeps no limits"):
        await cell.answer(replace(named, slo_tpot_s=1.0))


async def test_a_class_may_go_while_the_deployment_serves(cell: LiveCell) -> None:
    """It goes without another instance, and who names it then is told so."""
    await cell.deployed(CLASSES)
    named = replace(asking(1, 2, 3, max_tokens=2), slo_class="batch")
    await cell.answer(named)
    fewer = replace(CLASSES, classes=CLASSES.classes[:1])
    await cell.ask(cell.client.deploy, fewer)
    (found,) = await cell.ask(cell.client.list)
    assert (len(found.instances), [view.name for view in found.classes]) == (1, ["chat"])
    with pytest.raises(InvalidInput, match="has no SLO class 'batch'"):
        await cell.answer(named)


async def test_an_answer_streams_from_accepted_to_finished(cell: LiveCell) -> None:
    node = await cell.deployed()
    events = await cell.answer(asking(1, 2, 3, max_tokens=5))
    (accepted,) = (event for event in events if isinstance(event, Accepted))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert accepted == Accepted(
        request_id=accepted.request_id,
        prompt_tokens=3,
        ttft_limit_s=SPEC.slo.ttft_limit_s(3),
        tpot_limit_s=SPEC.slo.tpot_s,
        grace_s=finished.grace_s,
    )
    ahead = events[: events.index(accepted)]
    assert all(isinstance(event, Waiting) for event in ahead)
    assert (finished.reason, finished.prompt_tokens, finished.output_tokens) == (
        FinishReason.LENGTH,
        3,
        5,
    )
    assert 0 < finished.tpot_s < WAIT_S_MAX
    assert 0 < finished.ttft_s < WAIT_S_MAX
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert "".join(event.text for event in tokens) == "aaaaa"
    came = 0
    for event in tokens:
        assert event.first_index == came
        came += len(event.token_ids)
    assert came == 5
    assert (await node.told(SubmitRequest)).order.request.sampling.seed is not None


async def test_text_and_chats_are_tokenised_with_the_models_own_files(cell: LiveCell) -> None:
    node = await cell.deployed()
    text = Invocation(deployment=SPEC.name, prompt=TextPrompt(text="né"), max_tokens=1)
    assert (await cell.accepted(text)).prompt_tokens == 3
    turns = (ChatMessage(role="user", content="hi"),)
    chat = replace(text, prompt=ChatPrompt(messages=turns))
    await cell.answer(chat)
    orders = [c.order.request for c in node.commands if isinstance(c, SubmitRequest)]
    assert len(orders[-1].prompt_tokens) == len("<user>hi<assistant>")


async def test_defaults_are_filled_in_and_output_fits_the_context(cell: LiveCell) -> None:
    node = await cell.deployed()
    await cell.answer(replace(asking(*range(200)), max_tokens=None))
    await cell.answer(replace(asking(*[1] * 500), max_tokens=4000, seed=7, stop=("\n",)))
    first, second = (c.order.request for c in node.commands if isinstance(c, SubmitRequest))
    assert (first.sampling.max_tokens, first.sampling.temperature) == (256, 0.0)
    assert second.sampling.max_tokens == MODEL.context_tokens_max - 500
    assert (second.sampling.seed, second.sampling.stop) == (7, ("\n",))


async def test_a_waiting_client_is_told_what_it_waits_for(cell: LiveCell) -> None:
    node = await cell.deployed()
    node.loading = False
    asked = asyncio.create_task(cell.answer())
    load = await node.told(LoadInstance)
    await asyncio.sleep(0.05)
    await node.loaded(load)
    events = await asked
    assert Waiting(phase="weights", share=0.5) in events
    assert isinstance(events[-1], Finished)
    assert events[-1].node_id == "n1", "a client can tell who computed its answer"


GOOD = Invocation(deployment=SPEC.name, prompt=TextPrompt(text="hi"))


BAD = (
    (replace(GOOD, prompt=TextPrompt(text="")), "prompt is empty"),
    (replace(GOOD, prompt=ChatPrompt(messages=())), "no messages"),
    (replace(GOOD, prompt=TokenPrompt(token_ids=())), "no tokens"),
    (replace(GOOD, prompt=TokenPrompt(token_ids=(1, 256))), "token 1 of the prompt is 256"),
    (replace(GOOD, prompt=TokenPrompt(token_ids=(-1,))), "ids are 0 to 255"),
    (replace(GOOD, max_tokens=0), "max_tokens is 0; it must be 1 or more"),
    (replace(GOOD, max_tokens=-3), "max_tokens is -3"),
    (replace(GOOD, temperature=-0.1), "temperature is -0.1"),
    (replace(GOOD, temperature=math.nan), "temperature is nan"),
    (replace(GOOD, top_p=0.0), r"top_p is 0.0; it must be above 0 and at most 1"),
    (replace(GOOD, top_p=1.1), "top_p is 1.1"),
    (replace(GOOD, repetition_penalty=0.0), "repetition_penalty is 0.0"),
    (replace(GOOD, min_p=1.5), r"min_p is 1.5; it must be from 0 \(no limit\) to 1"),
    (replace(GOOD, presence_penalty=2.5), "presence_penalty is 2.5; it must be from -2 to 2"),
    (replace(GOOD, frequency_penalty=math.nan), "frequency_penalty is nan"),
    (replace(GOOD, logprobs=21), "logprobs is 21; it must be from 0 to 20"),
    (replace(GOOD, seed=-1), "seed is -1"),
    (replace(GOOD, stop=("x",) * 17), "17 stop strings; at most 16"),
    (replace(GOOD, stop=("x", "")), "stop string has 0 characters"),
    (replace(GOOD, max_tokens=1 << 40), "out of range"),
    (replace(GOOD, prompt=TextPrompt(text="\udcff")), "not valid UTF-8"),
)


async def test_bad_input_is_named_and_the_cell_serves_on(cell: LiveCell) -> None:
    await cell.deployed()
    for asked, said in BAD:
        with pytest.raises(InvalidInput, match=said):
            await cell.answer(asked)
    assert isinstance((await cell.answer())[-1], Finished)


async def test_a_token_that_the_model_has_no_embedding_of_is_named(cell: LiveCell) -> None:
    """The tokenizer knows one more than the model's 256."""
    tokenizer = Tokenizer.from_str(ASSETS.tokenizer_json.decode())
    tokenizer.add_special_tokens(["<image_soft_token>"])
    node = await cell.node()
    node.text = replace(ASSETS, tokenizer_json=tokenizer.to_str().encode())
    await cell.ask(cell.client.deploy, SPEC)
    turns = (ChatMessage(role="user", content="hi <image_soft_token>"),)
    raw = replace(GOOD, prompt=TextPrompt(text="hi <image_soft_token>"))
    with pytest.raises(InvalidInput, match=r"token 3 .* 256, '<image_soft_token>'; .* 0 to 255"):
        await cell.answer(raw)
    chat = replace(GOOD, prompt=ChatPrompt(messages=turns), max_tokens=1)
    assert isinstance((await cell.answer(chat))[-1], Finished), "content is text"
    await cell.ask(cell.client.deploy, replace(SPEC, special_tokens_in_content=True))
    with pytest.raises(InvalidInput, match="<image_soft_token>"):
        await cell.answer(chat)


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(cell: LiveCell) -> None:
    await cell.deployed()
    for text in ("x" * 600, "x" * (1 << 20)):
        asked = replace(GOOD, prompt=TextPrompt(text=text))
        with pytest.raises(Refused, match=f"{len(text)} .*512") as caught:
            await cell.answer(asked)
        assert caught.value.reason is RefusalReason.PROMPT_TOO_LONG


async def test_an_unknown_deployment_is_told_with_names_like_it(cell: LiveCell) -> None:
    await cell.deployed()
    for name, hint in (("chta", "did you mean chat?"), ("zzz", "deployments: chat")):
        with pytest.raises(NotFound, match=f"no deployment '{name}'") as caught:
            await cell.answer(replace(GOOD, deployment=DeploymentName(name)))
        assert caught.value.hint == hint


async def test_bytes_that_are_no_message_are_invalid_input(cell: LiveCell) -> None:
    """A client of another make may send text that is no UTF-8, or anything at all."""
    async with dial(cell.address) as channel:
        call = channel.unary_stream(
            "/mesh.v1.Inference/Invoke",
            request_serializer=lambda raw: raw,
            response_deserializer=pb.InvokeResponse.FromString,
        )
        for raw in (b"\x0a\x02\xff\xfe", b"\xff\xff\xff"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(raw).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await cell.status()).queued == 0


@pytest.mark.own_cell
async def test_a_client_that_goes_away_frees_its_place(cell: LiveCell) -> None:
    node = await cell.deployed(held=True)
    async with called(cell, asking()) as call:
        order = (await node.told(SubmitRequest)).order
        await node.answer(order, 0, 1, last=False)
        call.cancel()
        abort = await node.told(AbortRequest)
    assert (abort.request_id, abort.attempt) == (order.request.request_id, order.attempt)
    await cell.idle()
    await node.answer(order, 1, 1, last=True)  # tokens on their way meanwhile do no harm
    assert (await cell.status()).served == 0


async def test_a_deadline_frees_the_place_and_is_told_as_one(cell: LiveCell) -> None:
    node = await cell.deployed(held=True)
    with pytest.raises(DeadlineExceeded, match=r"not done within 0.2 s"):
        await asyncio.to_thread(lambda: list(cell.client.invoke(asking(), timeout_s=0.2)))
    await node.told(AbortRequest)
    await cell.idle()


async def test_leaving_the_clients_iterator_cancels_the_request(cell: LiveCell) -> None:
    node = await cell.deployed()
    await cell.answer(asking(max_tokens=1))
    node.held = True
    await cell.accepted(asking())
    await node.told(AbortRequest)


async def test_a_client_that_reads_too_slowly_is_cancelled(tmp_path: Path) -> None:
    """Its stream fills, then its bounded mailbox: its place is freed, the others' tokens flow."""
    async with live_cell(tmp_path, gateway=GatewayLimits(told_max=8)) as cell:
        node = await cell.deployed(held=True)
        narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(cell.address, options=narrow) as channel:
            call = InferenceStub(channel).Invoke(invocation_to_wire(asking()))
            order = (await node.told(SubmitRequest)).order
            await node.flood(order, "x" * 10_000)
            with pytest.raises(grpc.aio.AioRpcError, match="messages wait to be read"):
                async for _ in call:
                    pass
        await cell.idle()
        node.held = False
        assert isinstance((await cell.answer())[-1], Finished)


async def test_without_a_node_a_request_is_refused_at_once(tmp_path: Path) -> None:
    async with live_cell(tmp_path, limits=QUICK) as cell:
        node = await cell.deployed()
        await node.leave()
        await cell.until(lambda: not cell.client.nodes())
        with pytest.raises(Refused) as caught:
            await cell.answer()
        assert caught.value.reason is RefusalReason.NO_NODE
        assert caught.value.retry_after_s > 0


async def test_long_prompts_do_not_hold_up_others(cell: LiveCell) -> None:
    """A prompt of many characters is tokenised on a thread: an answer goes on meanwhile."""
    await cell.deployed()
    long = replace(GOOD, prompt=TextPrompt(text="ab " * 40_000))
    both = await asyncio.gather(cell.answer(long), cell.answer(), return_exceptions=True)
    assert isinstance(both[0], Refused)
    assert isinstance(both[1], list)


@pytest.mark.own_cell
async def test_an_unreachable_controller_is_told_with_its_address(cell: LiveCell) -> None:
    cell.stop.set()
    await cell.serving
    for call in (lambda: cell.client.status(), lambda: list(cell.client.invoke(asking()))):
        with pytest.raises(Unavailable, match=cell.address) as caught:
            await asyncio.to_thread(call)
        assert "mesh up" in caught.value.hint


@pytest.mark.own_cell
async def test_a_stopping_controller_tells_open_clients_why(
    cell: LiveCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", 0.1)
    node = await cell.deployed(held=True)
    open_call = asyncio.create_task(cell.answer())
    await node.told(SubmitRequest)
    cell.stop.set()
    with pytest.raises(MeshError, match="stopping") as caught:
        await open_call
    assert isinstance(caught.value, Refused)
    assert caught.value.reason is RefusalReason.SHUTTING_DOWN
