"""Times the choices of a front's core alone, before cells that exist on paper only.

What is timed is `handle`: a request that comes and is asked of a cell, and its end. Cells have
`--deployments` each of which two cells serve; half of the requests find a loaded instance with
room, the others the less busy of two cells. The looks of all cells in between, twice a second at
the most, count as well.

The last line is one JSON object: `choices_per_s` of processor time by cells, of the median round.
"""

import time
from statistics import median
from typing import Annotated

from bench.harness import Report, Table
from mesh.core.front import FrontCore, ranked
from mesh.domain.events import InvokeRequested
from mesh.domain.front import CellEnded, CellLook, CellSeen, DeploymentLook
from mesh.domain.ids import CellName, DeploymentName, ModelId, RequestId
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import Request

HOMES = 2
LOOKS_PER_S = 2.0
CHOICES_PER_S_MIN = 5_000


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


def run(
    *,
    cells: Annotated[tuple[int, ...], "of the fronts that are measured"] = (3, 100),
    deployments: int = 100,
    requests: int = 20_000,
    rounds: int = 5,
) -> Report:
    found = {
        str(count): round(median(rates(count, deployments, requests, rounds))) for count in cells
    }
    table = Table(
        headings=["cells", "choices/s"], rows=[[name, f"{n:,}"] for name, n in found.items()]
    )
    return Report(
        figures={"choices_per_s": found},
        shown=(table,),
        targets={"choices_per_s": f">= {CHOICES_PER_S_MIN}"},
    )
