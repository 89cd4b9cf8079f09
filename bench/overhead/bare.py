"""The bare engine, in a process of its own: stepped in a plain loop, nothing around it.

Reads a line and answers with a JSON line, so that it is idle while the cell is measured.
"""

import json
import sys
import time
from collections.abc import Iterator
from itertools import count

from bench.overhead.workload import (
    BATCH,
    BATCH_TOKENS,
    CONTEXT_TOKENS,
    KV_TOKENS,
    PROMPT_TOKENS,
    TTFT_REPEATS,
    steady,
)
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder
from mesh.runtime.engine import Engine
from mesh_loader.store import StoredModel

INSTANCE = InstanceId("bare")
PREFILL_TOKENS = NodeLimits().prefill_tokens_max


def load(engine: Engine, stored: StoredModel) -> None:
    """One instance, as large as the cell's."""
    engine.prepare(stored.info, stored.path, lambda phase, share: None)
    block_tokens = engine.footprint(stored.info).block_tokens
    order = LoadOrder(
        instance_id=INSTANCE,
        deployment=DeploymentName("bare"),
        model=stored.info,
        model_path=stored.path,
        kv_blocks=KV_TOKENS // block_tokens,
        context_tokens_max=CONTEXT_TOKENS,
        batch_max=CellLimits().batch_max,
    )
    engine.load(order, lambda phase, share: None)


def submit(engine: Engine, name: str, max_tokens: int) -> RequestId:
    request_id = RequestId(name)
    engine.submit(
        INSTANCE,
        EngineRequest(
            request_id=request_id,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=(),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1),
            stop_token_ids=(),
        ),
    )
    return request_id


def first_tokens(engine: Engine, numbers: Iterator[int]) -> list[float]:
    """Milliseconds to the first token of a lone request."""
    taken = []
    for _ in range(TTFT_REPEATS):
        start_s = time.perf_counter()
        submit(engine, f"r{next(numbers)}", 1)
        while not engine.step(INSTANCE, PREFILL_TOKENS).outputs:
            pass
        taken.append(1e3 * (time.perf_counter() - start_s))
    return taken


def batch(engine: Engine, numbers: Iterator[int]) -> tuple[float, ...]:
    """Milliseconds per token of eight requests at once."""
    times_s: dict[RequestId, list[float]] = {
        submit(engine, f"r{next(numbers)}", BATCH_TOKENS): [] for _ in range(BATCH)
    }
    while outputs := engine.step(INSTANCE, PREFILL_TOKENS).outputs:
        now_s = time.perf_counter()
        for output in outputs:
            times_s[output.request_id].append(now_s)
    return steady(list(times_s.values()))


def serve(engine: Engine, stored: StoredModel) -> None:
    """Answer every line of stdin until it ends."""
    load(engine, stored)
    numbers = count()
    print("ready", flush=True)
    for _ in sys.stdin:
        answer = {"ttft_ms": first_tokens(engine, numbers), "token_ms": batch(engine, numbers)}
        print(json.dumps(answer), flush=True)
    engine.close()
