"""All policies by name."""

from mesh.domain.errors import InvalidInput
from mesh.policy.fcfs import FirstComeFirstServed
from mesh.policy.interface import Policy
from mesh.policy.llm_mesh import LlmMesh

_POLICIES: dict[str, Policy] = {made.name: made for made in (LlmMesh(), FirstComeFirstServed())}
DEFAULT_POLICY = "llm-mesh"


def policy(name: str) -> Policy:
    """The policy of this name. Raises InvalidInput when there is none."""
    if name not in _POLICIES:
        raise InvalidInput(
            f"there is no policy {name!r}", hint=f"policies: {', '.join(sorted(_POLICIES))}"
        )
    return _POLICIES[name]
