"""`mesh node`: one node agent in the foreground, as `python -m mesh_nodes` runs it."""

from pathlib import Path

import click

from mesh.cli.options import (
    DEFAULT_ADDRESS,
    home_option,
    kv_option,
    precision_option,
    sources_option,
)
from mesh.domain.reasons import DeviceKind
from mesh.wire.credentials import TLS_VARIABLE
from mesh_loader.digests import Verify
from mesh_nodes.main import main as run_node


@click.command()
@click.option(
    "--join",
    metavar="HOST:PORT",
    envvar="MESH_CONTROLLER",
    show_envvar=True,
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="The controller of the cell to join.",
)
@click.option("--name", help="The node's name in its cell; default: <host>-cpu0.")
@click.option(
    "--device",
    type=click.Choice([kind.value for kind in DeviceKind]),
    default=DeviceKind.CPU.value,
    show_default=True,
    help="What it computes on.",
)
@click.option("--gpu", type=int, metavar="N", help="With --device gpu: which one; default: 0.")
@click.option("--engine", metavar="NAME", help="openvino or vllm; default: the device's own.")
@click.option("--memory", metavar="SIZE", help="Limit of its process; default: 70 % of what is.")
@click.option(
    "--prefetch-memory",
    metavar="SIZE",
    help="Of that, for models loaded before they are called, 0 for none; default: a quarter.",
)
@click.option(
    "--page-cache",
    metavar="SIZE",
    help="Of the memory beside it, for files that loads will read; default: half.",
)
@click.option("--threads", type=int, help="Threads to compute with; default: the usable cores.")
@click.option("--numa", type=int, metavar="N", help="CPUs of NUMA node N alone, near its memory.")
@precision_option
@kv_option
@click.option("--asleep", type=int, metavar="N", help="Unloaded models kept in host memory (GPU).")
@click.option("--asleep-memory", metavar="SIZE", help="Host memory for them; default: half.")
@click.option(
    "--verify",
    type=click.Choice([when.value for when in Verify]),
    default=Verify.FIRST.value,
    show_default=True,
    help="When a load checks the digests of its files.",
)
@click.option("--download-rate", metavar="SIZE", help="A second, for http and s3; default: any.")
@sources_option
@click.option("--tls", metavar="DIR", envvar=TLS_VARIABLE, help="As of `mesh tls init DIR`.")
@click.option("--key-file", metavar="FILE", help="The node's key for the cell; default: MESH_KEY.")
@click.option("--policy", metavar="FILE.py", help="The controller's, if it has a turn rule.")
@click.option("--journal", metavar="FILE", help="Write every decision of this node there.")
@home_option
@click.pass_context
def node(
    ctx: click.Context,
    join: str,
    name: str | None,
    device: str,
    gpu: int | None,
    engine: str | None,
    memory: str | None,
    prefetch_memory: str | None,
    page_cache: str | None,
    threads: int | None,
    numa: int | None,
    precision: str,
    kv: str,
    asleep: int | None,
    asleep_memory: str | None,
    verify: str,
    download_rate: str | None,
    sources: tuple[str, ...],
    tls: str | None,
    key_file: str | None,
    policy: str | None,
    journal: str | None,
    home: Path,
) -> None:
    """Run a node agent in the foreground: this machine computes for a cell."""
    arguments = ["--join", join, "--device", device, "--home", str(home)]
    arguments += ["--verify", verify, "--precision", precision, "--kv", kv]
    for rules in sources:
        arguments += ["--sources", rules]
    optional = (
        *(("--name", name), ("--gpu", gpu), ("--engine", engine), ("--memory", memory)),
        *(("--threads", threads), ("--asleep", asleep), ("--asleep-memory", asleep_memory)),
        *(("--prefetch-memory", prefetch_memory), ("--page-cache", page_cache)),
        ("--download-rate", download_rate),
        *(("--policy", policy), ("--journal", journal), ("--key-file", key_file)),
        *(("--tls", tls), ("--numa", numa)),
    )
    for option, value in optional:
        if value is not None:
            arguments += [option, str(value)]
    ctx.exit(run_node(arguments))
