"""All policies by name."""

from mesh.domain.errors import InvalidInput
from mesh.policy.aegaeon import AEGAEON
from mesh.policy.fcfs import FCFS
from mesh.policy.interface import Policy
from mesh.policy.llm_mesh import ABLATIONS, LLM_MESH
from mesh.policy.mesh import MESH, MESH_ABLATIONS
from mesh.policy.mesh_slo import MESH_SLO, MESH_SLO_ABLATIONS
from mesh.policy.polyserve import POLYSERVE_ABLATIONS, POLYSERVE_CO
from mesh.policy.polyserve_apart import POLYSERVE_PD, POLYSERVE_PD_ABLATIONS
from mesh.policy.polyserve_baselines import CO_BASELINES, PD_BASELINES
from mesh.policy.prism import PRISM
from mesh.policy.sllm import SLLM, SLLM_CPU, SLLM_CPU_SHARE

_ALL: tuple[Policy, ...] = (
    LLM_MESH,
    MESH,
    *ABLATIONS,
    *MESH_ABLATIONS,
    SLLM,
    SLLM_CPU,
    SLLM_CPU_SHARE,
    FCFS,
    AEGAEON,
    PRISM,
    POLYSERVE_CO,
    *POLYSERVE_ABLATIONS,
    POLYSERVE_PD,
    *POLYSERVE_PD_ABLATIONS,
    *CO_BASELINES,
    *PD_BASELINES,
    MESH_SLO,
    *MESH_SLO_ABLATIONS,
)
_POLICIES = {made.name: made for made in _ALL}
DEFAULT_POLICY = LLM_MESH.name


def policy(name: str) -> Policy:
    """The policy of this name. Raises InvalidInput when there is none."""
    if name not in _POLICIES:
        raise InvalidInput(
            f"there is no policy {name!r}", hint=f"policies: {', '.join(sorted(_POLICIES))}"
        )
    return _POLICIES[name]


def known_policies() -> tuple[str, ...]:
    """Their names."""
    return tuple(_POLICIES)
