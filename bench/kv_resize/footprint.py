"""What an idle instance takes, beside what its books say and beside its weights alone.

The process has loaded and unloaded the model once before, so that what the libraries take, which is
there once for all instances, is not counted as the instance's.
"""

import random
from dataclasses import dataclass

from bench.demo_model import stored_model
from bench.driving import INSTANCE, no_progress, order
from bench.kv_resize.resident import resident_bytes
from bench.kv_resize.serving import BATCH, BLOCKS, CONTEXT_TOKENS, Served, draw_prompts, wait_until
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

DECODES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    taken_bytes: int
    booked_bytes: int
    """Weights with graph and activations, as the engine states them, and KV blocks in use."""
    packed_bytes: int
    """One byte a weight: the least that an instance could do with."""


def measure_footprint(threads: int, draw: random.Random) -> Footprint:
    stored = stored_model()
    engine = OpenVinoEngine(threads=threads)
    engine.prepare(stored.info, stored.path, no_progress)
    wanted = order(stored, kv_blocks=BLOCKS, context_tokens_max=CONTEXT_TOKENS, batch_max=BATCH)
    try:
        engine.load(wanted, no_progress)
        _work(engine, draw)
        engine.unload(INSTANCE)
        base = resident_bytes()
        engine.load(wanted, no_progress)
        _work(engine, draw)
        (books,) = engine.memory()
        return Footprint(
            taken_bytes=resident_bytes() - base,
            booked_bytes=books.weights_bytes + books.kv_used_bytes,
            packed_bytes=stored.info.parameters + books.kv_used_bytes,
        )
    finally:
        engine.close()


def _work(engine: OpenVinoEngine, draw: random.Random) -> None:
    """Serve a full batch for a while, and come to rest."""
    served = Served(engine._instance(INSTANCE))
    served.begin(draw_prompts(draw, BATCH))
    for _ in range(DECODES):
        served.step_s()
    served.drop()
    wait_until(lambda: served.books.kv_held_bytes == 0)
