"""Times the choices of a front's core alone, and what a front adds before a cell on this machine.

First, cells that exist on paper only. What is timed is `handle`: a request that comes and is asked
of a cell, and its end. Cells have `--deployments` each of which two cells serve; half of the
requests find a loaded instance with room, the others the less busy of two cells. The looks of all
cells in between, twice a second at the most, count as well. Then the demo model in a cell is asked
directly and through a front, in turn, by gRPC; the engine has all cores but one. Last, a node that
computes nothing gives 16 streams 800 tokens a second through a front.

The last line is one JSON object: `choices_per_s` of processor time by cells, of the median round;
`ttft_added_ms` of lone requests and `token_added_ms` of 16 streams (medians over rounds of the
difference of the round's medians), and `relayed_per_s`, the tokens that a front relays in a second
of its processor time at 800 a second; `resting_ms_per_s` is what it computes before one cell while
nobody asks.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil

from bench.cells import deployed, local_cell, scripted_cell, wait_calm, wait_until
from bench.demo_model import SOURCE, stored_model
from bench.harness import Report, Table, in_turn
from bench.http import NAME, Round, by_grpc, measure
from bench.overhead import CONTEXT_TOKENS, SLO
from mesh.cli import children
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import free_address
from mesh.core.front import FrontCore, ranked
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError
from mesh.domain.events import InvokeRequested
from mesh.domain.front import CellEnded, CellLook, CellSeen, DeploymentLook
from mesh.domain.ids import CellName, DeploymentName, ModelId, RequestId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import Request
from mesh.wire.client import MeshClient

HOMES = 2
LOOKS_PER_S = 2.0
CHOICES_PER_S_MIN = 5_000
STEP_S = 0.02
"""An iteration of the node that computes nothing."""
RESTING_S = 5.0
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
    core = FrontCore([look.cell for look in looks])
    for look in looks:
        core.handle(look, 0.0)
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


def fronted(rounds: int) -> tuple[list[Round], list[Round]]:
    """Rounds of the cell alone and of the front before it; the first round warms up. The processor
    time is the controller's in the first and the front's in the second.
    """
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    with local_cell(threads=threads) as cell:
        deployed(cell.address, [SPEC])
        with front_before(cell) as (at, front):
            wait_calm(cell)
            asks = {cell.address: psutil.Process(cell.children[0].process.pid), at: front}
            found: dict[str, list[Round]] = {address: [] for address in asks}
            for number, address, process in in_turn(asks, rounds, warm_ups=1):
                one = measure(partial(by_grpc, address, NAME), process)
                found[address] += [one] if number > 0 else []
    return found[cell.address], found[at]


def relayed(rounds: int) -> tuple[list[float], float]:
    """The processor time of a front for each token in µs, of each round, and that of a second in
    which nobody asks in ms.
    """
    with scripted_cell(step_s=STEP_S) as cell:
        deployed(cell.address, [SPEC])
        with front_before(cell) as (at, front):
            ask = partial(by_grpc, at, NAME)
            found = [measure(ask, front).cpu_us_per_token for _ in range(rounds + 1)]
            before = front.cpu_times()
            time.sleep(RESTING_S)
            after = front.cpu_times()
    resting_s = after.user + after.system - before.user - before.system
    return found[1:], 1e3 * resting_s / RESTING_S


@contextmanager
def front_before(cell: LocalCell) -> Iterator[tuple[str, psutil.Process]]:
    """A front's address and its process."""
    at = free_address("127.0.0.1:0")
    options = ("--cells", f"cell={cell.address}", "--listen", at, "--http", "off")
    with tempfile.TemporaryDirectory() as folder:
        home = ("--home", folder)
        front = children.start("front", "mesh.front", (*options, *home), Path(folder) / "front.log")
        try:
            wait_until(lambda: _serves(at), "the front does not serve", cell=cell)
            yield at, psutil.Process(front.process.pid)
        finally:
            children.stop([front])


def _serves(address: str) -> bool:
    try:
        with MeshClient(address) as client:
            return client.get(NAME).state is DeploymentState.READY
    except MeshError:
        return False


def run(
    *,
    cells: Annotated[tuple[int, ...], "of the fronts that are measured"] = (3, 100),
    deployments: int = 100,
    requests: int = 20_000,
    rounds: int = 5,
) -> Report:
    stored_model()
    choices = {
        str(count): round(median(rates(count, deployments, requests, rounds))) for count in cells
    }
    alone, front = fronted(rounds)
    relayed_us, resting_ms = relayed(rounds)
    figures: dict[str, object] = {"choices_per_s": choices}
    rows = []
    for label, key in (("first token, ms", "ttft"), ("each token of 16 streams, ms", "token")):
        one, other = ([float(getattr(r, f"{key}_ms")) for r in of] for of in (alone, front))
        added = median(f - a for a, f in zip(one, other, strict=True))
        rows.append((label, f"{median(one):.2f}", f"{median(other):.2f}", f"{added:.2f}"))
        figures[f"{key}_added_ms"] = round(added, 3)
    figures["relayed_per_s"] = round(1e6 / median(relayed_us))
    figures["resting_ms_per_s"] = round(resting_ms, 1)
    return Report(
        figures=figures,
        shown=(
            Table(
                headings=["cells", "choices/s"],
                rows=[[name, f"{n:,}"] for name, n in choices.items()],
            ),
            Table(headings=("", "cell", "through a front", "added"), rows=rows),
        ),
        targets={
            "choices_per_s": f">= {CHOICES_PER_S_MIN}",
            "ttft_added_ms": "<= 2",
            "token_added_ms": "<= 0.5",
            "relayed_per_s": ">= 3000",
        },
    )
