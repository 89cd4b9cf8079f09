"""GGUF files as benchmarks want them: the same weights in another type, or random ones of a shape.

Before: the demo model's file, of which all have the vocabulary. After: the peers, and mesh's store.
"""

from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.tiny_model import LlamaShape

Kind = gguf.GGMLQuantizationType
FILE_TYPES = {Kind.F16: 1, Kind.Q4_0: 2, Kind.Q8_0: 7}
"""The `general.file_type` that says so (llama.h, enum llama_ftype)."""
_NORM_DEVIATION = 0.1
_DEVIATIONS = {Kind.Q8_0: 73.9, Kind.Q4_0: 4.61}
"""The standard deviation of the numbers that a block may have: drawn evenly from -128 to 127, or
from -8 to 7. Blocks of either kind begin with a scale in f16.
"""


def requantise(source: Path, target: Path, kind: Any) -> None:
    """The same GGUF with its matrices in another type; vectors become f32. Beside 4 bits the
    embedding and the head have 8.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if key == "general.file_type":
            writer.add_file_type(FILE_TYPES[kind])
        elif field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if len(shape) == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            held = _held(tensor.name, kind)
            packed = gguf.quants.quantize(values.astype(np.float32), held)
            writer.add_tensor(tensor.name, packed, raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random(
    path: Path, shape: LlamaShape, *, vocabulary: Path, seed: int = 0, kind: Any = Kind.Q8_0
) -> None:
    """A GGUF of this shape with the vocabulary of another; matrices as `requantise` has them."""
    reader = gguf.GGUFReader(vocabulary)
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_block_count(shape.layers)
    writer.add_context_length(reader.fields["llama.context_length"].contents())
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(reader.fields["llama.rope.freq_base"].contents())
    writer.add_layer_norm_rms_eps(1e-5)
    for key, field in reader.fields.items():
        if key.startswith("tokenizer.") and field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        elif key.startswith("tokenizer."):
            writer.add_key_value(key, field.contents(), field.types[0])
    tokens = len(reader.fields["tokenizer.ggml.tokens"].contents())
    draw = np.random.default_rng(seed)
    for name, dimensions in _tensors(shape, tokens):
        if len(dimensions) == 1:
            # OpenVINO drops a product with ones, and a graph without a norm is another shape.
            norm = 1.0 + _NORM_DEVIATION * draw.standard_normal(dimensions)
            writer.add_tensor(name, norm.astype(np.float32))
        else:
            held = _held(name, kind)
            deviation = 0.3 * sqrt(32 / shape.hidden)
            packed = _random_blocks(draw, *dimensions, kind=held, deviation=deviation)
            writer.add_tensor(name, packed, raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shape: LlamaShape, tokens: int) -> list[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (intermediate, hidden),
        "ffn_up": (intermediate, hidden),
        "ffn_down": (hidden, intermediate),
    }
    blocks = [
        (f"blk.{number}.{name}.weight", dimensions)
        for number in range(shape.layers)
        for name, dimensions in layer.items()
    ]
    return [("token_embd.weight", (tokens, hidden)), *blocks, ("output_norm.weight", (hidden,))]


def _random_blocks(
    draw: np.random.Generator, rows: int, columns: int, *, kind: Any, deviation: float
) -> npt.NDArray[np.uint8]:
    """[rows, bytes of a row's blocks]"""
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    packed = draw.integers(0, 256, (rows, columns // block_weights, block_bytes), np.uint8)
    scale = np.array([deviation / _DEVIATIONS[kind]], np.float16).view(np.uint8)
    packed[:, :, : len(scale)] = scale
    return packed.reshape(rows, -1)


def _held(name: str, kind: Any) -> Any:
    eight_bits = kind is Kind.Q4_0 and name in ("token_embd.weight", "output.weight")
    return Kind.Q8_0 if eight_bits else kind
