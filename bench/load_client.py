"""What a load client itself adds to a first token and to each further one: locust and asyncio.

A server of its own process streams tokens at known times to STREAMS calls that are open at once. A
client's share of a first token is the time from its sending to the token's coming less what the
server took; of a further token, the time from the server's sending it to its coming. The wire and
the server's own writing are in both clients' shares. One locust worker and the plain asyncio client
are measured in turn. The last line is one JSON object, in milliseconds: `ttft_share_ms_p50` and
`token_share_ms_p50` of locust, the same with `asyncio_` before, p95 beside, and how late the
clients sent. Exit code 1 when tokens are missing.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from bench.harness import Report, Table, in_turn
from bench.load_client_server import NAME, SLO, Log, scripted
from bench.peer import Peer
from mesh.domain.errors import Unavailable
from mesh.evaluation.load_client import Call, offer
from mesh.evaluation.replay.report import LATE_MS_MAX
from mesh.report.distribution import Distribution

PROMPT_TOKENS = 32
"""The prompt of the first call; each further one has one token more, by which the server
knows it.
"""
SPREAD_S = 2.0
"""All calls begin within it."""
RUN_S_MAX = 300.0
LOCUSTFILE = Path(__file__).parent / "load_client_locustfile.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a client noted of one call, on the machine's monotonic clock."""

    due_s: float
    sent_s: float
    tokens_s: Sequence[float]


@dataclass(slots=True)
class Shares:
    """One client's, in milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    missing: int = 0
    """Tokens."""

    def add(self, heard: Heard, came_s: float, went_s: Sequence[float], tokens: int) -> None:
        self.late_ms.append(1000 * (heard.sent_s - heard.due_s))
        self.missing += tokens - len(heard.tokens_s)
        if heard.tokens_s:
            served_s = went_s[0] - came_s
            self.ttft_ms.append(1000 * (heard.tokens_s[0] - heard.sent_s - served_s))
        pairs = zip(heard.tokens_s[1:], went_s[1:], strict=False)
        self.token_ms += (1000 * (got_s - sent_s) for got_s, sent_s in pairs)

    def figures(self) -> dict[str, float]:
        found = {"missing_tokens": float(self.missing)}
        for name, values in (
            ("ttft_share_ms", self.ttft_ms),
            ("token_share_ms", self.token_ms),
            ("late_ms", self.late_ms),
        ):
            spread = Distribution.of(values)
            for percent in (50, 95, 99):
                found[f"{name}_p{percent}"] = round(spread.at(percent) or 0.0, 3)
        return found


def by_asyncio(address: str, streams: int, tokens: int) -> dict[int, Heard]:
    """By the length of the prompt."""
    calls = [
        Call(
            at_s=n * SPREAD_S / streams,
            deployment=NAME,
            slo=SLO,
            prompt_tokens=(1,) * (PROMPT_TOKENS + n),
            output_tokens=tokens,
        )
        for n in range(streams)
    ]
    return {
        len(call.prompt_tokens): Heard(
            due_s=answer.sent_s - answer.lag_s,
            sent_s=answer.sent_s,
            tokens_s=[answer.sent_s + at_s for at_s in answer.tokens_s],
        )
        for call, answer in zip(calls, offer(address, calls), strict=True)
    }


def by_locust(address: str, streams: int, tokens: int, folder: Path) -> dict[int, Heard]:
    """The same calls, by one worker. Raises Unavailable when locust does not end well."""
    trace, out = folder / "trace.csv", folder / "tokens.json"
    rows = (f"{n * SPREAD_S / streams},0,{PROMPT_TOKENS + n},{tokens}" for n in range(streams))
    trace.write_text("\n".join(["t_s,function,input_tokens,output_tokens", *rows]) + "\n")
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", address),
            *("--headless", "--only-summary", "--processes", "1", "--trace", str(trace)),
            *("--tokens", str(out)),
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S_MAX,
    )
    if not out.exists():
        raise Unavailable(f"locust has failed:\n{ran.stdout[-3000:]}")
    return {int(length): Heard(**each) for length, each in json.loads(out.read_text()).items()}


def measure(streams: int, tokens: int, token_s: float, rounds: int) -> dict[str, Shares]:
    """By client. Raises Unavailable."""
    found = {"locust": Shares(), "asyncio": Shares()}
    for _, client, shares in in_turn(found, rounds):
        with Peer("the scripted server", scripted, token_s) as server:
            server.wait_ready()
            address, _ = server.ask()
            if client == "locust":
                with tempfile.TemporaryDirectory() as folder:
                    heard = by_locust(address, streams, tokens, Path(folder))
            else:
                heard = by_asyncio(address, streams, tokens)
            log: Log = server.ask()[1]
        for length in range(PROMPT_TOKENS, PROMPT_TOKENS + streams):
            if length in heard and length in log.came_s:
                shares.add(heard[length], log.came_s[length], log.went_s[length], tokens)
            else:
                shares.missing += tokens
    return found


def run(
    *,
    streams: Annotated[int, "streams that are open at once"] = 200,
    tokens: Annotated[int, "tokens of each"] = 100,
    token_s: Annotated[float, "seconds between two tokens"] = 0.1,
    rounds: int = 2,
) -> Report:
    figures = {n: s.figures() for n, s in measure(streams, tokens, token_s, rounds).items()}
    locust = figures["locust"]
    headings = ["SHARE", *(client.upper() for client in figures)]
    rows = [[name, *(f"{each[name]:g}" for each in figures.values())] for name in locust]
    late = locust["late_ms_p99"] > LATE_MS_MAX
    told = [f"the locust worker did not keep up: {locust['late_ms_p99']:g} ms late (p99)"]
    beside = {f"asyncio_{name}": value for name, value in figures["asyncio"].items()}
    return Report(
        figures={"streams": streams} | locust | beside,
        shown=[Table(headings=headings, rows=rows), *(told if late else ())],
        targets={"missing_tokens": "== 0", "asyncio_missing_tokens": "== 0"},
    )
