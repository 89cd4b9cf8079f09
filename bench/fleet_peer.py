"""The swapper as a process of its own, under the same calls as mesh, and what it says of itself."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from bench.demo_model import demo_gguf
from bench.spans import Kind, Span
from mesh.cli import children
from mesh.cli.cell_plan import free_address
from mesh.domain.errors import Unavailable
from mesh.evaluation.load_client import Answer, Call, offer

CALLS_AT_ONCE_MAX = 1024
"""The most calls that wait for servers side by side: more than ever do."""
READY_S_MAX = 180.0
POLL_S = 0.1


def swapped(
    calls: Sequence[Call],
    folder: Path,
    *,
    resident_max: int,
    preloaded: Sequence[str],
    call_s_max: float,
) -> tuple[list[Answer], list[Span]]:
    """Offer a fresh swapper these calls. Those that are loaded before the first one are computed
    side by side; where there are none, one call at a time has all cores.

    Raises Unavailable when it ends or does not start.
    """
    address, spans = free_address("127.0.0.1:0"), folder / "spans.json"
    arguments = {
        "--gguf": demo_gguf(),
        "--listen": address,
        "--resident-max": resident_max,
        "--at-once": CALLS_AT_ONCE_MAX if preloaded else 1,
        "--spans": spans,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    child = children.start(
        "the swapper", "bench.fleet_swapper", [*words, *preloaded], folder / "swapper.log"
    )
    try:
        _wait_serving(address, child)
        answers = offer(address, calls, call_s_max=call_s_max)
        if not child.running:
            raise _ended(child)
    finally:
        children.stop([child])
    return answers, [Span(Kind(kind), *times) for kind, *times in json.loads(spans.read_text())]


def _wait_serving(address: str, child: children.Child) -> None:
    until_s = time.monotonic() + READY_S_MAX
    with grpc.insecure_channel(address) as channel:
        ready = grpc.channel_ready_future(channel)
        while not ready.done():
            if not child.running:
                raise _ended(child)
            if time.monotonic() > until_s:
                raise Unavailable(f"the swapper does not serve after {READY_S_MAX:.0f} s")
            time.sleep(POLL_S)


def _ended(child: children.Child) -> Unavailable:
    return Unavailable(f"{child.name} {child.fate()}", hint=" | ".join(child.log_tail()[-2:]))
