"""Carries out what the node core decides, through three ports: the link, the store, the engine.

One performer for the live agent and the simulator. Engine calls run on lanes, each in order and
beside the others (`Lane`). The live lanes are threads; the simulator's run the call at once and
post what came of it after its `elapsed_s`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar, assert_never

from mesh.domain.actions import (
    AbortInEngine,
    AskPrefixes,
    FetchKv,
    NodeAction,
    SendReport,
    StartMeasure,
    StartStep,
    SubmitToEngine,
    SwapWeights,
)
from mesh.domain.errors import EngineError, MeshError
from mesh.domain.ids import InstanceId, OperationId, RequestId
from mesh.domain.limits import KV_SLICE_BYTES
from mesh.domain.messages import (
    CancelImport,
    ImportModel,
    InstanceGone,
    InstanceLoaded,
    KvArrived,
    KvResized,
    LoadFailed,
    LoadInstance,
    LoadProgress,
    NodeReport,
    OfferKv,
    ResizeKv,
    UnloadInstance,
    failure,
)
from mesh.domain.model import WeightPrecision
from mesh.domain.node_events import (
    AbortFinished,
    MeasureBroke,
    MeasureFinished,
    NodeEvent,
    PrefixesTold,
    StepBroke,
    StepFinished,
    SubmitBroke,
    SubmitFinished,
    SwapFinished,
)
from mesh.domain.profile import CountedIteration
from mesh.domain.steps import KvChunk, KvHeader, LoadOrder, LoadTier, PrefixChange
from mesh.domain.values import dataclass, replace
from mesh.runtime.engine import Engine, Progress

R = TypeVar("R")


Brought = Callable[[LoadOrder | MeshError], None]
"""Is told of the order of a load whose model is there by now, or why it is not."""


class Lane(StrEnum):
    """A load begins as a wake. What is not in memory goes on to the loads from disk, and what is
    not stored or not prepared waits on neither of the two.
    """

    COMPUTE = "compute"
    """Submit, abort, step, measure, resize, and unload where that is quick."""
    WAKING = "waking"
    """Loads whose weights are in the host's memory."""
    LOADING = "loading"
    """Loads from disk."""
    PREPARING = "preparing"
    """What an engine derives from a stored model."""
    UNLOADING = "unloading"
    """Unloads that take long."""
    SWAPPING = "swapping"
    """Weights on their way off the device and back."""


class Lanes(Protocol):
    def run(
        self, lane: Lane, call: Callable[[], R], done: Callable[[R | MeshError], NodeEvent | None]
    ) -> None:
        """Run `call` after those before it on its lane; post the event that `done` makes of its
        result, or of the error that it raised (any other exception counts as an EngineError).
        """
        ...

    def post_soon(self, event: NodeEvent) -> None:
        """Post an event from any thread, within a call or beside them."""
        ...


class ReportLink(Protocol):
    """The node's end of its link. Reports are dropped while it is closed."""

    def send(self, report: NodeReport) -> None: ...


class Models(Protocol):
    """The node's model store."""

    def start_import(
        self, operation_id: OperationId, source: str, weights: WeightPrecision | None
    ) -> None:
        """Begin; ImportProgress, then ImportDone or ImportFailed are posted."""
        ...

    def stop_import(self, operation_id: OperationId) -> None: ...

    def at_hand(self, action: LoadInstance) -> LoadOrder | None:
        """The load order with the model's path; None when it has to be brought first. Quick, from
        any thread. Raises ModelError.
        """
        ...

    def bring(self, action: LoadInstance, progress: Progress, then: Brought) -> None:
        """Import the model if the store lacks it, and prepare it; `then` is called once, from where
        events are posted. For the same thread.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetched:
    """KV blocks that have come from another node."""

    header: KvHeader
    chunks: Sequence[KvChunk]
    moved_bytes: int
    elapsed_s: float
    release: Callable[[], None] = lambda: None
    """It is called once nobody needs the chunks any more."""


Fetched = Callable[[KvFetched | MeshError], None]
"""Is told of the KV blocks that have come, or why they have not."""


class KvTransfers(Protocol):
    """The node's end of transfers of KV blocks, from node to node."""

    def offer(self, offer: OfferKv) -> None:
        """Hand out what is offered to the node that shows its ticket, as long as that holds."""
        ...

    def fetch(self, action: FetchKv, then: Fetched) -> Callable[[], None]:
        """Begin; `then` is called once, from where events are posted and after this call, unless
        what is returned, which gives it up, is called before.
        """
        ...


@dataclass(slots=True, eq=False)
class _Fetch:
    gone: bool = False
    """Nobody waits for it any more."""
    cancel: Callable[[], None] = lambda: None


class NodePerformer:
    def __init__(
        self,
        *,
        engine: Engine,
        lanes: Lanes,
        link: ReportLink,
        models: Models,
        kv: KvTransfers | None = None,
    ) -> None:
        """Without `kv` no KV blocks are handed out, and none come."""
        self._engine = engine
        self._kv = kv
        self._fetches: dict[tuple[InstanceId, RequestId], _Fetch] = {}
        """Those under way."""
        self._lanes = lanes
        self._link = link
        self._models = models
        engine.watch(self._ended)

    def perform(self, action: NodeAction) -> None:
        match action:
            case StartStep():
                self._step(action)
            case SendReport():
                self._link.send(action.report)
            case SubmitToEngine():
                self._submit(action)
            case FetchKv():
                self._fetch(action)
            case OfferKv():
                if self._kv is not None:
                    self._kv.offer(action)
            case AbortInEngine():
                self._abort(action)
            case AskPrefixes():
                self._ask_prefixes()
            case StartMeasure():
                self._measure(action)
            case SwapWeights():
                self._swap(action)
            case ResizeKv():
                self._resize(action)
            case LoadInstance():
                self._load(action)
            case UnloadInstance():
                self._unload(action)
            case ImportModel():
                self._models.start_import(action.operation_id, action.source, action.weights)
            case CancelImport():
                self._models.stop_import(action.operation_id)
            case _:
                assert_never(action)

    def _ended(self, instance_id: InstanceId, error: EngineError) -> None:
        self._lanes.post_soon(failure(InstanceGone, error, instance_id=instance_id))

    def _step(self, action: StartStep) -> None:
        self._lanes.run(
            Lane.COMPUTE,
            lambda: self._engine.step(
                action.instance_id, action.prefill, action.iterations, action.decode
            ),
            lambda result: (
                failure(StepBroke, result, instance_id=action.instance_id)
                if isinstance(result, MeshError)
                else StepFinished(instance_id=action.instance_id, result=result)
            ),
        )

    def _measure(self, action: StartMeasure) -> None:
        instance_id, shape = action.instance_id, action.shape

        def measure() -> CountedIteration:
            if action.counted:
                return self._engine.count_operators(instance_id, shape, action.cores)
            elapsed_s = self._engine.measure(instance_id, shape)
            return CountedIteration(elapsed_s=elapsed_s, operators=())

        self._lanes.run(
            Lane.COMPUTE,
            measure,
            lambda result: (
                failure(MeasureBroke, result, instance_id=instance_id)
                if isinstance(result, MeshError)
                else MeasureFinished(
                    instance_id=instance_id,
                    elapsed_s=result.elapsed_s,
                    operators=result.operators,
                )
            ),
        )

    def _swap(self, action: SwapWeights) -> None:
        self._lanes.run(
            Lane.SWAPPING,
            lambda: self._engine.swap(action.instance_id, action.share),
            lambda result: (
                failure(SwapFinished, result, instance_id=action.instance_id)
                if isinstance(result, MeshError)
                else SwapFinished(instance_id=action.instance_id)
            ),
        )

    def _resize(self, action: ResizeKv) -> None:
        self._lanes.run(
            Lane.COMPUTE,
            lambda: self._engine.resize_kv(action.instance_id, action.kv_blocks),
            lambda result: (
                failure(
                    KvResized, result, instance_id=action.instance_id, kv_blocks=0, elapsed_s=0.0
                )
                if isinstance(result, MeshError)
                else result
            ),
        )

    def _submit(self, action: SubmitToEngine) -> None:
        request = action.request

        def done(result: int | MeshError) -> NodeEvent | None:
            if isinstance(result, MeshError):
                return failure(
                    SubmitBroke, result, request_id=request.request_id, attempt=request.attempt
                )
            if request.cache_salt is None:
                return None
            return SubmitFinished(
                request_id=request.request_id, attempt=request.attempt, cached_tokens=result
            )

        self._lanes.run(
            Lane.COMPUTE, lambda: self._engine.submit(action.instance_id, request), done
        )

    def _fetch(self, action: FetchKv) -> None:
        """What was given up before its blocks are in the engine never comes there."""
        request, key = action.request, (action.instance_id, action.request.request_id)
        came = KvArrived(
            request_id=request.request_id,
            attempt=request.attempt,
            tokens=0,
            moved_bytes=0,
            elapsed_s=0.0,
        )
        fetch = _Fetch()

        def arrived(result: KvFetched | MeshError) -> None:
            if isinstance(result, MeshError):
                self._end_fetch(key, fetch)
                self._lanes.post_soon(_not_come(came, result))
                return
            moved = replace(came, moved_bytes=result.moved_bytes, elapsed_s=result.elapsed_s)

            def steps() -> Generator[None, None, int]:
                return (
                    yield from self._engine.import_kv(
                        action.instance_id, request, result.header, result.chunks
                    )
                )

            importing = steps()

            def call() -> int | None:
                """Some blocks more; returns the tokens once all are there."""
                if fetch.gone:
                    importing.close()
                    raise EngineError(f"request {request.request_id} has gone")
                for _ in range(max(KV_SLICE_BYTES // max(result.header.block_bytes, 1), 1)):
                    try:
                        next(importing)
                    except StopIteration as ended:
                        return int(ended.value)
                return None

            def done(tokens: int | MeshError | None) -> NodeEvent | None:
                if tokens is None:
                    self._lanes.run(Lane.COMPUTE, call, done)
                    return None
                self._end_fetch(key, fetch)
                result.release()
                if isinstance(tokens, MeshError):
                    return _not_come(moved, tokens)
                return replace(moved, tokens=tokens)

            self._lanes.run(Lane.COMPUTE, call, done)

        if self._kv is None:
            self._lanes.post_soon(_not_come(came, EngineError("this node fetches no KV blocks")))
            return
        self._fetches[key] = fetch
        fetch.cancel = self._kv.fetch(action, arrived)

    def _end_fetch(self, key: tuple[InstanceId, RequestId], fetch: "_Fetch") -> None:
        if self._fetches.get(key) is fetch:
            del self._fetches[key]

    def _give_up_fetches(self, instance_id: InstanceId, request_id: RequestId | None) -> None:
        """That of a request, or those of all."""
        for key in list(self._fetches):
            if key[0] == instance_id and request_id in (None, key[1]):
                fetch = self._fetches.pop(key, None)
                if fetch is not None:
                    fetch.gone = True
                    fetch.cancel()

    def _ask_prefixes(self) -> None:
        """From the compute lane, where iterations tell of the same."""

        def done(changes: Mapping[InstanceId, PrefixChange] | MeshError) -> NodeEvent | None:
            if isinstance(changes, MeshError) or not changes:
                return None
            return PrefixesTold(changes=tuple(changes.items()))

        self._lanes.run(Lane.COMPUTE, self._engine.tell_prefixes, done)

    def _abort(self, action: AbortInEngine) -> None:
        """No iteration may follow that would say what is in use now, so the engine is asked."""
        self._give_up_fetches(action.instance_id, action.request_id)

        def call() -> int:
            self._engine.abort(action.instance_id, action.request_id)
            books = (m for m in self._engine.memory() if m.instance_id == action.instance_id)
            return sum(m.kv_blocks_used for m in books)

        def done(used: int | MeshError) -> NodeEvent | None:
            if isinstance(used, MeshError):
                return None
            return AbortFinished(instance_id=action.instance_id, kv_blocks_used=used)

        self._lanes.run(Lane.COMPUTE, call, done)

    def _unload(self, action: UnloadInstance) -> None:
        """After all calls for the instance. Where it may take long, the compute lane only says that
        those are over.
        """
        self._give_up_fetches(action.instance_id, None)

        def call() -> None:
            self._engine.unload(action.instance_id)

        def done(_: MeshError | None) -> NodeEvent:
            return InstanceGone(instance_id=action.instance_id)

        def go_on(_: MeshError | None) -> None:
            self._lanes.run(Lane.UNLOADING, call, done)

        if self._engine.capabilities.unloads_beside:
            self._lanes.run(Lane.COMPUTE, lambda: None, go_on)
        else:
            self._lanes.run(Lane.COMPUTE, call, done)

    def _load(self, action: LoadInstance) -> None:
        def progress(phase: str, share: float) -> None:
            self._lanes.post_soon(
                LoadProgress(instance_id=action.instance_id, phase=phase, share=share)
            )

        def load(order: LoadOrder) -> InstanceLoaded:
            order = replace(order, swapped=action.swapped_bytes > 0)
            loaded = replace(self._engine.load(order, progress), swapped=order.swapped)
            if order.import_s:
                elapsed_s = order.import_s + loaded.elapsed_s
                loaded = replace(loaded, elapsed_s=elapsed_s, tier=LoadTier.REMOTE)
            return loaded

        def wake() -> InstanceLoaded | LoadOrder | None:
            order = self._models.at_hand(action)
            if order is None or self._engine.tier_of(order) is not LoadTier.HOST:
                return order
            return load(order)

        def done(result: InstanceLoaded | LoadOrder | MeshError | None) -> NodeEvent | None:
            match result:
                case None:
                    self._models.bring(action, progress, brought)
                    return None
                case LoadOrder():
                    self._lanes.run(Lane.LOADING, lambda: load(result), done)
                    return None
                case InstanceLoaded():
                    return result
                case _:
                    return failure(LoadFailed, result, instance_id=action.instance_id)

        def brought(result: LoadOrder | MeshError) -> None:
            event = done(result)
            if event is not None:
                self._lanes.post_soon(event)

        self._lanes.run(Lane.WAKING, wake, done)


def _not_come(came: KvArrived, error: MeshError) -> KvArrived:
    return replace(came, error=type(error).__name__, message=error.message)
