"""A thousand clients leave at once, some amid their answers, most before the first token.

They ask by HTTP, on a connection each, more than a cell can begin to answer, half of them for a
call of a tool, and close without a word. The last line is one JSON object: `place_freed_ms_p99` is
the time from a close until the controller's books have one request less, by its journal, the n-th
close beside the n-th request that goes; a call that asks the controller would wait behind them.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.cells import deployed, local_cell, wait_calm
from bench.demo_model import SOURCE, stored_model
from bench.harness import Report, show_status
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import Unavailable
from mesh.domain.events import CancelRequested
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.domain.text import ToolFormat
from mesh.domain.views import RequestPhase, RequestSnapshot
from mesh.runtime.journal import read_journal
from mesh.wire.client import MeshClient

DEPLOYMENTS = 4
"""A queue of each holds a quarter of the clients."""
SLO = Slo(ttft_s=600.0, tpot_s=600.0)
"""Nobody is refused, and no decode goes before the first tokens of others."""
TOKENS = 1000
OPEN_S_MAX = 60.0
FREED_S_MAX = 30.0
LOOK_S = 0.005
SEEN_S = 0.5
"""Nobody looks before: whoever asks takes the controller's time."""
PROMPT_TOKENS = 16
TOOL = {
    "type": "function",
    "function": {
        "name": "take_note",
        "parameters": {
            "type": "object",
            "properties": {"note": {"type": "string", "minLength": 4000}},
            "required": ["note"],
            "additionalProperties": False,
        },
    },
}
"""Whoever calls it is amid the call until its last token."""


async def opened(address: str, number: int) -> asyncio.StreamWriter:
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    model = number % DEPLOYMENTS
    asked = {"model": f"leaving-{model}", "max_tokens": TOKENS, "stream": True}
    if model < DEPLOYMENTS // 2:
        path = "completions"
        asked |= {"prompt": [1000 + number] * PROMPT_TOKENS, "ignore_eos": True}
    else:
        path = "chat/completions"
        asked |= {"messages": [{"role": "user", "content": f"What is the note {number}?"}]}
        asked |= {"tools": [TOOL], "tool_choice": "required"}
    body = json.dumps(asked).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    await writer.drain()
    return writer


async def until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Raises Unavailable."""
    end_s = time.monotonic() + seconds
    while not await asyncio.to_thread(holds):
        if time.monotonic() > end_s:
            raise Unavailable(f"{what} within {seconds:.0f} s")
        await asyncio.sleep(LOOK_S)


async def left(address: str, client: MeshClient, clients: int) -> tuple[int, list[float]]:
    """How many were being answered, and when each client left, by the machine's monotonic clock."""
    show_status(f"{clients} clients ask")
    writers = await asyncio.gather(*(opened(address, number) for number in range(clients)))
    await until(lambda: len(client.requests()) >= clients, OPEN_S_MAX, "not all were open")
    answering: list[RequestSnapshot] = []

    def each_answers() -> bool:
        answering[:] = [r for r in client.requests() if r.phase is RequestPhase.ANSWERING]
        return len({one.deployment for one in answering}) == DEPLOYMENTS

    await until(each_answers, OPEN_S_MAX, "a deployment answers nobody")
    answered = len(answering)
    closed = []
    for writer in writers:
        writer.transport.abort()
        closed.append(time.monotonic())
        await asyncio.sleep(0)

    def all_gone() -> bool:
        cell = client.status()
        return not cell.queued and not cell.running

    await asyncio.sleep(SEEN_S)
    await until(all_gone, FREED_S_MAX, "not all places were freed")
    return answered, closed


def freed_s(journal: Path) -> list[float]:
    """When each place was free: once the core had decided on who left."""
    _, decisions = read_journal(journal)
    freed: list[float] = []
    for decision, following in pairwise(decisions):
        match decision.event:
            case CancelRequested(request_ids=gone):
                freed += [following.now_s] * len(gone)
    return freed


def run(*, clients: int = 1000) -> Report:
    stored_model()
    specs = [
        DeploymentSpec(
            name=DeploymentName(f"leaving-{number}"),
            source=SOURCE,
            context_tokens_max=2048,
            slo=SLO,
            scaling=Scaling(replicas_max=1, keep_alive_s=600.0),
            tool_format=ToolFormat.HERMES,
        )
        for number in range(DEPLOYMENTS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "controller.journal"
        with (
            local_cell(http="127.0.0.1:0", journal=journal) as cell,
            MeshClient(cell.address) as client,
        ):
            deployed(cell.address, specs)
            wait_calm(cell)
            assert cell.http_address is not None
            answered, closed_s = asyncio.run(left(cell.http_address, client, clients))
        took_s = [end - begin for begin, end in zip(closed_s, freed_s(journal), strict=True)]
    took_ms = sorted(1e3 * seconds for seconds in took_s)
    p50, p99 = (took_ms[int(share * (len(took_ms) - 1))] for share in (0.5, 0.99))
    told = (
        f"{len(took_ms)} clients left at once, {answered} of them amid their answers: places were "
        f"free after {p50:.0f} ms (p50), {p99:.0f} ms (p99), {took_ms[-1]:.0f} ms (all)"
    )
    return Report(
        figures={
            "clients": len(took_ms),
            "answered": answered,
            "place_freed_ms_p50": round(p50, 1),
            "place_freed_ms_p99": round(p99, 1),
        },
        shown=[told],
    )
