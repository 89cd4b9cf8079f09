"""Asks a cell by gRPC and by HTTP in turn, and prints what HTTP adds.

The engine has all cores but one, which is left to the controller, the client and the loops. The
last line is one JSON object: `ttft_added_ms` of lone requests and `token_added_ms` of 16 streams
(medians over rounds of the difference of the round's medians), `cpu_us_per_token`, what the
controller computes for a token of these streams, beside gRPC's, and `keys_added_ms`, what a key
adds to an answer by HTTP.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import psutil

from bench.cells import deployed, local_cell, wait_calm
from bench.demo_model import SOURCE, stored_model
from bench.http.client import LONE_EVERY_S, Heard, by_grpc, by_http
from bench.http.keys import keys_added_ms
from bench.overhead.workload import CONTEXT_TOKENS, SLO
from bench.printing import errors_told, exit_by, last_line, show_status, show_table
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName

NAME = DeploymentName("http")
ROUNDS = 10
LONE = [(LONE_EVERY_S * number, 1) for number in range(9)]
"""The first of them opens the connection, and warms what a first call warms."""
STREAMS = 16
TOKENS = 128
TTFT_ADDED_MS_MAX = 2.0
TOKEN_ADDED_MS_MAX = 0.1
KEYS_ADDED_MS_MAX = 0.2

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


def compared(rounds: int, join_ms: float) -> tuple[list[Round], list[Round]]:
    """gRPC's rounds and HTTP's, in turn; who begins changes, and the first round warms up."""
    spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=SLO)
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    with local_cell(threads=threads, http="127.0.0.1:0", join_ms=join_ms) as cell:
        deployed(cell.address, [spec])
        wait_calm(cell)
        controller = psutil.Process(cell.children[0].process.pid)
        http_address = cell.http_address
        assert http_address is not None
        asks: list[Ask] = [
            lambda calls: by_grpc(cell.address, NAME, calls),
            lambda calls: by_http(http_address, NAME, calls),
        ]
        found: list[list[Round]] = [[], []]
        for number in range(rounds + 1):
            show_status(f"round {number} of {rounds}")
            for which in (0, 1) if number % 2 else (1, 0):
                found[which].append(measure(asks[which], controller))
    return found[0][1:], found[1][1:]


def report(rounds: int, join_ms: float) -> None:
    grpc, http = compared(rounds, join_ms)
    rows = []
    figures: dict[str, float] = {}
    for label, key in (
        ("first token, ms", "ttft_ms"),
        (f"each token of {STREAMS} streams, ms", "token_ms"),
        (f"CPU of a token of {STREAMS} streams, µs", "cpu_us_per_token"),
    ):
        one, other = ([float(getattr(r, key)) for r in of] for of in (grpc, http))
        added = median(h - g for g, h in zip(one, other, strict=True))
        rows.append((label, f"{median(one):.3f}", f"{median(other):.3f}", f"{added:.3f}"))
        if key.endswith("_ms"):
            figures[f"{key.removesuffix('_ms')}_added_ms"] = round(added, 3)
        figures |= {key: round(median(other), 3), f"{key}_grpc": round(median(one), 3)}
    figures["keys_added_ms"] = round(keys_added_ms(), 3)
    show_table(("", "gRPC", "HTTP", "added"), rows, title=f"medians over {rounds} rounds")
    last_line(figures)
    exit_by(
        {
            f"ttft_added_ms at most {TTFT_ADDED_MS_MAX:g}": figures["ttft_added_ms"]
            <= TTFT_ADDED_MS_MAX,
            f"token_added_ms at most {TOKEN_ADDED_MS_MAX:g}": figures["token_added_ms"]
            <= TOKEN_ADDED_MS_MAX,
            f"keys_added_ms at most {KEYS_ADDED_MS_MAX:g}": figures["keys_added_ms"]
            <= KEYS_ADDED_MS_MAX,
            "cpu_us_per_token at most gRPC's": figures["cpu_us_per_token"]
            <= figures["cpu_us_per_token_grpc"],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--join-ms", type=float, default=0.0, help="as of mesh controller")
    options = parser.parse_args()
    with errors_told():
        stored_model()
        report(options.rounds, options.join_ms)


if __name__ == "__main__":
    main()
