"""What the node core decides reaches the engine on its lane, and what came of it comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from mesh.domain.actions import StartLoad, StartMeasure
from mesh.domain.errors import MeshError
from mesh.domain.ids import InstanceId, OperationId
from mesh.domain.messages import NodeReport
from mesh.domain.node_events import MeasureBroke, MeasureFinished, NodeEvent
from mesh.domain.profile import IterationShape
from mesh.runtime.engine import LoadOrder, Progress
from mesh.runtime.node_actions import Lane, NodePerformer
from tests.contract.engine_contract import StoredModel, write_tiny_model
from tests.support.scripted_engine import Script, ScriptedEngine, measured_s

R = TypeVar("R")
INSTANCE = InstanceId("i-1")
SHAPE = IterationShape(decode_batch=2, decode_context_tokens=30)


class Around:
    """Everything around the performer: lanes that run a call at once, and nobody to talk to."""

    def __init__(self) -> None:
        self.events: list[tuple[Lane, NodeEvent | None]] = []

    def run(
        self,
        lane: Lane,
        call: Callable[[], R],
        done: Callable[[R | MeshError], NodeEvent | None],
    ) -> None:
        try:
            result: R | MeshError = call()
        except MeshError as error:
            result = error
        self.events.append((lane, done(result)))

    def post_soon(self, event: NodeEvent) -> None: ...

    def send(self, report: NodeReport) -> None: ...

    def start_import(self, operation_id: OperationId, source: str) -> None: ...

    def stop_import(self, operation_id: OperationId) -> None: ...

    def order(self, action: StartLoad, progress: Progress) -> LoadOrder:
        raise AssertionError("nothing is loaded here")


@pytest.fixture
def engine(tmp_path: Path) -> ScriptedEngine:
    """An instance is loaded; its steps take 20 ms, by its own account."""
    engine = ScriptedEngine(Script(step_s=0.02), sleep=lambda seconds: None)
    path = tmp_path / "model"
    stored = StoredModel(info=write_tiny_model(path), path=path)
    engine.load(stored.order(INSTANCE), lambda phase, share: None)
    return engine


def perform(engine: ScriptedEngine, action: StartMeasure) -> tuple[Lane, NodeEvent | None]:
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
