"""Finds a deployment by name, or says what is there instead."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

from mesh.domain.access import Caller, Role
from mesh.domain.checks import NAME_CHARS_MAX
from mesh.domain.errors import NotFound, Unavailable
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.values import replace
from mesh.domain.views import CellSnapshot, Deployed, DeploymentSnapshot, ProfileView

_Named = TypeVar("_Named", Deployed, DeploymentSnapshot)

NAMES_MAX = 8
"""As many names are listed in a hint."""


def seen_by(caller: Caller, snapshot: CellSnapshot) -> CellSnapshot:
    """Without the deployments of other tenants."""
    if caller.role is Role.ADMIN:
        return snapshot
    mine = tuple(one for one in snapshot.deployments if caller.may_see(one.spec))
    return replace(snapshot, deployments=mine)


def seen_profiles(caller: Caller, profiles: Iterable[ProfileView]) -> list[ProfileView]:
    """Those that hold for a node come first; a tenant is told of these alone, and of no node."""
    found = sorted(profiles, key=lambda one: not one.nodes)
    if caller.role is Role.ADMIN:
        return found
    return [replace(one, nodes=()) for one in found if one.nodes]


def find_deployment(name: DeploymentName, deployments: Sequence[_Named]) -> _Named:
    """Raises NotFound, which lists names like it."""
    for deployment in deployments:
        if deployment.spec.name == name:
            return deployment
    asked = name if len(name) <= NAME_CHARS_MAX else name[:NAME_CHARS_MAX] + "…"
    names = [str(deployment.spec.name) for deployment in deployments]
    raise NotFound(f"there is no deployment {asked!r}", hint=_instead(asked, names))


def no_deployment(name: DeploymentName, deployed: Sequence[Deployed]) -> NotFound | Unavailable:
    """Why a deployment takes no requests."""
    try:
        state = find_deployment(name, deployed).state
    except NotFound as error:
        return error
    if state in (DeploymentState.IMPORTING, DeploymentState.SAVING):
        return Unavailable(
            f"deployment {name!r} is still {state}", hint=f"`mesh get {name}` shows how far it is"
        )
    return NotFound(f"deployment {name!r} is {state}")


def no_request(request_id: RequestId) -> NotFound:
    return NotFound(
        f"there is no open request {request_id[:NAME_CHARS_MAX]!r}",
        hint="`mesh requests` lists those that there are",
    )


def _instead(name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    if not known:
        return "nothing is deployed; `mesh deploy model.yaml` deploys a model"
    close = get_close_matches(name, known, n=NAMES_MAX)
    if close:
        return f"did you mean {', '.join(close)}?"
    listed = ", ".join(known[:NAMES_MAX])
    more = len(known) - NAMES_MAX
    return f"deployments: {listed}" + (f" and {more} more" if more > 0 else "")
