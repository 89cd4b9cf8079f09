"""Runs a cell under mixed traffic for minutes and looks for what it does not give back.

Two deployments of the demo model; clients that finish, leave, miss deadlines and ask nonsense. At
the end, with no client left, there must be no request, no KV block in use, no further file
descriptor and no more resident memory than before. The last line is one JSON object; exit code 1
when something leaked, or when calls failed that should not have.
"""

import argparse
import asyncio
import sys
import time

import psutil

from bench.cells import local_cell
from bench.demo_model import SOURCE, stored_model
from bench.printing import errors_told, last_line, show_table
from bench.soak.traffic import Traffic
from bench.soak.watching import Held, leftovers, sample
from mesh.cli import output
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient

NAMES = ("soak-a", "soak-b")
SAMPLE_S = 5.0


def deploy(client: MeshClient) -> None:
    """One that stays loaded, and one that scales from zero again and again."""
    for name, keep_alive_s, replicas_min in ((NAMES[0], 600.0, 1), (NAMES[1], 2.0, 0)):
        scaling = Scaling(replicas_min=replicas_min, replicas_max=1, keep_alive_s=keep_alive_s)
        client.deploy(
            DeploymentSpec(
                name=DeploymentName(name),
                source=SOURCE,
                context_tokens_max=1024,
                scaling=scaling,
            )
        )


async def run_traffic(traffic: Traffic, held: list[Held], seconds: float) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(traffic.run(stop))
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        await asyncio.sleep(min(SAMPLE_S, left_s))
        sample(held)
        done = sum(traffic.outcomes.values())
        output.message(
            f"{seconds - max(0.0, left_s):5.0f} s  {done} requests  {traffic.tokens} tokens  "
            + "  ".join(f"{h.name} {h.rss_bytes[-1] >> 20} MiB {h.fds[-1]} fds" for h in held)
        )
    stop.set()
    await running


def soak(seconds: float, workers: int, seed: int) -> int:
    stored_model()
    with local_cell() as local:
        held = [
            Held(name=child.name, process=psutil.Process(child.process.pid))
            for child in local.children
        ]
        traffic = Traffic(local.address, NAMES, workers=workers, seed=seed)
        with MeshClient(local.address) as client:
            deploy(client)
            asyncio.run(run_traffic(traffic, held, seconds))
            leaks = leftovers(client)
        sample(held)
    for process in held:
        leaks += process.leaks()
    failures = traffic.failures()
    report(traffic, held, leaks, failures, seconds)
    return 1 if leaks or failures else 0


def report(
    traffic: Traffic, held: list[Held], leaks: list[str], failures: list[str], seconds: float
) -> None:
    rows = [
        (
            process.name,
            f"{100 * process.rss_growth():.1f}",
            str(process.fds_growth()),
            str(process.rss_bytes[-1] >> 20),
        )
        for process in held
    ]
    show_table(("process", "RSS growth %", "fds growth", "RSS MiB at end"), rows)
    for leak in leaks:
        print(f"leaked: {leak}")
    for failure in failures:
        print(f"failed: {failure}")
    figures = {
        "seconds": seconds,
        "outcomes": dict(sorted(traffic.outcomes.items())),
        "tokens": traffic.tokens,
        "rss_growth": {h.name: round(h.rss_growth(), 4) for h in held},
        "fds_growth": {h.name: h.fds_growth() for h in held},
        "leaks": leaks,
        "failures": failures,
    }
    last_line(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with errors_told():
        sys.exit(soak(options.seconds, options.workers, options.seed))


if __name__ == "__main__":
    main()
