"""What a scrape of `/metrics` costs a controller with 500 deployments, and its callers meanwhile.

Every deployment has had calls, so that each of its histograms is there. While a scrape renders, a
coroutine of the same event loop wakes every millisecond: by how much it is late is how long a token
might have to wait. The last line is one JSON object. Exit code 1 when a target was missed.
"""

import argparse
import asyncio
import random
import time

from bench.printing import exit_by, last_line, show_table
from mesh.controller.metrics import CellMetrics, Meter
from mesh.domain.actions import DeliverTokens
from mesh.domain.events import InvokeRequested
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request, RequestTokens
from mesh.domain.views import CellSnapshot

DEPLOYMENTS = 500
CALLS = 4
TOKENS = 20
TICK_S = 0.001
SCRAPES = 10
SCRAPE_S_MAX = 1.0
STALL_S_MAX = 0.005


def filled(deployments: int) -> tuple[Meter, int]:
    """A meter after some calls of each deployment, and how many tokens it has counted."""
    meter, draw, now_s, tokens = Meter(lambda name: True), random.Random(1), 0.0, 0
    for number in range(deployments * CALLS):
        request = Request(
            request_id=RequestId(f"r{number}"),
            deployment=DeploymentName(f"model-{number % deployments:03}"),
            prompt_tokens=(1,) * 20,
        )
        meter.record(now_s, InvokeRequested(request=request), ())
        for index in range(TOKENS):
            now_s += draw.expovariate(20.0)
            outputs = RequestTokens(
                request_id=request.request_id,
                attempt=1,
                first_index=index,
                token_ids=(index,),
                finish=FinishReason.LENGTH if index == TOKENS - 1 else None,
            )
            meter.record(now_s, None, (DeliverTokens(outputs=outputs),))
            tokens += 1
    return meter, tokens


async def scraped(meter: Meter) -> tuple[list[float], list[float], int]:
    """Seconds of each scrape, by how many seconds each tick was late beside them, bytes."""
    empty = CellSnapshot(deployments=(), nodes=(), queued=0, running=0, served=0, refused=())
    metrics, took_s, late_s, size = CellMetrics(meter, lambda: empty), [], [], 0
    for _ in range(SCRAPES):
        began_s = time.perf_counter()
        under_way = asyncio.ensure_future(metrics.exposition())
        while not under_way.done():
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s.append(time.perf_counter() - due_s)
        size = len(await under_way)
        took_s.append(time.perf_counter() - began_s)
    return took_s, late_s, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deployments", type=int, default=DEPLOYMENTS, help="(%(default)s)")
    options = parser.parse_args()
    began_s = time.perf_counter()
    meter, tokens = filled(options.deployments)
    record_us = (time.perf_counter() - began_s) / tokens * 1e6
    took_s, late_s, size = asyncio.run(scraped(meter))
    figures = {
        "deployments": options.deployments,
        "scrape_ms": round(max(took_s) * 1e3, 1),
        "stall_ms_max": round(max(late_s) * 1e3, 2),
        "stall_ms_p50": round(sorted(late_s)[len(late_s) // 2] * 1e3, 2),
        "scrape_bytes": size,
        "record_us_per_token": round(record_us, 2),
    }
    show_table(("FIGURE", "VALUE"), [(key, str(value)) for key, value in figures.items()])
    last_line(figures)
    exit_by(
        {
            "scrape_ms": max(took_s) <= SCRAPE_S_MAX,
            "stall_ms_max": max(late_s) <= STALL_S_MAX,
        }
    )


if __name__ == "__main__":
    main()
