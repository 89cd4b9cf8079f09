"""Many deployments with models of their own on a node of 2 GiB: how many are resident at once.

The deployments and calls of the fleet scene (`bench.fleet.workload`): first each deployment is
called alone, by which the books are corrected, then all at the scene's highest rate. Nothing of it
is timed, and SLOs are lenient.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cells import local_cell
from bench.fleet.workload import CONTEXT_TOKENS, SCENES, calls
from bench.overcommit.replaying import Audit, audit
from bench.overcommit.resident import Resident, watched
from bench.own_models import own_source, plant_models
from bench.printing import show_status
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import offer
from mesh.wire.client import MeshClient

MEMORY_BYTES = 2 * 2**30
RESIDENT_BEFORE = 6
"""Instances of the demo model's shape on such a node when each was booked at its estimate."""
CALL_S_MAX = 120.0
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
    drawn = calls(_FLEET, rate=_FLEET.rates[-1], seconds=seconds, seed=seed)
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
                    offer(local.address, [first], call_s_max=CALL_S_MAX)
                show_status(f"fleet: {len(sent)} calls")
                offer(local.address, sent, call_s_max=CALL_S_MAX)
            local.check_alive()
        show_status("fleet: deciding the journal again")
        return Fleet(audit=audit(journal), resident=resident)
