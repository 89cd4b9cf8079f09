"""Turns of conversations with a shared system prompt: mesh by its client, and engines bare.

Each round plays eight turns of fresh conversations, one alone and four at once, on every contender
in turns: a cell of mesh with its prefix cache and one without, OpenVINO GenAI with its prefix
cache, llama.cpp with its prompt cache. What is shown is the time to a turn's first token, as its
client sees it; of mesh the whole way of a request is in it. `--park` lets so many seconds pass
between turns, in which mesh parks its instance. The last line is one JSON object with lists by
conversations at once.
"""

import importlib.util
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any

from bench.cells import local_cell, measured_profile
from bench.demo_model import SOURCE
from bench.engine_contenders import THREADS as THREADS
from bench.engine_models import Models, prepared_models
from bench.harness import Report, Table, in_turn, show_status
from bench.peer import Peer
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import EngineError
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, TokenPrompt, Tokens
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient

SYSTEM_TOKENS = 420
"""About 400 words."""
TURN_TOKENS = 42
"""The tokens of a turn's question, with what a chat template puts around it."""
OUTPUT_TOKENS = 32
TURNS = 8
CONTEXT_TOKENS = 2048
CONVERSATIONS = (1, 4)
"""At once."""
TOKEN_IDS = range(1000, 40_000)


@dataclass(slots=True)
class Conversation:
    """`history` is all that has been said."""

    history: list[int]
    rng: random.Random
    first_token_s: list[float] = field(default_factory=list)
    """The TTFT of each turn."""
    made_up: bool = False
    """An answer's ids were not told, and it goes on with others: what is cached of that is lost."""

    def ask(self) -> list[int]:
        """The next prompt: the whole history with the next question."""
        self.history += self.rng.choices(TOKEN_IDS, k=TURN_TOKENS)
        return list(self.history)

    def hear(self, first_token_s: float, answer: list[int]) -> None:
        """Raises EngineError for an answer without a token."""
        if not first_token_s > 0.0:
            raise EngineError(f"turn {len(self.first_token_s) + 1} was answered without a token")
        self.first_token_s.append(first_token_s)
        if len(answer) != OUTPUT_TOKENS:
            self.made_up = True
            answer = self.rng.choices(TOKEN_IDS, k=OUTPUT_TOKENS)
        self.history += answer


def conversations(count: int, seed: int) -> list[Conversation]:
    """They share the system prompt, and no other seed does."""
    system = random.Random(f"system {seed}").choices(TOKEN_IDS, k=SYSTEM_TOKENS)
    return [Conversation(list(system), random.Random(f"{n} {seed}")) for n in range(count)]


Answer = tuple[float, list[int]]
"""Seconds to the first token, and the ids of all where they are told."""
Turn = Callable[[Sequence[list[int]]], list[Answer]]
"""The next turn of every conversation, at once."""
GENAI_CACHE_GB = 1
CACHE_RAM_MIB = 1024
"""llama.cpp's for prompts of conversations that have no slot."""


def mesh_turn(address: str, name: DeploymentName) -> Turn:
    def answer(prompt: list[int]) -> Answer:
        asked = Invocation(
            deployment=name,
            prompt=TokenPrompt(token_ids=tuple(prompt)),
            temperature=0.0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
        )
        made: list[int] = []
        first_s, start_s = 0.0, time.perf_counter()
        for event in client.invoke(asked):
            if isinstance(event, Tokens):
                first_s = first_s or time.perf_counter() - start_s
                made += event.token_ids
        return first_s, made

    client = MeshClient(address)
    threads = ThreadPoolExecutor(max(CONVERSATIONS))
    return lambda prompts: list(threads.map(answer, prompts))


def genai_turn(models: Models) -> Turn:
    """OpenVINO GenAI's continuous batching."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = GENAI_CACHE_GB
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(models.genai_ir), scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS}
    )
    generation = openvino_genai.GenerationConfig()
    generation.max_new_tokens = OUTPUT_TOKENS
    generation.ignore_eos = True
    generation.do_sample = False
    added = 0

    def turn(prompts: Sequence[list[int]]) -> list[Answer]:
        nonlocal added
        start_s, handles = time.perf_counter(), []
        for prompt in prompts:
            added += 1
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(pipeline.add_request(added, ids, generation))
        first_s, made = [0.0] * len(handles), [list[int]() for _ in handles]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for n, handle in enumerate(handles):
                while handle.can_read():
                    first_s[n] = first_s[n] or time.perf_counter() - start_s
                    for output in handle.read().values():
                        made[n] += output.generated_ids
        return list(zip(first_s, made, strict=True))

    return turn


def llama_turn(models: Models) -> Turn:
    """llama.cpp's server without its HTTP."""
    import xllamacpp

    slots = max(CONVERSATIONS)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(models.gguf)
    parameters.n_parallel = slots
    parameters.n_ctx = slots * CONTEXT_TOKENS
    parameters.cpuparams.n_threads = THREADS
    parameters.cpuparams_batch.n_threads = THREADS
    parameters.cache_ram_mib = CACHE_RAM_MIB
    server: Any = xllamacpp.Server(parameters)
    threads = ThreadPoolExecutor(slots)

    def answer(prompt: list[int]) -> Answer:
        start_s, first_s, made = time.perf_counter(), 0.0, list[int]()

        def came(chunk: dict[str, Any]) -> bool:
            nonlocal first_s
            if chunk.get("timings", {}).get("predicted_n", 0):
                first_s = first_s or time.perf_counter() - start_s
            for choice in chunk.get("choices", ()):
                made.extend(choice.get("tokens", ()))
            made.extend(chunk.get("tokens", ()))
            return False

        asked = {
            "prompt": prompt,
            "n_predict": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
            "timings_per_token": True,
        }
        server.handle_completions(asked, came)
        return first_s, made

    return lambda prompts: list(threads.map(answer, prompts))


ROUNDS = 3
ON, OFF = DeploymentName("cached"), DeploymentName("computed")
PEERS = {
    "openvino-genai": ("openvino_genai", genai_turn),
    "llama.cpp": ("xllamacpp", llama_turn),
}
SHOWN_TURNS = (1, 2, 4, TURNS)

Seconds = dict[str, dict[int, list[list[float]]]]
"""To first tokens: by contender, conversations at once, turn."""


def spec(name: DeploymentName, *, prefix_cache: bool) -> DeploymentSpec:
    return DeploymentSpec(
        name=name,
        source=SOURCE,
        context_tokens_max=CONTEXT_TOKENS,
        slo=Slo(ttft_s=20.0, tpot_s=2.0),
        scaling=Scaling(replicas_max=1),
        prefix_cache=prefix_cache,
    )


def played(turns: dict[str, Turn], rounds: int, park_s: float) -> tuple[Seconds, list[str]]:
    """And who goes on with answers that are made up."""
    made_up: dict[str, None] = {}
    found: Seconds = {
        name: {count: [[] for _ in range(TURNS)] for count in CONVERSATIONS} for name in turns
    }
    for number, name, turn in in_turn(turns, rounds):
        for count in CONVERSATIONS:
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


def report(found: Seconds, missing: list[str], made_up: list[str]) -> Report:
    medians = {
        name: {count: [median(turn) for turn in by[count]] for count in CONVERSATIONS}
        for name, by in found.items()
    }
    rows = [
        (name, str(count), *(f"{1e3 * by[count][n - 1]:.0f}" for n in SHOWN_TURNS))
        for name, by in medians.items()
        for count in CONVERSATIONS
    ]
    headings = ("contender", "at once", *(f"turn {n} ms" for n in SHOWN_TURNS))
    last = {name: [by[count][-1] for count in CONVERSATIONS] for name, by in medians.items()}
    others = [last[name] for name in last if name in PEERS]
    best = [min(of) for of in zip(*others, strict=True)] if others else []
    return Report(
        figures={
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
        shown=[Table(headings=headings, rows=rows, title="time to first token, median")],
        surveyed=True,
    )


def run(
    *,
    rounds: int = 3,
    park: Annotated[float, "seconds between turns, in which mesh parks its instance"] = 0.0,
    quick: bool = False,
    peers: bool = True,
) -> Report:
    with ExitStack() as stack:
        models = prepared_models()
        cell = stack.enter_context(local_cell(threads=THREADS))
        with MeshClient(cell.address) as client:
            for deployment in (ON, OFF):
                client.deploy(spec(deployment, prefix_cache=deployment == ON))
        measured_profile(cell.address, ON, show_status)
        turns = {"mesh": mesh_turn(cell.address, ON), "mesh, off": mesh_turn(cell.address, OFF)}
        missing: list[str] = []
        for name, (package, build) in PEERS.items():
            if not peers or importlib.util.find_spec(package) is None:
                missing.append(name)
                continue
            peer = stack.enter_context(Peer(name, build, models))
            peer.wait_ready()
            turns[name] = peer.ask
        for name, turn in turns.items():
            show_status(f"{name}: a first call, which is not counted")
            turn([[5] * 40])
        found, made_up = played(turns, 1 if quick else rounds, park)
    return report(found, missing, made_up)
