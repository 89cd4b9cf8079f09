"""The same questions by both protocols, by one client with one event loop each.

It reads no JSON while it waits: what a client computes on the cores that it measures is not the
protocol's.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.overhead.workload import PROMPT_TOKENS, SLO
from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName
from mesh.evaluation.load_client import Call, offer
from mesh.wire.channel import parse_address

LONE_EVERY_S = 0.5
"""Several times what a request of one token takes."""
CALL_S_MAX = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Seconds from the sending of a call to its first token and to its end."""

    first_s: float
    last_s: float


def by_grpc(address: str, name: DeploymentName, calls: Sequence[tuple[float, int]]) -> list[Heard]:
    """`calls`: when each is sent, and for how many tokens. Raises Unavailable for a torn answer."""
    asked = [
        Call(
            at_s=at_s,
            deployment=name,
            slo=SLO,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=tokens,
        )
        for at_s, tokens in calls
    ]
    answers = offer(address, asked, call_s_max=CALL_S_MAX)
    if odd := [a for c, a in zip(asked, answers, strict=True) if not a.whole(c)]:
        raise Unavailable(f"gRPC: {len(odd)} answers were torn: {odd[0].refused or odd[0].failed}")
    return [Heard(first_s=a.tokens_s[0], last_s=a.tokens_s[-1]) for a in answers]


def by_http(address: str, name: DeploymentName, calls: Sequence[tuple[float, int]]) -> list[Heard]:
    """As `by_grpc`, with the connections opened beforehand."""
    return asyncio.run(_all(address, name, calls))


async def _all(
    address: str, name: DeploymentName, calls: Iterable[tuple[float, int]]
) -> list[Heard]:
    host, port = parse_address(address)
    opened = [(*await asyncio.open_connection(host, port), at_s, n) for at_s, n in calls]
    start_s = time.monotonic()

    async def one(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at_s: float, tokens: int
    ) -> Heard:
        request = _request(name, tokens)
        await asyncio.sleep(start_s + at_s - time.monotonic())
        sent_s = time.monotonic()
        writer.write(request)
        status = await reader.readline()
        first_s = last_s = time.monotonic()
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                last_s = time.monotonic()
        if not line or b" 200 " not in status:
            raise Unavailable(f"HTTP: an answer was torn: {status.decode()}")
        return Heard(first_s=first_s - sent_s, last_s=last_s - sent_s)

    try:
        async with asyncio.timeout(CALL_S_MAX):
            heard = await asyncio.gather(*(one(*each) for each in opened), return_exceptions=True)
    finally:
        for _, writer, _, _ in opened:
            writer.close()
            await writer.wait_closed()
    for found in heard:
        if isinstance(found, BaseException):
            raise found
    return [found for found in heard if isinstance(found, Heard)]


def _request(name: DeploymentName, tokens: int) -> bytes:
    asked = {
        "model": name,
        "prompt": PROMPT_TOKENS,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
