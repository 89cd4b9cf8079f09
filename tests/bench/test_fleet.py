"""Where the seconds of a node go, what swaps llama.cpp servers, and how loads are foretold."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet_swapper import Swapper
from bench.live import errors_of
from bench.spans import Kind, Span, seconds_by_kind, spans_of
from mesh.domain.actions import NodeAction, StartMeasure, StartStep
from mesh.domain.events import NodeReported
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceGone, InstanceLoaded, LoadInstance, UnloadInstance
from mesh.domain.model import Footprint
from mesh.domain.node_events import HeartbeatDue, MeasureFinished, NodeEvent, StepFinished
from mesh.domain.profile import IterationShape
from mesh.evaluation.fidelity.observing import Observer
from mesh.runtime.journal import Decision
from mesh.v1 import inference_pb2 as pb
from tests.core.cells import (
    FOOTPRINT,
    CellUnderTest,
    commands,
    deployment,
    load_instance,
    step_result,
)

MIB = 2**20


def test_each_second_counts_once_and_what_is_computed_hides_a_load() -> None:
    spans = [
        *(Span(Kind.LOAD, 8.0, 12.0), Span(Kind.DECODE, 11.0, 13.0), Span(Kind.DECODE, 12.5, 13.5)),
        *(Span(Kind.PREFILL, 13.5, 14.0), Span(Kind.FIRST_RUN, 19.0, 25.0)),
        Span(Kind.LOAD, 30.0, 31.0),
    ]
    assert seconds_by_kind(spans, 10.0, 20.0) == {
        "load": pytest.approx(1.0),
        "unload": 0.0,
        "decode": pytest.approx(2.5),
        "prefill": pytest.approx(0.5),
        "first_run": pytest.approx(1.0),
        "idle": pytest.approx(5.0),
    }


ONE, TWO = InstanceId("i-1"), InstanceId("i-2")


def decided(now_s: float, event: NodeEvent, *actions: NodeAction) -> Decision:
    return Decision(now_s=now_s, event=event, actions=actions)


def load(instance_id: InstanceId) -> LoadInstance:
    return load_instance(instance_id=instance_id, deployment=DeploymentName("fleet-01"))


def loaded(instance_id: InstanceId) -> InstanceLoaded:
    footprint = Footprint(weights_bytes=236 * MIB, kv_block_bytes=720 * 1024, block_tokens=32)
    return InstanceLoaded(instance_id=instance_id, footprint=footprint, kv_blocks=8, elapsed_s=1.0)


def stepped(*, prefill_tokens: int = 0, decode_batch: int = 0) -> StepFinished:
    result = step_result(
        prefill_tokens=prefill_tokens,
        decode_batch=decode_batch,
        context_tokens=100 * decode_batch,
        kv_blocks_used=0,
        elapsed_s=0.25,
    )
    return StepFinished(instance_id=ONE, result=result)


def test_a_journal_tells_where_each_second_of_a_node_went() -> None:
    """Ten seconds: a load that began before, another that is half beside a decode, a step that ends
    after.
    """
    beat = HeartbeatDue(rss_bytes=0, engine_bytes=0)
    step = StartStep(instance_id=ONE, prefill=256)
    measure = StartMeasure(instance_id=ONE, shape=IterationShape(decode_batch=1))
    journal = [
        decided(99.0, beat, load(ONE)),
        decided(102.0, loaded(ONE), measure),
        decided(102.5, MeasureFinished(instance_id=ONE, elapsed_s=0.4), step),
        decided(103.25, stepped(prefill_tokens=27), step, load(TWO)),
        decided(104.25, stepped(decode_batch=1)),
        decided(105.25, loaded(TWO)),
        decided(107.0, beat, UnloadInstance(instance_id=TWO)),
        decided(107.25, InstanceGone(instance_id=TWO)),
        decided(109.5, beat, step),
        decided(112.0, stepped(decode_batch=1)),
    ]
    found = seconds_by_kind(spans_of(Observer().run(journal)), 100.0, 110.0)
    assert found == {
        "load": pytest.approx(3.0),
        "first_run": pytest.approx(0.5),
        "prefill": pytest.approx(0.75),
        "decode": pytest.approx(1.5),
        "unload": pytest.approx(0.25),
        "idle": pytest.approx(4.0),
    }
    assert sum(found.values()) == pytest.approx(10.0), "the wall clock"


SPANS = st.builds(
    lambda kind, began_s, took_s: Span(kind, began_s, began_s + took_s),
    st.sampled_from([kind for kind in Kind if kind is not Kind.IDLE]),
    st.floats(-5.0, 25.0),
    st.floats(0.0, 9.0),
)


@given(st.lists(SPANS, max_size=12))
def test_kinds_come_to_the_wall_clock_together_whatever_overlaps(spans: list[Span]) -> None:
    found = seconds_by_kind(spans, 5.0, 15.0)
    assert sum(found.values()) == pytest.approx(10.0)
    assert min(found.values()) >= 0.0
    for kind in {span.kind for span in spans}:
        alone = seconds_by_kind([span for span in spans if span.kind is kind], 5.0, 15.0)
        assert found[kind] <= alone[kind] + 1e-9


class Servers:
    """What the swapper loads: servers that answer when they are told to, or at once."""

    def __init__(self, *chunks: int) -> None:
        self.chunks = chunks
        self.loaded = 0
        self.asked: list[list[int]] = []
        self.asked_once = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> "Servers":
        self.loaded += 1
        return self

    def handle_completions(
        self, asked: dict[str, Any], on_chunk: Callable[[dict[str, Any]], bool]
    ) -> None:
        self.asked.append(asked["prompt"])
        self.asked_once.set()
        assert self.may_answer.wait(10.0)
        for count in self.chunks:
            on_chunk({"timings": {"predicted_n": count}})


async def ask(swapper: Swapper, name: str, prompt: int = 7) -> list[pb.InvokeResponse]:
    request = pb.InvokeRequest(deployment=name, tokens=pb.TokenIds(ids=[prompt]), max_tokens=4)
    return [message async for message in swapper.Invoke(request, None)]


async def test_an_answer_has_each_token_once_and_one_end() -> None:
    swapper = Swapper(Servers(1, 2, 2, 4), resident_max=1, at_once=1)
    *tokens, last = await ask(swapper, "a")
    assert [m.tokens.first_index + i for m in tokens for i in range(len(m.tokens.token_ids))] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    assert last.finished.output_tokens == 4
    assert [span.kind for span in swapper.spans] == [Kind.LOAD, Kind.PREFILL, Kind.DECODE]


async def test_the_least_recently_used_goes_for_a_model_that_is_not_there() -> None:
    servers = Servers(4)
    swapper = Swapper(servers, resident_max=2, at_once=1)
    for name, loads in [("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4), ("c", 5)]:
        await ask(swapper, name)
        assert servers.loaded == loads, name


async def test_calls_are_served_in_the_order_in_which_they_came() -> None:
    servers = Servers(4)
    swapper = Swapper(servers, resident_max=1, at_once=1)
    await asyncio.gather(*(ask(swapper, name, n) for n, name in enumerate("abab")))
    assert servers.asked == [[0], [1], [2], [3]]
    assert servers.loaded == 4


async def test_a_busy_model_is_not_unloaded() -> None:
    servers = Servers(4)
    swapper = Swapper(servers, resident_max=2, at_once=2)
    servers.may_answer.clear()
    busy = asyncio.create_task(ask(swapper, "a"))
    assert await asyncio.to_thread(servers.asked_once.wait, 10.0)
    await swapper.resident("b")
    await swapper.resident("c")
    await swapper.resident("a")
    assert servers.loaded == 3
    servers.may_answer.set()
    await busy


async def test_a_server_that_fails_ends_its_call_and_frees_its_place() -> None:
    class Failing(Servers):
        def handle_completions(self, asked: Any, on_chunk: Any) -> None:
            raise RuntimeError("no answer")

    swapper = Swapper(Failing(), resident_max=1, at_once=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no answer"):
            await ask(swapper, "a")


@pytest.mark.parametrize("took_share", [0.5, 1.0, 4.0])
def test_a_load_that_takes_otherwise_is_an_error_of_its_share(took_share: float) -> None:
    cell, decisions = CellUnderTest(deployment()), list[Decision]()
    link, _ = cell.join()
    load = commands(cell.invoke(), LoadInstance)[0]
    expected_s = cell.core.cell.instances[load.instance_id].load_s
    cell.now_s += took_share * expected_s
    loaded = InstanceLoaded(
        instance_id=load.instance_id, footprint=FOOTPRINT, kv_blocks=load.kv_blocks, elapsed_s=0.1
    )
    event = NodeReported(link_id=link, report=loaded)
    decisions.append(Decision(now_s=cell.now_s, event=event, actions=()))
    assert list(errors_of(cell.core, decisions)) == [pytest.approx(abs(1 - 1 / took_share))]
    assert cell.core.cell.instances[load.instance_id].is_loaded
