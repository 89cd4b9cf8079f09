"""The live side of `mesh bench fidelity`: a cell of this machine under bursts, and its journal.

A state folder of its own under the home keeps the profile, so that a further run need not measure
it again while it is fresh. The node writes its journal while it serves: that is part of what is
measured. Before: `mesh bench fidelity`, which starts the cell. After: `report`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Protocol

from mesh.compute.times import Times
from mesh.controller.registry import SqliteRegistry
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import HOME_HINT, StorageError, system_errors
from mesh.domain.ids import DeploymentName
from mesh.domain.profile import Profile
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass
from mesh.domain.views import NodeSnapshot
from mesh.evaluation.bursts import bursts, calls_of
from mesh.evaluation.fidelity.observing import Observer
from mesh.evaluation.fidelity.planning import hello_of
from mesh.evaluation.fidelity.report import LiveRun
from mesh.evaluation.load_client import Answer, Call, offer, outcome_of
from mesh.runtime.journal import read_journal
from mesh.sim.cluster import Arrival
from mesh.wire.client import MeshClient

SLOS = {
    "fidelity-a": Slo(ttft_s=1.5, tpot_s=0.12),
    "fidelity-b": Slo(ttft_s=2.0, tpot_s=0.15),
    "fidelity-c": Slo(ttft_s=3.0, tpot_s=0.20),
}
"""By deployment."""
CONTEXT_TOKENS = 1024
KEEP_ALIVE_S = 1.0
"""Shorter than the pauses, so that instances are parked in them and resumed."""
BATCH = 4
"""Requests of a deployment that decode together, for the estimate of what the node can do."""


def deployments(source: str) -> tuple[DeploymentSpec, ...]:
    """The deployments of the model of this source."""
    scaling = Scaling(replicas_min=0, replicas_max=1, keep_alive_s=KEEP_ALIVE_S)
    return tuple(
        DeploymentSpec(
            name=DeploymentName(name),
            source=source,
            context_tokens_max=CONTEXT_TOKENS,
            slo=slo,
            scaling=scaling,
        )
        for name, slo in SLOS.items()
    )


PROFILE_S_MAX = 600.0
"""Age until which a profile is taken as it is."""
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A run; times in seconds."""

    source: str
    calibrate_s: float
    compare_s: float
    load: float
    seed: int
    remeasure: bool = False

    @property
    def seconds(self) -> float:
        return self.calibrate_s + self.compare_s


class RunningCell(Protocol):
    """A cell of one node that runs on this machine."""

    @property
    def address(self) -> str: ...

    def check_alive(self) -> None:
        """Raises MeshError when a part of it has ended."""


StartCell = Callable[[Path, Path], AbstractContextManager[RunningCell]]
"""With a home, and a folder for the journal of its node. Raises MeshError."""


class LiveSide:
    """Owns the state folder; one cell at a time."""

    def __init__(self, wanted: Wanted, home: Path, start: StartCell, told: Report) -> None:
        """`told` ends the run by what it raises."""
        self._wanted = wanted
        self._folder = home / "bench" / "fidelity"
        self._start = start
        self._told = told
        self._profiled = self._folder / "profiled"
        """Its time is the profile's."""
        self._began_s = time.time()
        _link_store(self._folder, home / "store")

    def run(self) -> LiveRun:
        """Raises MeshError."""
        found = self._attempt()
        if found is None:
            # Measuring has loaded an instance: the run begins with a cell that has none.
            found = self._attempt()
        if found is None:
            raise StorageError(f"the profile was measured, and is not in {self._folder}")
        return found

    def _attempt(self) -> LiveRun | None:
        """None when there was no fresh profile: then there is one now."""
        wanted, journals = self._wanted, self._folder / "nodes"
        journals.mkdir(exist_ok=True)
        with self._start(self._folder, journals) as cell, MeshClient(cell.address) as client:
            specs = deployments(wanted.source)
            self._deploy(client, specs)
            (node,) = client.nodes()
            profile = self._fresh_profile(client, specs[0], node)
            if profile is None:
                client.profile(specs[0].name, progress=self._told)
                self._profiled.touch()
                return None
            arrivals = bursts(
                tuple(SLOS),
                Times(profile),
                BATCH,
                seconds=wanted.seconds,
                load=wanted.load,
                seed=wanted.seed,
            )
            calls = calls_of(arrivals, SLOS, wanted.seed)
            answers = offer(cell.address, calls, watch=lambda at_s: self._watch(cell, at_s))
        return live_run(
            self._folder,
            journals / f"{node.node_id}.journal",
            node=node,
            profile=profile,
            calls=calls,
            answers=answers,
            calibrated_s=wanted.calibrate_s,
        )

    def _deploy(self, client: MeshClient, specs: tuple[DeploymentSpec, ...]) -> None:
        """Anew, so that nothing is known of the lengths of earlier answers."""
        for known in client.list():
            client.delete(known.spec.name)
        for spec in specs:
            client.deploy(spec, self._told)

    def _fresh_profile(
        self, client: MeshClient, spec: DeploymentSpec, node: NodeSnapshot
    ) -> Profile | None:
        """One that was measured lately on such a node; `remeasure` is for an earlier run's."""
        began_s = self._began_s if self._wanted.remeasure else time.time() - PROFILE_S_MAX
        if not self._profiled.exists() or self._profiled.stat().st_mtime < began_s:
            return None
        known = (view.profile for view in client.profiles(spec.name))
        fresh = (p for p in known if p.measured and p.fingerprint == node.fingerprint)
        return next(fresh, None)

    def _watch(self, cell: RunningCell, at_s: float) -> None:
        self._told("calls", min(max(at_s, 0.0) / self._wanted.seconds, 1.0))
        cell.check_alive()


def _link_store(folder: Path, store: Path) -> None:
    """The models are those of the home."""
    with system_errors(StorageError, f"cannot write {store}", HOME_HINT):
        store.mkdir(parents=True, exist_ok=True)
    with system_errors(StorageError, f"cannot write {folder}", HOME_HINT):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "store").exists():
            (folder / "store").symlink_to(store)


def live_run(
    home: Path,
    journal: Path,
    *,
    node: NodeSnapshot,
    profile: Profile,
    calls: Sequence[Call],
    answers: Sequence[Answer],
    calibrated_s: float,
) -> LiveRun:
    """The run of a cell that has ended, from its state folder and its node's journal.

    Raises MeshError when either cannot be read.
    """
    _, decisions = read_journal(journal)
    start_s = answers[0].sent_s - answers[0].lag_s - calls[0].at_s
    with closing(SqliteRegistry(home / "controller")) as registry:
        deployed = registry.deployments()
    return LiveRun(
        node=hello_of(node),
        deployments=deployed,
        profile=profile,
        arrivals=tuple(
            Arrival(c.at_s, c.deployment, len(c.prompt_tokens), c.output_tokens) for c in calls
        ),
        outcomes=tuple(outcome_of(c, a, start_s) for c, a in zip(calls, answers, strict=True)),
        start_s=start_s,
        calibrated_s=calibrated_s,
        observed=Observer().run(decisions),
    )
