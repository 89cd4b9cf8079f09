"""KV blocks between two nodes over a real socket: whole, or not at all; nothing for strangers."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.actions import FetchKv
from mesh.domain.errors import EngineError, MeshError, Unavailable
from mesh.domain.ids import InstanceId, NodeId, RequestId
from mesh.domain.messages import OfferKv
from mesh.domain.request import KvSource, SamplingParams
from mesh.domain.steps import EngineRequest
from mesh.runtime.node_actions import KvFetched, Lane
from mesh.wire.certificates import Part, make_folder, read_tls
from mesh.wire.credentials import Tls
from mesh_nodes.kv_stream import ASK_S_MAX, CONNECTIONS_MAX, DIALS_MAX, KvStream
from tests.contract.driving import no_progress
from tests.contract.engine_contract import StoredModel, write_tiny_model
from tests.support.scripted_engine import ScriptedEngine

INSTANCE, REQUEST, TICKET, BLOCKS = InstanceId("i-1"), RequestId("moves"), "a ticket", 3
WAIT_S = 30.0


class Here:
    """Lanes that make every call where it is made."""

    def run(self, lane: Lane, call: Callable[[], Any], done: Callable[[Any], Any]) -> None:
        try:
            result = call()
        except MeshError as error:
            result = error
        done(result)

    def post_soon(self, event: object) -> None:
        raise AssertionError("a stream posts nothing")


def request(*, paused: bool) -> EngineRequest:
    return EngineRequest(
        request_id=REQUEST,
        prompt_tokens=tuple(range(3, 103)),
        sampling=SamplingParams(max_tokens=9),
        paused=paused,
    )


@dataclass
class Nodes:
    """`source` has a request of 100 tokens; `target` is to fetch its blocks."""

    loop: asyncio.AbstractEventLoop
    engine: ScriptedEngine
    source: KvStream
    target: KvStream

    def offer(self, *, to: str = "n2", expires_s: float = WAIT_S) -> None:
        self.source.offer(
            OfferKv(
                instance_id=INSTANCE,
                request_id=REQUEST,
                attempt=1,
                to=NodeId(to),
                ticket=TICKET,
                expires_s=expires_s,
            )
        )

    def fetched(self, ticket: str = TICKET, blocks: int = BLOCKS) -> KvFetched | MeshError:
        """What came of a fetch."""
        source = KvSource(
            node_id=NodeId("n1"),
            address=self.source.address,
            attempt=1,
            ticket=ticket,
            blocks=blocks,
        )
        action = FetchKv(instance_id=INSTANCE, request=request(paused=True), source=source)

        async def result() -> KvFetched | MeshError:
            came: asyncio.Future[KvFetched | MeshError] = self.loop.create_future()
            self.target.fetch(action, came.set_result)
            return await asyncio.wait_for(came, WAIT_S)

        return self.loop.run_until_complete(result())


def nodes_with(tmp_path: Path, tls: Tls | None, dialling: Tls | None) -> Iterator[Nodes]:
    loop, engine = asyncio.new_event_loop(), ScriptedEngine()
    model = StoredModel(info=write_tiny_model(tmp_path / "model"), path=tmp_path / "model")
    engine.load(model.order(INSTANCE), no_progress)
    engine.submit(INSTANCE, request(paused=False))
    engine.step(INSTANCE, 256)
    ends = [
        KvStream(
            node_id=NodeId(name),
            host="127.0.0.1",
            engine=engine,
            lanes=Here(),
            loop=loop,
            tls=shown,
        )
        for name, shown in (("n1", tls), ("n2", dialling))
    ]
    yield Nodes(loop, engine, *ends)
    for end in ends:
        end.close()
    loop.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    yield from nodes_with(tmp_path, None, None)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_folder(folder, ["localhost"], days=1)
    return folder


def test_blocks_come_once_for_their_ticket(nodes: Nodes) -> None:
    nodes.offer()
    came = nodes.fetched()
    assert isinstance(came, KvFetched)
    header, chunks = nodes.engine.export_kv(INSTANCE, REQUEST, 0, BLOCKS)
    assert (came.header, list(came.chunks)) == (header, list(chunks))
    assert came.moved_bytes == BLOCKS * header.block_bytes
    assert nodes.target.held_bytes == came.moved_bytes, "until the engine has them"
    came.release()
    assert nodes.target.held_bytes == 0
    assert isinstance(nodes.fetched(), Unavailable), "the ticket has been used"


def test_an_offer_may_come_after_who_wants_it(nodes: Nodes) -> None:
    nodes.loop.call_later(0.15, nodes.offer)
    assert isinstance(nodes.fetched(), KvFetched)


@pytest.mark.parametrize("wrong", ["no offer", "another ticket", "another node's", "expired"])
def test_who_has_no_ticket_gets_nothing(nodes: Nodes, wrong: str) -> None:
    if wrong != "no offer":
        nodes.offer(
            to="n3" if wrong == "another node's" else "n2",
            expires_s=0.0 if wrong == "expired" else WAIT_S,
        )
    assert isinstance(nodes.fetched("" if wrong == "another ticket" else TICKET), Unavailable)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x02{}",
        b"\0\0\0\x01[",
        b"\0\0\x10\0" + b"[" * 4096,
    ],
)
def test_a_stranger_is_sent_no_byte(nodes: Nodes, said: bytes) -> None:
    nodes.offer()
    host, _, port = nodes.source.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as stranger:
        stranger.sendall(said)
        with suppress(OSError):  # The node may have broken the connection already.
            stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert isinstance(nodes.fetched(), KvFetched), "and others are served"


def asked(nodes: Nodes, first: float, blocks: int = 1) -> bytes:
    """The answer to a question, by a socket of one's own."""
    question = json.dumps({"ticket": TICKET, "node": "n2", "first": first, "blocks": blocks})
    host, _, port = nodes.source.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as one:
        one.sendall(len(question).to_bytes(4, "big") + question.encode())
        some = one.recv(1)
        one.shutdown(socket.SHUT_WR)
        while one.recv(4096):
            pass
        return some


def test_a_question_of_no_number_is_not_answered(nodes: Nodes) -> None:
    nodes.offer()
    assert asked(nodes, float("inf")) == b""
    assert isinstance(nodes.fetched(), KvFetched)


def test_no_range_begins_before_the_last_one(nodes: Nodes) -> None:
    nodes.offer()
    assert asked(nodes, 1) != b""
    assert asked(nodes, 0) == b""
    assert asked(nodes, 1) != b""


@pytest.mark.parametrize("secured", [False, True])
def test_a_connection_that_says_little_by_little_is_closed(
    tmp_path: Path, certificates: Path, secured: bool
) -> None:
    """Its question, and with TLS the handshake before it."""
    tls = read_tls(certificates, Part.NODE) if secured else None
    for nodes in nodes_with(tmp_path, tls, tls):
        host, _, port = nodes.source.address.rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as slow:
            slow.sendall(b"\x16\3\1\x10\0" if secured else b"\0\0\x10\0")
            began_s = time.monotonic()
            with suppress(OSError):
                while time.monotonic() < began_s + WAIT_S:
                    slow.sendall(b"\1" if secured else b"[")
                    time.sleep(0.05)
        assert time.monotonic() < began_s + ASK_S_MAX + 2.0


def test_no_more_connections_are_open_than_may_be(nodes: Nodes) -> None:
    host, _, port = nodes.source.address.rpartition(":")
    idle = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(CONNECTIONS_MAX + 1)]
    assert idle[-1].recv(1) == b"", "one too many"
    for one in idle:
        one.close()


def test_what_the_source_has_not_computed_does_not_come(nodes: Nodes) -> None:
    nodes.offer()
    assert isinstance(nodes.fetched(blocks=BLOCKS + 9), EngineError)


class Cutting:
    """Passes a node's bytes on, and cuts the connection off after so many, so often."""

    def __init__(self, address: str, cuts: int, after_bytes: int) -> None:
        self._to, self._cuts, self._after = address, cuts, after_bytes
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.dialled = 0

    def serve(self) -> None:
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:
                return
            self.dialled += 1
            host, _, port = self._to.rpartition(":")
            with near, socket.create_connection((host, int(port))) as far:
                far.sendall(near.recv(4096))
                left = self._after if self.dialled <= self._cuts else 1 << 30
                while left and (some := far.recv(min(left, 4096))):
                    near.sendall(some)
                    left -= len(some)


@pytest.mark.parametrize("cuts", [1, DIALS_MAX])
def test_a_transfer_that_is_cut_off_goes_on_from_where_it_was(nodes: Nodes, cuts: int) -> None:
    header, _ = nodes.engine.export_kv(INSTANCE, REQUEST, 0, BLOCKS)
    header_bytes = 4 + len(json.dumps(asdict(header)))
    cutting = Cutting(
        nodes.source.address, cuts, after_bytes=header_bytes + (50 if cuts == 1 else 10)
    )
    threading.Thread(target=cutting.serve, daemon=True).start()
    nodes.offer()
    nodes.source.address = cutting.address
    came = nodes.fetched()
    cutting.listening.close()
    if cuts == 1:
        assert isinstance(came, KvFetched)
        assert (came.header.first_block, came.header.blocks) == (0, BLOCKS)
        assert [chunk.block for chunk in came.chunks] == list(range(BLOCKS))
        assert cutting.dialled == 2
    else:
        assert isinstance(came, Unavailable)
        assert cutting.dialled == DIALS_MAX


def test_nodes_of_a_cell_with_tls_know_each_other(tmp_path: Path, certificates: Path) -> None:
    node = read_tls(certificates, Part.NODE)
    for nodes in nodes_with(tmp_path, node, node):
        nodes.offer()
        assert isinstance(nodes.fetched(), KvFetched)


@pytest.mark.parametrize("part", [None, Part.CLIENT, Part.CONTROLLER])
def test_with_tls_nobody_but_a_node_gets_blocks(
    tmp_path: Path, certificates: Path, part: Part | None
) -> None:
    node = read_tls(certificates, Part.NODE)
    shown = None if part is None else read_tls(certificates, part)
    for nodes in nodes_with(tmp_path, node, shown):
        nodes.offer()
        assert isinstance(nodes.fetched(), Unavailable)
