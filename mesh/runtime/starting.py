"""A controller core as it is when it begins, from what a journal's first line says of it.

A live controller, a virtual one and a replay all begin here, so that none of them can begin with
anything that the journal does not have. Before: `journal`. After: `host`, or `journal.replay`.
"""

from mesh.core.controller.core import ControllerCore
from mesh.runtime.journal import ControllerStart
from mesh.runtime.policies import policy_of


def controller_core(start: ControllerStart) -> ControllerCore:
    """Raises InvalidInput for an unknown policy."""
    return ControllerCore(
        epoch=start.epoch,
        deployments=start.deployments,
        profiles=start.profiles,
        histories=start.histories,
        revisions=start.revisions,
        limits=start.limits,
        policy=policy_of(start.policy),
    )
