"""Turns of many iterations in one message: killed amid one, longer than a call may be, hung."""

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction
from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import (
    InstanceGone,
    LoadInstance,
    NodeReport,
    RequestReturned,
    SubmitRequest,
    TokensReport,
)
from mesh.domain.node_events import CommandReceived, LinkOpened, NodeEvent
from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request, RequestOrder
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadOrder
from mesh.runtime.engine import Progress
from mesh.runtime.host import Host
from mesh.runtime.node_actions import Brought, Lane, NodePerformer
from mesh.sim.clock import HeapClock
from mesh.sim.lanes import VirtualLanes
from mesh_nodes.engines.vllm import VllmEngine, remote
from tests.contract.driving import Driver, greedy
from tests.contract.engine_contract import StoredModel
from tests.core.cells import of_kind
from tests.core.nodes import load_command
from tests.nodes.engines.vllm.test_ends import PROMPT, WAIT_S_MAX, engine_processes, outcome_of
from tests.support.waiting import alive

CONTEXT_TOKENS, KV_BLOCKS = 4096, 300
OUTPUT_TOKENS = 300
PATIENT = Slo(ttft_s=1000.0, tpot_s=100.0)
"""With nobody near a deadline a turn is as long as the node allows."""
PROMPTS = {"a": PROMPT, "b": PROMPT[::-1]}
AMID_S = 0.1
"""Into a turn of hundreds of iterations, of milliseconds each."""


class Node:
    """A node core over a real engine. Calls of its lanes are made when the test says so."""

    def __init__(self, engine: VllmEngine, model: StoredModel) -> None:
        self.engine, self.lanes = engine, VirtualLanes(HeapClock(), by_hand=True)
        self.reports: list[NodeReport] = []
        self._model = model
        port: Any = self
        performer = NodePerformer(engine=engine, lanes=self.lanes, link=port, models=port)
        limits = NodeLimits(primed_tokens_max=0, deadline_margin_s_max=0.0)
        self._host: Host[NodeEvent, NodeAction] = Host(
            core=NodeCore(limits=limits), clock=HeapClock(), perform=performer.perform
        )
        self._deciding = threading.Lock()
        self.lanes.post = self.tell
        self.tell(LinkOpened(rule=NodeRule(turn_s_max=60.0)))

    def tell(self, event: NodeEvent) -> None:
        """From the test, or from the thread that watches the processes."""
        with self._deciding:
            self._host.post(event)

    def load(self, name: str) -> int:
        """The id of its process."""
        before = engine_processes()
        command = replace(
            load_command(name), kv_blocks=KV_BLOCKS, context_tokens_max=CONTEXT_TOKENS
        )
        self.tell(CommandReceived(command=command))
        assert self.lanes.run_one(Lane.WAKING)
        self.lanes.run_one(Lane.LOADING)
        (pid,) = engine_processes() - before
        return pid

    def submit(self, on: str, so_far: dict[str, tuple[int, ...]], attempt: int) -> None:
        for name, prompt in PROMPTS.items():
            request = Request(
                request_id=RequestId(name),
                deployment=load_command().deployment,
                prompt_tokens=prompt,
                sampling=greedy(OUTPUT_TOKENS),
            )
            order = RequestOrder(
                request=request,
                attempt=attempt,
                output_tokens=so_far.get(name, ()),
                slo=PATIENT,
                age_s=0.0,
                due_in_s=PATIENT.ttft_s,
            )
            self.tell(
                CommandReceived(command=SubmitRequest(instance_id=InstanceId(on), order=order))
            )

    def compute(self) -> None:
        """And unload, which has a lane of its own."""
        while self.lanes.run_one(Lane.COMPUTE) or self.lanes.run_one(Lane.UNLOADING):
            pass

    def tokens(self, attempt: int) -> dict[str, tuple[int, ...]]:
        """As reported, one after the other; those of a request that ended are whole."""
        told: dict[str, tuple[int, ...]] = {}
        for report in of_kind(self.reports, TokensReport):
            for output in report.outputs:
                if output.attempt == attempt:
                    told[output.request_id] = told.get(output.request_id, ()) + output.token_ids
        return told

    def ends(self) -> list[str]:
        return [
            output.request_id
            for report in of_kind(self.reports, TokensReport)
            for output in report.outputs
            if output.finish is FinishReason.LENGTH
        ]

    def send(self, report: NodeReport) -> None:
        self.reports.append(report)

    def at_hand(self, action: LoadInstance) -> LoadOrder:
        return self._model.order(
            action.instance_id,
            kv_blocks=action.kv_blocks,
            context_tokens_max=action.context_tokens_max,
            batch_max=action.batch_max,
        )

    def bring(self, action: LoadInstance, progress: Progress, then: Brought) -> None:
        raise AssertionError("all models are at hand")


def test_killed_amid_a_turn_each_request_comes_back_once_and_goes_on_elsewhere(
    engine: VllmEngine, model: StoredModel
) -> None:
    """The turn's own tokens are lost with it, and computed again."""
    node = Node(engine, model)
    node.load("i1")
    node.submit("i1", {}, attempt=1)
    node.compute()
    undisturbed = node.tokens(attempt=1)
    assert {name: len(tokens) for name, tokens in undisturbed.items()} == {"a": 300, "b": 300}
    assert len(node.reports) < 10, "a turn has many iterations"
    assert sorted(node.ends()) == ["a", "b"]
    engine.unload(InstanceId("i1"))

    node = Node(engine, model)
    pid = node.load("i2")
    node.submit("i2", {}, attempt=1)
    while len(node.tokens(attempt=1)) < 2:
        assert node.lanes.run_one(Lane.COMPUTE)
    known = node.tokens(attempt=1)
    turn, _ = outcome_of(lambda: node.lanes.run_one(Lane.COMPUTE))
    time.sleep(AMID_S)
    assert turn.is_alive()
    os.kill(pid, signal.SIGKILL)
    turn.join(WAIT_S_MAX)
    node.compute()
    assert [r.request_id for r in of_kind(node.reports, RequestReturned)] == ["a", "b"]
    assert [g.instance_id for g in of_kind(node.reports, InstanceGone)] == ["i2"]
    assert (node.tokens(attempt=1), node.ends()) == (known, [])
    assert engine.memory() == ()

    node.load("i3")
    node.submit("i3", known, attempt=2)
    node.compute()
    assert sorted(node.ends()) == ["a", "b"]
    again = node.tokens(attempt=2)
    assert {name: known[name] + again[name] for name in known} == undisturbed
    (books,) = engine.memory()
    assert (books.instance_id, books.kv_blocks_used) == ("i3", 0)


@pytest.fixture
def decoding(engine: VllmEngine, model: StoredModel) -> Driver:
    """With thousands of tokens still to come."""
    order = model.order(
        InstanceId("i"), kv_blocks=KV_BLOCKS, context_tokens_max=CONTEXT_TOKENS, batch_max=1
    )
    driver = Driver(engine, order)
    driver.submit("r", PROMPT, greedy(CONTEXT_TOKENS))
    driver.step()
    return driver


def test_a_turn_may_take_longer_than_the_bound_on_a_call(
    engine: VllmEngine, decoding: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process says now and then that it lives."""
    bound_s = 1.5
    monkeypatch.setattr(remote, "CALL_S_MAX", bound_s)
    iteration_s = engine.step(decoding.instance_id, 64, 100).elapsed_s / 100
    iterations = min(int(2 * bound_s / iteration_s), CONTEXT_TOKENS - 200)
    result = engine.step(decoding.instance_id, 64, iterations)
    assert result.iterations == iterations
    assert result.elapsed_s > bound_s


def test_a_process_that_hangs_amid_a_turn_is_killed_at_the_bound(
    engine: VllmEngine, decoding: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CALL_S_MAX", 1.0)
    (pid,) = engine_processes()
    thread, outcomes = outcome_of(lambda: engine.step(decoding.instance_id, 64, CONTEXT_TOKENS))
    time.sleep(AMID_S)
    assert thread.is_alive()
    os.kill(pid, signal.SIGSTOP)
    thread.join(WAIT_S_MAX)
    (error,) = outcomes
    assert isinstance(error, EngineError)
    assert "did not answer a step within 1 s" in error.message
    assert not alive(pid)
    assert engine.memory() == ()
