"""mesh's starts: a controller and a node as processes, called by a gRPC client, in all its tiers.

A deployment is deleted and deployed again between starts, so that its model is unloaded; the node
goes on. Owns the journal of the node, which tells where the time of each call went. Before:
`shapes`. After: `__main__`, which has the rounds.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.cells import local_cell, wait_calm
from bench.cold_start.files import bring, forget
from bench.cold_start.parts import parts_s
from bench.cold_start.shapes import Forms
from bench.cold_start.starts import (
    CONTEXT_TOKENS,
    PROMPT,
    THREADS,
    WARM_CALLS,
    Called,
    Engine,
    Start,
    Tier,
)
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, TokenPrompt, Tokens
from mesh.domain.lifecycle import InstanceState
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.domain.views import InstanceSnapshot
from mesh.runtime.journal import read_journal
from mesh.wire.client import MeshClient

FIRST, TWIN = DeploymentName("first"), DeploymentName("twin")
SLO = Slo(ttft_s=300.0, tpot_s=10.0)
"""Everybody is in time: what is measured is how long it takes."""
KEEP_ALIVE_S = 600.0
PARKED_AFTER_S = 0.2
"""Instead, once there have been warm calls: a parked instance leaves sizes uncomputed."""
WAIT_S_MAX = 600.0
POLL_S = 0.05
CALL_S_MAX = 300.0
_COMPILED = "compiled"
"""The store's folder of what loads without a compile are made from."""


class Starts:
    """The starts of one model, in one cell."""

    def __init__(self, cell: LocalCell, client: MeshClient, forms: Forms) -> None:
        self._cell = cell
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

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + WAIT_S_MAX
        while not done():
            self._cell.check_alive()
            if time.monotonic() > until_s:
                raise MeshError(f"{what} after {WAIT_S_MAX:.0f} s")
            time.sleep(POLL_S)


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
