"""Gives one node half the memory that four deployments want at their peaks, and looks at the books.

Bursts of calls come for deployments of different lengths and SLOs, so that instances grow, shrink,
are parked, give way and come back. Nothing may run out of memory, the controller's books must stay
within the node's capacity after every event (its journal is decided again, to look), the node's
process within its limit, and every call must end exactly once. Beside that: what instances of two
shapes are booked at over what they take (`shapes`), and how many of the demo model's shape a node
of 2 GiB holds (`fleet`). The last line is one JSON object; exit code 1 when any of that is not so.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from bench.cells import local_cell
from bench.demo_model import SOURCE, stored_model
from bench.fleet_workload import CONTEXT_TOKENS, SCENES
from bench.fleet_workload import calls as fleet_calls
from bench.harness import Report, Table, show_status
from bench.overcommit_cell import (
    KINDS,
    Audit,
    Peak,
    audit,
    bursts,
    calls,
    limit_bytes,
    peaks,
)
from bench.overcommit_shapes import Resident, booked_over_rss, watched
from bench.own_models import own_source, plant_models
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.slo import Slo
from mesh.domain.units import format_bytes
from mesh.evaluation.distribution import Distribution
from mesh.evaluation.judging import Judgement, judge
from mesh.evaluation.load_client import Call, offer
from mesh.wire.client import MeshClient
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES, estimate

MEMORY_BYTES = 2 * 2**30
RESIDENT_BEFORE = 6
"""Instances of the demo model's shape on such a node when each was booked at its estimate."""
FLEET_CALL_S_MAX = 120.0
SLO = Slo(ttft_s=30.0, tpot_s=1.0)
_FLEET = SCENES[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    audit: Audit
    resident: Resident

    def faults(self) -> list[str]:
        """What must not be, in words."""
        found = [f"fleet: {count} × {error}" for error, count in self.audit.errors.items()]
        if self.resident.over or not self.resident.samples:
            samples = f"{self.resident.over} of {self.resident.samples} samples"
            found.append(f"fleet: RSS was over the limit in {samples}")
        return found

    def figures(self) -> dict[str, object]:
        return {
            "density_ratio": round(self.audit.resident_max / RESIDENT_BEFORE, 3),
            "resident_max": self.audit.resident_max,
            "fleet_booked_over_rss": round(self.audit.booked_over_rss(), 3),
            "fleet_rss_samples": self.resident.samples,
            "fleet_rss_over_limit": self.resident.over,
            "fleet_rss_max_share": round(self.resident.rss_bytes_max / MEMORY_BYTES, 4),
        }


def play(*, seconds: float, seed: int) -> Fleet:
    """Raises MeshError when a part of the cell ends."""
    drawn = fleet_calls(_FLEET, rate=_FLEET.rates[-1], seconds=seconds, seed=seed)
    sent = [replace(call, slo=SLO) for call in drawn]
    with tempfile.TemporaryDirectory() as folder:
        store, journal = Path(folder) / "store", Path(folder) / "journal.jsonl"
        show_status(f"fleet: models for {_FLEET.deployments} deployments")
        plant_models(store, _FLEET.names())
        with local_cell(memory_bytes=MEMORY_BYTES, journal=journal, store=store) as local:
            with MeshClient(local.address) as client:
                for name in _FLEET.names():
                    spec = DeploymentSpec(
                        name=name,
                        source=own_source(name),
                        context_tokens_max=CONTEXT_TOKENS,
                        slo=SLO,
                        scaling=_FLEET.scaling,
                    )
                    client.deploy(spec)
            with watched(local.children[1].process.pid, MEMORY_BYTES) as resident:
                for name in _FLEET.names():
                    show_status(f"fleet: {name} alone")
                    first = replace(sent[0], at_s=0.0, deployment=name)
                    offer(local.address, [first], call_s_max=FLEET_CALL_S_MAX)
                show_status(f"fleet: {len(sent)} calls")
                offer(local.address, sent, call_s_max=FLEET_CALL_S_MAX)
            local.check_alive()
        show_status("fleet: deciding the journal again")
        return Fleet(audit=audit(journal), resident=resident)


SECONDS = 300.0
QUICK_SECONDS = 20.0
FLEET_SECONDS = 120.0
BOOKED_OVER_RSS = (1.0, 1.1)
DENSITY_RATIO = 1.3
QUICK_SCALE = 0.5
"""A quick run shortens the bursts by this: they are over sooner, and others get their turn."""
OVERCOMMIT = 2.0
CALL_S_MAX = 400.0
"""The longest answer, at its TPOT SLO, and what it may have to wait for."""
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    judged: Judgement
    audit: Audit
    resident: Resident

    def faults(self) -> list[str]:
        """What must not be, in words."""
        counts, books, resident = self.audit.counts, self.audit, self.resident
        found = [f"{count} × {error}" for error, count in sorted(books.errors.items())]
        found += [f"{count} calls ended {end}" for end, count in self.judged.odd_ends.items()]
        if not books.ended_once:
            found.append("the controller did not end every request once")
        if books.over_capacity:
            found.append(f"more than the capacity was tracked after {books.over_capacity} events")
        if books.diverged_at is not None:
            found.append(f"decision {books.diverged_at} of the journal came out otherwise")
        if resident.over:
            found.append(f"RSS was over the limit in {resident.over} of {resident.samples} samples")
        if not resident.samples:
            found.append("the node's RSS was never read")
        found += [f"no {what} at all" for what in ("loads", "unloads") if not counts[what]]
        found += [f"no KV cache {what}" for what in ("grows", "shrinks") if not counts[what]]
        if not self.judged.finished:
            found.append("no call finished")
        return found


def offered(sent: Sequence[Call], memory_bytes: int, journal: Path | None = None) -> Found:
    """The controller's journal goes to `journal`, to be kept, or nowhere. Raises MeshError when a
    part of the cell ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        journal = journal or Path(folder) / "journal.jsonl"
        with local_cell(memory_bytes=memory_bytes, journal=journal) as local:
            with MeshClient(local.address) as client:
                _deploy(client)
            node = local.children[1]
            with watched(node.process.pid, memory_bytes) as resident:
                answers = offer(local.address, sent, call_s_max=CALL_S_MAX)
            local.check_alive()
        show_status("deciding the journal again")
        books = audit(journal)
    return Found(judged=judge(sent, answers), audit=books, resident=resident)


def _deploy(client: MeshClient) -> None:
    for name, kind in KINDS.items():
        client.deploy(
            DeploymentSpec(
                name=DeploymentName(name),
                source=SOURCE,
                context_tokens_max=kind.context_tokens,
                slo=kind.slo,
            )
        )


def figures(found: Found) -> dict[str, object]:
    judged, books, resident = found.judged, found.audit, found.resident
    limit = resident.limit_bytes
    kinds = ("loads", "unloads", "grows", "shrinks", "parks", "resumes", "evictions")
    return {
        "requests": judged.requests,
        "finished": judged.finished,
        "refused_by_reason": judged.refused_by_reason,
        "met_of_admitted": round(judged.met_of_admitted, 4),
        "ended_once": not judged.odd_ends and books.ended_once,
        "out_of_memory": sum(n for e, n in books.errors.items() if e.endswith("OutOfMemory")),
        "errors": dict(sorted(books.errors.items())),
        "events": books.events,
        "tracked_over_capacity": books.over_capacity,
        "tracked_share_max": round(books.tracked_share_max, 4),
        "limit_mb": round(limit / MIB, 1),
        "base_mb": round(books.base_bytes / MIB, 1),
        "rss_samples": resident.samples,
        "rss_over_limit": resident.over,
        "rss_max_share": round(resident.rss_bytes_max / limit, 4),
        "rss_max_file_mb": round(resident.file_bytes / MIB, 1),
        "rss_high_water_share": round(resident.high_water_bytes / limit, 4),
        **{kind: books.counts[kind] for kind in kinds},
        "operations_waited": books.waited,
        "resize_ms_p50": _at_ms(books.resize_s, 50),
        "resize_ms_p99": _at_ms(books.resize_s, 99),
        "unaccounted_mb_max": _most_mb(books.unaccounted_bytes),
        "unaccounted_amid_loads_mb_max": _most_mb(books.unaccounted_amid_bytes),
    }


def _at_ms(seconds: Sequence[float], percent: int) -> float:
    """That percentile; 0 of none."""
    return round(1000 * (Distribution.of(seconds).at(percent) or 0.0), 3)


def _most_mb(sizes: Sequence[int]) -> float:
    return round(max(sizes, default=0) / MIB, 1)


def limit_shown(wanted: Sequence[Peak], memory_bytes: int) -> tuple[Table, str]:
    """How the node's limit comes about."""
    rows = []
    for peak in wanted:
        weights_bytes = peak.footprint.weights_bytes
        sizes = (weights_bytes, peak.size_bytes - weights_bytes, peak.size_bytes)
        counts = (str(peak.calls), str(peak.kv_blocks))
        rows.append((peak.deployment, *counts, *(f"{size / MIB:.0f}" for size in sizes)))
    headings = ("peak of", "calls at once", "KV blocks", "weights MiB", "KV MiB", "MiB")
    whole_bytes = sum(peak.size_bytes for peak in wanted)
    return (
        Table(headings=headings, rows=rows),
        (
            f"--memory {memory_bytes}: {format_bytes(whole_bytes)} / {OVERCOMMIT:g} + "
            f"{format_bytes(ENGINE_BYTES)} = {format_bytes(memory_bytes)}, with the node's process"
        ),
    )


def report(found: Found, fleet: Fleet | None, shapes: Mapping[str, float]) -> Report:
    faults = found.faults()
    told = figures(found)
    if fleet is not None:
        faults += fleet.faults()
        told |= fleet.figures()
        if fleet.audit.resident_max < DENSITY_RATIO * RESIDENT_BEFORE:
            faults.append(f"no more than {fleet.audit.resident_max} instances within 2 GiB")
        told["booked_over_rss"] = {name: round(ratio, 3) for name, ratio in shapes.items()}
        least, most = BOOKED_OVER_RSS
        faults += [
            f"{name} is booked at {ratio:.3f} of what it takes"
            for name, ratio in shapes.items()
            if not least <= ratio <= most
        ]
    told["faults"] = faults
    rows = [(name.replace("_", " "), str(value)) for name, value in told.items()]
    return Report(
        figures=told,
        shown=(Table(headings=("FIGURE", "VALUE"), rows=rows, words=2), *faults),
        targets={"no faults": not faults},
    )


def run(
    *,
    seconds: float = SECONDS,
    seed: int = 1,
    quick: bool = False,
    fleet_seconds: Annotated[float, "of the node of 2 GiB"] = FLEET_SECONDS,
    journal: Path | None = None,
) -> Report:
    seconds, scale = (QUICK_SECONDS, QUICK_SCALE) if quick else (seconds, 1.0)
    sent = bursts(seconds=seconds, seed=seed, scale=scale)
    footprint = estimate(stored_model().info, weights=WeightPrecision.I8, kv=KvPrecision.F16)
    wanted = peaks(sent, footprint)
    memory_bytes = limit_bytes(wanted, OVERCOMMIT)
    show_status(f"{len(calls(sent))} calls")
    found = offered(calls(sent), memory_bytes, journal)
    fleet, shapes = None, dict[str, float]()
    if not quick:
        fleet = play(seconds=fleet_seconds, seed=seed)
        show_status("what two shapes take")
        shapes = dict(booked_over_rss())
    made = report(found, fleet, shapes)
    return replace(made, shown=(*limit_shown(wanted, memory_bytes), *made.shown))
