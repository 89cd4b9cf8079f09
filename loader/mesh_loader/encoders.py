"""The encoders that mesh runs itself, and what a model's folder says of its embeddings.

BERT and its like read a text in both directions, and generate none: they embed a text, or score a
document by a query. How hidden states become an embedding is stated in the files that
sentence-transformers writes beside any model, a decoder included. The importer puts what it finds
into the store's config.json, under the keys that are declared here, from which engines read it.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from mesh.domain.checks import is_unicode
from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import ENCODERS, Task
from mesh_loader.architectures import ExpectedTensor, Shape, number_in, size_in
from mesh_loader.config_keys import (
    CONTEXT,
    NORMALISED,
    ONLY_TASK,
    POOLING,
    check_config,
)
from mesh_loader.model_files import MODULE_CONFIGS
from mesh_loader.model_info import TOKENIZER_BYTES_MAX, read_bounded, read_json

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
MODULES, LIMITS = "modules.json", "sentence_bert_config.json"
TEXT_TOKENS_MAX = 512
"""The longest text of an encoder: it is computed in one iteration, which all others wait for."""
_MODULES_BYTES_MAX = 1 << 20
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_UNUSED = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")
"""Beginnings of names, after the prefix, of what an encoder has for tasks that it does not do."""
_SCORES = "ForSequenceClassification"


class Pooling(StrEnum):
    """Which hidden states become the embedding of a text."""

    MEAN = "mean"
    CLS = "cls"
    """The first token's."""
    LAST = "last"
    """The last token's."""


def positions_before(config: Mapping[str, Any]) -> int:
    """Rows of the table of positions that come before that of the first token."""
    if config.get("model_type") not in ("roberta", "xlm-roberta"):
        return 0
    pad = config.get("pad_token_id")
    return 1 + (pad if isinstance(pad, int) else 1)


def encoder_shape(config: Mapping[str, Any], name: str) -> Shape:
    """The sizes in the config of an encoder; `name` is the file for error messages. Raises
    UnsupportedModel for an unusual one, TornModel where a size is missing or impossible.
    """
    check_config(config, name)
    kind = config.get("position_embedding_type") or "absolute"
    activation = config.get("hidden_act") or "gelu"
    for key, value, known in (
        ("position_embedding_type", kind, ("absolute",)),
        ("hidden_act", activation, ACTIVATIONS),
    ):
        if value not in known:
            raise UnsupportedModel(
                f"{name}: {config['model_type']} with {key} = {value!r} is not supported",
                hint=f"supported: {', '.join(known)}",
            )
    if config.get("is_decoder"):
        raise UnsupportedModel(
            f"{name}: {config['model_type']} with is_decoder = true is not supported: its tokens "
            "do not attend to later ones",
            hint="use a variant of the model without it",
        )
    number_in({"layer_norm_eps": 1e-12, **config}, "layer_norm_eps", name)
    hidden, heads = (
        size_in(config, "hidden_size", name),
        size_in(config, "num_attention_heads", name),
    )
    if hidden % heads:
        raise TornModel(f"{name}: {hidden} hidden elements do not divide into {heads} heads")
    positions = size_in(config, "max_position_embeddings", name)
    if positions <= positions_before(config):
        raise TornModel(f"{name}: max_position_embeddings is {positions}: no position is left")
    return Shape(
        architecture=str(config["model_type"]),
        layers=size_in(config, "num_hidden_layers", name),
        hidden=hidden,
        intermediate=size_in(config, "intermediate_size", name),
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        vocabulary=size_in(config, "vocab_size", name),
        tied=True,
        attention_bias=True,
        positions=positions,
        types=size_in(config, "type_vocab_size", name, 2),
        scores=_scores(config),
    )


def _scores(config: Mapping[str, Any]) -> bool:
    return any(str(one).endswith(_SCORES) for one in config.get("architectures") or ())


def encoder_tensors(shape: Shape) -> Iterator[ExpectedTensor]:
    """Every tensor of an encoder that is used, by its name after the prefix; those of a head that
    scores have none.
    """
    hidden, inner = shape.hidden, shape.intermediate
    rows = {"word": shape.vocabulary, "position": shape.positions, "token_type": shape.types}
    for name, count in rows.items():
        yield _tensor(f"embeddings.{name}_embeddings.weight", count, hidden)
    yield from _norm("embeddings.LayerNorm", hidden)
    for layer in range(shape.layers):
        block = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from _linear(f"{block}.attention.self.{part}", hidden, hidden)
        yield from _linear(f"{block}.attention.output.dense", hidden, hidden)
        yield from _norm(f"{block}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{block}.intermediate.dense", inner, hidden)
        yield from _linear(f"{block}.output.dense", hidden, inner)
        yield from _norm(f"{block}.output.LayerNorm", hidden)
    if shape.scores:
        dense, out = score_names(shape.architecture)
        yield from _linear(dense, hidden, hidden)
        yield from _linear(out, 1, hidden)


def score_names(architecture: str) -> tuple[str, str]:
    """The two matrices of the head that scores, by the names of their tensors."""
    if architecture == "bert":
        return "bert.pooler.dense", "classifier"
    return "classifier.dense", "classifier.out_proj"


def _tensor(name: str, *sizes: int) -> ExpectedTensor:
    return ExpectedTensor(name=name, gguf_name="", shape=sizes)


def _linear(name: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
    yield _tensor(f"{name}.weight", rows, columns)
    yield _tensor(f"{name}.bias", rows)


def _norm(name: str, size: int) -> Iterator[ExpectedTensor]:
    yield _tensor(f"{name}.weight", size)
    yield _tensor(f"{name}.bias", size)


def prefix_of(tensors: Collection[str], embedding: str) -> str:
    """What comes before `embedding`, the name of the table of tokens after the prefix; that of a
    decoder's own release is "model.". An export without a head has none.
    """
    found = sorted(name for name in tensors if name.endswith(embedding))
    return found[0].removesuffix(embedding) if found else ""


def is_unused(name: str, prefix: str) -> bool:
    """Whether an encoder's tensor belongs to a task that mesh does not have it do."""
    return name.removeprefix(prefix).startswith(_UNUSED)


def embedding_keys(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that tell how a text is embedded, by the folder's modules.json. For
    want of one the mean of an encoder's hidden states is taken, and the last of a decoder's;
    normalised, both.

    Raises TornModel for a file that cannot be read, UnsupportedModel for modules that mesh lacks.
    """
    encoder = config.get("model_type") in ENCODERS
    only = (Task.RERANK if _scores(config) else Task.EMBED) if encoder else None
    keys: dict[str, Any] = {POOLING: Pooling.MEAN, ONLY_TASK: only} if encoder else {}
    limits = read_json(path / LIMITS) if (path / LIMITS).is_file() else {}
    if limits.get("do_lower_case") is True and not _lowers(path):
        raise UnsupportedModel(
            f"{path.name}/{LIMITS}: do_lower_case is not supported",
            hint="give tokenizer.json a normaliser of type Lowercase",
        )
    if encoder:
        positions = size_in(config, "max_position_embeddings", path.name) - positions_before(config)
        most = size_in(limits, "max_seq_length", f"{path.name}/{LIMITS}", positions)
        # With room for the one output that ends each request and is never computed.
        keys[CONTEXT] = min(positions, most, TEXT_TOKENS_MAX) + 1
    if not (path / MODULES).is_file() or only is Task.RERANK:
        return keys
    keys[NORMALISED] = False
    for kind, folder in _modules(path):
        if kind == "Normalize":
            keys[NORMALISED] = True
        if kind == "Pooling":
            keys[POOLING] = _pooling(path / folder / "config.json")
    return keys


def _lowers(path: Path) -> bool:
    """Whether the tokenizer itself turns texts into lower case."""
    part = read_json(path / "tokenizer.json", TOKENIZER_BYTES_MAX).get("normalizer")
    several = part.get("normalizers") if isinstance(part, dict) else None
    return any(
        isinstance(one, dict) and (one.get("type") == "Lowercase" or one.get("lowercase") is True)
        for one in (several if isinstance(several, list) else [part])
    )


def _modules(path: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module."""
    try:
        modules = json.loads(read_bounded(path / MODULES, _MODULES_BYTES_MAX))
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in modules]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TornModel(f"{path.name}/{MODULES} is no list of modules") from error
    for kind, folder in found:
        if kind not in _KNOWN_MODULES:
            raise UnsupportedModel(
                f"{path.name}/{MODULES}: mesh has no module {kind[:64]!r}",
                hint=f"supported: {', '.join(_KNOWN_MODULES)}",
            )
        if folder and (Path(folder).name != folder or not is_unicode(folder)):
            raise TornModel(f"{path.name}/{MODULES}: a module's path is not a folder's name")
        if kind == "Pooling" and not PurePath(folder, "config.json").match(MODULE_CONFIGS):
            raise UnsupportedModel(
                f"{path.name}/{MODULES}: the folder {folder!r} of a module is not supported",
                hint="name it 1_Pooling, as sentence-transformers does",
            )
    return found


def _pooling(path: Path) -> Pooling:
    """Raises TornModel, or UnsupportedModel for another pooling than one of these."""
    config = read_json(path)
    wanted = {key for key, value in config.items() if key.startswith("pooling_mode_") and value}
    known = {
        "pooling_mode_cls_token": Pooling.CLS,
        "pooling_mode_mean_tokens": Pooling.MEAN,
        "pooling_mode_lasttoken": Pooling.LAST,
    }
    if config.get("pooling_mode") in tuple(Pooling) and not wanted:
        return Pooling(config["pooling_mode"])
    if len(wanted) != 1 or not wanted <= known.keys():
        raise UnsupportedModel(
            f"{path.parent.name}/config.json asks for {', '.join(sorted(wanted)) or 'no pooling'}",
            hint=f"supported: one of {', '.join(known)}",
        )
    return known[wanted.pop()]
