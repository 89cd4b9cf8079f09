"""What the store says of a model: ModelInfo from its folder, and ModelInfo as model.json.

The importers write the folder first; this reads its config.json and tokenizer files. Everything
after the store (engines, controller, wire) sees only the ModelInfo.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mesh.domain.errors import StorageError, TornModel
from mesh.domain.ids import ModelId
from mesh.domain.model import Mixture, ModelFormat, ModelInfo, Task, WeightPrecision
from mesh_loader.architectures import mixture_of, size_in
from mesh_loader.config_keys import (
    ANY_CONFIG,
    CONFIG,
    CONTEXT,
    GENERATION,
    ONLY_TASK,
    TEMPLATE_CHARS_MAX,
    TOKENIZER_CONFIG,
    check_config,
)
from mesh_loader.model_files import opened
from mesh_loader.quantisation import check_served, quantisation_of

CONFIG_BYTES_MAX = 4 << 20
"""The largest configuration; the largest in use take about 1 MB."""
INDEX_BYTES_MAX = 32 << 20
"""The largest index of shards; the largest in use take some 10 MB."""
CONTAINER_BYTES_LEAST = 16
"""In the mean over a file as long as it may be: reading millions of empty lists takes a minute."""
TOKENIZER_BYTES_MAX = 56 << 20
"""The largest tokenizer.json, which goes to the controller in one message; the largest in use take
35 MB.
"""
TEMPLATE_BYTES_MAX = TEMPLATE_CHARS_MAX
COMPANIONS = {"generation_config.json": GENERATION, "tokenizer_config.json": TOKENIZER_CONFIG}

STOP_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
)
"""Tokens that end a turn whatever the config says: chat models often name only one of several."""


def info_of_folder(
    folder: Path, *, model_id: ModelId, source: str, form: ModelFormat, parameters: int
) -> ModelInfo:
    """What the imported files in `folder` amount to.

    Raises TornModel where config.json lacks a size that every model has.
    """
    config = read_json(folder / "config.json")
    check_config(config, "config.json", ANY_CONFIG)
    sizes = config.get("text_config")
    sizes = sizes if isinstance(sizes, dict) else config
    name = "config.json"
    context = CONTEXT if CONTEXT in sizes else "max_position_embeddings"
    heads = size_in(sizes, "num_attention_heads", name)
    hidden_size = size_in(sizes, "hidden_size", name)
    # Some that only vLLM runs name it otherwise, or have one for each layer.
    plain = CONFIG["intermediate_size"].takes(sizes.get("intermediate_size"))
    return ModelInfo(
        model_id=model_id,
        source=source,
        format=form,
        architecture=str(config.get("model_type")),
        context_tokens_max=size_in(sizes, context, name),
        vocabulary_tokens=size_in(sizes, "vocab_size", name),
        layers=size_in(sizes, "num_hidden_layers", name),
        hidden_size=hidden_size,
        intermediate_size=size_in(sizes, "intermediate_size", name) if plain else 0,
        attention_heads=heads,
        kv_heads=size_in(sizes, "num_key_value_heads", name, heads),
        head_size=size_in(sizes, "head_dim", name, hidden_size // heads),
        parameters=parameters,
        disk_bytes=sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        stop_token_ids=stop_token_ids(folder, config, size_in(sizes, "vocab_size", name)),
        # An IR's config.json may still say what it was exported from.
        quantisation=quantisation_of(folder, config) if form is ModelFormat.SAFETENSORS else "",
        mixture=mixture_of(sizes, name),
        only_task=Task(config[ONLY_TASK]) if config.get(ONLY_TASK) in tuple(Task) else None,
        matryoshka=bool(config.get("is_matryoshka") or config.get("matryoshka_dimensions")),
    )


def stop_token_ids(
    folder: Path, config: Mapping[str, Any], vocabulary_tokens: int
) -> tuple[int, ...]:
    """Ids that end an answer: those of the configs, and the added tokens in STOP_TOKENS; sorted.
    One that the model has no embedding of never comes, and is left out.
    """
    found: set[int] = set()
    generation, tokenizer = companions(folder)
    for given in (config, generation):
        eos = given.get("eos_token_id")
        found |= {i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int}
    named = set(STOP_TOKENS)
    map_file = folder / "special_tokens_map.json"
    for given in (tokenizer, read_json(map_file) if map_file.is_file() else {}):
        eos_token = given.get("eos_token")
        eos_text = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
        named |= {eos_text} if isinstance(eos_text, str) else set()
    added = read_json(folder / "tokenizer.json", TOKENIZER_BYTES_MAX).get("added_tokens") or []
    for token in added:
        if isinstance(token, dict) and token.get("content") in named:
            found.add(int(token["id"]))
    return tuple(sorted(i for i in found if 0 <= i < vocabulary_tokens))


def companions(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """generation_config.json and tokenizer_config.json, each empty where there is none.

    Raises TornModel for one that holds what it cannot mean.
    """
    read = []
    for name, keys in COMPANIONS.items():
        config = read_json(folder / name) if (folder / name).is_file() else {}
        check_config(config, name, keys)
        read.append(config)
    generation, tokenizer = read
    return generation, tokenizer


def check_quantised(folder: Path, *, plain: bool) -> None:
    """As `check_served`, of a folder that may have nothing but its configurations yet. Raises
    TornModel for one that cannot be read.
    """
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        check_served(quantisation_of(folder, config), folder.name, plain=plain)


def read_json(path: Path, bytes_max: int = CONFIG_BYTES_MAX) -> dict[str, Any]:
    """A JSON object from a file. Raises TornModel, with the file's name, for anything else."""
    data = read_bounded(path, bytes_max)
    containers = data.count(b"[") + data.count(b"{")
    if containers > bytes_max // CONTAINER_BYTES_LEAST:
        raise TornModel(
            f"{path.name} holds {containers} lists and objects, more than any such file"
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TornModel(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TornModel(f"{path.name} should be a JSON object")
    return value


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """A small file, whole. Raises TornModel for one that is too large or cannot be read."""
    try:
        with opened(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            data = file.read(min(size_bytes, bytes_max) + 1)
    except OSError as error:
        raise TornModel(f"{path.name} cannot be read: {error.strerror}") from error
    if size_bytes > bytes_max:
        raise TornModel(f"{path.name} holds {size_bytes} bytes; such a file may have {bytes_max}")
    if len(data) != size_bytes:
        raise TornModel(f"{path.name} changed while it was read", hint="import it again")
    return data


def to_json(info: ModelInfo) -> dict[str, Any]:
    """A ModelInfo as plain JSON values."""
    return {**asdict(info), "stop_token_ids": list(info.stop_token_ids)}


def from_json(value: Mapping[str, Any]) -> ModelInfo:
    """The inverse of `to_json`. Raises StorageError for anything that it cannot have written."""
    try:
        return ModelInfo(
            **{
                **value,
                "model_id": ModelId(str(value["model_id"])),
                "format": ModelFormat(value["format"]),
                "weights": WeightPrecision(value["weights"]) if value.get("weights") else None,
                "only_task": Task(value["only_task"]) if value.get("only_task") else None,
                "stop_token_ids": tuple(int(i) for i in value["stop_token_ids"]),
                "mixture": Mixture(**value["mixture"]) if value.get("mixture") else None,
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"model.json is not one that this mesh wrote: {error}") from error
