"""Runs a cell under mixed traffic for minutes and looks for what it does not give back.

Two deployments of the demo model; clients that finish, leave, miss deadlines and ask nonsense. At
the end, with no client left, there must be no request, no KV block in use, no further file
descriptor and no more resident memory than before. The last line is one JSON object; exit code 1
when something leaked, or when calls failed that should not have.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import grpc
import grpc.aio
import psutil

from bench.cells import local_cell
from bench.demo_model import SOURCE, stored_model
from bench.harness import Report, Table
from mesh.cli import output
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.v1 import inference_pb2 as pb
from mesh.v1.inference_pb2_grpc import InferenceStub
from mesh.wire.client import MeshClient

RSS_GROWTH_MAX = 0.05
"""From the second quarter of the run to the last; the first is warm-up."""
QUIET_S_MAX = 60.0
FDS_GROWTH_MAX = 8
"""Sockets come and go with clients; a leak grows with the number of calls."""


@dataclass(slots=True, kw_only=True)
class Held:
    """Samples of one process."""

    name: str
    process: psutil.Process
    rss_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def sample(self) -> None:
        self.rss_bytes.append(self.process.memory_info().rss)
        self.fds.append(self.process.num_fds())

    def rss_growth(self) -> float:
        """Share by which the last quarter's median lies above the second quarter's."""
        early, late = _quarters(self.rss_bytes)
        return late / early - 1

    def fds_growth(self) -> int:
        early, late = _quarters(self.fds)
        return int(late - early)

    def leaks(self) -> list[str]:
        found = []
        if self.rss_growth() > RSS_GROWTH_MAX:
            found.append(f"{self.name}: RSS grew by {100 * self.rss_growth():.1f} %")
        if self.fds_growth() > FDS_GROWTH_MAX:
            found.append(f"{self.name}: {self.fds_growth()} more file descriptors")
        return found


def _quarters(values: Sequence[int]) -> tuple[float, float]:
    """The medians of the second quarter and of the last one."""
    quarter = max(1, len(values) // 4)
    return median(values[quarter : 2 * quarter] or values), median(values[-quarter:])


def leftovers(client: MeshClient) -> list[str]:
    """What is still held once the last client has gone; bounded wait for it to go."""
    until_s = time.monotonic() + QUIET_S_MAX
    while True:
        status = client.status()
        blocks = sum(i.kv_blocks_used for node in client.nodes() for i in node.instances)
        found = [
            f"{count} {what}"
            for what, count in (
                ("requests running", status.running),
                ("requests queued", status.queued),
                ("KV blocks in use", blocks),
            )
            if count
        ]
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(1.0)


PROMPT_TOKENS_MAX = 400
OUTPUT_TOKENS_MAX = 48
PAUSE_S_MAX = 3.0
CALL_S_MAX = 120.0
FINISHED_SHARE_MIN = 0.25
"""The least share of all requests that must finish; fewer answers than that put no load on
anything.
"""
FAILURES = ("internal", "unavailable", "unknown")
"""Outcomes that nothing in this traffic asks for, unlike refusals and missed deadlines."""


class Traffic:
    """`workers` clients, each asking again and again until told to stop."""

    def __init__(self, address: str, names: Sequence[str], *, workers: int, seed: int) -> None:
        self._address = address
        self._names = names
        self._workers = workers
        self._seed = seed
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0

    def failures(self) -> list[str]:
        """What went wrong besides leaks."""
        found = [f"{self.outcomes[o]} × {o}" for o in FAILURES if self.outcomes[o]]
        finished, asked = self.outcomes["finished"], sum(self.outcomes.values())
        if finished < FINISHED_SHARE_MIN * asked or not asked:
            found.append(f"only {finished} of {asked} requests finished")
        return found

    async def run(self, stop: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = InferenceStub(channel)
            seeds = range(self._seed, self._seed + self._workers)
            await asyncio.gather(*(self._worker(stub, random.Random(seed), stop) for seed in seeds))

    async def _worker(self, stub: InferenceStub, rng: random.Random, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.outcomes[await self._ask(stub, rng)] += 1
            try:
                async with asyncio.timeout(rng.uniform(0, PAUSE_S_MAX)):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _ask(self, stub: InferenceStub, rng: random.Random) -> str:
        kind = rng.choices(
            ["whole", "leaves", "deadline", "unknown", "too long"], [60, 25, 10, 3, 2]
        )[0]
        request = self._request(rng, kind)
        timeout_s = rng.uniform(0.05, 1.0) if kind == "deadline" else CALL_S_MAX
        leave_after = rng.randint(0, 10) if kind == "leaves" else None
        call = stub.Invoke(request, timeout=timeout_s)
        try:
            async for response in call:  # type: ignore[attr-defined]
                if response.WhichOneof("event") == "tokens":
                    self.tokens += len(response.tokens.token_ids)
                    if leave_after is not None and response.tokens.first_index >= leave_after:
                        call.cancel()  # type: ignore[no-untyped-call]
                        return "left"
        except asyncio.CancelledError:
            return "left"
        except grpc.aio.AioRpcError as error:
            return str(error.code().name).lower()
        return "finished"

    def _request(self, rng: random.Random, kind: str) -> pb.InvokeRequest:
        name = "nobody" if kind == "unknown" else rng.choice(self._names)
        length = 4000 if kind == "too long" else rng.randint(1, PROMPT_TOKENS_MAX)
        return pb.InvokeRequest(
            deployment=name,
            tokens=pb.TokenIds(ids=[rng.randint(100, 2000) for _ in range(length)]),
            max_tokens=rng.randint(1, OUTPUT_TOKENS_MAX),
            temperature=rng.choice([0.0, 0.8]),
            stop=rng.choice([[], [], ["the"]]),
        )


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
        for process in held:
            process.sample()
        done = sum(traffic.outcomes.values())
        output.message(
            f"{seconds - max(0.0, left_s):5.0f} s  {done} requests  {traffic.tokens} tokens  "
            + "  ".join(f"{h.name} {h.rss_bytes[-1] >> 20} MiB {h.fds[-1]} fds" for h in held)
        )
    stop.set()
    await running


def run(*, seconds: float = 600.0, workers: int = 12, seed: int = 1) -> Report:
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
        for process in held:
            process.sample()
    for process in held:
        leaks += process.leaks()
    failures = traffic.failures()
    rows = [
        (h.name, f"{100 * h.rss_growth():.1f}", str(h.fds_growth()), str(h.rss_bytes[-1] >> 20))
        for h in held
    ]
    return Report(
        figures={
            "seconds": seconds,
            "outcomes": dict(sorted(traffic.outcomes.items())),
            "tokens": traffic.tokens,
            "rss_growth": {h.name: round(h.rss_growth(), 4) for h in held},
            "fds_growth": {h.name: h.fds_growth() for h in held},
            "leaks": leaks,
            "failures": failures,
        },
        shown=(
            Table(headings=("process", "RSS growth %", "fds growth", "RSS MiB at end"), rows=rows),
            *(f"leaked: {leak}" for leak in leaks),
            *(f"failed: {failure}" for failure in failures),
        ),
        targets={"nothing leaked": not leaks, "no call failed": not failures},
    )
