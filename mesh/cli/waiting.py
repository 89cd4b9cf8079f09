"""Waits until a deployment is as somebody wants it, and shows meanwhile what it is at.

`deploy --wait` and `wait` ask the cell a few times a second; what is waited for is a goal by name.
"""

import time
from enum import StrEnum

from mesh.cli.progress import progress
from mesh.domain.errors import Cancelled, NotFound
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import InstanceState
from mesh.domain.revision import RevisionState
from mesh.domain.values import dataclass
from mesh.domain.views import DeploymentSnapshot
from mesh.wire.client import MeshClient

POLL_S = 0.2
_COMING = (RevisionState.IMPORTING, RevisionState.STARTING)
_SERVING = (InstanceState.READY, InstanceState.PARKED)


class Goal(StrEnum):
    READY = "ready"
    """As many instances as `replicas_min` says serve, or are parked, which a resize of milliseconds
    ends."""
    LOADED = "loaded"
    """At least one does."""
    GONE = "gone"
    """The cell does not know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a deployment is from its goal."""

    text: str
    share: float
    reached: bool = False


def standing(found: DeploymentSnapshot | None, goal: Goal) -> Standing:
    """`found` is None where the cell does not know the deployment, which only `gone` wants."""
    if found is None:
        return Standing(text="gone", share=1.0, reached=True)
    if goal is Goal.GONE:
        return Standing(text=f"{found.state}, {len(found.instances)} instances", share=0.0)
    coming = next((v for v in found.revisions if v.state in _COMING), None)
    if coming is not None and goal is Goal.READY:
        said = f": {coming.message}" if coming.message else ""
        text = f"revision {coming.number} {coming.state}, {coming.ready} of {coming.wanted} ready"
        return Standing(text=text + said, share=coming.ready / max(coming.wanted, 1))
    serving = sum(one.state in _SERVING for one in found.instances)
    wanted = found.spec.scaling.replicas_min if goal is Goal.READY else 1
    share = min(serving / wanted, 1.0) if wanted else 1.0
    text = f"{serving} of {wanted} instances ready{_loading(found)}"
    reached = found.model is not None and serving >= wanted
    return Standing(text=text, share=share, reached=reached)


def wait_for(client: MeshClient, name: DeploymentName, goal: Goal, wait_s: float) -> None:
    """Raises NotFound where the cell does not know the deployment, unless that is the goal, and
    Cancelled when `wait_s` is over.
    """
    until_s = time.monotonic() + wait_s
    coming: int | None = None
    with progress(name) as report:
        while True:
            found = _find(client, name, goal)
            now = standing(found, goal)
            for view in found.revisions if found is not None else ():
                if view.number == coming and view.state is RevisionState.FAILED:
                    raise Cancelled(
                        f"revision {coming} of {name} failed: {view.message}",
                        hint="the one before it serves on; `mesh rollout status` shows both",
                    )
                coming = view.number if view.state in _COMING else coming
            if now.reached:
                return
            report(now.text, now.share)
            if time.monotonic() > until_s:
                raise Cancelled(
                    f"{name} is not {goal} after {wait_s:g} s: {now.text}",
                    hint=f"`mesh describe {name}` and `mesh logs {name}` show why",
                )
            time.sleep(POLL_S)


def _find(client: MeshClient, name: DeploymentName, goal: Goal) -> DeploymentSnapshot | None:
    try:
        return client.get(name)
    except NotFound:
        if goal is Goal.GONE:
            return None
        raise


def _loading(found: DeploymentSnapshot) -> str:
    """What its import is at, or the first of those that are not ready."""
    loading = (one.phase for one in found.instances if one.state is InstanceState.LOADING)
    phase = found.phase or next(loading, "")
    return f": {phase}" if phase else ""
