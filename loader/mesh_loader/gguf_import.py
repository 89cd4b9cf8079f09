"""Imports one GGUF file: config, weights, tokenizer and chat template in the store's layout.

The plan reads the header and refuses what mesh does not run; writing converts the weights, which is
the long part. model_plan chooses it, the store gives it an empty folder and publishes the result.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from mesh.domain.model import ModelFormat
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader.architectures import Shape, expected_tensors, shape_of
from mesh_loader.disk import require_free
from mesh_loader.gguf_config import config_of, shortest
from mesh_loader.gguf_file import GgufFile, read_header
from mesh_loader.gguf_names import BLOCKS_FILE
from mesh_loader.gguf_tensors import (
    Match,
    head_rows,
    matched,
    raw_pieces,
    uninterleaved,
    write_weights,
)
from mesh_loader.gguf_tokenizer import check_tokenizer, tokenizer_config, tokenizer_json
from mesh_loader.safetensors_file import StoredTensor, header_bytes, write_json, write_synced

TYPES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)


def four_bit(matches: list[Match]) -> list[Match]:
    """Those whose blocks are kept."""
    return [
        (want, tensor)
        for want, tensor in matches
        if tensor.type in TYPES and len(tensor.shape) == 2
    ]


def blocks_bytes(matches: list[Match]) -> int:
    """About how many bytes the file's blocks take."""
    return sum(tensor.size_bytes for _, tensor in four_bit(matches))


def write_blocks(
    file: GgufFile, shape: Shape, matches: list[Match], folder: Path, progress: Progress
) -> None:
    """Writes nothing where no tensor has 4 bits. Raises TornModel for a file that shrinks."""
    kept = four_bit(matches)
    if not kept:
        return
    entries = (
        (
            f"{want.name}:{tensor.type.name}",
            StoredTensor(dtype="U8", shape=(want.shape[0], tensor.size_bytes // want.shape[0])),
        )
        for want, tensor in kept
    )
    total_bytes, done_bytes = blocks_bytes(kept), 0
    with (
        file.path.open("rb", buffering=0) as source,
        (folder / BLOCKS_FILE).open("wb") as target,
    ):
        target.write(header_bytes(entries))
        for want, tensor in kept:
            rows = head_rows(shape, want)
            for count, data in raw_pieces(source.fileno(), file.path.name, tensor, rows):
                piece = np.frombuffer(data, np.uint8).reshape(count, -1)
                target.write((uninterleaved(piece, rows) if rows > 1 else piece).data)
                done_bytes += len(data)
                progress("keep 4-bit weights", done_bytes / total_bytes)
        target.flush()
        os.fsync(target.fileno())


SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""What generation_config.json recommends, and llama.cpp's name of it after `general.sampling.`."""
WEIGHT_BYTES = 2
TOKENIZER_BYTES_MAX = 64 << 20
"""Room for tokenizer.json and the small files; the largest in use are about 35 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """A GGUF file that mesh can import."""

    file: GgufFile
    config: dict[str, Any]
    shape: Shape
    matches: list[Match]
    form: ModelFormat = ModelFormat.SAFETENSORS

    def write(self, folder: Path, progress: Progress) -> int:
        """Writes the model; returns the number of its parameters.

        Raises TornModel for weights that are no numbers, StorageError for a full disk.
        """
        parameters = sum(want.elements for want, _ in self.matches)
        weights_bytes = parameters * WEIGHT_BYTES + blocks_bytes(self.matches)
        needed_bytes = weights_bytes + TOKENIZER_BYTES_MAX
        require_free(folder, needed_bytes, self.file.path.name)
        progress("build tokenizer", 0.0)
        write_synced(folder / "tokenizer.json", tokenizer_json(self.file).encode())
        write_json(folder / "tokenizer_config.json", tokenizer_config(self.file))
        template = self.file.text("tokenizer.chat_template", "")
        if template:
            write_synced(folder / "chat_template.jinja", template.encode())
        write_json(folder / "config.json", self.config)
        recommended = {"eos_token_id": _stop_ids(self.file), **_sampling(self.file)}
        write_json(folder / "generation_config.json", recommended)
        progress("build tokenizer", 1.0)
        write_weights(self.file, self.shape, self.matches, folder / "model.safetensors", progress)
        write_blocks(self.file, self.shape, self.matches, folder, progress)
        return parameters


def plan_gguf(path: Path) -> GgufPlan:
    """The plan for a GGUF file, from its header alone.

    Raises TornModel, UnsupportedModel, or StorageError where the file cannot be read.
    """
    file = read_header(path)
    config = config_of(file)
    shape = shape_of(config, path.name)
    check_tokenizer(file)
    matches = matched(file, list(expected_tensors(shape)))
    return GgufPlan(file=file, config=config, shape=shape, matches=matches)


def _stop_ids(file: GgufFile) -> list[int]:
    """End of sequence, of turn and of message, where the metadata names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return sorted({file.integer(key) for key in keys if key in file.metadata})


def _sampling(file: GgufFile) -> dict[str, float]:
    """How the model's makers recommend to sample, where the metadata says so."""
    keys = {name: f"general.sampling.{key}" for name, key in SAMPLING.items()}
    found = {n: shortest(file.number(key)) for n, key in keys.items() if key in file.metadata}
    return {name: int(value) if name == "top_k" else value for name, value in found.items()}
