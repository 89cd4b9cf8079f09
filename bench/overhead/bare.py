"""The bare engine, stepped in a plain loop with nothing around it: the peer of the cell."""

import time
from collections.abc import Callable

from bench.demo_model import stored_model
from bench.driving import LoadedModel
from bench.overhead.workload import (
    BATCH,
    BATCH_TOKENS,
    CONTEXT_TOKENS,
    KV_TOKENS,
    LONE_EVERY_S,
    PROMPT_TOKENS,
    TTFT_REPEATS,
    Answer,
    steady,
)
from mesh.domain.ids import RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

PREFILL_TOKENS = NodeLimits().prefill_tokens_max


def first_tokens(model: LoadedModel) -> tuple[float, ...]:
    """Milliseconds to the first token of a lone request."""
    taken = []
    for _ in range(TTFT_REPEATS):
        time.sleep(LONE_EVERY_S)
        start_s = time.perf_counter()
        model.submit(PROMPT_TOKENS, 1)
        while not model.step(PREFILL_TOKENS).outputs:
            pass
        taken.append(1e3 * (time.perf_counter() - start_s))
    return tuple(taken)


def batch(model: LoadedModel) -> tuple[float, ...]:
    """Milliseconds per token of eight requests at once."""
    times_s: dict[RequestId, list[float]] = {
        model.submit(PROMPT_TOKENS, BATCH_TOKENS): [] for _ in range(BATCH)
    }
    while outputs := model.step(PREFILL_TOKENS).outputs:
        now_s = time.perf_counter()
        for output in outputs:
            times_s[output.request_id].append(now_s)
    return steady(list(times_s.values()))


def contender(threads: int) -> Callable[[None], Answer]:
    """With one instance, as large as the cell's."""
    model = LoadedModel(
        OpenVinoEngine(threads=threads),
        stored_model(),
        kv_tokens=KV_TOKENS,
        context_tokens_max=CONTEXT_TOKENS,
        batch_max=CellLimits().batch_max,
    )
    return lambda _: Answer(ttft_ms=first_tokens(model), token_ms=batch(model))
