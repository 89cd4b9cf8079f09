"""`make load`: two minutes of generated calls against a cell of this machine, by locust.

It starts a cell in a temporary home, with 16 deployments of the demo model and memory for 6 of them
at once, replays, and stops everything. The report stays. Only the model store is the usual one.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.cell import LocalCell, running_cell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.main import run
from mesh.cli.options import home_option
from mesh.cli.progress import progress
from mesh.cli.stopping import Stopping
from mesh.cli.verbs.demo import SOURCE, temporary_home
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError, StorageError, Unavailable, system_errors
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient
from mesh_load import LOCUSTFILE

DEPLOYMENTS = 16
ROOM = 6
MEMORY_BYTES = 820 << 20
"""For ROOM instances: the process and the weights that all of them share take some 535 MiB, and
each instance with its KV cache some 47 more. Measured: 650 hold 2 at once, 740 hold 4, 780 hold 5,
820 and 860 hold 6.
"""
CONTEXT_TOKENS = 1024
SLO = Slo(ttft_s=4.0, ttft_tokens_per_s=128.0, tpot_s=0.4)
CALLS_PER_S = 1.0
TOKENS_SCALE = 0.1
"""The lengths of a published trace are scaled by this: 115 tokens in and 21 out, on two cores."""
WATCH_S = 0.5
LOCUST_S_MAX = 120.0
"""After the last call was due."""


@click.command()
@click.option("--seconds", type=click.FloatRange(min=1.0), default=120.0, show_default=True)
@click.option(
    "--report",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".mesh/load"),
    show_default=True,
    help="Where the page, the record and locust's files go.",
)
@home_option
def load(seconds: float, report: Path, home: Path) -> None:
    """Load a cell of this machine for a while, then stop everything."""
    hint = "choose another one with --report"
    with system_errors(StorageError, f"cannot make the folder {report}", hint):
        report.mkdir(parents=True, exist_ok=True)
    with Stopping() as stopping, temporary_home(home / "store") as scratch:
        plan = CellPlan(
            listen="127.0.0.1:0",
            home=scratch,
            nodes=plan_nodes(["cpu"]),
            memory_bytes=MEMORY_BYTES,
        )
        with running_cell(plan, stopping, output.message) as cell:
            _deploy(cell.address, stopping)
            code = _replay(cell, seconds, report, stopping)
    if stopping.asked():
        raise KeyboardInterrupt
    if code:
        raise MeshError(
            f"locust ended with exit code {code}", hint=f"what it said is above; see {report}"
        )


def _deploy(address: str, stopping: Stopping) -> None:
    """The first one imports the model."""
    with MeshClient(address) as client, progress("deploy") as show:
        for number in range(DEPLOYMENTS):
            if stopping.asked():
                raise KeyboardInterrupt
            show(f"{number} of {DEPLOYMENTS} deployments", number / DEPLOYMENTS)
            client.deploy(
                DeploymentSpec(
                    name=DeploymentName(f"chat-{number:02}"),
                    source=SOURCE,
                    context_tokens_max=CONTEXT_TOKENS,
                    slo=SLO,
                    scaling=Scaling(replicas_max=1, keep_alive_s=10.0),
                )
            )


def _replay(cell: LocalCell, seconds: float, report: Path, stopping: Stopping) -> int:
    """Locust's exit code. A signal is handed on to it once, and its report is waited for."""
    locust = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "mesh.cli.tied", str(os.getpid())),
            *("locust", "-f", str(LOCUSTFILE)),
            *("--headless", "--only-summary", "--loglevel", "WARNING", "--host", cell.address),
            *("--generate", str(CALLS_PER_S), "--duration", str(seconds), "--map", "popularity"),
            *("--tokens-scale", str(TOKENS_SCALE), "--report", str(report / "replay.html")),
            *("--record", str(report / "replay.csv"), "--html", str(report / "locust.html")),
            *("--csv", str(report / "locust"), "--json-file", str(report / "locust")),
        ],
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    begun_s = time.monotonic()
    told, loaded = False, 0
    try:
        with MeshClient(cell.address) as client, progress("replay") as show:
            while locust.poll() is None:
                cell.check_alive()
                # The controller may be slow under its load, and this figure may do without a look.
                with suppress(Unavailable):
                    loaded = max(loaded, sum(len(node.instances) for node in client.nodes()))
                passed_s = time.monotonic() - begun_s
                if passed_s > seconds + LOCUST_S_MAX:
                    raise MeshError(
                        f"locust has not ended {LOCUST_S_MAX:g} s after the last call",
                        hint=f"the calls that had ended are in {report / 'replay.csv'}",
                    )
                if stopping.asked() and not told:
                    locust.send_signal(signal.SIGINT)
                    told = True
                show(f"calls of {seconds:g} s", min(passed_s / seconds, 1.0))
                time.sleep(WATCH_S)
    finally:
        if locust.poll() is None:
            locust.kill()
            locust.wait()
    said = f"at most {loaded} of {DEPLOYMENTS} deployments were loaded; there is memory for {ROOM}"
    few = ": a busy machine refuses calls for want of time before its memory is full"
    output.message(said + few if loaded < ROOM else said)
    return locust.returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], load))
