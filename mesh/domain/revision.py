"""Revisions of a deployment: what it was, is, and is to become, by number.

A changed manifest makes the next revision. One that needs other instances than those that serve has
a name of its own in the cell, `NAME@NUMBER`, so that both serve side by side for a while; callers
and operators know the deployment by NAME alone. Pure functions on tuples of revisions: before them
the core, which decides; after them the registry, which keeps what they return.
"""

from enum import StrEnum

from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.values import dataclass, replace

REVISIONS_MAX = 10
"""How many revisions of a deployment are kept, beside the one that serves."""
_MARK = "@"


class RevisionState(StrEnum):
    """Only the states from STARTING on, but for SERVING and RETIRING, are ever stored."""

    IMPORTING = "importing"
    STARTING = "starting"
    """It is stored, and takes over once its instances are ready."""
    SERVING = "serving"
    RETIRING = "retiring"
    """Its successor serves; it answers those who came before."""
    PAST = "past"
    """It has served."""
    FAILED = "failed"
    """It never took over; its message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One that does not serve. Its number is its deployment's."""

    deployment: Deployment
    state: RevisionState
    message: str = ""

    @property
    def number(self) -> int:
        return self.deployment.revision


Revisions = tuple[Revision, ...]
"""The revisions by number, the oldest first, without the one that serves."""


def name_in_cell(name: DeploymentName, number: int) -> DeploymentName:
    """The name under which the instances and requests of a revision go."""
    return DeploymentName(f"{public_name(name)}{_MARK}{number}")


def number_of(name: DeploymentName) -> int:
    """The number of the revision that has this name in the cell first."""
    return int(name.partition(_MARK)[2] or 1)


def public_name(name: DeploymentName) -> DeploymentName:
    """The deployment's, whichever revision is meant."""
    return DeploymentName(name.partition(_MARK)[0])


def named(spec: DeploymentSpec, name: DeploymentName) -> DeploymentSpec:
    return replace(spec, name=name)


def public(spec: DeploymentSpec) -> DeploymentSpec:
    """The spec as its manifest gives it."""
    name = public_name(spec.name)
    return spec if name == spec.name else named(spec, name)


def needs_no_instance(old: DeploymentSpec, new: DeploymentSpec) -> bool:
    """Whether the instances of one serve the other as well."""
    same = replace(
        old,
        slo=new.slo,
        classes=new.classes,
        class_default=new.class_default,
        scaling=new.scaling,
        tool_format=new.tool_format,
        special_tokens_in_content=new.special_tokens_in_content,
        cells=new.cells,
    )
    return named(same, new.name) == new


def starting(revisions: Revisions) -> Revision | None:
    return next((r for r in revisions if r.state is RevisionState.STARTING), None)


def given_up(revisions: Revisions, message: str) -> Revisions:
    """The one that is starting, if any, has failed."""
    return tuple(
        replace(r, state=RevisionState.FAILED, message=message)
        if r.state is RevisionState.STARTING
        else r
        for r in revisions
    )


def with_revision(revisions: Revisions, deployment: Deployment, state: RevisionState) -> Revisions:
    """One more; the oldest go."""
    joined = (*revisions, Revision(deployment=deployment, state=state))
    return tuple(sorted(joined, key=lambda r: r.number))[-REVISIONS_MAX:]


def next_number(current: Deployment, revisions: Revisions) -> int:
    return max([current.revision, *(r.number for r in revisions)]) + 1


def to_go_back_to(revisions: Revisions, number: int | None) -> Revision | None:
    """The last that served, or that of this number."""
    known = [
        r
        for r in revisions
        if r.number == number or (number is None and r.state is RevisionState.PAST)
    ]
    return known[-1] if known else None
