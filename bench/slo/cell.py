"""A cell of one CPU node under one policy, with every deployment loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bench.cells import deployed, local_cell
from bench.demo_model import SOURCE
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo

CONTEXT_TOKENS = 1024


@contextmanager
def loaded_cell(policy: str, slos: Mapping[str, Slo]) -> Iterator[LocalCell]:
    """With a deployment for each of these. Raises MeshError when a part of it ends."""
    with local_cell(policy=policy) as local:
        deployed(
            local.address,
            [
                DeploymentSpec(
                    name=DeploymentName(name),
                    source=SOURCE,
                    context_tokens_max=CONTEXT_TOKENS,
                    slo=slo,
                )
                for name, slo in slos.items()
            ],
        )
        yield local
        local.check_alive()
