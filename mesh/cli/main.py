"""The composition root of `mesh`: the verbs, the exit codes, and what becomes of every failure.

Exit codes: 0 done, 1 failed (partial success is failure), 2 usage, 130 interrupted, 141 nobody
reads the output any more. A failure is two lines on stderr, whatever raised it.
"""

import difflib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import click

from mesh import __version__
from mesh.cli import output
from mesh.domain.errors import InvalidInput, MeshError
from mesh.wire.credentials import TLS_VARIABLE, client_tls, read_credentials, show

DONE, FAILED, USAGE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141

VERBS = {
    "up": "Start a cell on this machine; Ctrl-C stops all of it.",
    "controller": "Run a cell's controller in the foreground.",
    "node": "Run a node agent in the foreground.",
    "fleet": "Run node agents on machines of a Ray cluster.",
    "front": "Serve clients before several cells, in the foreground.",
    "deploy": "Deploy models from manifests.",
    "rollout": "Show a deployment's revisions, or go back to an earlier one.",
    "get": "List deployments, or show one.",
    "describe": "Show one deployment or node in full.",
    "wait": "Wait until deployments are ready, loaded or gone.",
    "scale": "Change a deployment's scaling limits.",
    "plan": "Plan how many instances a deployment needs, on which nodes.",
    "load": "Load deployments ahead of their first call.",
    "unload": "Have the instances of deployments go.",
    "delete": "Delete deployments.",
    "profile": "Measure a model's iteration times on a node, or show them.",
    "models": "List the models that the cell serves.",
    "state": "Copy a cell's registry between SQLite and PostgreSQL.",
    "pull": "Import a model into this machine's store.",
    "store": "List, check and clear this machine's model store.",
    "invoke": "Ask a deployment: one prompt, one answer.",
    "chat": "Talk with a deployment.",
    "requests": "List the requests that are being answered.",
    "cancel": "End requests.",
    "nodes": "List the cell's nodes.",
    "drain": "Give a node no new work.",
    "status": "Show the cell in a few numbers, and how instances keep up.",
    "usage": "Show what was used: by deployment, hour, tenant or key.",
    "tls": "Make certificates for a cell.",
    "key": "Make, list and revoke keys; limit tenants.",
    "top": "Watch memory, instances and memory operations, live.",
    "logs": "Show what happened in the cell.",
    "report": "Report what the cell did within the last hour.",
    "page": "Show a controller's journal in the browser.",
    "replay": "Send a trace's calls to the cell, each at its time.",
    "sim": "Run a scenario under a virtual clock, or replay a journal.",
    "bench": "Repeat a measurement, such as the paper's evaluation.",
    "demo": "Show mesh at work on this machine.",
    "version": "Print the version of this mesh.",
}
"""In the order in which one works with them. A verb's command has its name, and so has its module
but for those of MODULES.
"""
MODULES = {
    **dict.fromkeys(("load", "unload", "delete", "cancel"), "each"),
    **dict.fromkeys(("get", "describe", "models", "nodes", "requests", "status"), "showing"),
}


SERVERS = ("controller", "front", "node", "up")
"""Verbs with certificates of their own."""


class Verbs(click.Group):
    """Imports a verb when it is used: `mesh get` should wait for no engine, store or server."""

    verbs: ClassVar = VERBS
    module = "mesh.cli.verbs.{}"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return None
        module = importlib.import_module(self.module.format(MODULES.get(cmd_name, cmd_name)))
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.verbs:
            close = difflib.get_close_matches(args[0], self.verbs, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise click.UsageError(f"there is no command {args[0]!r}{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.verbs.items()))


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--traceback", is_flag=True, help="On a failure, show where it came from.")
@click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A key for the cell; default: MESH_KEY.",
)
@click.option(
    "--tls",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    envvar=TLS_VARIABLE,
    show_envvar=True,
    help="Certificates for the cell: ca.pem, client.pem, client.key.",
)
@click.version_option(__version__, "--version", message="mesh %(version)s")
@click.pass_context
def mesh(ctx: click.Context, traceback: bool, key_file: Path | None, tls: Path | None) -> None:
    """Serve many small language models from few machines, each within its SLO."""
    verb = ctx.invoked_subcommand
    if verb in SERVERS and tls is not None:
        ctx.default_map, tls = {verb: {"tls": str(tls)}}, None
    show(read_credentials(os.environ, key_file, None if tls is None else client_tls(tls)))
    if verb is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str], command: click.Command = mesh) -> int:
    """Run one command line, of `mesh` unless given; the exit code."""
    try:
        # Not through click's own main(): it would write a line of its own on Ctrl-C.
        with command.make_context(command.name, list(arguments)) as ctx:
            command.invoke(ctx)
        sys.stdout.flush()
        return DONE
    except click.exceptions.Exit as end:
        return end.exit_code
    except BrokenPipeError:
        _forget_stdout()
        return UNREAD
    except (KeyboardInterrupt, click.Abort, EOFError):
        return INTERRUPTED
    except Exception as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        return _tell(error)


def _tell(error: Exception) -> int:
    match error:
        case MeshError():
            output.error(error)
            return USAGE if isinstance(error, InvalidInput) else FAILED
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "mesh"
            said = error.format_message().rstrip(".")
            output.error(
                InvalidInput(
                    said[:1].lower() + said[1:], hint=f"`{path} --help` shows what is accepted"
                )
            )
            return USAGE
        case OSError():
            reason = error.strerror or str(error)
            what = f"{error.filename}: {reason}" if error.filename else reason
            output.error(MeshError(what, hint="check the path, its permissions and free space"))
        case _:
            output.error(
                MeshError(
                    f"unexpected {type(error).__name__}: {error}",
                    hint="this is a fault of mesh; `mesh --traceback …` shows where",
                )
            )
    return FAILED


def _forget_stdout() -> None:
    """Python flushes stdout once more as it ends: let that go nowhere, not to a closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def main() -> None:
    """The console script."""
    # Whoever started this may have these otherwise, as supervisors and scripts do: then no child's
    # exit code would come back, or SIGTERM never arrive.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks is spelled out; it is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run(sys.argv[1:]))
