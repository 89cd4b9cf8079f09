"""What the keys of a model's configuration may hold: the type, the range and the length of each.

A model's files are written by strangers, and what they say ends in allocations, in divisions and in
fields of messages. So each key that mesh reads is declared here once, and checked before anything
uses it. Ranges are those of the message fields that carry a value where these are the narrower
ones, and else lie far beyond any published model. A key that is absent or null is nobody's fault:
who needs it says so. Importers and engines call `check_config` before they read a configuration.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Protocol

from mesh.domain.checks import CONTEXT_TOKENS_MAX, is_unicode
from mesh.domain.errors import TornModel
from mesh.domain.values import dataclass

INT32_MAX = 2**31 - 1
"""The largest token id, and the largest value of whatever has no bound of its own: engines index
with 32 bits.
"""
LAYERS_MAX = 1024
SIZE_MAX = 1 << 20
"""The largest size of a hidden state, in elements; some 16,000 are in use."""
WIDE_MAX = 1 << 24
"""The largest size of a vocabulary, or of an MLP's inner state."""
HEADS_MAX = 1 << 14
"""The most heads or experts of a layer; also the most elements of a head."""
STOP_TOKENS_MAX = 1024
TEXT_CHARS_MAX = 1024
"""The longest name or special token."""
TEMPLATE_CHARS_MAX = 1 << 20
NUMBER_MAX = 1e30


class Kind(Protocol):
    """What a key may hold. The text of a kind completes `KEY should be …`."""

    def takes(self, value: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer; neither a truth value nor a float, however whole."""

    least: int
    most: int

    def takes(self, value: Any) -> bool:
        return type(value) is int and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"an integer from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number."""

    least: float
    most: float = NUMBER_MAX
    above: bool = False
    """Whether `least` itself is no such number."""

    def takes(self, value: Any) -> bool:
        if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
            return False
        return bool(self.least < value if self.above else self.least <= value) and bool(
            value <= self.most
        )

    def __str__(self) -> str:
        begin = f"above {self.least:g}" if self.above else f"from {self.least:g}"
        return f"a number {begin} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class Flag:
    def takes(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """A text that UTF-8 can hold: a lone surrogate, which JSON can write, is none."""

    chars_max: int = TEXT_CHARS_MAX

    def takes(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= self.chars_max and is_unicode(value)

    def __str__(self) -> str:
        return f"a text of at most {self.chars_max} characters"


@dataclass(frozen=True, slots=True)
class Listed:
    of: Kind
    items_max: int

    def takes(self, value: Any) -> bool:
        fits = isinstance(value, list) and len(value) <= self.items_max
        return fits and all(self.of.takes(item) for item in value)

    def __str__(self) -> str:
        return f"a list of at most {self.items_max}, each {self.of}"


@dataclass(frozen=True, slots=True)
class Either:
    """One of two kinds."""

    one: Kind
    other: Kind

    def takes(self, value: Any) -> bool:
        return self.one.takes(value) or self.other.takes(value)

    def __str__(self) -> str:
        return f"{self.one}, or {self.other}"


@dataclass(frozen=True, slots=True)
class Object:
    """A JSON object, of which these keys are read."""

    keys: "Mapping[str, Kind]"

    def takes(self, value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            value.get(key) is None or kind.takes(value[key]) for key, kind in self.keys.items()
        )

    def __str__(self) -> str:
        return "an object"


POOLING, NORMALISED = "mesh_pooling", "mesh_normalised"
ONLY_TASK, CONTEXT = "mesh_only_task", "mesh_context_tokens"
PREFIX = "mesh_prefix"
"""Keys of config.json that importers add, for what other files of a model's folder say: how hidden
states become an embedding, what alone the model can do, the context limit of an encoder in tokens,
and what comes before the names of its tensors.
"""
_SIZE, _WIDE, _HEADS = Whole(1, SIZE_MAX), Whole(1, WIDE_MAX), Whole(1, HEADS_MAX)
_CONTEXT = Whole(1, CONTEXT_TOKENS_MAX)
_POSITIVE = Real(0.0, above=True)
_TOKEN_ID = Whole(-1, INT32_MAX)
"""-1 is some configurations' word for none."""
_TOKEN_IDS = Either(_TOKEN_ID, Listed(_TOKEN_ID, STOP_TOKENS_MAX))
_FACTORS = Listed(_POSITIVE, HEADS_MAX)

ROPE: Mapping[str, Kind] = {
    "rope_type": Text(), "type": Text(), "rope_theta": _POSITIVE, "factor": _POSITIVE,
    "low_freq_factor": _POSITIVE, "high_freq_factor": _POSITIVE, "attention_factor": _POSITIVE,
    "original_max_position_embeddings": _CONTEXT, "short_factor": _FACTORS,
    "long_factor": _FACTORS, "partial_rotary_factor": Real(0.0, 1.0, above=True),
    "beta_fast": _POSITIVE, "beta_slow": _POSITIVE,
}  # fmt: skip
_ROPE = Object({**ROPE, "full_attention": Object(ROPE), "sliding_attention": Object(ROPE)})

CONFIG: Mapping[str, Kind] = {
    "model_type": Text(), "architectures": Listed(Text(), LAYERS_MAX),
    "hidden_act": Text(), "hidden_activation": Text(),
    "hidden_size": _SIZE, "intermediate_size": _WIDE, "num_hidden_layers": Whole(1, LAYERS_MAX),
    "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "head_dim": _HEADS,
    "vocab_size": _WIDE, "max_position_embeddings": _CONTEXT,
    "original_max_position_embeddings": _CONTEXT,
    "num_experts": _HEADS, "num_local_experts": _HEADS, "num_experts_per_tok": _HEADS,
    "moe_intermediate_size": _WIDE, "shared_expert_intermediate_size": _WIDE,
    "decoder_sparse_step": Whole(1, INT32_MAX),
    "mlp_only_layers": Listed(Whole(0, LAYERS_MAX), LAYERS_MAX),
    "layer_types": Listed(Text(), LAYERS_MAX), "max_window_layers": Whole(0, INT32_MAX),
    "sliding_window": Whole(0, INT32_MAX), "sliding_window_pattern": Whole(1, LAYERS_MAX),
    "rms_norm_eps": Real(0.0, 1.0), "layer_norm_eps": Real(0.0, 1.0),
    "type_vocab_size": _HEADS, "position_embedding_type": Text(),
    "rope_theta": _POSITIVE, "rope_local_base_freq": _POSITIVE,
    "partial_rotary_factor": Real(0.0, 1.0, above=True), "query_pre_attn_scalar": _POSITIVE,
    "final_logit_softcapping": Real(0.0), "attn_logit_softcapping": Real(0.0),
    "rope_scaling": _ROPE, "rope_parameters": _ROPE,
    "tie_word_embeddings": Flag(), "attention_bias": Flag(), "mlp_bias": Flag(),
    "qkv_bias": Flag(), "is_decoder": Flag(), "use_sliding_window": Flag(),
    "norm_topk_prob": Flag(),
    POOLING: Text(), NORMALISED: Flag(), ONLY_TASK: Text(), CONTEXT: _CONTEXT, PREFIX: Text(),
    "bos_token_id": _TOKEN_IDS, "eos_token_id": _TOKEN_IDS, "pad_token_id": _TOKEN_IDS,
}  # fmt: skip
"""The keys of config.json, where mesh runs the architecture itself."""

ANY_CONFIG: Mapping[str, Kind] = {
    key: CONFIG[key] for key in ("model_type", "architectures", "eos_token_id")
}
"""The same of any architecture: the other keys may mean something else there."""

_SAMPLED = Real(-NUMBER_MAX)
GENERATION: Mapping[str, Kind] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _SAMPLED),
    "top_k": Whole(-1, INT32_MAX), "eos_token_id": _TOKEN_IDS,
}  # fmt: skip
"""The keys of generation_config.json. A value outside its range, such as a temperature that is
none, recommends nothing.
"""

_TOKEN = Either(Text(), Object({"content": Text()}))
TOKENIZER_CONFIG: Mapping[str, Kind] = {
    "bos_token": _TOKEN, "eos_token": _TOKEN, "unk_token": _TOKEN, "pad_token": _TOKEN,
    "add_bos_token": Flag(), "add_eos_token": Flag(),
    "chat_template": Either(
        Text(TEMPLATE_CHARS_MAX),
        Listed(Object({"name": Text(), "template": Text(TEMPLATE_CHARS_MAX)}), STOP_TOKENS_MAX),
    ),
}  # fmt: skip

SIZE = Whole(1, INT32_MAX)
"""What a size may be whose key is not in CONFIG."""


def check_config(config: Mapping[str, Any], name: str, keys: Mapping[str, Kind] = CONFIG) -> None:
    """Raises TornModel, which names the file `name`, the key, its value and what it should be."""
    for key, kind in keys.items():
        value = config.get(key)
        if value is None or kind.takes(value):
            continue
        if isinstance(kind, Object) and isinstance(value, Mapping):
            check_config(value, f"{name}: {key}", kind.keys)
        raise TornModel(
            f"{name}: {key} should be {kind}, it is {shown(value)}",
            hint=f"correct {key} in the model's configuration; no other try will go better",
        )


def shown(value: object) -> str:
    """A value for a message, shortened: a file may hold a list of a million."""
    return reprlib.repr(value).encode("utf-8", "backslashreplace").decode("utf-8")
