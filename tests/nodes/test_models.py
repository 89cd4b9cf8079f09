"""The node's models: imports asked for by the controller, and load orders."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from mesh.domain.errors import (
    Cancelled,
    MeshError,
    ModelError,
    StorageError,
    TornModel,
    Unavailable,
)
from mesh.domain.ids import InstanceId, ModelId, OperationId
from mesh.domain.messages import (
    ImportDone,
    ImportFailed,
    ImportProgress,
    InstanceGone,
    LoadFailed,
    LoadInstance,
)
from mesh.domain.model import Footprint, ModelInfo, WeightPrecision
from mesh.domain.node_events import LinkClosed, NodeEvent
from mesh.domain.steps import LoadOrder
from mesh.domain.text import TextAssets
from mesh.runtime.engine import Progress
from mesh.runtime.node_actions import Lane
from mesh_loader.store import ModelStore
from mesh_nodes import models as models_module
from mesh_nodes.lanes import ThreadLanes
from mesh_nodes.models import ModelsInUse, NodeModels
from tests.core.cells import load_instance
from tests.nodes.test_imports import Importer, StoredHere, model_info, silent
from tests.support.tiny_model import write_tiny_llama

WAIT_S = 60.0
FOOTPRINT = Footprint(weights_bytes=5000, kv_block_bytes=64, block_tokens=32)
MODEL = model_info(source="file:///m")

E = TypeVar("E", bound=NodeEvent)


@dataclass
class PreparingEngine:
    """Notes what it prepares; `during` runs within, with the progress to call."""

    prepared: list[Path] = field(default_factory=list)
    during: Callable[[Progress], None] = lambda progress: None

    def footprint(self, model: ModelInfo) -> Footprint:
        return FOOTPRINT

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        self.during(progress)
        self.prepared.append(model_path)

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool:
        return model_path in self.prepared


@dataclass
class Node:
    """NodeModels with real lanes, and what they posted."""

    importer: Importer = field(default_factory=Importer)
    engine: PreparingEngine = field(default_factory=PreparingEngine)
    stored: dict[ModelId, StoredHere] = field(default_factory=dict)
    events: list[NodeEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    import_s: float = 0.0
    """The seconds of the last order."""

    def __post_init__(self) -> None:
        loop = self.loop = asyncio.get_running_loop()
        self.lanes = ThreadLanes(loop=loop, post=self._post)
        self.models = NodeModels(
            engine=self.engine,
            lanes=self.lanes,
            loop=loop,
            find=self.stored.get,
            import_source=self.importer,
            read_assets=lambda path: TextAssets(tokenizer_json=str(path).encode()),
        )

    def _post(self, event: NodeEvent) -> None:
        """From the compute lane's thread, too, whose own `set` would not wake the loop."""
        self.events.append(event)
        self.loop.call_soon_threadsafe(self.changed.set)

    async def event(self, kind: type[E]) -> E:
        """The first event of this kind, now or soon."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for event in self.events:
                    if isinstance(event, kind):
                        return event
                self.changed.clear()
                await self.changed.wait()

    @staticmethod
    def action() -> LoadInstance:
        """A load of MODEL."""
        return load_instance(instance_id=InstanceId("i-1"), model=MODEL, batch_max=4)

    async def order(self, progress: Progress = silent) -> Path:
        """Where a load of MODEL finds it."""
        action = self.action()
        at_hand = self.models.at_hand(action)
        if at_hand is not None:
            return at_hand.model_path
        brought: asyncio.Future[LoadOrder | MeshError] = asyncio.get_running_loop().create_future()
        self.models.bring(action, progress, brought.set_result)
        async with asyncio.timeout(WAIT_S):
            order = await brought
        if isinstance(order, MeshError):
            raise order
        assert (order.instance_id, order.kv_blocks, order.model) == ("i-1", 8, MODEL)
        self.import_s = order.import_s
        return order.model_path


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    yield node
    node.importer.release.set()
    assert await node.models.close(WAIT_S)
    assert await asyncio.to_thread(node.lanes.close, WAIT_S, lambda: None)


async def test_an_import_is_prepared_and_reported_with_footprint_and_tokenizer(node: Node) -> None:
    node.engine.during = lambda progress: progress("quantise", 0.5)
    node.importer.release.set()
    node.models.start_import(OperationId("op-1"), "file:///m", None)
    finished = await node.event(ImportDone)
    assert finished.operation_id == "op-1"
    assert finished.model == MODEL
    assert finished.footprint == FOOTPRINT
    assert finished.text.tokenizer_json == b"/store/file:/m"
    told = [e for e in node.events if isinstance(e, ImportProgress)]
    assert [(e.operation_id, e.phase, e.share) for e in told] == [
        ("op-1", "write", 1.0),
        ("op-1", "quantise", 0.5),
    ]


async def test_two_imports_of_one_source_both_end_well_after_one_fetch(node: Node) -> None:
    node.models.start_import(OperationId("op-1"), "file:///m", None)
    node.models.start_import(OperationId("op-2"), "file:///m", None)
    await asyncio.to_thread(node.importer.wait_begun, 1)
    node.importer.release.set()
    async with asyncio.timeout(WAIT_S):
        while sum(isinstance(e, ImportDone) for e in node.events) < 2:
            node.changed.clear()
            await node.changed.wait()
    assert node.importer.begun == ["file:///m"]


async def test_a_failed_import_says_why_with_its_hint(node: Node) -> None:
    node.importer.error = TornModel("m.gguf ends after 12 of 40 bytes", hint="fetch it again")
    node.importer.release.set()
    node.models.start_import(OperationId("op-1"), "file:///m", None)
    broke = await node.event(ImportFailed)
    assert (broke.operation_id, broke.error, broke.hint) == ("op-1", "TornModel", "fetch it again")
    assert "12 of 40" in broke.message


async def test_weights_that_an_openvino_ir_cannot_have_are_refused_before_it_is_imported(
    node: Node, tmp_path: Path
) -> None:
    (tmp_path / "openvino_model.xml").touch()
    node.models.start_import(OperationId("op-1"), f"file://{tmp_path}", WeightPrecision.I8)
    broke = await node.event(ImportFailed)
    assert (broke.error, node.importer.begun) == ("UnsupportedModel", [])
    assert "is an OpenVINO IR" in broke.message


async def test_a_failed_preparation_fails_the_import(node: Node) -> None:
    def during(progress: Progress) -> None:
        raise StorageError("no space left")

    node.engine.during = during
    node.importer.release.set()
    node.models.start_import(OperationId("op-1"), "file:///m", None)
    broke = await node.event(ImportFailed)
    assert (broke.error, broke.message) == ("StorageError", "no space left")


async def test_stopping_an_import_ends_it_as_cancelled(node: Node) -> None:
    node.models.start_import(OperationId("op-1"), "file:///m", None)
    await asyncio.to_thread(node.importer.wait_begun, 1)
    node.models.stop_import(OperationId("op-1"))
    assert (await node.event(ImportFailed)).error == "Cancelled"
    with node.importer.changed:
        ended = node.importer.changed.wait_for(lambda: node.importer.at_once == 0, WAIT_S)
    assert ended, "the importer was not told to stop"


async def test_stopping_one_of_two_leaves_the_other(node: Node) -> None:
    node.models.start_import(OperationId("op-1"), "file:///m", None)
    node.models.start_import(OperationId("op-2"), "file:///m", None)
    await asyncio.to_thread(node.importer.wait_begun, 1)
    node.models.stop_import(OperationId("op-1"))
    node.importer.release.set()
    assert (await node.event(ImportDone)).operation_id == "op-2"
    assert [e.operation_id for e in node.events if isinstance(e, ImportFailed)] == ["op-1"]


async def test_stopping_ends_a_preparation_at_its_next_progress(node: Node) -> None:
    preparing, stopped = threading.Event(), threading.Event()

    def during(progress: Progress) -> None:
        preparing.set()
        assert stopped.wait(WAIT_S)
        progress("quantise", 0.5)

    node.engine.during = during
    node.importer.release.set()
    node.models.start_import(OperationId("op-1"), "file:///m", None)
    assert await asyncio.to_thread(preparing.wait, WAIT_S)
    node.models.stop_import(OperationId("op-1"))
    stopped.set()
    assert (await node.event(ImportFailed)).error == "Cancelled"
    assert await node.models.close(WAIT_S)
    assert node.engine.prepared == []
    assert not any(isinstance(e, ImportDone) for e in node.events)


async def test_a_load_takes_what_the_store_has(node: Node) -> None:
    node.stored[MODEL.model_id] = StoredHere(Path("/store/have"), MODEL)
    assert await node.order() == Path("/store/have")
    assert (node.importer.begun, node.import_s) == ([], 0.0)
    assert node.engine.prepared == [Path("/store/have")], "what `mesh pull` brought is prepared now"


async def test_a_load_imports_what_the_store_lacks_and_tells_its_progress(node: Node) -> None:
    node.importer.release.set()
    told: list[str] = []
    assert await node.order(lambda phase, _: told.append(phase)) == Path("/store/file:///m")
    assert node.importer.begun == ["file:///m"]
    assert told == ["write"]
    assert node.import_s > 0.0


async def test_a_load_of_a_source_that_has_changed_is_refused(node: Node) -> None:
    node.importer.release.set()
    node.importer.model_id = "sha256-feedfeedfeedfeed"
    with pytest.raises(ModelError, match="has changed since it was deployed") as raised:
        await node.order()
    assert "sha256-0123456789abcdef" in raised.value.message
    assert "sha256-feedfeedfeedfeed" in raised.value.message
    assert "deploy chat again" in raised.value.hint


async def test_a_load_waits_for_an_import_only_so_long(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_module, "LOAD_IMPORT_S_MAX", 0.05)
    with pytest.raises(Unavailable, match="was not imported within"):
        await node.order()
    with node.importer.changed:
        ended = node.importer.changed.wait_for(lambda: node.importer.at_once == 0, WAIT_S)
    assert ended, "nobody waits for the import any more, so it stops"


async def test_a_store_that_cannot_be_written_does_not_prevent_a_load(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    def during(progress: Progress) -> None:
        raise StorageError("read-only file system")

    node.engine.during = during
    node.stored[MODEL.model_id] = StoredHere(Path("/store/have"), MODEL)
    assert await node.order() == Path("/store/have")
    assert "read-only file system" in caplog.text


async def test_a_damaged_store_fails_the_load_and_not_the_node(node: Node) -> None:
    def find(model_id: ModelId) -> StoredHere | None:
        raise StorageError(f"the stored model {model_id} is damaged")

    node.models._find = find
    brought: list[LoadOrder | MeshError] = []
    node.models.bring(node.action(), silent, brought.append)
    (error,) = brought
    assert isinstance(error, StorageError)


async def test_a_load_that_waits_for_an_import_holds_up_nothing_else(node: Node) -> None:
    lacking = asyncio.create_task(node.order())
    await asyncio.to_thread(node.importer.wait_begun, 1)
    for lane in Lane:
        node.lanes.run(lane, lambda: None, lambda _: LinkClosed(reason="ran"))
    async with asyncio.timeout(WAIT_S):
        while sum(isinstance(e, LinkClosed) for e in node.events) < len(Lane):
            node.changed.clear()
            await node.changed.wait()
    assert not lacking.done()
    node.importer.release.set()
    assert await lacking == Path("/store/file:///m")


async def test_the_end_of_the_node_ends_a_preparation(node: Node) -> None:
    preparing, closed = threading.Event(), threading.Event()

    def during(progress: Progress) -> None:
        preparing.set()
        assert closed.wait(WAIT_S)
        progress("quantise", 0.5)

    node.engine.during = during
    node.stored[MODEL.model_id] = StoredHere(Path("/store/have"), MODEL)
    bringing = asyncio.create_task(node.order())
    assert await asyncio.to_thread(preparing.wait, WAIT_S)
    assert await node.models.close(WAIT_S)
    closed.set()
    with pytest.raises(Cancelled):
        await bringing
    assert node.engine.prepared == []


FIRST, SECOND = InstanceId("i-1"), InstanceId("i-2")


def start(instance_id: InstanceId, model: ModelInfo) -> LoadInstance:
    return load_instance(instance_id=instance_id, model=model, batch_max=4)


def test_a_model_is_free_with_the_end_of_its_last_instance(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    info = store.import_model(f"file://{write_tiny_llama(tmp_path / 'model')}").info
    in_use = ModelsInUse(store.root)
    in_use.record(0.0, None, [start(FIRST, info), start(SECOND, info)])
    broke = LoadFailed(instance_id=FIRST, error="ModelError", message="", hint="")
    in_use.record(1.0, broke, [])
    with pytest.raises(Unavailable, match="is in use by a node"):
        store.remove(info.model_id)
    in_use.record(2.0, InstanceGone(instance_id=SECOND), [])
    store.remove(info.model_id)
    assert store.models() == []
    # A load that waits for its import holds the model before it is there.
    in_use.record(3.0, None, [start(FIRST, info)])
    store.import_model(f"file://{tmp_path / 'model'}")
    with store.unused(info.model_id) as free:
        assert not free
    in_use.close()
    with store.unused(info.model_id) as free:
        assert free
