"""A cell of one CPU node under one policy, with every deployment loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.cells import deployed, local_cell
from bench.demo_model import SOURCE
from bench.slo.workload import SLOS
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.profile import Profile
from mesh.wire.client import MeshClient

CONTEXT_TOKENS = 1024
DEPLOYMENTS = tuple(
    DeploymentSpec(
        name=DeploymentName(name), source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=slo
    )
    for name, slo in SLOS.items()
)


@contextmanager
def loaded_cell(policy: str) -> Iterator[str]:
    """Its address. Raises MeshError when a part of it ends."""
    with local_cell(policy=policy) as local:
        deployed(local.address, DEPLOYMENTS)
        yield local.address
        local.check_alive()


def measured_profile(address: str, note: Callable[[str], None]) -> Profile:
    """Measure the deployments' model, for the cell to use from now on."""
    name = DEPLOYMENTS[0].name
    with MeshClient(address) as client:
        client.profile(name, progress=lambda phase, share: note(f"{phase}: {100 * share:.0f} %"))
        found = [view.profile for view in client.profiles(name) if view.profile.measured]
    if not found:
        raise SystemExit("error: the cell has no measured profile after measuring one")
    return found[0]
