"""How long iterations of a model take with its weights held so, and what it takes in memory.

Weights of zeros take as long as others, so that a model of any shape costs no download. Each
contender runs in a process of its own (`bench.peer`). Before: `__main__`.
"""

from collections.abc import Callable
from pathlib import Path

import psutil

from bench.driving import INSTANCE, no_progress, order
from mesh.domain.ids import ModelId
from mesh.domain.model import ModelFormat, WeightPrecision
from mesh.domain.profile import IterationShape
from mesh_loader.architectures import expected_tensors, shape_of
from mesh_loader.model_info import info_of_folder
from mesh_loader.safetensors_file import StoredTensor, header_bytes, write_json
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

CONTEXT_TOKENS = 1024
BATCHES = (1, 4, 8, 16)
PREFILL_TOKENS = 512
SHAPES = {
    **{f"decode {n}": IterationShape(decode_batch=n, decode_context_tokens=256) for n in BATCHES},
    "prefill": IterationShape(prefill_tokens=PREFILL_TOKENS),
}
LLAMA_1B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
"""Llama 3.2 1B."""


def model_of_zeros(folder: Path, config: dict[str, object]) -> StoredModel:
    """Takes no disk but for what is prepared of it."""
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", {})
    wanted = list(expected_tensors(shape_of(config, "config.json")))
    head = header_bytes((each.name, StoredTensor(dtype="F16", shape=each.shape)) for each in wanted)
    parameters = sum(each.elements for each in wanted)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 2 * parameters)
    info = info_of_folder(
        folder,
        model_id=ModelId("of-zeros"),
        source="made for the benchmark",
        form=ModelFormat.SAFETENSORS,
        parameters=parameters,
    )
    return StoredModel(path=folder, info=info)


def timed(
    stored: StoredModel, weights: WeightPrecision, threads: int
) -> Callable[[str | None], float]:
    """A loaded model, as a `Peer` has it: the seconds of an iteration of SHAPES, or, asked None,
    the bytes of memory that it has taken beside its KV cache and the pages of files.
    """
    engine = OpenVinoEngine(threads=threads, weights=weights)
    before_bytes = _own_bytes()
    engine.prepare(stored.info, stored.path, no_progress)
    kv_blocks = engine.footprint(stored.info).blocks_for(max(BATCHES) * CONTEXT_TOKENS)
    batch_max = max(BATCHES)
    wanted = order(
        stored, kv_blocks=kv_blocks, context_tokens_max=CONTEXT_TOKENS, batch_max=batch_max
    )
    engine.load(wanted, no_progress)

    def answer(name: str | None) -> float:
        if name is not None:
            return engine.measure(INSTANCE, SHAPES[name])
        return _own_bytes() - before_bytes - sum(m.kv_held_bytes for m in engine.memory())

    return answer


def _own_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
