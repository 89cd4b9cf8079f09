"""Measures vLLM's own loop and mesh's adapter in turn, A B A B …, decoding a batch of eight.

Both compute on one core less than there are, so that the agent has one. The last line is one JSON
object: `overhead_share`, the median over rounds of how much longer an iteration takes when the
agent asks for it than in vLLM's own loop (medians of each round), and `agent_ms_p50`, what of an
iteration is not spent in the engine process: sending, receiving, waking up.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import count
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.demo_model import stored_model
from bench.vllm_step.workload import (
    BATCH,
    CONTEXT_TOKENS,
    KV_BLOCKS,
    OUTPUT_TOKENS,
    PREFILL_TOKENS_MAX,
    prompt,
)
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder
from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from mesh_nodes.engines.vllm.environment import ENVIRONMENT

ROUNDS = 10
OVERHEAD_SHARE_MAX = 0.05
AGENT_MS_MAX = 1.0
INSTANCE = InstanceId("bench")


class OwnLoop:
    """vLLM's own loop at the other end of a pipe."""

    def __init__(self, stored: StoredModel, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.vllm_step.bare", str(stored.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
        )
        while self._line() != "ready\n":
            pass

    def steps_ms(self) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return [float(taken) for taken in json.loads(self._line())]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("error: vLLM's own loop ended; what it wrote says why")
        return line


class Adapter:
    """mesh's engine, stepped as the node's agent steps it."""

    def __init__(self, stored: StoredModel, threads: int) -> None:
        self._engine = VllmEngine(threads=threads)
        self._names = count()
        order = LoadOrder(
            instance_id=INSTANCE,
            deployment=DeploymentName("bench"),
            model=stored.info,
            model_path=stored.path,
            kv_blocks=KV_BLOCKS,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH,
        )
        self._engine.load(order, lambda phase, share: None)

    def steps_ms(self) -> tuple[list[float], list[float]]:
        """Of every iteration that decoded the whole batch: all of it, and the agent's side."""
        for number in range(BATCH):
            request = EngineRequest(
                request_id=RequestId(str(next(self._names))),
                prompt_tokens=tuple(prompt(number)),
                output_tokens=(),
                sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
                stop_token_ids=(),
            )
            self._engine.submit(INSTANCE, request)
        taken_ms, agent_ms, running = [], [], BATCH
        while running:
            start_s = time.perf_counter()
            result = self._engine.step(INSTANCE, PREFILL_TOKENS_MAX)
            elapsed_s = time.perf_counter() - start_s
            running -= sum(output.finish is not None for output in result.outputs)
            if result.decode_batch == BATCH:
                taken_ms.append(1e3 * elapsed_s)
                agent_ms.append(1e3 * (elapsed_s - result.elapsed_s))
        return taken_ms, agent_ms

    def close(self) -> None:
        self._engine.close()


def report(rounds: int, threads: int) -> None:
    stored = stored_model()
    own, adapter = OwnLoop(stored, threads), Adapter(stored, threads)
    own_ms, whole_ms, agent_ms = [], [], []
    try:
        for turn in range(rounds + 1):
            own_taken = own.steps_ms()
            taken, on_agent = adapter.steps_ms()
            if turn > 0:  # the first warms up
                own_ms.append(median(own_taken))
                whole_ms.append(median(taken))
                agent_ms += on_agent
    finally:
        own.close()
        adapter.close()
    share = median(b / a - 1.0 for a, b in zip(own_ms, whole_ms, strict=True))
    agent = median(agent_ms)
    table = Table(
        title=f"batch {BATCH}, medians over {rounds} rounds", title_justify="left", box=None
    )
    for heading in ("", "measured", "limit"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("vLLM's own loop, ms an iteration", f"{median(own_ms):.2f}", "")
    table.add_row("stepped by the agent, ms an iteration", f"{median(whole_ms):.2f}", "")
    table.add_row("overhead", f"{share:+.1%}", f"{OVERHEAD_SHARE_MAX:.0%}")
    table.add_row("of it on the agent's side, ms", f"{agent:.2f}", f"{AGENT_MS_MAX:.1f}")
    Console(width=100).print(table)
    figures = {
        "overhead_share": round(share, 4),
        "agent_ms_p50": round(agent, 3),
        "own_ms_p50": round(median(own_ms), 3),
        "stepped_ms_p50": round(median(whole_ms), 3),
        "batch": BATCH,
        "rounds": rounds,
        "threads": threads,
    }
    print(json.dumps(figures))


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=max(1, cores - 1))
    options = parser.parse_args()
    report(options.rounds, options.threads)


if __name__ == "__main__":
    main()
