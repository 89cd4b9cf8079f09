"""What both sides serve: deployments of one model, each with an instance at most."""

from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo

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
