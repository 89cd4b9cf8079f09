"""What the node core decides reaches the engine on its lane, and what came of it comes back."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from mesh.domain.actions import AbortInEngine, FetchKv, NodeAction, StartMeasure, StartStep
from mesh.domain.errors import MeshError, ModelError, TornModel
from mesh.domain.ids import InstanceId, NodeId, OperationId, RequestId
from mesh.domain.limits import KV_SLICE_BYTES
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvArrived,
    KvResized,
    LoadFailed,
    LoadInstance,
    NodeReport,
    OfferKv,
    ResizeKv,
    UnloadInstance,
)
from mesh.domain.model import WeightPrecision
from mesh.domain.node_events import (
    AbortFinished,
    MeasureBroke,
    MeasureFinished,
    NodeEvent,
    StepFinished,
)
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.request import KvSource, SamplingParams
from mesh.domain.steps import EngineCapabilities, KvChunk, KvHeader, LoadTier, StepResult
from mesh.runtime.engine import EngineRequest, LoadOrder, Progress
from mesh.runtime.node_actions import Brought, Fetched, KvFetched, Lane, NodePerformer
from tests.contract.engine_contract import StoredModel, write_tiny_model
from tests.core.cells import load_instance
from tests.support.scripted_engine import (
    KV_BLOCK_BYTES,
    WEIGHTS_BYTES,
    ModelsAtHand,
    Script,
    ScriptedEngine,
    measured_s,
)

R = TypeVar("R")
INSTANCE = InstanceId("i-1")
MEMORY_BYTES = WEIGHTS_BYTES + 100 * KV_BLOCK_BYTES
SHAPE = IterationShape(decode_batch=2, decode_context_tokens=30)


class Around(ModelsAtHand):
    """Everything around the performer: lanes that run a call at once, and nobody to talk to."""

    def __init__(self) -> None:
        self.events: list[tuple[Lane, NodeEvent | None]] = []

    def run(
        self, lane: Lane, call: Callable[[], R], done: Callable[[R | MeshError], NodeEvent | None]
    ) -> None:
        try:
            result: R | MeshError = call()
        except MeshError as error:
            result = error
        self.events.append((lane, done(result)))

    def post_soon(self, event: NodeEvent) -> None: ...

    def send(self, report: NodeReport) -> None: ...

    def start_import(
        self, operation_id: OperationId, source: str, weights: WeightPrecision | None
    ) -> None: ...

    def stop_import(self, operation_id: OperationId) -> None: ...


@pytest.fixture
def engine(tmp_path: Path) -> ScriptedEngine:
    """An instance is loaded; its steps take 20 ms and resizes 3, by its own account."""
    script = Script(step_s=0.02, resize_s=0.003)
    engine = ScriptedEngine(script, memory_bytes=MEMORY_BYTES, sleep=lambda seconds: None)
    path = tmp_path / "model"
    stored = StoredModel(info=write_tiny_model(path), path=path)
    engine.load(stored.order(INSTANCE), lambda phase, share: None)
    return engine


def perform(engine: ScriptedEngine, action: NodeAction) -> tuple[Lane, NodeEvent | None]:
    around = Around()
    NodePerformer(engine=engine, lanes=around, link=around, models=around).perform(action)
    (came,) = around.events
    return came


def test_a_measured_iteration_comes_back_with_its_time(engine: ScriptedEngine) -> None:
    assert perform(engine, StartMeasure(instance_id=INSTANCE, shape=SHAPE)) == (
        Lane.COMPUTE,
        MeasureFinished(instance_id=INSTANCE, elapsed_s=measured_s(SHAPE, 0.02)),
    )


def test_a_measure_that_fails_comes_back_with_its_cause(engine: ScriptedEngine) -> None:
    shape = IterationShape(decode_batch=8, decode_context_tokens=256 + 1)
    lane, event = perform(engine, StartMeasure(instance_id=INSTANCE, shape=shape))
    assert lane is Lane.COMPUTE
    assert isinstance(event, MeasureBroke)
    assert (event.instance_id, event.error) == (INSTANCE, "EngineError")
    assert "257 tokens" in event.message


def test_operators_are_counted_only_where_that_was_asked_for(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = CountedIteration(elapsed_s=0.2, operators=(("down", 0.1),))
    monkeypatch.setattr(ScriptedEngine, "count_operators", lambda *_: counted)
    action = StartMeasure(instance_id=INSTANCE, shape=SHAPE, counted=True)
    assert perform(engine, action)[1] == MeasureFinished(
        instance_id=INSTANCE, elapsed_s=0.2, operators=(("down", 0.1),)
    )
    _, event = perform(engine, replace(action, counted=False))
    assert isinstance(event, MeasureFinished)
    assert event.operators == ()


def submit(engine: ScriptedEngine, name: str, max_tokens: int) -> None:
    engine.submit(
        INSTANCE,
        EngineRequest(
            request_id=RequestId(name),
            prompt_tokens=(1, 2, 3),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        ),
    )


def turn(engine: ScriptedEngine, iterations: int) -> StepResult:
    action = StartStep(instance_id=INSTANCE, prefill=64, iterations=iterations)
    lane, event = perform(engine, action)
    assert lane is Lane.COMPUTE
    assert isinstance(event, StepFinished)
    return event.result


def test_a_turn_of_several_decodes_comes_back_as_one(engine: ScriptedEngine) -> None:
    submit(engine, "a", 9)
    assert turn(engine, 1).iterations == 1
    result = turn(engine, 3)
    assert (result.iterations, result.decode_batch) == (3, 1)
    (output,) = result.outputs
    assert (output.first_index, len(output.token_ids)) == (1, 3)
    assert result.context_tokens == 5, "the mean of 4, 5 and 6"
    assert result.elapsed_s == pytest.approx(3 * 0.02)


def test_a_resize_comes_back_with_the_blocks_in_force_and_its_time(engine: ScriptedEngine) -> None:
    assert perform(engine, ResizeKv(instance_id=INSTANCE, kv_blocks=100)) == (
        Lane.COMPUTE,
        KvResized(instance_id=INSTANCE, kv_blocks=100, elapsed_s=0.003),
    )
    assert engine.memory()[0].kv_blocks == 100


def test_a_resize_that_fails_comes_back_with_its_cause(engine: ScriptedEngine) -> None:
    lane, event = perform(engine, ResizeKv(instance_id=INSTANCE, kv_blocks=101))
    assert lane is Lane.COMPUTE
    assert isinstance(event, KvResized)
    assert (event.instance_id, event.error) == (INSTANCE, "OutOfMemory")
    assert str(MEMORY_BYTES) in event.message


def test_an_abort_comes_back_with_the_blocks_that_are_left_in_use(engine: ScriptedEngine) -> None:
    """So do the books of an instance whose starved requests were taken back."""
    for name, tokens in (("a", 32), ("b", 64), ("c", 32)):
        engine.submit(
            INSTANCE,
            EngineRequest(
                request_id=RequestId(name),
                prompt_tokens=(5,) * tokens,
                sampling=SamplingParams(max_tokens=8),
            ),
        )
    engine.resize_kv(INSTANCE, 3)
    assert engine.step(INSTANCE, 256).starved == ("c",)
    for name, used in (("c", 3), ("b", 1), ("b", 1), ("a", 0)):
        action = AbortInEngine(instance_id=INSTANCE, request_id=RequestId(name))
        assert perform(engine, action) == (
            Lane.COMPUTE,
            AbortFinished(instance_id=INSTANCE, kv_blocks_used=used),
        )


class BesideEngine(ScriptedEngine):
    """Its unloads may be made beside steps."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities, unloads_beside=True)


@pytest.mark.parametrize(
    ("kind", "lanes"),
    [(ScriptedEngine, [Lane.COMPUTE]), (BesideEngine, [Lane.UNLOADING, Lane.COMPUTE])],
)
def test_an_unload_comes_after_the_calls_before_it_and_where_it_may_be_beside_steps(
    kind: type[ScriptedEngine], lanes: list[Lane]
) -> None:
    """The inner of two calls is listed first: it is made of what came of the outer one."""
    around = Around()
    performer = NodePerformer(engine=kind(), lanes=around, link=around, models=around)
    performer.perform(UnloadInstance(instance_id=INSTANCE))
    assert [lane for lane, _ in around.events] == lanes
    events = [event for _, event in around.events if event is not None]
    assert events == [InstanceGone(instance_id=INSTANCE)]


class WakingEngine(ScriptedEngine):
    """Has all weights in the host's memory."""

    def tier_of(self, order: LoadOrder) -> LoadTier:
        return LoadTier.HOST


class Elsewhere(Around):
    """The model must be fetched first, which ends as `found` says."""

    def __init__(self, found: MeshError | None = None) -> None:
        super().__init__()
        self.found = found
        self.posted: list[NodeEvent] = []

    def at_hand(self, action: LoadInstance) -> LoadOrder | None:
        return None

    def bring(self, action: LoadInstance, progress: Progress, then: Brought) -> None:
        then(self.found or super().at_hand(action) or ModelError("is there"))

    def post_soon(self, event: NodeEvent) -> None:
        self.posted.append(event)


def load(around: Around, kind: type[ScriptedEngine] = ScriptedEngine) -> list[Lane]:
    """The lanes of a load's calls, the last one first: the end of each begins the next."""
    engine = kind(memory_bytes=MEMORY_BYTES, sleep=lambda seconds: None)
    action = load_instance(instance_id=INSTANCE, batch_max=4)
    NodePerformer(engine=engine, lanes=around, link=around, models=around).perform(action)
    return [lane for lane, _ in around.events]


@pytest.mark.parametrize(
    ("around", "kind", "lanes"),
    [
        (Around, WakingEngine, [Lane.WAKING]),
        (Around, ScriptedEngine, [Lane.LOADING, Lane.WAKING]),
        (Elsewhere, ScriptedEngine, [Lane.LOADING, Lane.WAKING]),
    ],
    ids=["in memory", "stored", "to be fetched"],
)
def test_a_load_waits_only_for_those_of_its_kind(
    around: type[Around], kind: type[ScriptedEngine], lanes: list[Lane]
) -> None:
    surroundings = around()
    assert load(surroundings, kind) == lanes
    assert isinstance(surroundings.events[0][1], InstanceLoaded)


def test_a_model_that_cannot_be_fetched_fails_its_load() -> None:
    around = Elsewhere(TornModel("it ends early", hint="fetch it again"))
    assert load(around) == [Lane.WAKING]
    assert around.posted == [
        LoadFailed(
            instance_id=INSTANCE,
            error="TornModel",
            message="it ends early",
            hint="fetch it again",
        )
    ]


class BlockByBlock(ScriptedEngine):
    """Imports a block a step, of blocks that are as large as a slice may be."""

    def import_kv(
        self,
        instance_id: InstanceId,
        request: EngineRequest,
        header: KvHeader,
        chunks: Iterable[KvChunk],
    ) -> Generator[None, None, int]:
        for _ in range(header.blocks):
            yield
        whole = list(chunks)
        header = replace(header, block_bytes=len(whole[0].pages))
        return (yield from super().import_kv(instance_id, request, header, whole))


class Come:
    """The blocks of a request that the first instance has computed are there at once."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine, self.released = engine, 0

    def offer(self, offer: OfferKv) -> None: ...

    def fetch(self, action: FetchKv, then: Fetched) -> Callable[[], None]:
        header, chunks = self.engine.export_kv(INSTANCE, action.request.request_id, 0, 2)
        then(
            KvFetched(
                header=replace(header, block_bytes=KV_SLICE_BYTES),
                chunks=list(chunks),
                moved_bytes=9,
                elapsed_s=0.1,
                release=self.release,
            )
        )
        return lambda: None

    def release(self) -> None:
        self.released += 1


def test_blocks_are_imported_some_at_a_time(tmp_path: Path) -> None:
    engine, to = BlockByBlock(memory_bytes=4 * MEMORY_BYTES), InstanceId("i-2")
    stored = StoredModel(info=write_tiny_model(tmp_path / "model"), path=tmp_path / "model")
    for instance_id in (INSTANCE, to):
        engine.load(stored.order(instance_id), lambda phase, share: None)
    request = EngineRequest(
        request_id=RequestId("moves"),
        prompt_tokens=tuple(range(3, 103)),
        sampling=SamplingParams(max_tokens=9),
    )
    engine.submit(INSTANCE, request)
    engine.step(INSTANCE, 256)
    around, kv = Around(), Come(engine)
    performer = NodePerformer(engine=engine, lanes=around, link=around, models=around, kv=kv)
    source = KvSource(node_id=NodeId("n1"), address="", attempt=1, ticket="", blocks=2)
    performer.perform(FetchKv(instance_id=to, request=replace(request, paused=True), source=source))
    (last, *others) = (event for _, event in around.events)
    assert isinstance(last, KvArrived)
    assert (last.tokens > 0, last.error, kv.released) == (True, "", 1)
    assert others == [None, None], "two calls before it took a block each"
