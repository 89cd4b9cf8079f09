"""`mesh rollout`: the revisions of a deployment, and the way back to an earlier one."""

import click

from mesh.cli import output
from mesh.cli.options import controller_option, format_option, timeout_option
from mesh.cli.output import Column, Format, number, word
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.ids import DeploymentName
from mesh.domain.revision import RevisionState
from mesh.domain.views import DeploymentSnapshot, RevisionView
from mesh.wire.client import MeshClient

_COLUMNS: tuple[Column[RevisionView], ...] = (
    number("REVISION", lambda v: v.number),
    word("STATE", lambda v: v.state),
    word("READY", lambda v: f"{v.ready}/{v.wanted}" if v.wanted else str(v.ready)),
    number("REQUESTS", lambda v: v.requests),
    word("SOURCE", lambda v: v.spec.source),
    word("MESSAGE", lambda v: v.message),
)


@click.group()
def rollout() -> None:
    """Show a deployment's revisions, or go back to an earlier one."""


@rollout.command()
@click.argument("name")
@format_option
@controller_option
def status(name: str, form: Format, address: str) -> None:
    """Show the revisions of a deployment: which serves, which comes, and why one failed."""
    with MeshClient(address) as client:
        views = _revisions(client.get(DeploymentName(name)))
    if form is Format.TABLE:
        output.table(_COLUMNS, views)
    else:
        output.structured(views, form)


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
    output.message(f"{name}: {done}")


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
