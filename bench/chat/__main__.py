"""Turns of conversations with a shared system prompt: mesh by its client, and engines bare.

Each round plays eight turns of fresh conversations, one alone and four at once, on every contender
in turns: a cell of mesh with its prefix cache and one without, OpenVINO GenAI with its prefix
cache, llama.cpp with its prompt cache. What is shown is the time to a turn's first token, as its
client sees it; of mesh the whole way of a request is in it. `--park` lets so many seconds pass
between turns, in which mesh parks its instance. The last line is one JSON object with lists by
conversations at once.
"""

import argparse
import importlib.util
import time
from contextlib import ExitStack
from statistics import median

from bench.cells import local_cell, measured_profile
from bench.chat.contenders import Turn, genai_turn, llama_turn, mesh_turn
from bench.chat.workload import CONTEXT_TOKENS, CONVERSATIONS, THREADS, TURNS, conversations
from bench.demo_model import SOURCE
from bench.engine.models import prepared_models
from bench.peer import Peer
from bench.printing import errors_told, last_line, show_status, show_table
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient

ROUNDS = 3
ON, OFF = DeploymentName("cached"), DeploymentName("computed")
PEERS = {
    "openvino-genai": ("openvino_genai", genai_turn),
    "llama.cpp": ("xllamacpp", llama_turn),
}
SHOWN_TURNS = (1, 2, 4, TURNS)

Seconds = dict[str, dict[int, list[list[float]]]]
"""To first tokens: by contender, conversations at once, turn."""


def played(turns: dict[str, Turn], rounds: int, park_s: float) -> tuple[Seconds, list[str]]:
    """And who goes on with answers that are made up."""
    made_up: dict[str, None] = {}
    found: Seconds = {
        name: {count: [[] for _ in range(TURNS)] for count in CONVERSATIONS} for name in turns
    }
    for number in range(rounds):
        for count in CONVERSATIONS:
            for name, turn in turns.items():
                show_status(f"round {number + 1}: {name}, {count} at once")
                made = conversations(count, seed=number)
                for at in range(TURNS):
                    if at and park_s:
                        time.sleep(park_s)
                    answers = turn([one.ask() for one in made])
                    for one, (first_s, answer) in zip(made, answers, strict=True):
                        one.hear(first_s, answer)
                        if one.made_up:
                            made_up[name] = None
                    found[name][count][at] += [one.first_token_s[-1] for one in made]
    return found, list(made_up)


def spec(name: DeploymentName, *, prefix_cache: bool) -> DeploymentSpec:
    return DeploymentSpec(
        name=name,
        source=SOURCE,
        context_tokens_max=CONTEXT_TOKENS,
        slo=Slo(ttft_s=20.0, tpot_s=2.0),
        scaling=Scaling(replicas_max=1),
        prefix_cache=prefix_cache,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--park", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="mesh alone")
    options = parser.parse_args()
    if options.rounds < 1 or options.park < 0:
        parser.error("--rounds must be 1 or more, --park 0 or more")
    with errors_told(), ExitStack() as stack:
        models = prepared_models()
        cell = stack.enter_context(local_cell(threads=THREADS))
        with MeshClient(cell.address) as client:
            for deployment in (ON, OFF):
                client.deploy(spec(deployment, prefix_cache=deployment == ON))
        measured_profile(cell.address, ON, show_status)
        turns = {"mesh": mesh_turn(cell.address, ON), "mesh, off": mesh_turn(cell.address, OFF)}
        missing: list[str] = []
        for name, (package, build) in PEERS.items():
            if not options.peers or importlib.util.find_spec(package) is None:
                missing.append(name)
                continue
            peer = stack.enter_context(Peer(name, build, models))
            peer.wait_ready()
            turns[name] = peer.ask
        for name, turn in turns.items():
            show_status(f"{name}: a first call, which is not counted")
            turn([[5] * 40])
        rounds = 1 if options.quick else options.rounds
        found, made_up = played(turns, rounds, options.park)
    report(found, missing, made_up)


def report(found: Seconds, missing: list[str], made_up: list[str]) -> None:
    medians = {
        name: {count: [median(turn) for turn in by[count]] for count in CONVERSATIONS}
        for name, by in found.items()
    }
    show_table(
        ("contender", "at once", *(f"turn {n} ms" for n in SHOWN_TURNS)),
        [
            (name, str(count), *(f"{1e3 * by[count][n - 1]:.0f}" for n in SHOWN_TURNS))
            for name, by in medians.items()
            for count in CONVERSATIONS
        ],
        title="time to first token, median",
    )
    last = {name: [by[count][-1] for count in CONVERSATIONS] for name, by in medians.items()}
    others = [last[name] for name in last if name in PEERS]
    best = [min(of) for of in zip(*others, strict=True)] if others else []
    last_line(
        {
            "conversations": list(CONVERSATIONS),
            "turn8_ms": {name: [round(1e3 * s, 1) for s in by] for name, by in last.items()},
            "turn8_ratio_to_best": [
                round(ours / theirs, 3) for ours, theirs in zip(last["mesh"], best, strict=False)
            ],
            "turn8_ratio_to_off": [
                round(on / off, 3) for on, off in zip(last["mesh"], last["mesh, off"], strict=True)
            ],
            "missing": missing,
            "made_up_answers": made_up,
        },
        surveyed=True,
    )


if __name__ == "__main__":
    main()
