"""A front before several cells: protocols, deployments in home cells, and what may be lost."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests

from mesh.controller.keys import KeyBook
from mesh.core.front import ranked
from mesh.domain.access import TenantLimits
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import (
    AlreadyExists,
    Forbidden,
    InvalidInput,
    MeshError,
    NotFound,
    Refused,
    Unauthenticated,
    Unavailable,
)
from mesh.domain.front import CellSeen, CellSilent
from mesh.domain.ids import CellName, DeploymentName, NodeId
from mesh.domain.invocation import Finished, Invocation, TextPrompt
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import Slo
from mesh.front.cells import CellLink
from mesh.front.main import main as run_front
from mesh.front.options import read_cells
from mesh.front.server import FrontConfig, serve
from mesh.runtime.clock import LoopClock
from mesh.v1 import control_pb2
from mesh.v1.control_pb2_grpc import ControlStub
from mesh.wire.client import MeshClient
from mesh.wire.credentials import Credentials, show
from mesh.wire.errors import error_of
from mesh_workloads.generating import LLM_MESH, generate
from mesh_workloads.scaling import Scale
from mesh_workloads.trace import Arrival as Call
from tests.cluster.conftest import saying
from tests.controller.live import SPEC, WAIT_S_MAX, FakeNode, LiveCell, asking, live_cell
from tests.controller.test_access import A, B, Keys, made_keys, showing
from tests.e2e.forked import Forked
from tests.e2e.live_cell import Answer, free_port, invoked
from tests.http.edge import HELLO, Edge
from tests.support.depth import DEEP
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import until

CELLS = [CellName("a"), CellName("b"), CellName("c")]
TWICE = replace(SPEC, cells=2)
FIRST, SECOND, THIRD = ranked(SPEC.name, CELLS)
DEPLOYMENTS, LOAD_S = (64, 90.0) if DEEP else (8, 15.0)
"""Deployments under load while a cell is killed, and how long that lasts."""
CALLS_PER_S, TOKENS_SCALE = 8.0, 0.1
"""In the mean: two cores serve some 20 calls a second."""
SLO = Slo(ttft_s=WAIT_S_MAX, tpot_s=2.0)


@dataclass
class Fronted:
    """Three cells with a node each, and a front before them; `client` asks the front."""

    cells: dict[CellName, LiveCell]
    nodes: dict[CellName, FakeNode]
    front: LiveCell
    http: Edge

    @property
    def client(self) -> MeshClient:
        return self.front.client

    async def ask(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)

    async def having(self) -> set[CellName]:
        """The cells that have the deployment."""
        found = set()
        for name, cell in self.cells.items():
            if [one for one in await self.ask(cell.client.list) if one.spec.name == SPEC.name]:
                found.add(name)
        return found

    async def seen(self, count: int = 1) -> None:
        """Until the front knows of so many instances of the deployment."""
        await self.front.until(
            lambda: sum(len(one.instances) for one in self.client.list()) >= count
        )


@asynccontextmanager
async def a_front(home: Path, cells: Mapping[CellName, tuple[str, ...]], **how: Any) -> Any:
    """A front in this loop, as a `LiveCell` of which only the client and the address are used."""
    ready: asyncio.Future[tuple[str, str | None]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    config = FrontConfig(
        listen="127.0.0.1:0", http="127.0.0.1:0", home=home, cells=dict(cells), **how
    )
    serving: Any = asyncio.create_task(serve(config, lambda *at: ready.set_result(at), stop))
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
    at, http = await ready
    front = LiveCell(at, stop, serving, http)
    try:
        yield front
    finally:
        stop.set()
        await serving
        front.client.close()


@asynccontextmanager
async def fronted(folder: Path, **how: Any) -> AsyncIterator[Fronted]:
    async with AsyncExitStack() as stack:
        cells, nodes = {}, {}
        for name in CELLS:
            cells[name] = await stack.enter_async_context(live_cell(folder / name))
            nodes[name] = await cells[name].node(node_id=NodeId(f"{name}-1"))
        at = {name: (cell.address,) for name, cell in cells.items()}
        front = await stack.enter_async_context(a_front(folder / "front", at, **how))
        yield Fronted(cells, nodes, front, Edge(front))


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Fronted]:
    async with fronted(tmp_path) as made:
        yield made


async def test_a_deployment_goes_to_its_home_cells_and_is_served_by_every_protocol(
    three: Fronted,
) -> None:
    message = (await three.ask(three.client.deploy, TWICE)).text
    assert message == f"deployed in {FIRST}; deployed in {SECOND}" or set(message.split("; ")) == {
        f"deployed in {FIRST}",
        f"deployed in {SECOND}",
    }
    assert await three.having() == {FIRST, SECOND}
    assert "unchanged" in (await three.ask(three.client.deploy, TWICE)).text
    await three.front.until(lambda: len(three.client.list()) == 1)
    (one,) = await three.ask(three.client.list)
    assert (one.spec.cells, one.differs) == (2, "")
    asked = Invocation(deployment=SPEC.name, prompt=TextPrompt(text="hi"), max_tokens=3)
    *_, last = await three.front.answer(asked)
    assert isinstance(last, Finished)
    assert (last.output_tokens, last.prompt_tokens) == (3, 2)
    assert last.node_id == f"{FIRST}/{FIRST}-1"
    await three.seen()
    chat = (await three.http.chat(max_tokens=3, n=2)).json()
    assert [one["message"]["content"] for one in chat["choices"]] == ["aaa", "aaa"]
    streamed = await three.http.complete("hi", max_tokens=2, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    ollama = await three.http.post("/api/chat", {"model": "chat", "messages": HELLO})
    assert ollama.status_code == 200
    anthropic = await three.http.post(
        "/v1/messages", {"model": "chat", "max_tokens": 2, "messages": HELLO}
    )
    assert anthropic.json()["content"][0]["text"] == "aa"
    models = (await three.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["state"]) for one in models] == [("chat", "ready")]
    for path in ("/healthz", "/readyz", "/api/tags", "/", "/api/v1/usage"):
        assert (await three.http.get(path)).status_code == 200, path
    for path in ("/v1/files", "/v1/batches", "/v1/batches/x"):
        told = await three.http.get(path)
        assert (told.status_code, "ask the controller of a cell" in told.text) == (404, True)
    metrics = (await three.http.get("/metrics")).text
    assert "vllm:request_success_total{" in metrics
    cell = (await three.http.get("/api/v1/cell")).json()
    assert len(cell["nodes"]) == 3
    usage = await three.ask(three.client.usage)
    assert sum(one.requests for one in usage) == 6
    assert {node.node_id for node in await three.ask(three.client.nodes)} == {
        f"{name}/{name}-1" for name in CELLS
    }
    assert (await three.ask(three.client.tokenizer, SPEC.name)).tokenizer_json


async def test_what_is_wrong_with_a_call_is_told_as_by_a_controller(three: Fronted) -> None:
    await three.ask(three.client.deploy, SPEC)
    with pytest.raises(NotFound, match="no deployment 'chatt'"):
        await three.front.answer(replace(asking(), deployment=DeploymentName("chatt")))
    with pytest.raises(InvalidInput, match="max_tokens"):
        await three.front.answer(asking(max_tokens=0))
    with pytest.raises(Refused) as told:
        await three.front.answer(asking(*([1] * 70_000)))
    assert told.value.reason is RefusalReason.PROMPT_TOO_LONG
    with pytest.raises(InvalidInput, match="this front is before 3"):
        await three.ask(three.client.deploy, replace(SPEC, cells=4))
    with pytest.raises(InvalidInput, match="leads no cell"):
        await three.ask(three.client.step_down)
    with pytest.raises(NotFound, match="no node 'n1'"):
        await three.ask(three.client.drain, NodeId("n1"))
    twice = replace(asking(), key="mine")
    three.nodes[FIRST].held = True
    with closing(three.client.invoke(twice)):
        await three.nodes[FIRST].told(SubmitRequest)
        with pytest.raises(AlreadyExists):
            await three.front.answer(twice)


async def test_operators_act_in_all_cells_that_have_it(three: Fronted) -> None:
    await three.ask(three.client.deploy, TWICE)
    await three.front.until(lambda: len(three.client.list()) == 1)
    await three.ask(lambda: three.client.scale(SPEC.name, replicas_max=7))
    for name in (FIRST, SECOND):
        found = await three.ask(three.cells[name].client.get, SPEC.name)
        assert found.spec.scaling.replicas_max == 7
    assert await three.ask(three.client.load, SPEC.name) == "loading"
    await three.seen()
    await three.ask(three.client.unload, SPEC.name)
    await three.ask(three.client.drain, NodeId(f"{THIRD}/{THIRD}-1"))
    (node,) = await three.ask(three.cells[THIRD].client.nodes)
    assert node.state is NodeState.DRAINING
    await three.ask(three.client.delete, SPEC.name)
    assert await three.having() == set()


async def test_what_a_cell_refuses_its_other_home_serves(three: Fronted) -> None:
    await three.ask(three.client.deploy, TWICE)
    await three.nodes[FIRST].leave()
    await three.cells[FIRST].until(lambda: not three.cells[FIRST].client.nodes())
    *_, last = await three.front.answer()
    assert isinstance(last, Finished)
    assert last.node_id == f"{SECOND}/{SECOND}-1"


async def test_what_a_cell_that_is_away_did_not_get_is_told_and_done_by_the_same_command(
    tmp_path: Path,
) -> None:
    port = {name: free_port() for name in CELLS}
    at = {name: (f"127.0.0.1:{port[name]}",) for name in (FIRST, SECOND)}

    def cell(name: CellName) -> Any:
        return live_cell(tmp_path / name, listen=at[name][0])

    def ready(front: LiveCell) -> int:
        return sum(node.state is NodeState.READY for node in front.client.nodes())

    def deleted(front: LiveCell) -> bool:
        """The front's link to a cell that is back may be up a moment later: `try again`."""
        with suppress(Unavailable):
            front.client.delete(SPEC.name)
            return True
        return False

    async with cell(FIRST) as first, a_front(tmp_path / "front", at) as front:
        await first.node()
        with pytest.raises(Unavailable, match=f"deployed in {FIRST}; not in {SECOND}: .*away") as t:
            await front.ask(front.client.deploy, TWICE)
        assert "mesh deploy" in t.value.hint
        assert f"missing in {SECOND}" in (await front.ask(front.client.get, SPEC.name)).differs
        async with cell(SECOND) as second:
            await second.node()
            await front.until(lambda: ready(front) == 2)
            assert await front.ask(second.client.list) == (), "a front deploys nothing by itself"
            message = (await front.ask(front.client.deploy, TWICE)).text
            assert set(message.split("; ")) == {f"unchanged in {FIRST}", f"deployed in {SECOND}"}
            await front.ask(lambda: second.client.scale(SPEC.name, replicas_max=5))
            await front.until(lambda: front.client.get(SPEC.name).differs == f"differs in {SECOND}")
        with pytest.raises(Unavailable, match=f"in {FIRST}; not in {SECOND}") as t:
            await front.ask(front.client.delete, SPEC.name)
        assert "mesh delete chat" in t.value.hint
        assert await front.ask(first.client.list) == ()
        async with cell(SECOND) as second:
            await second.node()
            await front.until(lambda: deleted(front))
            assert await front.ask(second.client.list) == ()


async def test_each_cell_goes_back_to_its_own_revision_of_what_is_meant(three: Fronted) -> None:
    """Numbers of revisions differ: one cell was changed by itself meanwhile."""
    await three.ask(three.client.deploy, TWICE)
    second = three.cells[SECOND].client
    await three.ask(lambda: second.scale(SPEC.name, replicas_max=5))
    await three.ask(three.client.deploy, replace(TWICE, scaling=Scaling(replicas_max=9)))
    await three.ask(three.client.undo, SPEC.name)
    for name in (FIRST, SECOND):
        assert (await three.ask(three.cells[name].client.get, SPEC.name)).spec == TWICE
    with pytest.raises(NotFound, match="no revision 17"):
        await three.ask(three.client.undo, SPEC.name, 17)


async def test_keys_and_tenants_hold_through_a_front(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "front")
    spec = replace(TWICE, source="pkg://tiny/tiny.gguf")
    async with AsyncExitStack() as stack:
        cells = {}
        for name in CELLS[:2]:
            home = tmp_path / name / "controller"
            home.mkdir(parents=True)
            copied = Path(keys.book.path)
            for file in copied.parent.glob("keys.sqlite3*"):
                (home / file.name).write_bytes(file.read_bytes())
            cells[name] = await stack.enter_async_context(live_cell(tmp_path / name, keys=True))
            with showing(keys.node):
                await cells[name].node()
        at = {name: (cell.address,) for name, cell in cells.items()}
        show(Credentials(key=keys.admin))
        stack.callback(show, Credentials())
        front = await stack.enter_async_context(a_front(tmp_path / "front", at, keys=True))

        def client_of(key: str) -> MeshClient:
            with showing(key):
                made = MeshClient(front.address)
            show(Credentials(key=keys.admin))
            return stack.enter_context(made)

        a, b, admin, nobody = map(client_of, (keys.a, keys.b, keys.admin, ""))
        with pytest.raises(Unauthenticated):
            await front.ask(nobody.list)
        await front.ask(a.deploy, spec)
        await front.until(lambda: len(a.list()) == 1)
        assert (await front.ask(admin.get, SPEC.name)).spec.tenant == A
        assert await front.ask(b.list) == ()
        with pytest.raises(NotFound):
            await front.ask(lambda: list(b.invoke(asking(), timeout_s=WAIT_S_MAX)))
        with pytest.raises(AlreadyExists):
            await front.ask(b.deploy, spec)
        # A name that is another tenant's in one cell is nobody else's through a front.
        with showing(keys.b):
            there = stack.enter_context(MeshClient(cells[CELLS[1]].address))
        show(Credentials(key=keys.admin))
        own = replace(spec, name=DeploymentName("own"))
        await front.ask(there.deploy, own)
        with pytest.raises(AlreadyExists):
            await front.ask(a.deploy, own)
        with pytest.raises(Forbidden):
            await front.ask(a.nodes)
        *_, last = await front.ask(lambda: list(a.invoke(asking(), timeout_s=WAIT_S_MAX)))
        assert isinstance(last, Finished)
        (used,) = await front.ask(a.usage)
        assert (used.tenant, used.requests) == (A, 1)
        assert await front.ask(b.usage) == ()
        keys.book.limit(A, TenantLimits(requests_per_s=0.01))
        await front.ask(lambda: list(a.invoke(asking(), timeout_s=WAIT_S_MAX)))
        with pytest.raises(Refused) as told:
            await front.ask(lambda: list(a.invoke(asking(), timeout_s=WAIT_S_MAX)))
        assert told.value.reason is RefusalReason.TENANT_LIMIT
        # Keys are made and revoked at the cells: the front has a copy.
        shown = {"Authorization": f"Bearer {keys.admin}"}
        listed = f"http://{front.http}/api/v1/keys"
        answer = await front.ask(lambda: requests.get(listed, headers=shown, timeout=10))
        assert (answer.status_code, "wants no keys" in answer.text) == (404, True)
        # Only operators act for others.
        with pytest.raises(Forbidden, match="may not act for others"):
            await front.ask(_as_another, cells[CELLS[0]].address, keys)
        # What is revoked at the cells ends at a front, too, whatever its copy of the keys says.
        for name in CELLS[:2]:
            with closing(KeyBook(tmp_path / name / "controller")) as book:
                book.revoke(next(key.key_id for key in book.all_keys() if key.tenant == B))
        with pytest.raises(Forbidden, match="was revoked"):
            await front.ask(b.deploy, replace(spec, name=DeploymentName("later")))
        # Nobody learns of another tenant's deployment where its cells are away.
        for name in CELLS[:2]:
            cells[name].stop.set()
        await front.until(lambda: not [n for n in admin.nodes() if n.state is NodeState.READY])
        with pytest.raises(NotFound):
            await front.ask(lambda: list(b.invoke(asking(), timeout_s=WAIT_S_MAX)))


def _as_another(address: str, keys: Keys) -> None:
    """A tenant calls for another."""
    with grpc.insecure_channel(address) as channel:
        metadata = (("authorization", f"Bearer {keys.b}"), ("mesh-for", "tenant/a//"))
        try:
            ControlStub(channel).ListDeployments(
                control_pb2.ListDeploymentsRequest(), metadata=metadata, timeout=WAIT_S_MAX
            )
        except grpc.RpcError as error:
            raise error_of(error) from error  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([], "before no cell"),
        (["127.0.0.1:1"], "has no name"),
        (["A=127.0.0.1:1"], "no DNS label"),
        (["a=127.0.0.1"], "is no address"),
        (["a=127.0.0.1:1", "a=127.0.0.1:2"], "named twice"),
        (["a=127.0.0.1:1,127.0.0.1:1"], "is of a and of a"),
        (["a=127.0.0.1:1", "b=127.0.0.1:1"], "is of b and of a"),
    ],
)
def test_cells_that_cannot_be_meant(
    cells: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_cells(cells)
    given = [word for cell in cells for word in ("--cells", cell)]
    assert run_front([*given, "--listen", "127.0.0.1:0"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_front_lends_its_key_to_nobody_who_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    with showing("mesh_key"):
        assert run_front(["--cells", "a=127.0.0.1:1", "--listen", "127.0.0.1:0"]) == 2
    assert "give --keys" in capsys.readouterr().err


async def test_a_front_whose_cells_do_not_answer_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = {CELLS[0]: (f"127.0.0.1:{free_port()}",)}
    caplog.set_level("INFO")
    async with a_front(tmp_path, at) as front:
        with pytest.raises(Unavailable, match="not seen yet: a") as told:
            await front.answer()
        assert "the front's log tells which are away" in told.value.hint
        assert f"a is away: none of {at[CELLS[0]][0]} leads it" in caplog.text
        edge = Edge(front)
        assert (await edge.get("/healthz")).status_code == 200
        assert (await edge.get("/readyz")).status_code == 503
        assert (await edge.chat()).status_code == 503


@asynccontextmanager
async def looking(
    addresses: list[str], tell: Callable[[CellSeen | CellSilent], None] = lambda _: None
) -> AsyncIterator[CellLink]:
    link = CellLink(CELLS[0], addresses, LoopClock(asyncio.get_running_loop()), tell)
    watch = asyncio.create_task(link.watch())
    try:
        yield link
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await link.close()


async def test_of_two_that_say_that_they_lead_a_cell_the_one_that_began_last_does() -> None:
    told: list[CellSeen | CellSilent] = []

    async def until(what: Any) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not (told and what(told[-1])):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def led_by(at: str) -> Any:
        return lambda one: isinstance(one, CellSeen) and one.leader == at

    async with saying() as x, AsyncExitStack() as stack:
        y = await stack.enter_async_context(saying())
        both = [y.address, x.address]
        async with looking(both, told.append):
            await x.say(leads=True)
            await until(led_by(x.address))
            await y.say(leads=True)  # X does not know yet that it was followed
            await until(led_by(y.address))
            await stack.aclose()
            await until(led_by(x.address))
            await x.say(leads=False)
            await until(lambda one: isinstance(one, CellSilent) and one.drains)


async def test_a_new_leader_is_found_while_the_old_one_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mesh.wire.leader.LOOK_S_MAX", WAIT_S_MAX)
    async with saying() as x, saying() as y:
        both = [x.address, y.address]
        async with looking(both) as link:
            await x.say(leads=True)
            await until_led(link, x.address)
            x.hangs, looks = True, y.looks
            async with asyncio.timeout(WAIT_S_MAX / 2):
                while y.looks < looks + 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await y.say(leads=True)
            await until_led(link, y.address)


async def test_one_that_comes_back_after_another_has_led_is_not_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mesh.wire.leader.LOOK_S_MAX", 0.2)
    monkeypatch.setattr("mesh.front.cells.TAKEOVER_S_MAX", 0.1)
    async with saying() as x, saying() as y:
        both = [x.address, y.address]
        async with looking(both) as link:
            await x.say(leads=True)
            await until_led(link, x.address)
            x.hangs = True
            await until_led(link, "")
            await asyncio.sleep(0.4)
            await y.say(leads=True)
            await until_led(link, y.address)
            x.hangs, looks = False, x.looks
            async with asyncio.timeout(WAIT_S_MAX / 2):
                while x.looks < looks + 4:
                    await asyncio.sleep(0.02)
                    assert link.leader != x.address


async def until_led(link: CellLink, at: str) -> None:
    async with asyncio.timeout(WAIT_S_MAX / 2):
        while link.leader != at:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_operators_call_waits_for_a_leader_that_answered_just_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mesh.front.cells.TAKEOVER_S_MAX", WAIT_S_MAX)
    request = control_pb2.GetStatusRequest()

    async with saying() as one:
        at = one.address
        link = CellLink(CELLS[0], [at], LoopClock(asyncio.get_running_loop()), lambda _: None)
        with pytest.raises(Unavailable, match="is away"):
            await link.asked("GetStatus", request)
        watch = asyncio.create_task(link.watch())
        for leader in (at, ""):
            await one.say(leads=bool(leader))
            await until_led(link, leader)
        assert not link.away
        asked = asyncio.create_task(link.asked("GetStatus", request))
        await asyncio.sleep(0)
        await one.say(leads=True)
        with pytest.raises(Unavailable, match="did not answer: Method not found"):
            await asked
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await link.close()


# Real processes.


class Machines:
    """Three cells of a controller and a node each, and two fronts, all of them processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.cells = {name: f"127.0.0.1:{free_port()}" for name in CELLS}
        self.fronts = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.https = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.processes: dict[str, list[Forked]] = {}
        for name, at in self.cells.items():
            home = ("--home", str(folder / name))
            self._start(name, "mesh", "controller", "--listen", at, "--http", "off", *home)
            node = ("--join", at, "--name", f"{name}-1", "--memory", "1GiB")
            script = ("--step-s", "0.02", "--", *node, "--home", str(folder / f"{name}-1"))
            self._start(name, "tests.support.scripted_node", *script)
        named = [word for name, at in self.cells.items() for word in ("--cells", f"{name}={at}")]
        for at, http in zip(self.fronts, self.https, strict=True):
            home = ("--home", str(folder / "front"))
            self._start(at, "mesh", "front", *named, "--listen", at, "--http", http, *home)

    def wait_ready(self) -> None:
        self._until(lambda: all(len(self._nodes(at)) == len(CELLS) for at in self.fronts))

    def _start(self, what: str, module: str, *arguments: str) -> None:
        process = Forked(module, arguments, self._folder / "log")
        self._stack.callback(process.wait, WAIT_S_MAX)
        self._stack.callback(process.send_signal, signal.SIGKILL)
        self.processes.setdefault(what, []).append(process)

    def _nodes(self, at: str) -> tuple[Any, ...]:
        with MeshClient(at) as client:
            try:
                return client.nodes()
            except MeshError:
                return ()

    def _until(self, what: Any) -> None:
        until_s = time.monotonic() + WAIT_S_MAX
        while not what():
            assert time.monotonic() < until_s, (self._folder / "log").read_text()
            time.sleep(0.05)

    def kill(self, what: str) -> None:
        for process in self.processes[what]:
            process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """What one test kills, the other does without."""
    with closing(Machines(tmp_path_factory.mktemp("machines"))) as made:
        made.wait_ready()
        yield made


def generated_load() -> tuple[Call, ...]:
    """The load of `mesh bench paper`, in less time, with shorter prompts and answers."""
    rate_per_s = CALLS_PER_S * LOAD_S / LLM_MESH.duration_s
    drawn = generate(replace(LLM_MESH, functions=DEPLOYMENTS, rate_per_s=rate_per_s), seed=1)
    return Scale(time=LOAD_S / LLM_MESH.duration_s, tokens=TOKENS_SCALE).of(drawn).arrivals


class Callers:
    """Ask by HTTP when calls of a load are due, and keep what came of each."""

    def __init__(self, http: str, names: list[str], calls: Sequence[Call]) -> None:
        self.ended: list[tuple[str, int, str]] = []
        self._http = http
        self._due = [threading.Timer(c.t_s, self.ask, (names[c.function], c)) for c in calls]
        for due in self._due:
            due.start()

    def ask(self, name: str, call: Call) -> None:
        body = {
            "model": name,
            "prompt": [97] * call.input_tokens,
            "max_tokens": call.output_tokens,
            "ignore_eos": True,
        }
        answer = requests.post(f"http://{self._http}/v1/completions", json=body, timeout=WAIT_S_MAX)
        said = answer.headers.get("retry-after", "") + " " + answer.text
        whole = answer.status_code == 200
        whole = whole and answer.json()["usage"]["completion_tokens"] == call.output_tokens
        status = answer.status_code if whole else -answer.status_code
        self.ended.append((name, status, said))

    def end(self) -> None:
        for due in self._due:
            due.join()

    def stop(self) -> None:
        for due in self._due:
            due.cancel()
        self.end()


def test_a_front_killed(machines: Machines, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", seed=1)
    name = DeploymentName("chat")
    with MeshClient(",".join(machines.fronts)) as both:
        both.deploy(DeploymentSpec(name=name, source=f"file://{model}", cells=2))

        def ask(tokens: int = 120) -> Answer:
            return invoked(both, name, "go on", max_tokens=tokens, temperature=1.0, seed=7)

        unbroken = ask()
        unbroken.finished()
        answers = [ask() for _ in range(4)]
        until(lambda: all(len(answer.token_ids) >= 3 for answer in answers))
        machines.kill(machines.fronts[0])
        later = [ask(3) for _ in range(20)]
        for answer in answers:
            answer.finished()
            assert (answer.token_ids, answer.text) == (unbroken.token_ids, unbroken.text)
        for answer in later:
            answer.finished()


def test_a_whole_cell_killed_under_load(machines: Machines, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", seed=1)
    lost = CELLS[0]
    names = [f"d-{n}" for n in range(DEPLOYMENTS)]
    first_there = [name for name in names if ranked(DeploymentName(name), CELLS)[0] == lost]
    once = first_there[::3]
    twice = [name for name in first_there if name not in once]
    others = [name for name in names if name not in first_there]
    scaling, calls = Scaling(keep_alive_s=60.0), generated_load()
    with MeshClient(machines.fronts[1]) as client:
        for name, cells in [*((n, 2) for n in twice), *((n, 1) for n in (*once, *others))]:
            client.deploy(
                DeploymentSpec(
                    name=DeploymentName(name),
                    source=f"file://{model}",
                    cells=cells,
                    slo=SLO,
                    scaling=scaling,
                )
            )
        callers = Callers(machines.https[1], names, calls)
        try:
            until(lambda: len(callers.ended) >= len(calls) // 3, LOAD_S + WAIT_S_MAX)
            answers = [
                invoked(client, twice[0], "go on", max_tokens=200, temperature=1.0, seed=7)
                for _ in range(2)
            ]
            until(lambda: all(len(answer.token_ids) >= 3 for answer in answers))
            machines.kill(lost)
            for answer in answers:
                assert answer.finished().output_tokens == 200
            assert answers[0].token_ids == answers[1].token_ids
            assert answers[0].text == answers[1].text
            callers.end()
            assert len(callers.ended) == len(calls)
            for name in once:
                callers.ask(name, calls[0])
                assert callers.ended[-1][1] == -503, "nobody else serves it"
        finally:
            callers.stop()
        for name, status, said in callers.ended:
            if name not in once:
                assert status == 200, (name, said)
            elif status != 200:
                assert status == -503
                again, _, body = said.partition(" ")
                assert again, "it says when to come again"
                assert json.loads(body)["error"]["code"] in ("cell_away", "unavailable")
        until(lambda: _lost(client) == [f"{lost}/{lost}-1"], poll_s=0.1)


def _lost(client: MeshClient) -> list[NodeId]:
    return [node.node_id for node in client.nodes() if node.state is NodeState.LOST]
