"""A cell of one CPU node under one policy, with every deployment loaded."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.cells import local_cell
from bench.demo_model import SOURCE
from bench.slo.workload import SLOS
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import InstanceState
from mesh.domain.profile import Profile
from mesh.wire.client import MeshClient

CONTEXT_TOKENS = 1024
LOADED_S_MAX = 180.0


@contextmanager
def loaded_cell(policy: str) -> Iterator[str]:
    """Its address. Raises MeshError when a part of it ends."""
    with local_cell(policy=policy) as local:
        with MeshClient(local.address) as client:
            _deploy(client)
        yield local.address
        local.check_alive()


def measured_profile(address: str, note: Callable[[str], None]) -> Profile:
    """Measure the deployments' model, for the cell to use from now on."""
    name = DeploymentName(next(iter(SLOS)))
    with MeshClient(address) as client:
        client.profile(name, progress=lambda phase, share: note(f"{phase}: {100 * share:.0f} %"))
        found = [view.profile for view in client.profiles(name) if view.profile.measured]
    if not found:
        raise SystemExit("error: the cell has no measured profile after measuring one")
    return found[0]


def _deploy(client: MeshClient) -> None:
    scaling = Scaling(replicas_min=1, replicas_max=1, keep_alive_s=600.0)
    for name, slo in SLOS.items():
        client.deploy(
            DeploymentSpec(
                name=DeploymentName(name),
                source=SOURCE,
                context_tokens_max=CONTEXT_TOKENS,
                slo=slo,
                scaling=scaling,
            )
        )
    until_s = time.monotonic() + LOADED_S_MAX
    while not all(
        any(instance.state is InstanceState.READY for instance in deployment.instances)
        for deployment in client.list()
    ):
        if time.monotonic() > until_s:
            raise SystemExit(f"error: not all loaded within {LOADED_S_MAX:.0f} s")
        time.sleep(0.1)
