"""GGUF files become Hugging Face folders with the very weights, whatever the architecture."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType as Quantization
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mesh.domain.model import ModelFormat
from mesh.domain.text import SamplingDefaults
from mesh.text.assets import read_assets
from mesh_loader.gguf_config import llama3_frequency_factors
from mesh_loader.store import ModelStore, StoredModel
from tests.loader.tiny_gguf import (
    HEAD_SIZE,
    HIDDEN,
    byte_tokenizer,
    random_tensors,
    write_tiny_gguf,
)


def imported(tmp_path: Path) -> StoredModel:
    return ModelStore(tmp_path / "store").import_model(f"file://{tmp_path}/m.gguf")


def config(stored: StoredModel) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((stored.path / "config.json").read_text())
    return value


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "gemma3"])
def test_weights_come_back_by_name_and_in_order(tmp_path: Path, architecture: str) -> None:
    """llama.cpp's interleaving of llama's queries and keys is undone, and what it adds to Gemma's
    norms; other rows stay.
    """
    written = write_tiny_gguf(tmp_path / "m.gguf", architecture)
    stored = imported(tmp_path)
    found = load_file(stored.path / "model.safetensors")
    assert sorted(found) == sorted(written)
    for name, array in written.items():
        assert found[name].dtype == np.float16
        # A norm of Gemma's has gone through f32 one higher.
        np.testing.assert_allclose(
            found[name].astype(np.float32), array, rtol=0, atol=1e-7 * (architecture == "gemma3")
        )
    assert stored.info.architecture == {"gemma3": "gemma3_text"}.get(architecture, architecture)
    assert stored.info.format is ModelFormat.SAFETENSORS
    assert stored.info.parameters == sum(array.size for array in written.values())


@pytest.mark.parametrize(
    "quantization",
    [
        *(Quantization.F32, Quantization.BF16, Quantization.Q4_0, Quantization.Q4_1),
        *(Quantization.Q5_0, Quantization.Q5_1, Quantization.Q8_0),
    ],
    ids=lambda kind: kind.name,
)
def test_quantisations_are_the_librarys(tmp_path: Path, quantization: Quantization) -> None:
    """Piecewise conversion gives what the gguf package gives for the whole tensor."""
    written = write_tiny_gguf(tmp_path / "m.gguf", "qwen3", quantization=quantization)
    found = load_file(imported(tmp_path).path / "model.safetensors")
    for name, array in written.items():
        if array.ndim == 2:
            packed = gguf.quants.quantize(array, quantization)
            expected = gguf.quants.dequantize(packed, quantization).reshape(array.shape)
            np.testing.assert_array_equal(found[name], expected.astype(np.float16), err_msg=name)


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    tensors = random_tensors("llama", len(byte_tokenizer().tokens), tied=True)
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    stored = imported(tmp_path)
    assert config(stored)["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(stored.path / "model.safetensors")


def test_llama_biases_are_interleaved_too_and_come_back(tmp_path: Path) -> None:
    tensors = random_tensors("llama", len(byte_tokenizer().tokens), bias=True)
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    stored = imported(tmp_path)
    assert config(stored)["attention_bias"] is True
    found = load_file(stored.path / "model.safetensors")
    for name in (n for n in tensors if n.endswith(".bias")):
        np.testing.assert_array_equal(found[name].astype(np.float32), tensors[name], err_msg=name)


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_how_a_text_is_embedded_is_read(tmp_path: Path, number: int, pooling: str) -> None:
    metadata = {"llama.pooling_type": number, "llama.attention.causal": True}
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert config(imported(tmp_path))["mesh_pooling"] == pooling


def test_the_config_is_a_hugging_face_one(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    stored = imported(tmp_path)
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "vocab_size": 260,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 257,
        "eos_token_id": 258,
    }
    assert expected.items() <= config(stored).items()
    info = stored.info
    assert (info.layers, info.hidden_size, info.attention_heads) == (2, 64, 4)
    assert (info.kv_heads, info.head_size, info.context_tokens_max) == (2, 16, 256)
    assert (info.vocabulary_tokens, info.intermediate_size) == (260, 128)


@pytest.mark.parametrize(
    ("architecture", "metadata", "expected"),
    [
        (
            "gemma3",
            {"gemma3.attention.sliding_window": 512, "gemma3.rope.freq_base": 1e6},
            {
                "model_type": "gemma3_text",
                "hidden_act": "gelu_pytorch_tanh",
                "sliding_window": 512,
                "rope_theta": 1e6,
                "rope_local_base_freq": 10000.0,
                "query_pre_attn_scalar": 16,
            },
        ),
        (
            "phi3",
            {"phi3.rope.dimension_count": 12, "phi3.attention.sliding_window": 2047},
            {"model_type": "phi3", "sliding_window": 2047, "partial_rotary_factor": 0.75},
        ),
    ],
)
def test_what_a_family_alone_has_is_in_the_config(
    tmp_path: Path,
    architecture: str,
    metadata: dict[str, int | float | str],
    expected: dict[str, Any],
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", architecture, metadata=metadata)
    found = config(imported(tmp_path))
    assert {key: found[key] for key in expected} == expected


def test_stop_tokens_are_the_ends_of_sequence_and_turn_and_known_names(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 256})
    assert imported(tmp_path).info.stop_token_ids == (256, 258, 259)


@pytest.mark.parametrize("name", ["<end_of_turn>", "<|end|>"])
def test_what_ends_a_turn_of_gemma_and_phi_stops_them(tmp_path: Path, name: str) -> None:
    """By its name alone: 258 is the end of sequence that the metadata gives."""
    tokenizer = byte_tokenizer()
    tokenizer.tokens[-1] = name
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    assert imported(tmp_path).info.stop_token_ids == (258, 259)


def test_how_its_makers_recommend_to_sample_is_kept(tmp_path: Path) -> None:
    """As in a generation_config.json, from which llama.cpp's converter has it."""
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.1}
    metadata = {f"general.sampling.{name}": value for name, value in said.items()}
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert read_assets(imported(tmp_path).path).sampling == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1
    )


def test_the_chat_template_becomes_a_file(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }} — é\n{% endfor %}"
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
    stored = imported(tmp_path)
    assert (stored.path / "chat_template.jinja").read_text(encoding="utf-8") == template


def test_llama3_rotary_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    factors = llama3_frequency_factors(500000.0, HEAD_SIZE, 32.0).astype(np.float32)
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(32.0)
    write_tiny_gguf(
        tmp_path / "m.gguf",
        extra={"rope_freqs.weight": factors},
        metadata={"llama.rope.freq_base": 500000.0},
    )
    assert config(imported(tmp_path))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_llama3_factors_are_those_of_the_reference_recipe() -> None:
    """Llama 3.1 8B: head size 128, theta 500000, factor 8; computed by Meta's published loop."""
    expected = []
    for index in range(64):
        frequency = 1.0 / 500000.0 ** (2 * index / 128)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            scaled = frequency
        elif wavelength > 8192 / 1:
            scaled = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency / scaled)
    np.testing.assert_allclose(llama3_frequency_factors(500000.0, 128, 8.0), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        (
            "yarn",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_other_rotary_scalings_are_taken_from_the_metadata(
    tmp_path: Path, kind: str, expected: dict[str, object]
) -> None:
    metadata: dict[str, int | float | str] = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert config(imported(tmp_path))["rope_scaling"] == expected


def test_memory_stays_bounded_while_a_large_tensor_passes(tmp_path: Path) -> None:
    """A 38 MB embedding takes less than 16 MB of memory: it is never held whole."""
    rows = 300_000
    tensors = random_tensors("llama", len(byte_tokenizer().tokens), tied=True)
    embedding: npt.NDArray[np.float32] = np.ones((rows, HIDDEN), np.float32)
    tensors["model.embed_tokens.weight"] = embedding
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors, quantization=Quantization.Q8_0)
    del tensors, embedding
    tracemalloc.start()
    try:
        stored = imported(tmp_path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (stored.path / "model.safetensors").stat().st_size > rows * HIDDEN * 2
    assert peak_bytes < 16 << 20


def test_the_tokenizer_is_saved_and_names_its_special_tokens(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    stored = imported(tmp_path)
    tokenizer = Tokenizer.from_file(str(stored.path / "tokenizer.json"))
    assert tokenizer.encode("he</s>").ids == [256, 258]
    said = json.loads((stored.path / "tokenizer_config.json").read_text())
    assert (said["bos_token"], said["eos_token"], said["add_bos_token"]) == ("<s>", "</s>", False)


def test_progress_runs_through_its_phases_and_never_back(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    heard: list[tuple[str, float]] = []
    ModelStore(tmp_path / "store").import_model(
        f"file://{tmp_path}/m.gguf", lambda phase, share: heard.append((phase, share))
    )
    phases = list(dict.fromkeys(phase for phase, _ in heard))
    assert phases == ["hash", "build tokenizer", "convert weights", "write digests", "done"]
    for phase in phases:
        shares = [share for name, share in heard if name == phase]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
