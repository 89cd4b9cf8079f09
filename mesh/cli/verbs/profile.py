"""`mesh profile`: measure the iteration times of a deployment's model, or show what is known.

The controller has a node measure and keeps the result under the node's fingerprint; every schedule
on nodes of that fingerprint uses it from then on. Showing and drawing change nothing.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli import profile_tables as tables
from mesh.cli.options import check_plotting, controller_option, format_option, in_folder
from mesh.cli.output import Format
from mesh.cli.progress import progress
from mesh.domain.errors import NotFound
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.model import decodes
from mesh.domain.views import ProfileView
from mesh.wire.client import MeshClient

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def _plot_path(ctx: click.Context, option: click.Parameter, value: str | None) -> Path | None:
    if value is None:
        return None
    path = Path(value)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise click.BadParameter(f"{value!r} does not end in {', '.join(PLOT_SUFFIXES)}")
    return in_folder(ctx, option, path)


def _cores(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(each) for each in value.split(",")})) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list such as 1,2,4") from None


@click.command()
@click.argument("name")
@click.option("--node", metavar="NODE", help="Measure there, or show what holds there.")
@click.option(
    "--show/--measure",
    default=None,
    help="Show what is known, or measure; default: measure, but with --plot show.",
)
@click.option(
    "--plot",
    metavar="FILE",
    callback=_plot_path,
    help="Draw the times to a .png, .svg or .pdf file.",
)
@click.option(
    "--operators",
    is_flag=True,
    help="Count what operators (attention, matrix products, norms) take, too, or show it.",
)
@click.option(
    "--cores",
    metavar="N,N,…",
    callback=_cores,
    help="With --operators: count once more with so many of the node's cores.",
)
@format_option
@controller_option
def profile(
    name: str,
    node: str | None,
    show: bool | None,
    plot: Path | None,
    operators: bool,
    cores: tuple[int, ...],
    form: Format,
    address: str,
) -> None:
    """Measure iteration times of a deployment's model, or show what is known."""
    if cores and not operators:
        raise click.UsageError("--cores is for --operators")
    if plot is not None:
        check_plotting("--plot")  # before minutes are spent on measuring
    deployment, node_id = DeploymentName(name), None if node is None else NodeId(node)
    with MeshClient(address) as client:
        if show or (show is None and plot is not None):
            views = _known(client, deployment, node_id, operators=operators)
            _show(views, form, whole=node_id is None, operators=operators)
        else:
            views = (_measure(client, deployment, node_id, operators=operators, cores=cores),)
            _tell(name, views[0], form, operators=operators)
    if plot is not None:
        _draw(name, views, plot, operators=operators)


def _known(
    client: MeshClient, name: DeploymentName, node_id: NodeId | None, *, operators: bool
) -> tuple[ProfileView, ...]:
    """Raises NotFound when there is nothing to show, so that an answer holds at least one."""
    views = client.profiles(name)
    if node_id is not None:
        if all(node.node_id != node_id for node in client.nodes()):
            raise NotFound(f"there is no node {node_id!r}", hint="`mesh nodes` lists nodes")
        views = tuple(view for view in views if node_id in view.nodes)
    if not views:
        where = "" if node_id is None else f" on node {node_id}"
        wanted = "" if node_id is None else f" --node {node_id}"
        raise NotFound(
            f"no profile of {name} is known{where}", hint=f"run `mesh profile {name}{wanted}`"
        )
    if operators and not any(view.profile.operators for view in views):
        raise NotFound(
            f"no operators of {name} have been counted",
            hint=f"run `mesh profile {name} --operators`",
        )
    return views


def _measure(
    client: MeshClient,
    name: DeploymentName,
    node_id: NodeId | None,
    *,
    operators: bool,
    cores: tuple[int, ...],
) -> ProfileView:
    """Measure, and find among what is known then what this has added."""
    try:
        before = {view.profile for view in client.profiles(name)}
    except NotFound:
        before = set()  # if it is the deployment that is missing, measuring says so
    with progress(name) as report:
        client.profile(name, node_id, report, operators=operators, cores=cores)
    measured = [view for view in client.profiles(name) if view.profile.measured]
    if node_id is not None:
        measured = [view for view in measured if node_id in view.nodes] or measured
    fresh = [view for view in measured if view.profile not in before] or measured
    if not fresh:
        raise NotFound(
            f"{name} was measured, but its profile has gone since",
            hint=f"`mesh logs {name}` shows what happened",
        )
    profile = fresh[0].profile
    if len(profile.by_cores) < len(cores) or (operators and not profile.operators):
        raise NotFound(
            f"{name} was measured, but its node has counted no operators",
            hint="run controller and nodes of one version",
        )
    return fresh[0]


def _tell(name: str, view: ProfileView, form: Format, *, operators: bool) -> None:
    if form is not Format.TABLE:
        output.structured(view, form)
        return
    profile = view.profile
    nodes = ", ".join(view.nodes) or "no node that is here now"
    output.message(f"{name}: {tables.origin(profile)}, on {profile.hardware}")
    output.message(f"{name}: kept under fingerprint {profile.fingerprint}; holds for {nodes}")
    if operators:
        _show_operators(view)


def _show_operators(view: ProfileView) -> None:
    for title, headings, rows in tables.operators(view.profile):
        output.text(f"\n{title}")
        output.table(output.text_columns(headings), rows)


def _show(views: Sequence[ProfileView], form: Format, *, whole: bool, operators: bool) -> None:
    """All of them, or the only one that holds for a node."""
    if form is not Format.TABLE:
        output.structured(views if whole else views[0], form)
        return
    for number, view in enumerate(views):
        if number:
            output.text("")
        output.fields(tables.profile_fields(view))
        prefill, decode = view.profile.prefill, view.profile.decode
        output.text(f"\n{tables.PREFILL}")
        output.table(*tables.prefill(prefill))
        if decodes(view.profile.model_id):
            output.text(f"\n{tables.DECODE}")
            output.table(*tables.decode(decode))
        if operators:
            _show_operators(view)


def _draw(name: str, views: Sequence[ProfileView], path: Path, *, operators: bool) -> None:
    from mesh.cli import profile_plot

    profile_plot.draw(name, views, path, operators=operators)
    output.message(f"{name}: drawn in {path}")
