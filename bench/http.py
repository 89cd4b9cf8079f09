"""Asks a cell by gRPC and by HTTP in turn, and prints what HTTP adds.

The engine has all cores but one, which is left to the controller, the client and the loops. The
last line is one JSON object: `ttft_added_ms` of lone requests and `token_added_ms` of 16 streams
(medians over rounds of the difference of the round's medians), `cpu_us_per_token`, what the
controller computes for a token of these streams, beside gRPC's, `protocols_added_ms`, what each
protocol adds to the first token of the same prompt by Chat Completions where the engine computes
nothing, with the interval in which it is by 95 % (`protocols_added_within_ms`), and what that token
takes by Chat Completions itself (`chat_ttft_ms`), `n_ttft_ratio`, the time to
the first token of a call for 8 answers over that of a call for one (`n_all_ratio`: until each of
them has its first token), and `keys_added_ms`, what a key adds to an answer by HTTP.
"""

import asyncio
import http.client
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from bench.cells import deployed, keys_shown, local_cell, scripted_cell, wait_calm
from bench.demo_model import SOURCE, stored_model
from bench.harness import Report, Table, in_turn
from bench.overhead import CALL_S_MAX, CONTEXT_TOKENS, PROMPT_TOKENS, SLO, answered
from mesh.controller.keys import KeyBook
from mesh.domain.access import Role, TenantLimits, TenantName
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.evaluation.load_client import Call
from mesh.wire.channel import parse_address

LONE_EVERY_S = 0.5
"""Several times what a request of one token takes."""


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
    answers = answered(address, asked)
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
        asked = {
            "model": name,
            "prompt": PROMPT_TOKENS,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        request = _request("/v1/completions", asked)
        await asyncio.sleep(start_s + at_s - time.monotonic())
        sent_s = time.monotonic()
        writer.write(request)
        status = await reader.readline()
        first_s = last_s = time.monotonic()
        if b" 200 " not in status:
            raise Unavailable(f"HTTP: not answered in full: {status.decode().strip()}")
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                last_s = time.monotonic()
        if not line:
            raise Unavailable("HTTP: an answer was torn")
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


def _request(path: str, asked: object) -> bytes:
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


CALLS = 500
WARM = 50
TENANT = TenantName("bench")
LIMITS = TenantLimits(requests_per_s=1e6, tokens_per_min=1e9, running=1000)
BODY = b'{"model": "none", "prompt": "hi"}'


def keys_added_ms() -> float:
    """Median over pairs of calls, one of each cell; who is asked first changes."""
    with ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        opened.enter_context(keys_shown(home))
        with closing(KeyBook(home / "controller")) as book:
            secret, _ = book.create(Role.TENANT, TENANT)
            book.limit(TENANT, LIMITS)
        lines = []
        for keys in (False, True):
            cell = opened.enter_context(
                local_cell(nodes=(), http="127.0.0.1:0", keys=keys, home=home if keys else None)
            )
            line = http.client.HTTPConnection(cell.http_address or "")
            opened.callback(line.close)
            lines.append(line)
        added = []
        for number in range(WARM + CALLS):
            took = {n: _took_ms(lines[n], secret) for n in ((0, 1) if number % 2 else (1, 0))}
            added.append(took[1] - took[0])
    return median(added[WARM:])


def _took_ms(line: http.client.HTTPConnection, secret: str) -> float:
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    begun_s = time.perf_counter()
    line.request("POST", "/v1/completions", BODY, headers)
    answer = line.getresponse()
    answer.read()
    took_s = time.perf_counter() - begun_s
    if answer.status != http.client.NOT_FOUND:
        raise MeshError(f"a model that is not there was answered with {answer.status}")
    return 1e3 * took_s


NAME = DeploymentName("http")
SPEC = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)
WORDS = [{"role": "user", "content": "What is the capital of France?"}]
SAID = {"messages": WORDS, "max_tokens": 1, "temperature": 0}
PROTOCOLS: Mapping[str, tuple[str, Mapping[str, object], bytes]] = {
    "chat": ("/v1/chat/completions", SAID, b'"delta":{"content"'),
    "completions": ("/v1/completions", {"max_tokens": 1, "temperature": 0}, b'"text":'),
    "responses": (
        "/v1/responses",
        {"input": WORDS, "max_output_tokens": 1, "temperature": 0},
        b"response.output_text.delta",
    ),
    "messages": ("/v1/messages", SAID, b"text_delta"),
    "ollama": (
        "/api/chat",
        {"messages": WORDS, "options": {"num_predict": 1, "temperature": 0}},
        b'"content":',
    ),
}
"""The path of each protocol, what is asked of it, and what the line of a first token holds."""
FIRST_CALLS = 600
WARM_CALLS = 30
ANSWERS = 8
ANSWERS_PROMPT_TOKENS = 512
ANSWERS_CALLS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A median of differences, and the interval that holds it in 95 of 100 such runs."""

    median_ms: float
    least_ms: float
    most_ms: float


def protocols_added() -> tuple[float, dict[str, Added]]:
    """The time to a first token by Chat Completions in ms, and what each other protocol adds to it:
    calls one after the other, in turn, of an engine whose iterations take no time.
    """
    with ExitStack() as opened:
        cell = opened.enter_context(scripted_cell(http="127.0.0.1:0"))
        deployed(cell.address, [SPEC])
        assert cell.http_address is not None
        with closing(http.client.HTTPConnection(cell.http_address)) as line:
            rendered = {"model": NAME, "messages": WORDS}
            tokens = json.loads(asked(line, "/tokenize", rendered).read())["tokens"]
        lines: dict[str, tuple[socket.socket, bytes, bytes]] = {}
        for name, (path, said, marker) in PROTOCOLS.items():
            said = {**said, "prompt": tokens} if name == "completions" else said
            request = _request(path, {"model": NAME, "stream": True, **said})
            connection = socket.create_connection(parse_address(cell.http_address), CALL_S_MAX)
            lines[name] = opened.enter_context(connection), request, marker
        took: dict[str, list[float]] = {name: [] for name in PROTOCOLS}
        for _, name, line_and_said in in_turn(lines, FIRST_CALLS, warm_ups=WARM_CALLS):
            took[name].append(_first_ms(*line_and_said))
    chat = took.pop("chat")[WARM_CALLS:]
    return median(chat), {
        name: _added([one - c for one, c in zip(of[WARM_CALLS:], chat, strict=True)])
        for name, of in took.items()
    }


def _first_ms(line: socket.socket, request: bytes, marker: bytes) -> float:
    """Reads the answer to its end. Raises Unavailable for a torn one, or another than was asked
    for.
    """
    begun_s, took_s, came = time.perf_counter(), 0.0, b""
    line.sendall(request)
    while not came.endswith(b"\r\n0\r\n\r\n"):
        more = line.recv(1 << 16)
        came += more
        if not took_s and marker in came:
            took_s = time.perf_counter() - begun_s
        if not more or not came.startswith(b"HTTP/1.1 200"):
            raise Unavailable(f"an answer was torn: {came.decode()}")
    if not took_s:
        raise Unavailable(f"an answer without {marker.decode()}: {came.decode()}")
    return 1e3 * took_s


def _added(differences_ms: Sequence[float]) -> Added:
    """The interval is of the ranks between which a median is by 95 %, whatever the distribution."""
    ranked, count = sorted(differences_ms), len(differences_ms)
    reach = 1.96 * count**0.5 / 2
    return Added(
        median_ms=round(median(ranked), 3),
        least_ms=round(ranked[max(0, int(count / 2 - reach))], 3),
        most_ms=round(ranked[min(count - 1, int(count / 2 + reach))], 3),
    )


def answers_ratios(address: str) -> tuple[float, float]:
    """The time until the first token of any of 8 answers, and of all of them, over the time to the
    first token of a single one. No prompt is asked twice.
    """
    draw = random.Random(0)
    first_s: dict[int, list[float]] = {1: [], ANSWERS: []}
    all_s: list[float] = []
    with closing(http.client.HTTPConnection(address)) as line:
        counts = {"one": 1, "several": ANSWERS}
        for _, _, count in in_turn(counts, ANSWERS_CALLS, warm_ups=1):
            said = {
                "model": NAME,
                "prompt": [draw.randrange(100, 10_000) for _ in range(ANSWERS_PROMPT_TOKENS)],
                "max_tokens": 2,
                "n": count,
                "ignore_eos": True,
                "stream": True,
            }
            begun_s, begun = time.perf_counter(), dict[int, float]()
            answer = asked(line, "/v1/completions", said)
            for told in answer:
                if told.startswith(b"data: {"):
                    for choice in json.loads(told.removeprefix(b"data: "))["choices"]:
                        begun.setdefault(choice["index"], time.perf_counter() - begun_s)
            first_s[count].append(min(begun.values()))
            if count > 1:
                all_s.append(max(begun.values()))
    alone_s = median(first_s[1][1:])
    return median(first_s[ANSWERS][1:]) / alone_s, median(all_s[1:]) / alone_s


def asked(line: http.client.HTTPConnection, path: str, said: object) -> http.client.HTTPResponse:
    """Raises MeshError."""
    line.request("POST", path, json.dumps(said), {"Content-Type": "application/json"})
    answer = line.getresponse()
    if answer.status != http.client.OK:
        raise MeshError(f"{path} answered {answer.status}: {answer.read().decode()}")
    return answer


LONE = [(LONE_EVERY_S * number, 1) for number in range(9)]
"""The first of them opens the connection, and warms what a first call warms."""
STREAMS = 16
TOKENS = 128

Ask = Callable[[Sequence[tuple[float, int]]], list[Heard]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The times of one protocol."""

    ttft_ms: float
    token_ms: float
    cpu_us_per_token: float


def measure(ask: Ask, controller: psutil.Process) -> Round:
    lone = ask(LONE)[1:]
    before = controller.cpu_times()
    together = ask([(0.0, TOKENS)] * STREAMS)
    after = controller.cpu_times()
    cpu_s = (after.user + after.system) - (before.user + before.system)
    return Round(
        ttft_ms=1e3 * median(heard.first_s for heard in lone),
        token_ms=1e3 * median((h.last_s - h.first_s) / (TOKENS - 1) for h in together),
        cpu_us_per_token=1e6 * cpu_s / (STREAMS * TOKENS),
    )


def compared(rounds: int, join_ms: float) -> tuple[list[Round], list[Round], tuple[float, float]]:
    """gRPC's rounds and HTTP's, in turn; the first round warms up. Then the ratios of several
    answers.
    """
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    with local_cell(threads=threads, http="127.0.0.1:0", join_ms=join_ms) as cell:
        deployed(cell.address, [SPEC])
        wait_calm(cell)
        controller = psutil.Process(cell.children[0].process.pid)
        http_address = cell.http_address
        assert http_address is not None
        asks: dict[str, Ask] = {
            "gRPC": lambda calls: by_grpc(cell.address, NAME, calls),
            "HTTP": lambda calls: by_http(http_address, NAME, calls),
        }
        found: dict[str, list[Round]] = {name: [] for name in asks}
        for _, name, asked in in_turn(asks, rounds, warm_ups=1):
            found[name].append(measure(asked, controller))
        ratios = answers_ratios(http_address)
    return found["gRPC"][1:], found["HTTP"][1:], ratios


def run(*, rounds: int = 10, join_ms: float = 0.0) -> Report:
    stored_model()
    chat_ms, protocols = protocols_added()
    grpc, by, ratios = compared(rounds, join_ms)
    rows = []
    figures: dict[str, float] = {}
    for label, key in (
        ("first token, ms", "ttft_ms"),
        (f"each token of {STREAMS} streams, ms", "token_ms"),
        (f"CPU of a token of {STREAMS} streams, µs", "cpu_us_per_token"),
    ):
        one, other = ([float(getattr(r, key)) for r in of] for of in (grpc, by))
        added = median(h - g for g, h in zip(one, other, strict=True))
        rows.append((label, f"{median(one):.3f}", f"{median(other):.3f}", f"{added:.3f}"))
        if key.endswith("_ms"):
            figures[f"{key.removesuffix('_ms')}_added_ms"] = round(added, 3)
        figures |= {key: round(median(other), 3), f"{key}_grpc": round(median(one), 3)}
    figures["n_ttft_ratio"], figures["n_all_ratio"] = (round(ratio, 3) for ratio in ratios)
    figures["keys_added_ms"] = round(keys_added_ms(), 3)
    title = f"medians over {rounds} rounds"
    return Report(
        figures={
            **figures,
            "chat_ttft_ms": round(chat_ms, 3),
            "protocols_added_ms": {name: added.median_ms for name, added in protocols.items()},
            "protocols_added_within_ms": {
                name: (added.least_ms, added.most_ms) for name, added in protocols.items()
            },
        },
        shown=[
            Table(headings=("", "gRPC", "HTTP", "added"), rows=rows, title=title),
            Table(
                headings=("over Chat Completions", "added, ms", "least", "most"),
                rows=[
                    (name, f"{a.median_ms:.3f}", f"{a.least_ms:.3f}", f"{a.most_ms:.3f}")
                    for name, a in protocols.items()
                ],
                title=f"a first token takes {chat_ms:.3f} ms; medians of {FIRST_CALLS} differences",
            ),
        ],
        targets={
            "ttft_added_ms": "<= 2",
            "token_added_ms": "<= 0.1",
            "protocols_added_ms": "<= 0.3",
            "n_ttft_ratio": "<= 1.2",
            "keys_added_ms": "<= 0.2",
            "cpu_us_per_token": f"<= {figures['cpu_us_per_token_grpc']}",
        },
    )
