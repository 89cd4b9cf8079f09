"""Foreign architectures go through optimum-intel, whose refusals are told in one line."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mesh.domain.errors import UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh_loader import convert_import
from mesh_loader.store import ModelStore
from tests.support.tiny_model import write_tiny_llama

EXPORTER = importlib.util.find_spec("optimum") is not None


def write_tiny_neox(folder: Path) -> Path:
    """A GPT-NeoX of two layers with random weights: an architecture that mesh does not build."""
    write_tiny_llama(folder)
    hidden, inner, vocabulary = 32, 64, 258
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "vocab_size": vocabulary,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    shapes: dict[str, tuple[int, ...]] = {
        "gpt_neox.embed_in.weight": (vocabulary, hidden),
        "gpt_neox.final_layer_norm.weight": (hidden,),
        "gpt_neox.final_layer_norm.bias": (hidden,),
        "embed_out.weight": (vocabulary, hidden),
    }
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "attention.query_key_value": (3 * hidden, hidden),
            "attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (inner, hidden),
            "mlp.dense_4h_to_h": (hidden, inner),
        }.items():
            shapes[f"gpt_neox.layers.{layer}.{name}.weight"] = shape
            shapes[f"gpt_neox.layers.{layer}.{name}.bias"] = shape[:1]
    draw = np.random.default_rng(0)
    tensors = {n: (draw.standard_normal(s) * 0.1).astype(np.float16) for n, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_exporter_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_import, "_exporter_installed", lambda: True)
    monkeypatch.setattr(convert_import, "EXPORTER_MODULE", "mesh_loader.no_such_exporter")
    folder = write_tiny_neox(tmp_path / "neox")
    store = ModelStore(tmp_path / "store")
    heard: list[str] = []
    with pytest.raises(UnsupportedModel) as caught:
        store.import_model(f"file://{folder}", lambda phase, share: heard.append(phase))
    assert "architecture gpt_neox could not be exported to OpenVINO" in caught.value.message
    assert "no_such_exporter" in caught.value.message
    assert "\n" not in caught.value.message
    assert "export gpt_neox to OpenVINO" in heard
    assert store.models() == []
    assert not list((tmp_path / "store" / "staging").iterdir())


@pytest.mark.skipif(not EXPORTER, reason="needs the convert extra")
def test_a_foreign_architecture_becomes_an_openvino_model(tmp_path: Path) -> None:
    folder = write_tiny_neox(tmp_path / "neox")
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    assert stored.info.format is ModelFormat.OPENVINO_IR
    assert stored.info.architecture == "gpt_neox"
    assert (stored.path / "openvino_model.bin").stat().st_size > 10_000
