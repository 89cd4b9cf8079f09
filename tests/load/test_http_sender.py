"""Locust's calls by OpenAI's protocol, against a live cell: what comes is what gRPC brings."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import gevent
import pytest

from mesh.controller.keys import KeyBook
from mesh.domain.access import Role, TenantName
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer, Call, outcome_of
from mesh.wire.certificates import Part, make_folder, read_tls
from mesh.wire.credentials import Credentials, show
from mesh_load.http_sender import HttpSender
from mesh_load.sender import GrpcSender, Sender, ask
from tests.controller.live import SPEC, FakeNode
from tests.http.edge import Edge, edge

SLO = Slo(ttft_s=2.0, tpot_s=0.25)


def call(deployment: str = "chat", tokens: int = 4, prompt: int = 5) -> Call:
    return Call(
        at_s=0.0,
        deployment=DeploymentName(deployment),
        slo=SLO,
        prompt_tokens=(97,) * prompt,
        output_tokens=tokens,
    )


async def asked(sender: Sender, one: Call, timeout_s: float = 10.0) -> Answer:
    """In a thread of its own: the cell answers in this one."""

    def answer() -> Answer:
        try:
            return ask(sender, one, due_s=time.monotonic(), timeout_s=timeout_s)
        finally:
            sender.close()

    return await asyncio.to_thread(answer)


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Edge]:
    async with edge(tmp_path) as http:
        yield http


async def test_an_answer_is_heard_token_by_token_as_by_grpc(http: Edge) -> None:
    node = await http.cell.deployed()
    heard = await asked(HttpSender(str(http.cell.http)), call())
    beside = await asked(GrpcSender(http.cell.address), call())
    for answer in (heard, beside):
        assert answer.whole(call()), answer
        assert (answer.told_tokens, answer.accepted, answer.in_order) == (4, True, True)
        assert outcome_of(call(), answer).end is FinishReason.LENGTH
    first, second = (one.order.request for one in node.commands if isinstance(one, SubmitRequest))
    assert first.sampling == second.sampling
    assert first.prompt_tokens == second.prompt_tokens


async def test_refusals_and_failures_are_told_apart_as_by_grpc(http: Edge) -> None:
    """A reason is kept where its code says it alone."""
    await http.cell.deployed()
    at = str(http.cell.http)
    for sender in (HttpSender(at), GrpcSender(http.cell.address)):
        refused = await asked(sender, call(prompt=5000))
        assert (refused.refused, refused.failed) == (RefusalReason.PROMPT_TOO_LONG, "")
    for sender in (HttpSender(at), GrpcSender(http.cell.address)):
        failed = await asked(sender, call("nowhere"))
        assert (failed.refused, failed.failed) == ("", "not_found")
    gone = await asked(HttpSender("127.0.0.1:1"), call())
    assert (gone.failed, outcome_of(call(), gone).end) == ("unavailable", FinishReason.FAILED)


async def test_a_cell_without_a_place_says_when_to_come_again(http: Edge) -> None:
    await http.cell.deployed()
    await http.cell.nodes.pop().leave()
    await http.cell.until(
        lambda: all(node.state is not NodeState.READY for node in http.cell.client.nodes())
    )
    heard = await asked(HttpSender(str(http.cell.http)), call())
    beside = await asked(GrpcSender(http.cell.address), call())
    assert heard.refused == beside.refused != ""
    assert (heard.retry_after_s > 0) == (beside.retry_after_s > 0)


async def test_a_call_that_takes_too_long_or_is_killed_is_left(http: Edge) -> None:
    await http.cell.deployed(held=True)
    sender = HttpSender(str(http.cell.http))
    late = await asked(sender, call(), timeout_s=0.3)
    assert late.failed == "deadline_exceeded"
    await http.cell.idle()

    def killed() -> Answer:
        sender = HttpSender(str(http.cell.http))
        asking = gevent.spawn(ask, sender, call(), due_s=time.monotonic(), timeout_s=60.0)
        gevent.sleep(0.3)
        asking.kill()
        assert isinstance(asking.value, Answer)
        return asking.value

    assert (await asyncio.to_thread(killed)).failed == "stopped"
    await http.cell.idle()


async def test_a_key_and_an_authority_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    make_folder(folder, ("localhost", "127.0.0.1"), 1)
    book = KeyBook(tmp_path / "controller")
    admin, node_key = (book.create(role, TenantName(""))[0] for role in (Role.ADMIN, Role.NODE))
    client = read_tls(folder, Part.CLIENT)
    show(Credentials(key=admin, tls=client))
    tls = read_tls(folder, Part.CONTROLLER)
    async with edge(tmp_path, tls=tls, keys=True) as http:
        operator = http.cell.client
        show(Credentials(key=node_key, tls=read_tls(folder, Part.NODE)))
        http.cell.nodes.append(await FakeNode(http.cell.address).join())
        show(Credentials(key=admin, tls=client))
        assert (await http.cell.ask(operator.deploy, SPEC)).message == "deployed"
        at = str(http.cell.http)
        assert (await asked(HttpSender(at), call())).whole(call())
        show(Credentials(tls=client))
        assert (await asked(HttpSender(at), call())).failed == "unauthenticated"
        make_folder(tmp_path / "other", ("127.0.0.1",), 1)
        show(Credentials(key=admin, tls=read_tls(tmp_path / "other", Part.CLIENT)))
        assert (await asked(HttpSender(at), call())).failed == "unavailable"
    book.close()
