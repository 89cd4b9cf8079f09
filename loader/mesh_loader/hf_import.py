"""Imports a Hugging Face folder of an architecture that mesh runs itself, or that vLLM does.

Every safetensors file must be whole and hold the tensors that config.json calls for, in a float
type or as their quantisation has them. The weights are taken as they are, shards included;
config.json is brought into one form: transformers has moved keys over the years (`rope_parameters`,
`dtype`, `type` for `rope_type`) and leaves out what equals its defaults. What only vLLM runs is
taken whole, where it is imported for vLLM; other architectures, and folders with pickled weights
only, go to convert_import.
"""

import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh.runtime.engine import Progress
from mesh_loader.architectures import (
    NATIVE_ARCHITECTURES,
    Shape,
    check_rotary,
    expected_tensors,
    number_in,
    shape_of,
    size_in,
    with_defaults,
)
from mesh_loader.config_keys import ANY_CONFIG, check_config
from mesh_loader.convert_import import ConvertPlan, plan_convert
from mesh_loader.disk import place
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
from mesh_loader.tokenizer_file import complete_tokenizer, require_tokenizer

PIECE_BYTES = 1 << 20
"""Read at once: so much stays in a core's cache until it has been looked through."""

_NOT_FINITE: Mapping[str, tuple[str, int]] = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E8M0": ("<u1", 0xFF),
}
"""By element type: the unsigned integer of its size, and the bits that are all set in a NaN and,
where the type has it, in an infinity, and in no finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A tensor and where its bytes lie in a file."""

    path: Path
    name: str
    tensor: StoredTensor
    begin_bytes: int
    end_bytes: int

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Its bytes. Raises TornModel for a file that has become shorter."""
        with self.path.open("rb") as file:
            file.seek(self.begin_bytes)
            left = self.end_bytes - self.begin_bytes
            while left:
                data = file.read(min(left, piece_bytes))
                if len(data) < min(left, piece_bytes):
                    raise TornModel(
                        f"{self.path.name} became shorter while it was read, in tensor {self.name}",
                        hint="import it again",
                    )
                left -= len(data)
                yield data


def located(path: Path, tensors: Mapping[str, StoredTensor]) -> list[Located]:
    """The file's tensors, in the order of their bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    found = []
    for name, tensor in tensors.items():
        begin, end = (8 + length + int(offset) for offset in header[name]["data_offsets"])
        found.append(Located(path=path, name=name, tensor=tensor, begin_bytes=begin, end_bytes=end))
    return sorted(found, key=lambda one: (one.begin_bytes, one.name))


def check_finite(tensors: Collection[Located], progress: Progress) -> None:
    """Looks through every tensor of a float type.

    Raises TornModel with the name of a tensor that holds a NaN or an infinity.
    """
    total_bytes = max(1, sum(one.end_bytes - one.begin_bytes for one in tensors))
    done_bytes = 0
    for one in tensors:
        if one.tensor.dtype in _NOT_FINITE:
            integer, bits = _NOT_FINITE[one.tensor.dtype]
            mask = np.dtype(integer).type(bits)
            for piece in one.pieces():
                if int((np.frombuffer(piece, integer) & mask).max()) == bits:
                    raise TornModel(
                        f"{one.path.name}: tensor {one.name} holds values that are not finite",
                        hint="fetch the file again; if it is as published, its weights are broken",
                    )
                done_bytes += len(piece)
                progress("check weights", done_bytes / total_bytes)
    progress("check weights", 1.0)


def equal(one: Located, other: Located) -> bool:
    """Whether two tensors of float types and of one shape hold the same numbers."""
    if one.tensor.dtype == other.tensor.dtype:
        return all(a == b for a, b in zip(one.pieces(), other.pieces(), strict=True))
    sizes = [np.dtype(_NOT_FINITE[each.tensor.dtype][0]).itemsize for each in (one, other)]
    pieces = [
        each.pieces(PIECE_BYTES // 8 * size) for each, size in zip((one, other), sizes, strict=True)
    ]
    return all(
        np.array_equal(_values(a, one.tensor.dtype), _values(b, other.tensor.dtype))
        for a, b in zip(*pieces, strict=True)
    )


def _values(piece: bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "BF16":
        upper = np.frombuffer(piece, "<u2").astype(np.uint32) << np.uint32(16)
        return upper.view(np.float32).astype(np.float64)
    floats = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
    return np.frombuffer(piece, floats).astype(np.float64)


ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")


def normalised(config: Mapping[str, Any], shape: Shape, name: str) -> dict[str, Any]:
    """The config with all keys filled in; `name` is the file for error messages.

    Raises UnsupportedModel for a rotary scaling that transformers does not name either.
    """
    config = with_defaults(config)
    rope, local = _rope(config, name)
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    check_rotary(shape, partial, name)
    kind = rope.get("rope_type", "default")
    given = rope.pop("rope_theta", None)
    theta = number_in(config if given is None else {"rope_theta": given}, "rope_theta", name)
    if shape.architecture == "phi3" and kind in ("su", "yarn") and "short_factor" in rope:
        kind = rope["rope_type"] = "longrope"  # as its early configs name it
    if kind not in (*ROPE_TYPES, "default"):
        raise UnsupportedModel(f"{name}: rotary scaling {kind!r} is not supported")
    if kind in ("llama3", "yarn", "longrope"):
        original = config.get("original_max_position_embeddings")
        # The key outside comes first, as in transformers.
        inside = rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = (
            original or inside or config.get("max_position_embeddings")
        )
    factors = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    for key in (*(("factor",) if kind in ("linear", "dynamic", "llama3") else ()), *factors):
        number_in(rope, key, name)
    if shape.architecture == "gemma3_text":
        local = number_in({"rope_local_base_freq": local}, "rope_local_base_freq", name)
    filled = {key: value for key, value in config.items() if key != "rope_parameters"}
    if shape.experts:
        filled["num_experts"] = shape.experts
    if partial != 1.0:
        filled["partial_rotary_factor"] = partial
    else:
        filled.pop("partial_rotary_factor", None)
    if local is not None:
        filled["rope_local_base_freq"] = local
    return {
        **filled,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": config.get("hidden_activation") or config.get("hidden_act"),
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else rope,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "torch_dtype": config.get("torch_dtype", config.get("dtype")),
    }


def _rope(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], float | None]:
    """The rotary scaling, and the base frequency of layers with a window where it is another.

    `rope_scaling` comes before `rope_parameters`, as in transformers.
    """
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    local = config.get("rope_local_base_freq")
    for given in (parameters, scaling):
        if not isinstance(given, dict):
            raise TornModel(f"{name}: the rotary scaling should be an object, it is {given!r}")
    if "full_attention" in parameters or "sliding_attention" in parameters:
        sliding = _typed(parameters.get("sliding_attention") or {}, name)
        if sliding.get("rope_type", "default") != "default":
            raise UnsupportedModel(
                f"{name}: rotary scaling {sliding['rope_type']!r} of layers with a window is not "
                "supported"
            )
        local = sliding.get("rope_theta", local)
        full = _typed(parameters.get("full_attention") or {}, name)
        return {**full, **_typed(scaling, name)}, local
    return _typed(scaling or parameters, name), local


def _typed(given: Any, name: str) -> dict[str, Any]:
    """A copy, in which the type is called `rope_type`."""
    if not isinstance(given, dict):
        raise TornModel(f"{name}: the rotary scaling should be an object, it is {given!r}")
    rope = dict(given)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_CHARS_MAX = 255
"""The longest name that a file can have."""
WEIGHT_TYPES = ("F16", "BF16", "F32")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    native = config.get("model_type") in NATIVE_ARCHITECTURES
    if not weights or not (native or as_is or method):
        return plan_convert(path, config)
    try:
        shape = shape_of(config, name)
        config = normalised(config, shape, name)
    except UnsupportedModel:
        if not as_is:
            raise
        _check_as_is(config, as_is, name)
        shape = None
    tensors = {one.name: one for file, _ in weights for one in located(file, read_whole(file))}
    if shape is not None and not method:
        if shape.tied and _has_own_head(tensors):
            shape = replace(shape, tied=False)
            config["tie_word_embeddings"] = False
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


def _has_own_head(tensors: Mapping[str, Located]) -> bool:
    """Whether a model whose head is said to be its embedding has another one after all, as after a
    training that did not tie them. transformers computes with it, too.
    """
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is None or embedding is None:
        return head is not None
    if (head.tensor.shape, head.tensor.dtype in WEIGHT_TYPES) != (embedding.tensor.shape, True):
        return True
    return embedding.tensor.dtype in WEIGHT_TYPES and not equal(head, embedding)


def _refuse_unused(shape: Shape, tensors: Collection[str], folder: str) -> None:
    """Raises UnsupportedModel for a tensor that the graph would leave out: without it the model
    would compute something else than whoever trained it meant.
    """
    used = {want.name for want in expected_tensors(shape)} | {HEAD}
    for name in sorted(tensors):
        if name not in used and not name.endswith(HARMLESS):
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
    for want in expected_tensors(shape):
        _check(tensors.get(want.name), want.name, want.shape, folder)
    return sum(want.elements for want in expected_tensors(shape))


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
    found = [path / WEIGHTS] if (path / WEIGHTS).is_file() else sorted(path.glob("*.safetensors"))
    if len(found) > 1:
        raise TornModel(f"{path.name} has {len(found)} safetensors files but no {INDEX}")
    return tuple((file, WEIGHTS) for file in found)


def has_whole_weights(path: Path) -> bool:
    """Whether the folder has weights of its own, beside those of an adapter."""
    files = [file for file in path.glob("*.safetensors") if not file.name.startswith("adapter_")]
    return bool(files) or any(path.glob("pytorch_model*.bin"))


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
