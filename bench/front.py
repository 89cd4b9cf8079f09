"""Times the choices of a front's core alone, and what a front adds before a cell on this machine.

First, cells that exist on paper only. What is timed is `handle`: a request that comes and is asked
of a cell, and its end. Cells have `--deployments` each of which two cells serve; half of the
requests find a loaded instance with room, the others the less busy of two cells. The looks of all
cells in between, twice a second at the most, count as well. Then a cell is asked directly and
through a front, in turn, by gRPC. Its node computes nothing and takes 20 ms for each iteration, for
what a model computes differs by more from call to call than a front adds; 16 streams get 800 tokens
a second.

The last line is one JSON object: `choices_per_s` of processor time by cells, of the median round;
`ttft_added_ms` of lone requests and `token_added_ms` of 16 streams (medians over rounds of the
difference of the round's medians), and `relayed_per_s`, the tokens that a front relays in a second
of its processor time at 800 a second; `resting_ms_per_s` is what it computes before one cell while
nobody asks. With `--standby` a second such cell has its registry in PostgreSQL and a controller
that stands by: `ttft_standby_ms` and `token_standby_ms` say how much more that takes than the
first. It wants PostgreSQL's `initdb`, and the extra `cluster`. With `--ray`, too, that cell has an
agent which `mesh fleet` keeps on a Ray of two machines; it wants the extra `ray`, and a network and
processes of its own, as root: `unshare --net --uts --pid --fork --kill-child --mount-proc sh -c 'ip
link set lo up && exec "$@"' sh .venv-ray/bin/python -m bench front --standby --ray`.
"""

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil

from bench.cells import deployed, scripted_cell, wait_until
from bench.demo_model import SOURCE
from bench.harness import Report, Table, in_turn
from bench.http import NAME, Round, by_grpc, measure
from bench.overhead import CONTEXT_TOKENS, SLO
from mesh.cli import children
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import free_address
from mesh.core.front import FrontCore, ranked
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.events import InvokeRequested
from mesh.domain.front import CellEnded, CellLook, CellSeen, DeploymentLook
from mesh.domain.ids import CellName, DeploymentName, ModelId, RequestId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import Request
from mesh.wire.channel import dial
from mesh.wire.client import MeshClient
from mesh.wire.leader import Look, look
from tests.support.postgres_server import PostgresServer, binaries
from tests.support.ray_machines import RayMachines

HOMES = 2
LOOKS_PER_S = 2.0
CHOICES_PER_S_MIN = 5_000
STEP_S = 0.02
"""An iteration of the node that computes nothing."""
RESTING_S = 5.0
ADDED = {"front": "added", "standby": "standby"}
"""What the figures call that which comes with each of them."""
SPEC = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)


def looks_of(cells: int, deployments: int) -> list[CellSeen]:
    """A look at each of so many cells, which together serve so many deployments for each."""
    names = [CellName(f"cell-{n}") for n in range(cells)]
    served: dict[CellName, list[DeploymentLook]] = {name: [] for name in names}
    for n in range(cells * deployments // HOMES):
        name = DeploymentName(f"d-{n}")
        for home in ranked(name, names)[:HOMES]:
            look = DeploymentLook(name=name, model_id=ModelId(f"m-{n}"), room=1000 * (n % 2))
            served[home].append(look)
    return [
        CellSeen(
            cell=name,
            leader="1",
            look=CellLook(deployments=tuple(served[name]), nodes=10, requests=n % 7),
        )
        for n, name in enumerate(names)
    ]


def rates(cells: int, deployments: int, requests: int, rounds: int) -> list[float]:
    """Choices a second, of each round."""
    looks = looks_of(cells, deployments)
    core = FrontCore([one.cell for one in looks])
    for one in looks:
        core.handle(one, 0.0)
    names = cells * deployments // HOMES
    return [rate(core, looks, names, requests) for _ in range(rounds)]


def rate(core: FrontCore, looks: list[CellSeen], names: int, requests: int) -> float:
    asked = [
        Request(
            request_id=RequestId(f"r-{n}"),
            deployment=DeploymentName(f"d-{n % names}"),
            prompt_tokens=(1,) * 64,
        )
        for n in range(requests)
    ]
    began_s = looked_s = time.process_time()
    for n, request in enumerate(asked):
        now_s = time.process_time()
        core.handle(InvokeRequested(request=request), now_s)
        ended = CellEnded(
            request_id=request.request_id,
            attempt=1,
            error="Refused",
            message="",
            reason=RefusalReason.TENANT_LIMIT,
        )
        core.handle(ended, now_s)
        if now_s - looked_s > 1.0 / LOOKS_PER_S / len(looks):
            looked_s = now_s
            core.handle(looks[n % len(looks)], now_s)
    return requests / (time.process_time() - began_s)


def fronted(rounds: int, standby: bool, ray: bool) -> tuple[dict[str, list[Round]], float]:
    """Rounds of each contender; the first round warms up. The processor time is the front's in its
    own and the controller's in the others. Then the front's of a second in which nobody asks in ms.
    """
    with ExitStack() as opened:
        cell = opened.enter_context(scripted_cell(step_s=STEP_S))
        deployed(cell.address, [SPEC])
        at, front = opened.enter_context(front_before(cell))
        asks = {"cell": (cell.address, _controller(cell)), "front": (at, front)}
        if standby:
            other = opened.enter_context(standby_cell())
            deployed(other.address, [SPEC])
            if ray:
                opened.enter_context(fleet_of(other))
            asks["standby"] = other.address, _controller(other)
        found: dict[str, list[Round]] = {name: [] for name in asks}
        for number, name, (address, process) in in_turn(asks, rounds, warm_ups=1):
            one = measure(partial(by_grpc, address, NAME), process)
            found[name] += [one] if number > 0 else []
        before = front.cpu_times()
        time.sleep(RESTING_S)
        after = front.cpu_times()
    resting_s = after.user + after.system - before.user - before.system
    return found, 1e3 * resting_s / RESTING_S


def _controller(cell: LocalCell) -> psutil.Process:
    return psutil.Process(cell.children[0].process.pid)


@contextmanager
def front_before(
    cell: LocalCell, name: DeploymentName = NAME
) -> Iterator[tuple[str, psutil.Process]]:
    """A front's address and its process, once it serves a deployment of this name."""
    at = free_address("127.0.0.1:0")
    options = ("--cells", f"cell={cell.address}", "--listen", at, "--http", "off")
    with tempfile.TemporaryDirectory() as folder:
        home = ("--home", folder)
        front = children.start("front", "mesh.front", (*options, *home), Path(folder) / "front.log")
        try:
            wait_until(lambda: _serves(at, name), "the front does not serve", cell=cell)
            yield at, psutil.Process(front.process.pid)
        finally:
            children.stop([front])


@contextmanager
def standby_cell() -> Iterator[LocalCell]:
    """A cell whose registry is in PostgreSQL, and a controller that stands by. Raises MeshError."""
    found = binaries()
    if found is None or find_spec("asyncpg") is None:
        raise Unavailable(
            "no PostgreSQL here, or no driver of it",
            hint="apt-get install postgresql; pip install 'mesh-serve[cluster]'",
        )
    with ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        server = PostgresServer(found)
        opened.callback(server.close)
        server.start()
        state, at = server.url(database="postgres"), free_address("127.0.0.1:0")
        cell = opened.enter_context(scripted_cell(step_s=STEP_S, state=state))
        options = ("--state", state, "--listen", at, "--home", str(home))
        second = children.start("the standby", "mesh.controller", options, home / "log")
        opened.callback(children.stop, [second])
        wait_until(lambda: asyncio.run(_stands_by(at)), "none stands by", cell=cell)
        yield cell


@contextmanager
def fleet_of(cell: LocalCell) -> Iterator[None]:
    """A Ray that runs an agent which joins the cell. Raises MeshError."""
    if find_spec("ray") is None or [name for _, name in socket.if_nameindex()] != ["lo"]:
        hint = "python -m bench front --help says how to start it"
        raise Unavailable("no Ray here, or a network that others use", hint=hint)
    with tempfile.TemporaryDirectory() as folder, MeshClient(cell.address) as client:
        machines = RayMachines(Path(folder), ["m1"])
        try:
            machines.start()
            agent = ("--join", cell.address, "--memory", "300MiB")
            # Given, they need not be measured at the start.
            settled = ("--precision", "f32", "--kv", "f16", "--page-cache", "0")
            said = machines.mesh("up", "--nodes", "1", *agent, *settled)
            if said.returncode:
                raise Unavailable(said.stderr)
            wait_until(lambda: len(client.nodes()) == 2, "Ray's agent has not joined", cell=cell)
            yield
        finally:
            machines.clear()


async def _stands_by(address: str) -> bool:
    async with dial(address) as channel:
        return await look(channel) is Look.FOLLOWS


def _serves(address: str, name: DeploymentName) -> bool:
    try:
        with MeshClient(address) as client:
            return client.get(name).state is DeploymentState.READY
    except MeshError:
        return False


def run(
    *,
    cells: Annotated[tuple[int, ...], "of the fronts that are measured"] = (3, 100),
    deployments: int = 100,
    requests: int = 20_000,
    rounds: int = 10,
    standby: Annotated[bool, "a cell with PostgreSQL and a controller that stands by, too"] = False,
    ray: Annotated[bool, "that cell has an agent on a Ray, too"] = False,
) -> Report:
    choices = {
        str(count): round(median(rates(count, deployments, requests, rounds))) for count in cells
    }
    found, resting_ms = fronted(rounds, standby, ray)
    alone = found.pop("cell")
    figures: dict[str, object] = {"choices_per_s": choices}
    rows = []
    for key, label in (("ttft", "first token, ms"), ("token", "each token of 16 streams, ms")):
        for name, others in found.items():
            one, other = ([float(getattr(r, f"{key}_ms")) for r in of] for of in (alone, others))
            added = median(f - a for a, f in zip(one, other, strict=True))
            rows.append((label, name, f"{median(one):.2f}", f"{median(other):.2f}", f"{added:.2f}"))
            figures[f"{key}_{ADDED[name]}_ms"] = round(added, 3)
    front = found["front"]
    figures["relayed_per_s"] = round(1e6 / median(r.cpu_us_per_token for r in front))
    figures["resting_ms_per_s"] = round(resting_ms, 1)
    return Report(
        figures=figures,
        shown=(
            Table(
                headings=["cells", "choices/s"],
                rows=[[name, f"{n:,}"] for name, n in choices.items()],
            ),
            Table(headings=("", "with", "cell alone", "with it", "added"), rows=rows),
        ),
        targets={
            "choices_per_s": f">= {CHOICES_PER_S_MIN}",
            "ttft_added_ms": "<= 2",
            "token_added_ms": "<= 0.5",
            "relayed_per_s": ">= 3000",
            **({"ttft_standby_ms": "<= 0.3", "token_standby_ms": "<= 0.3"} if standby else {}),
        },
    )
