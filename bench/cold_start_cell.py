"""Files in and out of the page cache, and how fast bytes come from the disk and through memory."""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.cells import local_cell, wait_calm, wait_until
from bench.cold_start_shapes import Forms
from bench.harness import timed
from mesh.cli.cell import LocalCell
from mesh.domain.actions import StartStep
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError, StorageError
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.invocation import Invocation, TokenPrompt, Tokens
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import InstanceLoaded, LoadInstance, LoadProgress, SubmitRequest
from mesh.domain.node_events import CommandReceived, StepFinished
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.domain.views import InstanceSnapshot
from mesh.runtime.journal import Decision, read_journal
from mesh.wire.client import MeshClient
from mesh_loader import page_cache

PROMPT = tuple(range(100, 127))
CONTEXT_TOKENS = 256
THREADS = 2
DIRECT_PIECE_BYTES = 4 << 20
DIRECT_THREADS = (4, 16, 32)
WARM_CALLS = 3
"""In a row, after one that makes it warm."""


class Engine(StrEnum):
    MESH = "mesh"
    GENAI = "openvino-genai"
    LLAMA_CPP = "llama.cpp"


class Tier(StrEnum):
    """From where a start comes, the nearest first."""

    WARM = "warm"
    RESIDENT = "resident"
    """The model is loaded, but has no KV cache: it was parked after its keep-alive."""
    HOST = "host"
    """What was compiled is in memory, for an instance of another deployment of the model."""
    CACHED = "cached"
    """No compile is needed (mesh: prepared; GenAI: by its model cache; llama.cpp has none), and all
    files are in the page cache."""
    STORED = "stored"
    """So it is, and none is."""
    COMPILED = "compiled, cached"
    COMPILED_STORED = "compiled, stored"


class Part(StrEnum):
    """The parts of mesh's time, one after the other."""

    QUEUE = "queue"
    """Until the node has the order to load, or, where nothing is loaded, the request."""
    READ = "read"
    """Checks, and mapping files; of a shared model, all until it runs."""
    GRAPH = "graph"
    """Import or compile, with what it reads of the weights."""
    FIRST_RUN = "first run"
    """With its KV cache, until the node knows that the load has ended."""
    HAND_OVER = "hand over"
    """Until the node begins the request's iteration."""
    PREFILL = "prefill"
    WIRE = "wire"
    """Until the caller has the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    engine: Engine
    tier: Tier
    ttft_s: float
    parts_s: dict[Part, float] = field(default_factory=dict)
    """How long each part took. Of a peer, GRAPH is the time to load and PREFILL is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A call of mesh, on the machine's monotonic clock."""

    deployment: DeploymentName
    tier: Tier
    sent_s: float
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of this machine, in the same run; bytes a second."""

    memcpy: float
    disk: float


FIRST, TWIN = DeploymentName("first"), DeploymentName("twin")
TRIES = 3
COPIED_BYTES_MAX = 1 << 30
_PIECE_BYTES = 8 << 20
_CACHED_SHARE_MAX = 0.1


def bring(*paths: Path) -> None:
    """Read these files, and all files in these folders, so that the page cache has them."""
    for path in _files(paths):
        page_cache.read_through(path)


def forget(*paths: Path) -> None:
    """Have the page cache forget them. Raises StorageError where it keeps a large one."""
    for path in _files(paths):
        page_cache.forget(path)
        share = page_cache.cached_share(path) if path.stat().st_size > _PIECE_BYTES else 0.0
        if share > _CACHED_SHARE_MAX:
            raise StorageError(
                f"the page cache keeps {share:.0%} of {path.name} when it is to forget it",
                hint="somebody has it mapped, or its file system is in memory",
            )


def _files(paths: Sequence[Path]) -> list[Path]:
    found = [each for path in paths for each in (path, *path.rglob("*"))]
    return [path for path in found if path.is_file()]


def rates(weights: Path) -> Rates:
    """The best that the disk gives of this file past the page cache, and a copy of as many bytes
    into memory that is there."""
    size_bytes = weights.stat().st_size
    copied_bytes = min(size_bytes, COPIED_BYTES_MAX)
    return Rates(
        memcpy=copied_bytes / memcpy_s(copied_bytes, TRIES),
        disk=max(
            _direct_rate(weights, threads) for threads in DIRECT_THREADS for _ in range(TRIES)
        ),
    )


def _direct_rate(path: Path, threads: int) -> float:
    taken_s, read_bytes = timed(lambda: direct(path, threads))
    return read_bytes / taken_s


_GRAPH_PHASES = ("import compiled", "compile")
_FIRST_RUN_PHASE = "warm up"


def parts_s(call: Called, decisions: Iterable[Decision]) -> dict[Part, float]:
    """They come to the time from its sending to its first token. `decisions` are in their order."""
    marks: dict[Part, float] = {}
    instance_id: InstanceId | None = None
    submitted = False
    for decision in decisions:
        if not call.sent_s <= decision.now_s <= call.first_s:
            continue
        match decision.event:
            case CommandReceived(command=LoadInstance(deployment=call.deployment) as command):
                instance_id = command.instance_id
                marks[Part.QUEUE] = decision.now_s
            case LoadProgress(instance_id=i, phase=phase) if i == instance_id:
                if phase in (*_GRAPH_PHASES, _FIRST_RUN_PHASE):
                    part = Part.GRAPH if Part.READ in marks else Part.READ
                    marks.setdefault(part, decision.now_s)
            case InstanceLoaded(instance_id=i) if i == instance_id:
                marks[Part.FIRST_RUN] = decision.now_s
            case CommandReceived(command=SubmitRequest() as command):
                if command.order.request.deployment == call.deployment:
                    instance_id, submitted = command.instance_id, True
                    marks.setdefault(Part.QUEUE, decision.now_s)
            case StepFinished(instance_id=i) if i == instance_id and Part.HAND_OVER in marks:
                marks.setdefault(Part.PREFILL, decision.now_s)
            case _:
                pass
        for action in decision.actions:
            if submitted and isinstance(action, StartStep) and action.instance_id == instance_id:
                marks.setdefault(Part.HAND_OVER, decision.now_s)
    marks[Part.WIRE] = call.first_s
    parts, at_s = dict[Part, float](), call.sent_s
    for part in Part:
        if part in marks:
            parts[part], at_s = marks[part] - at_s, marks[part]
    return parts


SLO = Slo(ttft_s=300.0, tpot_s=10.0)
"""Everybody is in time: what is measured is how long it takes."""
KEEP_ALIVE_S = 600.0
PARKED_AFTER_S = 0.2
"""Instead, once there have been warm calls: a parked instance leaves sizes uncomputed."""
WAIT_S_MAX = 600.0
CALL_S_MAX = 300.0
_COMPILED = "compiled"
"""The store's folder of what loads without a compile are made from."""


class Starts:
    """The starts of one model, in one cell."""

    def __init__(self, cell: LocalCell, client: MeshClient, forms: Forms) -> None:
        self._cell = cell
        self._wait = partial(wait_until, s_max=WAIT_S_MAX, cell=cell)
        self._client = client
        self._forms = forms
        self.calls: list[Called] = []

    def warm_up(self, *, blob: bool) -> None:
        """The first load of the model here, after which, with `blob`, no load compiles."""
        self.start(Tier.COMPILED)
        if blob:
            folder = self._forms.store / _COMPILED
            self._wait(
                lambda: [path.suffix for path in folder.glob("*")] == [".blob"],
                "the model has no blob",
            )
        self.calls.clear()

    def start(self, tier: Tier) -> None:
        """A call from zero, with nothing or all of the files in the page cache; from there also
        warm ones, one to a parked instance, and one from zero beside that.
        """
        if tier in (Tier.STORED, Tier.COMPILED_STORED):
            forget(self._forms.store)
        else:
            bring(self._forms.store)
        self._deploy(FIRST)
        self._call(FIRST, tier)
        loaded_from = self._instance(FIRST).tier
        expected = LoadTier.DISK if "compiled" in tier else LoadTier.PREPARED
        if loaded_from is not expected:
            raise MeshError(f"a start from {tier} was one from {loaded_from}, not {expected}")
        if tier is Tier.CACHED:
            self._beside_loaded()
        # It would compute on, for nobody, beside what is measured next.
        self._unloaded(FIRST)

    def _beside_loaded(self) -> None:
        """Calls of the model that is loaded: warm, parked, and of a twin."""
        wait_calm(self._cell)
        for _ in range(WARM_CALLS + 1):
            self._call(FIRST, Tier.WARM)
        del self.calls[-WARM_CALLS - 1]
        self._client.scale(FIRST, keep_alive_s=PARKED_AFTER_S)
        parked = InstanceState.PARKED
        self._wait(lambda: self._instance(FIRST).state is parked, "the instance is not parked")
        self._call(FIRST, Tier.RESIDENT)
        self._deploy(TWIN)
        self._call(TWIN, Tier.HOST)
        if self._instance(TWIN).tier is not LoadTier.HOST:
            raise MeshError(f"the twin was loaded from {self._instance(TWIN).tier}, not from host")
        self._unloaded(TWIN)

    def read(self, journal: Path) -> list[Start]:
        """What became of the calls so far."""
        decisions = list(read_journal(journal)[1])
        return [
            Start(
                engine=Engine.MESH,
                tier=call.tier,
                ttft_s=call.first_s - call.sent_s,
                parts_s=parts_s(call, decisions),
            )
            for call in self.calls
        ]

    def _call(self, name: DeploymentName, tier: Tier) -> None:
        asked = Invocation(
            deployment=name,
            prompt=TokenPrompt(token_ids=PROMPT),
            max_tokens=2,
            ignore_eos=True,
            seed=1,
        )
        sent_s = time.monotonic()
        events = self._client.invoke(asked, timeout_s=CALL_S_MAX)
        first_s = next(time.monotonic() for event in events if isinstance(event, Tokens))
        for _ in events:
            pass
        self.calls.append(Called(deployment=name, tier=tier, sent_s=sent_s, first_s=first_s))

    def _deploy(self, name: DeploymentName) -> None:
        self._client.deploy(
            DeploymentSpec(
                name=name,
                source=self._forms.source,
                context_tokens_max=CONTEXT_TOKENS,
                slo=SLO,
                scaling=Scaling(keep_alive_s=KEEP_ALIVE_S, replicas_max=1),
            )
        )

    def _unloaded(self, name: DeploymentName) -> None:
        if any(deployment.spec.name == name for deployment in self._client.list()):
            self._client.delete(name)
        self._wait(
            lambda: all(i.deployment != name for n in self._client.nodes() for i in n.instances),
            f"{name} is not unloaded",
        )

    def _instance(self, name: DeploymentName) -> InstanceSnapshot:
        (instance,) = self._client.get(name).instances
        return instance


@contextmanager
def starts(forms: Forms, *, compiles: bool) -> Iterator[tuple[Starts, Path]]:
    """In a fresh cell of one CPU node, and its journal. With `compiles` no load of it goes without.

    Raises MeshError when a part of it does not start or ends.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = _without_blobs(forms.store, folder / "compiling") if compiles else forms.store
        # Nothing is loaded before it is called: that would be no start.
        opened = local_cell(
            store=store, threads=THREADS, node_journals=folder, prefetch_bytes=0, page_cache_bytes=0
        )
        with opened as cell, MeshClient(cell.address) as client:
            yield Starts(cell, client, forms), next(folder.glob("*.journal"))


def _without_blobs(store: Path, folder: Path) -> Path:
    """The same models in a store that keeps nothing compiled: a file is in that folder's place."""
    folder.mkdir()
    for part in ("models", "sources"):
        (folder / part).symlink_to(store / part)
    (folder / _COMPILED).touch()
    return folder


def direct(path: Path, threads: int) -> int:
    """O_DIRECT past the page cache, each thread into one buffer again and again: no reader that
    keeps the bytes can be quicker. Returns how many there are.
    """
    pieces = iter(range(0, path.stat().st_size, DIRECT_PIECE_BYTES))
    taking = threading.Lock()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def taken() -> Iterator[int]:
        while True:
            with taking:
                begin = next(pieces, None)
            if begin is None:
                return
            yield begin

    def read(_: int) -> int:
        with mmap.mmap(-1, DIRECT_PIECE_BYTES) as buffer:
            return sum(os.preadv(descriptor, [buffer], begin) for begin in taken())

    try:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(read, range(threads)))
    finally:
        os.close(descriptor)


def memcpy_s(size_bytes: int, rounds: int) -> float:
    """The median time of a copy into pages that are there."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    return median(timed(lambda: np.copyto(target, source))[0] for _ in range(rounds))
