"""Measures vLLM's own loop and mesh's adapter in turn, A B C C B A …, decoding a batch of eight.

B asks for one iteration a message, C for a turn of four, as the node's agent does where nobody else
has work.

Both compute on one core less than there are, so that the agent has one. The last line is one JSON
object: `overhead_share`, the median over rounds of how much longer an iteration takes when the
agent asks for it than in vLLM's own loop (medians of each round), and `agent_ms_p50`, what of an
iteration is not spent in the engine process: sending, receiving, waking up. The same with `_of_4`,
an iteration's share of its turn.
"""

import os
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from itertools import count
from statistics import median

from bench.demo_model import stored_model
from bench.driving import LoadedModel
from bench.harness import Report, Table, in_turn
from bench.peer import Peer
from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from mesh_nodes.engines.vllm.environment import ENVIRONMENT

BATCH = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
CONTEXT_TOKENS = 512
BLOCK_TOKENS = 32
KV_BLOCKS = BATCH * CONTEXT_TOKENS // BLOCK_TOKENS
PREFILL_TOKENS_MAX = 256


def prompt(number: int) -> list[int]:
    """Another one for each request."""
    return [100 + (number * 37 + index * 11) % 4000 for index in range(PROMPT_TOKENS)]


def contender(model_path: str) -> Callable[[None], list[float]]:
    """With the same model, precision, KV cache and bounds as mesh's adapter has."""
    # Here, for it reads the peer's environment when it is imported.
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    warnings.simplefilter("ignore")
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=BATCH,
            max_num_batched_tokens=PREFILL_TOKENS_MAX + BATCH,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=KV_BLOCKS + 1,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
        )
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    names = count()

    def steps_ms(_: None) -> list[float]:
        for number in range(BATCH):
            engine.add_request(str(next(names)), {"prompt_token_ids": prompt(number)}, params)
        taken_ms = []
        while engine.has_unfinished_requests():
            start_s = time.perf_counter()
            outputs = engine.step()
            if len(outputs) == BATCH:
                taken_ms.append(1e3 * (time.perf_counter() - start_s))
        return taken_ms

    return steps_ms


TURN = 4
"""Iterations of a turn."""
OVERHEAD_SHARE_MAX = 0.05
AGENT_MS_MAX = 1.0


class Adapter:
    """mesh's engine, stepped as the node's agent steps it."""

    def __init__(self, stored: StoredModel, threads: int) -> None:
        self._model = LoadedModel(
            VllmEngine(threads=threads),
            stored,
            kv_tokens=BATCH * CONTEXT_TOKENS,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH,
        )
        self.close = self._model.close

    def steps_ms(self, iterations: int) -> tuple[list[float], list[float]]:
        """The times of every turn of so many iterations that decoded the whole batch, per
        iteration: in all, and in the agent's side.
        """
        for number in range(BATCH):
            self._model.submit(prompt(number), OUTPUT_TOKENS)
        taken_ms, agent_ms, running = [], [], BATCH
        while running:
            start_s = time.perf_counter()
            result = self._model.step(PREFILL_TOKENS_MAX, iterations)
            elapsed_s = time.perf_counter() - start_s
            running -= sum(output.finish is not None for output in result.outputs)
            if result.decode_batch == BATCH and result.iterations == iterations:
                taken_ms.append(1e3 * elapsed_s / iterations)
                agent_ms.append(1e3 * (elapsed_s - result.elapsed_s) / iterations)
        return taken_ms, agent_ms


TURNS = {"vLLM's own loop": 0, "one a message": 1, f"turns of {TURN}": TURN}
"""Iterations that the agent asks for at once."""


def measure(rounds: int, threads: int) -> tuple[dict[int, list[float]], dict[int, float]]:
    """By iterations of a turn: the median of each round, and what of an iteration is spent on the
    agent's side, in the median; milliseconds.
    """
    stored = stored_model()
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    whole_ms: dict[int, list[float]] = {turn: [] for turn in TURNS.values()}
    agent_ms: dict[int, list[float]] = {1: [], TURN: []}
    with (
        Peer("vLLM's own loop", contender, str(stored.path), environment=environment) as own,
        closing(Adapter(stored, threads)) as adapter,
    ):
        own.wait_ready()
        for number, _, turn in in_turn(TURNS, rounds, warm_ups=1):
            taken, spent = adapter.steps_ms(turn) if turn else (own.ask(), [])
            if number > 0:
                whole_ms[turn].append(median(taken))
                if turn:
                    agent_ms[turn] += spent
    return whole_ms, {turn: median(spent) for turn, spent in agent_ms.items()}


def run(*, rounds: int = 10, threads: int = max(1, len(os.sched_getaffinity(0)) - 1)) -> Report:
    whole_ms, agent_ms = measure(rounds, threads)
    own_ms, single_ms, turn_ms = (median(whole_ms[turn]) for turn in TURNS.values())
    share, share_of_4 = (
        median(b / a - 1.0 for a, b in zip(whole_ms[0], whole_ms[turn], strict=True))
        for turn in (1, TURN)
    )
    agent = (f"{each:.2f}" for each in agent_ms.values())
    rows = [
        ("vLLM's own loop, ms an iteration", f"{own_ms:.2f}", f"{own_ms:.2f}", ""),
        ("stepped by the agent, ms an iteration", f"{single_ms:.2f}", f"{turn_ms:.2f}", ""),
        ("overhead", f"{share:+.1%}", f"{share_of_4:+.1%}", f"{OVERHEAD_SHARE_MAX:.0%}"),
        ("of it on the agent's side, ms", *agent, f"{AGENT_MS_MAX:.1f}"),
    ]
    return Report(
        figures={
            "overhead_share": round(share, 4),
            "agent_ms_p50": round(agent_ms[1], 3),
            "overhead_share_of_4": round(share_of_4, 4),
            "agent_ms_p50_of_4": round(agent_ms[TURN], 3),
            "own_ms_p50": round(own_ms, 3),
            "stepped_ms_p50": round(single_ms, 3),
            "stepped_ms_p50_of_4": round(turn_ms, 3),
            "batch": BATCH,
            "rounds": rounds,
            "threads": threads,
        },
        shown=[
            Table(
                headings=("", *list(TURNS)[1:], "limit"),
                rows=rows,
                title=f"batch {BATCH}, medians over {rounds} rounds",
            )
        ],
    )
