"""A node core under its host, with real lanes' order: what the engine is asked for, in which order,
and a journal of it that replays.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction
from mesh.domain.ids import InstanceId, ModelId, OperationId, RequestId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import (
    AbortRequest,
    Heartbeat,
    InstanceGone,
    InstanceLoaded,
    KvResized,
    NodeCommand,
    NodeReport,
    RequestReturned,
    ResizeKv,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.model import WeightPrecision
from mesh.domain.node_events import CommandReceived, HeartbeatDue, LinkOpened, NodeEvent
from mesh.domain.request import RequestOrder
from mesh.domain.slo import Slo
from mesh.domain.steps import Decode, HeldModel, LoadTier, Prefill
from mesh.runtime.engine import EngineRequest, StepResult
from mesh.runtime.host import Host
from mesh.runtime.journal import NodeStart, open_journal, read_journal, replay
from mesh.runtime.node_actions import Lane, NodePerformer
from mesh.sim.clock import HeapClock
from mesh.sim.lanes import VirtualLanes
from tests.core.cells import of_kind, request
from tests.core.nodes import load_command
from tests.support.scripted_engine import (
    BLOCK_TOKENS,
    KV_BLOCK_BYTES,
    WEIGHTS_BYTES,
    ModelsAtHand,
    ScriptedEngine,
)

I1 = InstanceId("i1")
START = NodeStart(version="test", limits=NodeLimits(primed_tokens_max=0))
BLOCKS_MAX = 20
"""That the engine has memory for; the instance is loaded with 16."""


class LoggingEngine(ScriptedEngine):
    """Notes in order what is asked of it."""

    def __init__(self) -> None:
        memory_bytes = WEIGHTS_BYTES + BLOCKS_MAX * KV_BLOCK_BYTES
        super().__init__(memory_bytes=memory_bytes, sleep=lambda seconds: None)
        self.log: list[str] = []

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> int:
        self.log.append(f"submit {request.request_id}")
        return super().submit(instance_id, request)

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        self.log.append(f"abort {request_id}")
        super().abort(instance_id, request_id)

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        self.log.append("step")
        return super().step(instance_id, prefill, iterations, decode)

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        self.log.append(f"resize {kv_blocks}")
        return super().resize_kv(instance_id, kv_blocks)


class HostedNode(ModelsAtHand):
    """With an instance loaded, and a link that keeps what is reported."""

    def __init__(self, tmp_path: Path) -> None:
        self.engine, self.lanes = LoggingEngine(), VirtualLanes(HeapClock(), by_hand=True)
        self.reports: list[NodeReport] = []
        self.journal_path = tmp_path / "journal.jsonl"
        self.journal = open_journal(self.journal_path, START)
        self.model_path = tmp_path
        port: Any = self
        performer = NodePerformer(engine=self.engine, lanes=self.lanes, link=port, models=port)
        host: Host[NodeEvent, NodeAction] = Host(
            core=NodeCore(limits=START.limits),
            clock=HeapClock(),
            perform=performer.perform,
            recorders=[self.journal],
        )
        self.tell = self.lanes.post = host.post
        self.tell(LinkOpened())
        self.command(load_command())
        assert self.lanes.run_one(Lane.WAKING)
        assert self.lanes.run_one(Lane.LOADING)

    def command(self, command: NodeCommand) -> None:
        self.tell(CommandReceived(command=command))

    def submit(self, name: str, prompt_tokens: int = 3) -> None:
        order = RequestOrder(
            request=request(name, prompt=(7,) * prompt_tokens),
            attempt=1,
            slo=Slo(),
            age_s=0.0,
            due_in_s=2.0,
        )
        self.command(SubmitRequest(instance_id=I1, order=order))

    def resize(self, kv_blocks: int) -> None:
        self.command(ResizeKv(instance_id=I1, kv_blocks=kv_blocks))

    def compute(self) -> list[NodeReport]:
        """Until nothing more is to be computed; what was reported of it."""
        before = len(self.reports)
        for _ in range(1000):
            if not self.lanes.run_one(Lane.COMPUTE):
                return self.reports[before:]
        raise AssertionError("the node computes without end")

    def send(self, report: NodeReport) -> None:
        self.reports.append(report)

    def start_import(
        self, operation_id: OperationId, source: str, weights: WeightPrecision | None
    ) -> None:
        raise AssertionError("nothing is imported here")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[HostedNode]:
    node = HostedNode(tmp_path)
    yield node
    node.journal.close()


def test_a_load_that_imported_its_model_says_how_long_that_took(node: HostedNode) -> None:
    (at_hand,) = of_kind(node.reports, InstanceLoaded)
    assert at_hand.tier is LoadTier.DISK
    node.command(UnloadInstance(instance_id=I1))
    node.compute()
    node.import_s = 3.0
    node.command(load_command("i2"))
    assert node.lanes.run_one(Lane.WAKING)
    assert node.lanes.run_one(Lane.LOADING)
    _, imported = of_kind(node.reports, InstanceLoaded)
    assert (imported.instance_id, imported.tier) == ("i2", LoadTier.REMOTE)
    assert imported.elapsed_s == pytest.approx(at_hand.elapsed_s + 3.0)


def test_resizes_and_submits_reach_the_engine_in_order(node: HostedNode) -> None:
    """All of them during an iteration, and before the next."""
    node.submit("a")
    node.resize(8)
    node.submit("b")
    node.resize(20)
    node.submit("c")
    node.compute()
    assert node.engine.log[:7] == [
        *("submit a", "step", "resize 8", "submit b", "resize 20", "submit c", "step")
    ]


def test_a_grow_feeds_the_requests_that_starve(node: HostedNode) -> None:
    node.resize(1)
    node.submit("a", BLOCK_TOKENS - 2)
    node.submit("b", BLOCK_TOKENS)
    hungry = of_kind(node.compute(), TokensReport)
    assert [said.starved for said in hungry] == [(), ("b",), ("b",), ("a", "b")]
    assert [len(said.outputs) for said in hungry] == [1, 1, 1, 0], "the one block is full"
    node.resize(4)
    fed = of_kind(node.compute(), TokensReport)
    assert {r for said in fed for r in said.starved} == set()
    ended = [output for said in fed for output in said.outputs if output.finish is not None]
    assert [output.request_id for output in ended] == ["a", "b"]


def test_a_request_taken_back_frees_blocks_for_the_one_that_starves(node: HostedNode) -> None:
    node.resize(1)
    node.submit("a", BLOCK_TOKENS)
    node.submit("b", BLOCK_TOKENS - 9)
    assert of_kind(node.compute(), TokensReport)[-1].starved == ("a", "b")
    node.command(AbortRequest(request_id=RequestId("a"), attempt=1))
    said = of_kind(node.compute(), TokensReport)
    assert [output.request_id for output in said[-1].outputs if output.finish] == ["b"]
    assert "abort b" not in node.engine.log, "the node itself takes nobody back"


def test_a_grow_without_memory_is_answered_and_the_instance_serves_on(node: HostedNode) -> None:
    node.resize(BLOCKS_MAX + 1)
    node.submit("a")
    said = node.compute()
    (answer,) = of_kind(said, KvResized)
    assert (answer.kv_blocks, answer.error) == (16, "OutOfMemory")
    assert of_kind(said, TokensReport)[-1].outputs[0].finish is not None


def test_what_a_node_decides_about_memory_replays(node: HostedNode) -> None:
    node.resize(1)
    node.submit("a", BLOCK_TOKENS)
    node.submit("b")
    node.compute()
    node.resize(BLOCKS_MAX + 1)
    node.resize(BLOCKS_MAX)
    node.compute()
    models = (HeldModel(model_id=ModelId("m"), tier=LoadTier.HOST, context_tokens_max=64),)
    node.tell(HeartbeatDue(rss_bytes=300, engine_bytes=200, models=models))
    node.journal.close()
    start, decisions = read_journal(node.journal_path)
    kept = list(decisions)
    (beat,) = (d.event for d in kept if isinstance(d.event, HeartbeatDue))
    assert beat.models == models
    assert start == START
    assert replay(NodeCore(limits=START.limits), iter(kept)) is None
    events = [type(decision.event) for decision in kept]
    assert {KvResized, KvResized} <= set(events)
    resizes = [a for d in kept for a in d.actions if isinstance(a, ResizeKv)]
    assert [resize.kv_blocks for resize in resizes] == [1, BLOCKS_MAX + 1, BLOCKS_MAX]


def test_an_instance_that_ends_itself_is_missed_and_replays(node: HostedNode) -> None:
    """Its requests come back, and the engine forgets it."""
    node.submit("a")
    before = len(node.reports)
    node.engine.lose(I1)
    beat, returned = node.reports[before:]
    assert isinstance(beat, Heartbeat)
    assert beat.instances == ()
    assert isinstance(returned, RequestReturned)
    assert "it was killed" in returned.message
    (gone,) = of_kind(node.compute(), InstanceGone)
    assert (gone.instance_id, gone.error) == (I1, "EngineError")
    node.journal.close()
    _, decisions = read_journal(node.journal_path)
    assert replay(NodeCore(limits=START.limits), decisions) is None
