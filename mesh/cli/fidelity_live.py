"""The live side of `mesh bench fidelity`: a cell of this machine under bursts, and its journal.

A state folder of its own under the home keeps the profile, so that a further run need not measure
it again while it is fresh. The node writes its journal while it serves: that is part of what is
measured. Before: `bench_fidelity`. After: `mesh.sim.fidelity`.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.stopping import Stopping
from mesh.controller.registry import SqliteRegistry
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import StorageError
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.messages import NodeHello
from mesh.domain.profile import Profile
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.views import NodeSnapshot
from mesh.report.outcomes import Outcome
from mesh.runtime.journal import read_journal
from mesh.sim.cluster import Arrival
from mesh.sim.fidelity.observing import Observer
from mesh.sim.fidelity.report import LiveRun
from mesh.sim.fidelity.workload import SLOS, bursts, deployments
from mesh.wire.client import MeshClient
from mesh.wire.offering import Answer, offer

PROFILE_S_MAX = 600.0
"""Age until which a profile is taken as it is."""
TOKEN_IDS = range(100, 2000)
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
    threads: int | None = None
    memory_bytes: int | None = None

    @property
    def seconds(self) -> float:
        return self.calibrate_s + self.compare_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """See `mesh.wire.offering.Sendable`."""

    at_s: float
    deployment: str
    prompt_tokens: tuple[int, ...]
    output_tokens: int


class LiveSide:
    """Owns the state folder; one cell at a time."""

    def __init__(self, wanted: Wanted, home: Path, stopping: Stopping, report: Report) -> None:
        self._wanted = wanted
        self._folder = home / "bench" / "fidelity"
        self._stopping = stopping
        self._report = report
        self._profiled = self._folder / "profiled"
        """Its time is the profile's."""
        self._began_s = time.time()
        _link_store(self._folder, home / "store")

    def run(self) -> LiveRun:
        """Raises MeshError, KeyboardInterrupt when stopped."""
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
        with self._cell(journals) as cell, MeshClient(cell.address) as client:
            specs = deployments(wanted.source)
            self._deploy(client, specs)
            (node,) = client.nodes()
            profile = self._fresh_profile(client, specs[0], node)
            if profile is None:
                client.profile(specs[0].name, progress=self._told)
                self._profiled.touch()
                return None
            arrivals = bursts(profile, seconds=wanted.seconds, load=wanted.load, seed=wanted.seed)
            calls = _calls(arrivals, wanted.seed)
            answers = offer(cell.address, calls, watch=lambda at_s: self._watch(cell, at_s))
        _, decisions = read_journal(journals / f"{node.node_id}.journal")
        start_s = answers[0].sent_s - answers[0].lag_s - calls[0].at_s
        with closing(SqliteRegistry(self._folder / "controller")) as registry:
            deployed = registry.deployments()
        return LiveRun(
            node=_hello(node),
            deployments=deployed,
            profile=profile,
            arrivals=arrivals,
            prompts=tuple(call.prompt_tokens for call in calls),
            outcomes=tuple(outcome_of(c, a, start_s) for c, a in zip(calls, answers, strict=True)),
            start_s=start_s,
            calibrated_s=wanted.calibrate_s,
            observed=Observer().run(decisions),
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

    def _told(self, phase: str, share: float) -> None:
        if self._stopping.asked():
            raise KeyboardInterrupt
        self._report(phase, share)

    def _watch(self, cell: LocalCell, at_s: float) -> None:
        self._told("calls", min(max(at_s, 0.0) / self._wanted.seconds, 1.0))
        cell.check_alive()

    @contextmanager
    def _cell(self, journals: Path) -> Iterator[LocalCell]:
        cell = LocalCell(
            CellPlan(
                listen="127.0.0.1:0",
                home=self._folder,
                nodes=plan_nodes(["cpu"]),
                threads=self._wanted.threads,
                memory_bytes=self._wanted.memory_bytes,
                node_journals=journals,
            )
        )
        try:
            cell.start()
            if not cell.wait_ready(self._stopping.asked, lambda line: None):
                raise KeyboardInterrupt
            yield cell
        finally:
            cell.stop(self._stopping.asked_again)


def _link_store(folder: Path, store: Path) -> None:
    """The models are those of the home."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store.mkdir(exist_ok=True)
        if not (folder / "store").exists():
            (folder / "store").symlink_to(store)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename}: {(error.strerror or str(error)).lower()}",
            hint="choose a state folder that you may write with --home or MESH_HOME",
        ) from error


def _hello(node: NodeSnapshot) -> NodeHello:
    """What the node said when it came, as far as it matters."""
    return NodeHello(
        node_id=node.node_id,
        run_id="virtual",
        device=node.device,
        hardware=node.hardware,
        cores=node.cores,
        engine=node.engine,
        memory_bytes=node.memory_bytes,
        base_bytes=node.base_bytes,
        fingerprint=node.fingerprint,
    )


def _calls(arrivals: tuple[Arrival, ...], seed: int) -> list[Call]:
    draw = random.Random(seed)
    return [
        Call(
            at_s=arrival.at_s,
            deployment=arrival.deployment,
            prompt_tokens=tuple(draw.choices(TOKEN_IDS, k=arrival.input_tokens)),
            output_tokens=arrival.output_tokens,
        )
        for arrival in arrivals
    ]


def outcome_of(call: Call, answer: Answer, start_s: float) -> Outcome:
    """As both sides are compared; `start_s` is when the run began, on the machine's clock."""
    sent_s = answer.sent_s - start_s
    end: FinishReason | RefusalReason
    if answer.refused:
        end = RefusalReason(answer.refused)
    else:
        whole = len(answer.tokens_s) == call.output_tokens and answer.in_order
        end = FinishReason.LENGTH if whole and not answer.failed else FinishReason.FAILED
    return Outcome(
        request_id=RequestId(f"{call.deployment}@{call.at_s:.6f}"),
        deployment=DeploymentName(call.deployment),
        slo=SLOS[call.deployment],
        arrival_s=sent_s,
        input_tokens=len(call.prompt_tokens),
        tokens_s=tuple(sent_s + at_s for at_s in answer.tokens_s),
        ended_s=sent_s + answer.ended_s,
        grace_s=answer.grace_s,
        end=end,
    )
