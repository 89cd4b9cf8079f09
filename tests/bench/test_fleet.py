"""The fleet benchmark: its calls, a node's memory, where seconds go, who is swapped, figures."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet import Measured, Played, figures
from bench.fleet_cell import errors_of, spans_of
from bench.fleet_swapper import Swapper
from bench.fleet_workload import (
    CONTEXT_TOKENS,
    OUTPUT_TOKENS,
    SCENES,
    SYSTEM_TOKENS,
    Kind,
    Span,
    calls,
    seconds_by_kind,
)
from mesh.domain.actions import NodeAction, StartMeasure, StartStep
from mesh.domain.events import NodeReported
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceGone, InstanceLoaded, LoadInstance, UnloadInstance
from mesh.domain.model import Footprint
from mesh.domain.node_events import HeartbeatDue, MeasureFinished, NodeEvent, StepFinished
from mesh.domain.profile import IterationShape
from mesh.domain.slo import Slo
from mesh.domain.steps import StepResult
from mesh.evaluation.fidelity.observing import Observer
from mesh.evaluation.judging import judge
from mesh.evaluation.load_client import Answer, Call
from mesh.runtime.journal import Decision
from mesh.v1 import inference_pb2 as pb
from tests.core.cells import FOOTPRINT, MODEL, CellUnderTest, commands, deployment
from tests.support.profiles import PROFILE

FLEET, RESIDENT, LOCALITY, CONVERSATIONS = SCENES
MIB = 2**20


def test_calls_come_in_order_at_their_rate_and_the_popular_more_often() -> None:
    sent = calls(FLEET, rate=20.0, seconds=200.0, seed=2)
    assert len(sent) == pytest.approx(4000, rel=0.05)
    assert [call.at_s for call in sent] == sorted(call.at_s for call in sent)
    assert sent[0].at_s > 0.0
    assert sent[-1].at_s < 200.0
    counts = Counter(call.deployment for call in sent)
    first, second, last = FLEET.names()[0], FLEET.names()[1], FLEET.names()[-1]
    assert counts[first] / counts[second] == pytest.approx(2**0.9, rel=0.2)
    assert counts[first] / counts[last] == pytest.approx(40**0.9, rel=0.4)
    assert {call.output_tokens for call in sent} == set(OUTPUT_TOKENS)
    assert sum(len(call.prompt_tokens) for call in sent) / len(sent) == pytest.approx(27, rel=0.02)


def test_the_same_seed_draws_the_same_calls_and_a_short_run_has_one() -> None:
    assert calls(FLEET, rate=1.0, seconds=9.0, seed=3) == calls(
        FLEET, rate=1.0, seconds=9.0, seed=3
    )
    assert calls(FLEET, rate=1.0, seconds=9.0, seed=3) != calls(
        FLEET, rate=1.0, seconds=9.0, seed=4
    )
    assert calls(FLEET, rate=0.001, seconds=1.0, seed=5)


def test_a_turn_asks_with_all_that_was_said_and_the_peer_lacks_the_cache_alone() -> None:
    sent = calls(CONVERSATIONS, rate=2.0, seconds=300.0, seed=6)
    assert sent == calls(CONVERSATIONS, rate=2.0, seconds=300.0, seed=6)
    first = [call for call in sent if call.deployment == CONVERSATIONS.names()[0]]
    system = first[0].prompt_tokens[:SYSTEM_TOKENS]
    assert all(call.prompt_tokens[:SYSTEM_TOKENS] == system for call in first)
    prompts = [call.prompt_tokens for call in first]
    later = [p for p in prompts if any(p != q and p[: len(q)] == q for q in prompts)]
    assert len(later) > len(prompts) / 2
    assert all(len(c.prompt_tokens) + c.output_tokens <= CONTEXT_TOKENS for c in sent)
    assert CONVERSATIONS.without == replace(CONVERSATIONS, prefix_cache=False)
    assert LOCALITY.without == LOCALITY


@pytest.mark.parametrize("base_bytes", [90 * MIB, 190 * MIB])
def test_a_node_has_memory_for_as_many_instances_as_the_scene_says(base_bytes: int) -> None:
    footprint = Footprint(weights_bytes=236 * MIB, kv_block_bytes=720 * 1024, block_tokens=32)
    free_bytes = FLEET.memory_bytes(footprint) - base_bytes
    assert free_bytes // footprint.instance_bytes(40) == FLEET.resident_max


def test_each_second_counts_once_and_what_is_computed_hides_a_load() -> None:
    spans = [
        Span(Kind.LOAD, 8.0, 12.0),
        Span(Kind.DECODE, 11.0, 13.0),
        Span(Kind.DECODE, 12.5, 13.5),
        Span(Kind.PREFILL, 13.5, 14.0),
        Span(Kind.FIRST_RUN, 19.0, 25.0),
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
    return LoadInstance(
        instance_id=instance_id,
        deployment=FLEET.names()[0],
        model=MODEL,
        kv_blocks=8,
        context_tokens_max=256,
        batch_max=8,
        profile=PROFILE,
    )


def loaded(instance_id: InstanceId) -> InstanceLoaded:
    footprint = Footprint(weights_bytes=236 * MIB, kv_block_bytes=720 * 1024, block_tokens=32)
    return InstanceLoaded(instance_id=instance_id, footprint=footprint, kv_blocks=8, elapsed_s=1.0)


def stepped(*, prefill_tokens: int = 0, decode_batch: int = 0) -> StepFinished:
    result = StepResult(
        outputs=(),
        prefill_tokens=prefill_tokens,
        prefill_past_tokens=0,
        decode_batch=decode_batch,
        context_tokens=100 * decode_batch,
        prefill_left=(),
        starved=(),
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


CALL = Call(
    at_s=0.0,
    deployment=DeploymentName("fleet-01"),
    slo=Slo(ttft_s=1.0, tpot_s=0.1),
    prompt_tokens=(7,),
    output_tokens=3,
)
MET = Answer(ended_s=1.0, tokens_s=(0.5, 0.6, 0.7), finishes=1)


def measured(*answers: Answer, rate: float = 1.0, simulated: float | None = None) -> Measured:
    return Measured(
        rate=rate,
        judged=judge([CALL] * len(answers), answers),
        seconds={str(kind): 1.04 for kind in Kind},
        loads=2,
        loading_s=1.04,
        simulated_met_share=simulated,
    )


@pytest.fixture
def mixed() -> Measured:
    """One met, one only in the mean, one only by every token, one late as told, one refused."""
    return measured(
        MET,
        replace(MET, tokens_s=(0.95, 1.14, 1.14)),
        replace(MET, tokens_s=(0.5, 0.85, 1.19)),
        replace(MET, tokens_s=(1.5, 1.6, 1.7), grace_s=3.0),
        replace(MET, tokens_s=(), finishes=0, refused="queue_timeout"),
        simulated=0.3,
    )


def test_calls_are_counted_both_ways_by_the_clock(mixed: Measured) -> None:
    assert mixed.met_share == pytest.approx(2 / 5)
    assert mixed.met_every_token_share == pytest.approx(2 / 5)
    assert mixed.met_of_admitted == pytest.approx(2 / 3)
    assert mixed.met_every_token_of_admitted == pytest.approx(2 / 3)
    assert mixed.told_late == 1
    assert mixed.ttft_s(95) == pytest.approx(1.5, abs=0.1)


def test_figures_are_lists_by_rate_beside_those_of_the_peer(mixed: Measured) -> None:
    late = replace(MET, tokens_s=(9.0, 9.1, 9.2))
    peer = (measured(MET, MET, MET, MET, late), measured(late, rate=2.0))
    found = figures([Played(scene=FLEET, ours=(mixed, measured(MET, rate=2.0)), peer=peer)])
    assert found["rates"] == [1.0, 2.0]
    assert found["met_share"] == [0.4, 1.0]
    assert found["lru_met_share"] == [0.8, 0.0]
    assert found["lru_ratio"] == [0.5, None]
    assert found["met_of_admitted"] == found["met_every_token_of_admitted"] == [0.6667, 1.0]
    assert found["told_late"] == [1, 0]
    assert found["sim_difference"] == [pytest.approx(0.1), None]
    assert found["refused_by_reason"] == [{"queue_timeout": 1}, {}]
    assert found["seconds_by_kind"] == [{str(kind): 1.0 for kind in Kind}] * 2


def test_figures_of_resident_models_say_so_and_do_without_a_peer() -> None:
    found = figures([Played(scene=RESIDENT, ours=(measured(MET),))])
    assert found["resident_met_share"] == [1.0]
    assert found["resident_peer_met_share"] == []
    assert "met_share" not in found


def test_figures_of_models_loaded_ahead_are_beside_those_of_mesh_without() -> None:
    late = replace(MET, tokens_s=(9.0, 9.1, 9.2))
    found = figures(
        [Played(scene=LOCALITY, ours=(measured(MET, MET),), peer=(measured(MET, late),))]
    )
    assert found["locality_met_share"] == [1.0]
    assert found["locality_without_met_share"] == [0.5]
    assert found["locality_gain"] == [2.0]
    assert LOCALITY.names()[0] == "locality-01"


@pytest.mark.parametrize("took_share", [0.5, 1.0, 4.0])
def test_a_load_that_takes_otherwise_than_expected_is_an_error_of_its_share(
    took_share: float,
) -> None:
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
