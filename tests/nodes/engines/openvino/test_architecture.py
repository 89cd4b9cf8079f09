"""config.json becomes the right architecture, or a refusal that names what is supported."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh_nodes.engines.openvino.architecture import parse_architecture, read_architecture

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
}


def test_what_is_left_out_has_its_published_default() -> None:
    architecture = parse_architecture(CONFIG)
    assert (architecture.kv_heads, architecture.head_size) == (4, 16)
    assert (architecture.rope.theta, architecture.rope.scaling) == (10000.0, "default")
    assert not architecture.tied_embeddings


@pytest.mark.parametrize(
    ("kind", "attention_bias", "qkv", "output", "qk_norm"),
    [
        ("llama", None, False, False, False),
        ("llama", True, True, True, False),
        ("qwen2", None, True, False, False),
        ("qwen3", None, False, False, True),
        ("qwen3", True, True, True, True),
    ],
)
def test_biases_and_norms_by_kind(
    kind: str, attention_bias: bool | None, qkv: bool, output: bool, qk_norm: bool
) -> None:
    config = CONFIG | {"model_type": kind}
    if attention_bias is not None:
        config["attention_bias"] = attention_bias
    a = parse_architecture(config)
    assert (a.qkv_bias, a.output_bias, a.qk_norm) == (qkv, output, qk_norm)


def test_rope_parameters_of_newer_configs_are_understood() -> None:
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    rope = parse_architecture(CONFIG | {"rope_parameters": parameters}).rope
    assert (rope.theta, rope.scaling, rope.factor) == (5e5, "linear", 2.0)


S, F = 128, 0
QWEN2 = {"model_type": "qwen2", "sliding_window": S, "max_window_layers": 4}
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": S, "hidden_act": "gelu_pytorch_tanh"}
GEMMA2 = GEMMA3 | {"model_type": "gemma2", "attn_logit_softcapping": None}
QWEN2_MOE = QWEN2 | {"model_type": "qwen2_moe", "use_sliding_window": True}
LAYER_TYPES = ["full_attention", *["sliding_attention"] * 5]


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": S}, ()),  # llama's: no part of the architecture
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral", "sliding_window": S}, (S, S, S, S, S, S)),
        (QWEN2, ()),
        (QWEN2 | {"use_sliding_window": True}, (F, F, F, F, S, S)),
        (GEMMA3, (S, S, S, S, S, F)),
        (GEMMA3 | {"sliding_window_pattern": 3}, (S, S, F, S, S, F)),
        (GEMMA3 | {"layer_types": LAYER_TYPES}, (F, S, S, S, S, S)),
        (GEMMA2, (S, F, S, F, S, F)),
        (QWEN2_MOE, (S, F, S, F, F, F)),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, (4096,) * 6),
        ({"model_type": "mistral"}, (4096,) * 6),
        ({"model_type": "gemma3_text"}, (4096, 4096, 4096, 4096, 4096, F)),
    ],
)
def test_which_layers_have_a_window(change: dict[str, Any], windows: tuple[int, ...]) -> None:
    config = CONFIG | {"num_hidden_layers": 6} | change
    assert parse_architecture(config).windows == windows


@pytest.mark.parametrize(
    ("change", "named", "supported"),
    [
        ({"model_type": "gemma3"}, "gemma3", "llama, qwen2, qwen3, mistral, phi3, gemma2"),
        ({"hidden_act": "gelu"}, "gelu", "silu"),
        ({"use_bidirectional_attention": True}, "bidirectional", "vLLM nodes"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0", "vLLM nodes"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn", "default, linear, llama3, longrope"),
    ],
)
def test_what_no_graph_has_is_refused(change: dict[str, Any], named: str, supported: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as refused:
        parse_architecture(CONFIG | change)
    assert supported in refused.value.hint


ZERO_HEADS = json.dumps(CONFIG | {"num_attention_heads": 0})


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", json.dumps({"model_type": "llama"}), json.dumps(CONFIG | {"vocab_size": []})),
        *(json.dumps(CONFIG | {"rope_scaling": "yarn"}), ZERO_HEADS),
    ],
)
def test_a_config_that_cannot_be_meant_is_torn(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TornModel, match=r"config\.json"):
        read_architecture(tmp_path)
