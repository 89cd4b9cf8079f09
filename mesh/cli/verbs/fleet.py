"""`mesh fleet`: node agents on machines of a Ray cluster, as many as are wanted.

Ray supplies machines and starts what dies; it has no part in what the cell does.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mesh.cli import output
from mesh.cli.options import format_option
from mesh.cli.output import Column, Format, number, word
from mesh.domain.errors import InvalidInput, MeshError
from mesh.report.plain import plain

if TYPE_CHECKING:
    from mesh_fleet.keeper import AgentSeen
    from mesh_fleet.supplier import FleetSeen

UP_S_MAX, PLACES_S_MAX = 60.0, 8.0
"""How long all agents are waited for, and how long machines are of which Ray has too few."""
STEADY_S = 3.0
"""An agent that has lived for so long has good options."""
STARTS_MAX = 3
"""`up` waits no longer for one that has been started so often and does not run."""
POLL_S = 0.5
Command = TypeVar("Command", bound=Callable[..., Any])

AGENTS: "tuple[Column[AgentSeen], ...]" = (
    word("HOST", lambda a: a.host),
    word("DEVICE", lambda a: a.device),
    word("STATE", lambda a: _state(a)),
    number("PID", lambda a: a.pid),
    number("ALIVE_S", lambda a: f"{a.alive_s:.0f}" if a.pid else None),
    number("STARTS", lambda a: a.starts),
    word("FAILURE", lambda a: a.failure),
)


def _state(agent: "AgentSeen") -> str:
    if agent.leaving:
        return "draining"
    return "running" if agent.pid else "starting"


def ray_options(command: Command) -> Command:
    """`--ray` and `--device`."""
    device = click.option(
        "--device",
        type=click.Choice(["cpu", "gpu"]),
        default="cpu",
        show_default=True,
        help="The fleet of these nodes; its machines have Ray's resource mesh_cpu or mesh_gpu.",
    )
    address = click.option(
        "--ray",
        "address",
        metavar="HOST:PORT",
        envvar="RAY_ADDRESS",
        required=True,
        show_envvar=True,
        help="The head of a Ray cluster.",
    )
    return address(device(command))


@click.group()
def fleet() -> None:
    """Run node agents on machines of a Ray cluster."""
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        raise MeshError(
            "`mesh fleet` needs Ray, which is not installed", hint="pip install 'mesh-serve[ray]'"
        ) from error


@fleet.command(context_settings={"ignore_unknown_options": True})
@ray_options
@click.option("--nodes", metavar="N", type=click.IntRange(0, 10_000), help="As many nodes.")
@click.option(
    "--wanted",
    metavar="URL,…",
    help="As many nodes as the controller wants that serves HTTP there (--nodes-wanted).",
)
@click.option("--join", metavar="HOST:PORT,…", required=True, help="As of mesh node.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), metavar="FILE", help="As of mesh node."
)
@click.option("--tls", type=click.Path(path_type=Path), metavar="DIR", help="As of mesh node.")
@click.option("--home", default="", metavar="DIR", help="As of mesh node.")
@click.argument("node_options", nargs=-1, type=click.UNPROCESSED)
def up(
    address: str,
    device: str,
    nodes: int | None,
    wanted: str | None,
    join: str,
    key_file: Path | None,
    tls: Path | None,
    home: str,
    node_options: tuple[str, ...],
) -> None:
    """Have agents run, with NODE_OPTIONS as of `mesh node`; a fleet that is there changes to this.
    Agents that run already stay as they are.
    """
    from mesh_fleet.fleet import connected, install, seen
    from mesh_fleet.supplier import FleetSpec

    if (nodes is None) == (wanted is None):
        raise click.UsageError("give --nodes or --wanted")
    for given in node_options:
        if given.partition("=")[0] in ("--name", "--device", "--gpu"):
            raise InvalidInput(f"{given} is the fleet's to give: its agents differ in it")
    paths = [("--key-file", key_file), ("--tls", tls)]
    arguments = ["--join", join, *node_options]
    arguments += [text for flag, path in paths if path for text in (flag, str(path.absolute()))]
    spec = FleetSpec(
        device=device,
        arguments=tuple(arguments),
        home=home,
        nodes=nodes,
        wanted=tuple(url.rstrip("/") for url in (wanted or "").split(",") if url),
        key_file=key_file and key_file.absolute(),
        authority=tls and (tls / "ca.pem").absolute(),
    )
    with connected(address):
        install(spec)
        began_s = time.monotonic()
        while not _settled(found := seen(device)):
            lacks = found.looked and found.places < (found.wanted or 0)
            if time.monotonic() - began_s >= (PLACES_S_MAX if lacks else UP_S_MAX):
                break
            if any(agent.pid is None and agent.starts >= STARTS_MAX for agent in found.agents):
                break
            time.sleep(POLL_S)
    _show(found, Format.TABLE)
    if not _settled(found):
        raise MeshError(_lacks(found, device), hint="`mesh fleet status` shows how it goes on")


@fleet.command()
@ray_options
@format_option
def status(address: str, device: str, form: Format) -> None:
    """Show a fleet: how many nodes are wanted, and each agent."""
    from mesh_fleet.fleet import connected, seen

    with connected(address):
        found = seen(device)
    _show(found, form)


@fleet.command()
@ray_options
@click.argument("nodes", metavar="N|wanted")
def scale(address: str, device: str, nodes: str) -> None:
    """Have N nodes, or as many as the controller wants."""
    from mesh_fleet.fleet import change, connected

    if nodes != "wanted" and not (nodes.isdecimal() and int(nodes) <= 10_000):
        raise InvalidInput(f"{nodes!r} is neither a number of nodes up to 10000 nor `wanted`")
    with connected(address):
        change(device, None if nodes == "wanted" else int(nodes))
    output.message(f"the {device} fleet is to have {nodes} nodes")


@fleet.command()
@ray_options
@click.option("--timeout", metavar="SECONDS", type=click.FloatRange(1, 3600), default=120.0)
def down(address: str, device: str, timeout: float) -> None:
    """Drain all agents of a fleet, and end it."""
    from mesh_fleet.fleet import connected, end

    with connected(address):
        end(device, timeout)
    output.message(f"the {device} fleet has ended")


def _settled(found: "FleetSeen") -> bool:
    steady = [a for a in found.agents if a.alive_s >= STEADY_S and not a.leaving]
    return found.looked and len(steady) == found.wanted


def _lacks(found: "FleetSeen", device: str) -> str:
    if found.problem:
        return found.problem
    failures = [agent.failure for agent in found.agents if agent.failure]
    if failures:
        return f"an agent ended: {failures[0]}"
    have = f"Ray has {found.places} devices for it (resource mesh_{device})"
    return f"{found.wanted} nodes are wanted; {have}"


def _show(found: "FleetSeen", form: Format) -> None:
    if form is not Format.TABLE:
        output.structured(plain(found), form)
        return
    said = "not known" if found.wanted is None else str(found.wanted)
    told = [("wanted", said), ("devices", str(found.places)), ("waiting", str(found.waiting))]
    output.fields(told + [("problem", found.problem)] * bool(found.problem))
    output.table(AGENTS, found.agents)
