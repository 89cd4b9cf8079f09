"""Imports a Hugging Face folder of an architecture that mesh runs itself, or that vLLM does.

Every safetensors file must be whole and hold the tensors that config.json calls for, in a float
type or as their quantisation has them. The weights are taken as they are, shards included;
config.json is brought into one form. What only vLLM runs is taken whole, where it is imported for
vLLM; other architectures, and folders with pickled weights only, go to convert_import.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import ENCODERS, ModelFormat, Task
from mesh.domain.values import dataclass, replace
from mesh.runtime.engine import Progress
from mesh_loader.architectures import (
    NATIVE_ARCHITECTURES,
    ExpectedTensor,
    Shape,
    expected_tensors,
    shape_of,
    size_in,
)
from mesh_loader.config_keys import ANY_CONFIG, ONLY_TASK, PREFIX, check_config
from mesh_loader.convert_import import ConvertPlan, plan_convert
from mesh_loader.disk import place
from mesh_loader.encoders import (
    embedding_keys,
    encoder_shape,
    encoder_tensors,
    is_unused,
    prefix_of,
)
from mesh_loader.hf_config import normalised
from mesh_loader.model_info import (
    CONFIG_BYTES_MAX,
    INDEX_BYTES_MAX,
    TEMPLATE_BYTES_MAX,
    TOKENIZER_BYTES_MAX,
    companions,
    read_bounded,
    read_json,
)
from mesh_loader.quantisation import MODELOPT_CONFIG, check_parts, check_served, quantisation_of
from mesh_loader.safetensors_file import StoredTensor, read_whole, write_json, write_synced
from mesh_loader.tensor_values import Located, check_finite, equal, located
from mesh_loader.tokenizer_file import complete_tokenizer, require_tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_CHARS_MAX = 255
"""The longest name that a file can have."""
WEIGHT_TYPES = ("F16", "BF16", "F32")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ENCODER_EMBEDDING = "embeddings.word_embeddings.weight"
_UNREAD = ("*.onnx", "onnx/*.onnx", "*.h5", "*.msgpack", "*.pth", "openvino_*_model.xml")
HARMLESS = ("rotary_emb.inv_freq", "attn.masked_bias")
"""Ends of names of tensors that hold no weights: what they say config.json says, too."""
BOOKED_BY = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("max_position_embeddings", "vocab_size"),
)
"""What a config.json must say of an architecture that mesh does not know."""
SMALL_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "special_tokens_map.json", "chat_template.jinja", MODELOPT_CONFIG,
)  # fmt: skip
BYTES_MAX = {
    "tokenizer.json": TOKENIZER_BYTES_MAX,
    "chat_template.jinja": TEMPLATE_BYTES_MAX,
}
"""The bound of each small file that has another one than CONFIG_BYTES_MAX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfPlan:
    """A Hugging Face folder that mesh can import."""

    path: Path
    own_files: bool
    config: dict[str, Any]
    weights: tuple[tuple[Path, str], ...]
    """Each file of weights, and its name in the store."""
    tensors: tuple[Located, ...]
    """All of them, whose values are still to be checked."""
    parameters: int
    form: ModelFormat = ModelFormat.SAFETENSORS

    def write(self, folder: Path, progress: Progress) -> int:
        """Writes the model; returns the number of its parameters.

        Raises TornModel for weights that are not finite, StorageError for a full disk.
        """
        check_finite(self.tensors, progress)
        write_json(folder / "config.json", self.config)
        place_small_files(self.path, folder)
        place(self.weights, folder, own_files=self.own_files, progress=progress)
        return self.parameters


def plan_hf(
    path: Path, *, own_files: bool, as_is: Collection[str] = (), plain: bool = False
) -> HfPlan | ConvertPlan:
    """The plan for a folder with a config.json, after its weights' headers have been checked.
    `as_is`: architectures, by transformers' classes, that the importing node's engine reads without
    mesh's knowing them. `plain`: it computes no weights that their makers quantised.

    Raises TornModel or UnsupportedModel with the name of the file that is to blame.
    """
    name = f"{path.name}/config.json"
    config = read_json(path / "config.json")
    check_config(config, name, ANY_CONFIG)
    companions(path)
    require_tokenizer(path)
    method = quantisation_of(path, config)
    check_served(method, path.name, plain=plain)
    weights = _weight_files(path)
    if not weights and not has_whole_weights(path):
        raise _without_weights(path)
    native = config.get("model_type") in (*NATIVE_ARCHITECTURES, *ENCODERS)
    if not weights or not (native or as_is or method):
        return plan_convert(path, config)
    encoder = config.get("model_type") in ENCODERS
    if encoder and method:
        raise UnsupportedModel(
            f"{path.name} is an encoder that is quantised by {method!r}, which mesh does not serve",
            hint="use the unquantised model",
        )
    try:
        if encoder:
            shape = encoder_shape(config, name)
            config = dict(config)
        else:
            shape = shape_of(config, name)
            config = normalised(config, shape, name)
    except UnsupportedModel:
        if not as_is:
            raise
        _check_as_is(config, as_is, name)
        shape = None
    config |= embedding_keys(path, config)
    tensors = {one.name: one for file, _ in weights for one in located(file, read_whole(file))}
    if shape is not None and not method:
        prefix = prefix_of(tensors, ENCODER_EMBEDDING if encoder else EMBEDDING)
        shape = replace(shape, prefix=prefix)
        if prefix != "model.":
            config[PREFIX] = prefix
        if shape.tied and _has_own_head(tensors, prefix):
            shape = replace(shape, tied=False)
            config["tie_word_embeddings"] = False
        elif not shape.tied and _has_no_head(config, tensors):
            shape = replace(shape, tied=True)
            config |= {"tie_word_embeddings": True, ONLY_TASK: Task.EMBED}
        if not as_is:
            _refuse_unused(shape, tensors, path.name)
    sharded = weights[0][1] != WEIGHTS
    index = ((path / INDEX, INDEX),) if sharded else ()
    return HfPlan(
        path=path,
        own_files=own_files,
        config=config,
        weights=(*weights, *index),
        tensors=tuple(tensors.values()),
        parameters=_parameters(
            shape, {name: one.tensor for name, one in tensors.items()}, method, path.name
        ),
    )


def _without_weights(path: Path) -> UnsupportedModel:
    """The error for a folder without weights that mesh reads, which names those of another kind."""
    others = sorted(
        str(file.relative_to(path)) for pattern in _UNREAD for file in path.glob(pattern)
    )
    found = f": mesh reads no {others[0]}" if others else ""
    return UnsupportedModel(
        f"{path.name} has a config.json, and no weights that can be read{found}",
        hint="fetch the model with its .safetensors files, or as one GGUF file",
    )


def _tensors_of(shape: Shape) -> list[ExpectedTensor]:
    """Those that the engine reads; an encoder's names get their prefix, but for its head's."""
    if shape.architecture not in ENCODERS:
        return list(expected_tensors(shape))
    return [
        replace(want, name=f"{shape.prefix}{want.name}")
        if want.name.startswith(("embeddings.", "encoder."))
        else want
        for want in encoder_tensors(shape)
    ]


def _has_no_head(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether it was saved without a head on purpose, as a decoder that embeds is."""
    classes = config.get("architectures") or ()
    return HEAD not in tensors and any(str(one).endswith("Model") for one in classes)


def _has_own_head(tensors: Mapping[str, Located], prefix: str) -> bool:
    """Whether a model whose head is said to be its embedding has another one after all, as after a
    training that did not tie them. transformers computes with it, too.
    """
    head, embedding = tensors.get(HEAD), tensors.get(f"{prefix}{EMBEDDING}")
    if head is None or embedding is None:
        return head is not None
    if (head.tensor.shape, head.tensor.dtype in WEIGHT_TYPES) != (embedding.tensor.shape, True):
        return True
    return embedding.tensor.dtype in WEIGHT_TYPES and not equal(head, embedding)


def _refuse_unused(shape: Shape, tensors: Collection[str], folder: str) -> None:
    """Raises UnsupportedModel for a tensor that the graph would leave out: without it the model
    would compute something else than whoever trained it meant.
    """
    used = {want.name for want in _tensors_of(shape)} | {HEAD}
    encoder = shape.architecture in ENCODERS
    for name in sorted(tensors):
        unused = encoder and is_unused(name, shape.prefix)
        if not (name in used or unused or name.endswith(HARMLESS)):
            raise UnsupportedModel(
                f"{folder}: tensor {name} has no place in a {shape.architecture} model with this "
                "config.json",
                hint="correct config.json where it leaves out what the tensor belongs to, or "
                "remove the tensor from the file",
            )


def _check_as_is(config: Mapping[str, Any], as_is: Collection[str], name: str) -> None:
    """Raises UnsupportedModel."""
    given = config.get("architectures")
    classes = given if isinstance(given, list) else []
    if not any(one in as_is for one in classes):
        raise UnsupportedModel(
            f"{name}: {', '.join(map(str, classes[:4])) or 'no architecture'} is none that the "
            "vLLM of this node computes text with, nor mesh itself",
            hint=f"mesh runs {', '.join(NATIVE_ARCHITECTURES)} itself; on OpenVINO nodes others "
            "can be exported",
        )
    for key in BOOKED_BY:
        try:
            size_in(config, key, name)
        except TornModel as error:
            raise UnsupportedModel(
                f"{error.message}; without it nobody knows what {classes[0]} takes on vLLM nodes"
            ) from error


def _parameters(
    shape: Shape | None, tensors: Mapping[str, StoredTensor], method: str, folder: str
) -> int:
    """How many the model has, by its shape; for want of one, by its tensors. Raises TornModel,
    UnsupportedModel for tensors that are not as they should be.
    """
    if shape is None:
        return sum(math.prod(tensor.shape) for tensor in tensors.values())
    if method:
        return check_parts(shape, tensors, folder)
    for want in _tensors_of(shape):
        _check(tensors.get(want.name), want.name, want.shape, folder)
    return sum(want.elements for want in _tensors_of(shape))


def place_small_files(path: Path, folder: Path) -> None:
    """Copies the tokenizer and its companions; a chat template inside a config becomes a file.

    Raises TornModel for one that is larger than any such file.
    """
    for name in SMALL_FILES:
        if (path / name).is_file():
            write_synced(
                folder / name, read_bounded(path / name, BYTES_MAX.get(name, CONFIG_BYTES_MAX))
            )
    template = chat_template(path)
    if template and not (folder / "chat_template.jinja").exists():
        write_synced(folder / "chat_template.jinja", template.encode())
    complete_tokenizer(path, folder)


def chat_template(path: Path) -> str:
    """The template in tokenizer_config.json: a text, or the one named default of several."""
    if not (path / "tokenizer_config.json").is_file():
        return ""
    _, tokenizer = companions(path)
    given = tokenizer.get("chat_template")
    if isinstance(given, list):
        named = {
            str(entry.get("name")): entry.get("template")
            for entry in given
            if isinstance(entry, Mapping)
        }
        given = named.get("default")
    return given if isinstance(given, str) else ""


def _weight_files(path: Path) -> tuple[tuple[Path, str], ...]:
    """The files of weights in the folder with their names in the store; none where it has none.

    A whole file comes before an index, which may be left over from shards: so does transformers.
    """
    if (path / INDEX).is_file() and not (path / WEIGHTS).is_file():
        weight_map = read_json(path / INDEX, INDEX_BYTES_MAX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise TornModel(f"{path.name}/{INDEX} has no weight_map")
        shards = sorted({str(shard) for shard in weight_map.values()})
        for shard in shards:
            plain = len(shard) <= SHARD_CHARS_MAX and Path(shard).name == shard
            if not plain or not (path / shard).is_file():
                raise TornModel(
                    f"{path.name} lacks {shard[:SHARD_CHARS_MAX]}, one of the {len(shards)} "
                    f"files in {INDEX}",
                    hint="fetch the missing file",
                )
        return tuple((path / shard, shard) for shard in shards)
    found = [path / WEIGHTS] if (path / WEIGHTS).is_file() else _beside_adapters(path)
    if len(found) > 1:
        raise TornModel(
            f"{path.name} has {len(found)} safetensors files but no {INDEX}",
            hint="fetch the index, too, or keep the file that is the model",
        )
    return tuple((file, WEIGHTS) for file in found)


def _beside_adapters(path: Path) -> list[Path]:
    """The safetensors files that are no adapter's."""
    files = sorted(path.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("adapter_")]


def has_whole_weights(path: Path) -> bool:
    """Whether the folder has weights of its own, beside those of an adapter."""
    return bool(_beside_adapters(path)) or any(path.glob("pytorch_model*.bin"))


def _check(found: StoredTensor | None, name: str, shape: tuple[int, ...], folder: str) -> None:
    if found is None:
        raise TornModel(
            f"{folder} lacks tensor {name}, which its config.json calls for",
            hint="fetch the folder again; a LoRA adapter alone is no model",
        )
    if found.shape != shape:
        raise TornModel(
            f"{folder}: tensor {name} has shape {found.shape}, config.json calls for {shape}"
        )
    if found.dtype not in WEIGHT_TYPES:
        raise UnsupportedModel(
            f"{folder}: tensor {name} has type {found.dtype}, mesh reads {', '.join(WEIGHT_TYPES)}",
            hint="use the unquantised model, or a GGUF file",
        )
