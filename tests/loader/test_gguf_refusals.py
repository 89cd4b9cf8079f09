"""GGUF files that mesh does not run, or that are broken, are refused by name and leave no trace."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from mesh.domain.errors import ModelError, TornModel, UnsupportedModel
from mesh_loader.gguf_file import read_header
from mesh_loader.store import ModelStore
from tests.loader.tiny_gguf import (
    HIDDEN,
    LAYERS,
    TinyTokenizer,
    byte_tokenizer,
    random_tensors,
    write_tiny_gguf,
)

VOCABULARY = len(byte_tokenizer().tokens)


def refusal(tmp_path: Path) -> ModelError:
    """What the import of m.gguf is refused with; the store must be as empty as before."""
    store = ModelStore(tmp_path / "store")
    with pytest.raises(ModelError) as caught:
        store.import_model(f"file://{tmp_path}/m.gguf")
    assert store.models() == []
    assert not list((tmp_path / "store" / "staging").iterdir())
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def test_a_file_cut_in_its_tensors_is_torn_and_both_sizes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    header = read_header(path)
    end_bytes = max(t.offset_bytes + t.size_bytes for t in header.tensors.values())
    path.write_bytes(path.read_bytes()[: end_bytes - 10])
    error = refusal(tmp_path)
    assert isinstance(error, TornModel)
    assert "m.gguf is truncated" in error.message
    assert f"ends at byte {end_bytes}, the file has {end_bytes - 10}" in error.message


def test_a_file_cut_anywhere_is_torn(tmp_path: Path) -> None:
    """Never another exception, and never an import, wherever the cut is."""
    path = tmp_path / "whole.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    draw = random.Random(20)
    cuts = [0, 1, 3, 4, 7, 8, 23, 24, *(draw.randrange(24, len(whole) - 64) for _ in range(60))]
    for cut in cuts:
        (tmp_path / "m.gguf").write_bytes(whole[:cut])
        with pytest.raises(TornModel, match=r"m\.gguf"):
            read_header(tmp_path / "m.gguf")


def test_flipped_bytes_in_the_header_never_raise_anything_but_a_model_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    header_bytes = min(t.offset_bytes for t in read_header(path).tensors.values())
    draw = random.Random(21)
    store = ModelStore(tmp_path / "store")
    said: list[str] = []
    for _ in range(150):
        broken = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            broken[draw.randrange(header_bytes)] = draw.randrange(256)
        path.write_bytes(broken)
        try:
            store.import_model(f"file://{path}")
        except ModelError as error:
            said.append(error.message)
    assert len(said) > 50
    assert all("m.gguf" in message for message in said)


def test_something_else_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<!DOCTYPE html><html>not found</html>")
    error = refusal(tmp_path)
    assert isinstance(error, TornModel)
    assert "m.gguf is not a GGUF file: it does not begin with b'GGUF'" in error.message


def test_a_version_from_the_future_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedModel)
    assert "version 9" in error.message


def test_an_architecture_that_mesh_does_not_run_is_named_with_those_it_does(
    tmp_path: Path,
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", "gptneox", tensors=random_tensors("llama", VOCABULARY))
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedModel)
    assert "m.gguf: architecture gptneox is not supported" in error.message
    assert "llama, qwen2, qwen3, phi3, gemma3" in error.hint


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"split.count": 3}, "one part of 3"),
        ({"llama.rope.dimension_count": 8}, "rotary part of 8"),
        ({"llama.rope.scaling.type": "su"}, "rotary scaling su"),
    ],
)
def test_features_that_would_be_left_out_are_unsupported(
    tmp_path: Path, metadata: dict[str, int | float | str], said: str
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedModel)
    assert said in error.message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors("llama", VOCABULARY)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    error = refusal(tmp_path)
    assert isinstance(error, TornModel)
    assert "m.gguf lacks tensor blk.1.ffn_up.weight" in error.message


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = random_tensors("llama", VOCABULARY)
    tensors["model.norm.weight"] = np.ones(HIDDEN + 32, np.float32)
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    error = refusal(tmp_path)
    assert isinstance(error, TornModel)
    assert "output_norm.weight has shape (96,), its metadata calls for (64,)" in error.message


def test_a_tensor_without_a_place_is_refused_instead_of_left_out(tmp_path: Path) -> None:
    name = f"blk.{LAYERS - 1}.attn_sinks.weight"
    write_tiny_gguf(tmp_path / "m.gguf", extra={name: np.ones(4, np.float32)})
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedModel)
    assert name in error.message


def test_rotary_factors_of_another_recipe_are_unsupported(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    write_tiny_gguf(tmp_path / "m.gguf", extra=extra)
    assert "rope_freqs.weight is not Llama 3's" in refusal(tmp_path).message


def test_weights_that_are_no_numbers_are_torn(tmp_path: Path) -> None:
    tensors = random_tensors("llama", VOCABULARY)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.nan
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    error = refusal(tmp_path)
    assert isinstance(error, TornModel)
    assert "blk.0.ffn_up.weight holds values that are not finite" in error.message


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (byte_tokenizer("cuneiform"), "pre-tokenizer cuneiform is not supported"),
        (TinyTokenizer(model="bert", tokens=["[PAD]", "a"], types=[3, 1]), "tokenizer bert"),
    ],
    ids=["pre-tokenizer", "model"],
)
def test_a_tokenizer_that_mesh_does_not_know_is_named(
    tmp_path: Path, tokenizer: TinyTokenizer, said: str
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedModel)
    assert said in error.message


@pytest.mark.parametrize(
    "tokenizer",
    [
        TinyTokenizer(model="gpt2", pre="gpt-2", tokens=["a", "a"], types=[1, 1]),
        TinyTokenizer(model="gpt2", pre="gpt-2", tokens=["a", "b"], types=[1]),
        TinyTokenizer(model="gpt2", pre="gpt-2", tokens=["a", "b"], types=[1, 1], merges=["a c"]),
        TinyTokenizer(model="llama", tokens=["a", "b"], types=[1, 1], scores=[0.0]),
        TinyTokenizer(model="gpt2", pre="gpt-2", tokens=["a", "b"], types=[1, 1], eos=7),
    ],
    ids=["token twice", "types", "unknown merge", "scores", "eos outside"],
)
def test_a_vocabulary_that_contradicts_itself_is_corrupt(
    tmp_path: Path, tokenizer: TinyTokenizer
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    error = refusal(tmp_path)
    assert isinstance(error, TornModel)
    assert "m.gguf is corrupt" in error.message
