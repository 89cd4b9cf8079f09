"""`mesh rollout`: the revisions of a deployment, and the way back to an earlier one."""

from collections.abc import Sequence

import click

from mesh.cli import output
from mesh.cli.options import controller_option, format_option, timeout_option
from mesh.cli.output import Column, Format, number, word
from mesh.cli.spec_changes import Change, changes
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.ids import DeploymentName
from mesh.domain.revision import RevisionState
from mesh.domain.values import dataclass
from mesh.domain.views import DeploymentSnapshot, RevisionView
from mesh.wire.client import MeshClient


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    view: RevisionView
    changes: tuple[Change, ...]
    """From the revision that was made before it, of those that are kept."""


_COLUMNS: tuple[Column[_Row], ...] = (
    number("REVISION", lambda r: r.view.number),
    word("STATE", lambda r: r.view.state),
    word("READY", lambda r: _ready(r.view)),
    number("REQUESTS", lambda r: r.view.requests),
    word("SOURCE", lambda r: r.view.spec.source),
    word("CHANGES", lambda r: ", ".join(map(str, r.changes))),
    word("MESSAGE", lambda r: r.view.message),
)


def _ready(view: RevisionView) -> str:
    return f"{view.ready}/{view.wanted}" if view.wanted else str(view.ready)


def _rows(views: Sequence[RevisionView]) -> list[_Row]:
    """In the order of the views, which need not be that of their numbers."""
    before: RevisionView | None = None
    found: dict[int, tuple[Change, ...]] = {}
    for view in sorted(views, key=lambda v: v.number):
        found[view.number] = () if before is None else changes(before.spec, view.spec)
        before = view
    return [_Row(view=view, changes=found[view.number]) for view in views]


@click.group()
def rollout() -> None:
    """Show a deployment's revisions, or go back to an earlier one."""


@rollout.command()
@click.argument("name")
@format_option
@controller_option
def status(name: str, form: Format, address: str) -> None:
    """Show the revisions of a deployment: which serves, which comes, what each changed, and why one
    failed."""
    with MeshClient(address) as client:
        views = _revisions(client.get(DeploymentName(name)))
    output.answer(form, _COLUMNS, _rows(views), views)


@rollout.command()
@click.argument("name")
@click.option("--to", metavar="NUMBER", type=click.IntRange(min=1), help="Which one.")
@click.option("--wait", is_flag=True, help="Wait until it serves.")
@timeout_option(600.0, "How long --wait waits.")
@controller_option
def undo(name: str, to: int | None, wait: bool, timeout_s: float, address: str) -> None:
    """Give up the revision that is to take over, or go back to the one that served before."""
    with MeshClient(address) as client:
        done = client.undo(DeploymentName(name), to)
        if wait:
            wait_for(client, DeploymentName(name), Goal.READY, timeout_s)
            done = _serving(_revisions(client.get(DeploymentName(name))), done)
    output.message(f"{name}: {done}")


def _serving(views: Sequence[RevisionView], done: str) -> str:
    """How the wait ended, in words; `done` where no revision serves."""
    for view in views:
        if view.state is RevisionState.SERVING:
            return f"revision {view.number} serves, {_ready(view)} instances ready"
    return done


def _revisions(found: DeploymentSnapshot) -> tuple[RevisionView, ...]:
    """One that has never been changed has only itself."""
    alone = RevisionView(
        number=found.revision,
        state=RevisionState.SERVING if found.model is not None else RevisionState.IMPORTING,
        spec=found.spec,
        ready=sum(one.state in ("ready", "parked") for one in found.instances),
        wanted=found.spec.scaling.replicas_min,
        requests=found.running + found.queued,
    )
    return found.revisions or (alone,)
