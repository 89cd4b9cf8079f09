"""A core as it is when it begins, from what a journal's first line says of it.

A live controller, a virtual one and a replay all begin here, so that none of them can begin with
anything that the journal does not have. Before: `journal`. After: `host`, or `journal.replay`.
"""

from typing import Any

from mesh.core.controller.core import ControllerCore
from mesh.core.node.core import NodeCore
from mesh.runtime.host import Core
from mesh.runtime.journal import ControllerStart, Start
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


def fresh_core(start: Start) -> Core[Any, Any]:
    """Of a controller or of a node. Raises InvalidInput for an unknown policy."""
    if isinstance(start, ControllerStart):
        return controller_core(start)
    return NodeCore(limits=start.limits)
