"""GGUF files that mesh does not run, or that are broken, are refused by name and leave no trace."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from mesh.domain.errors import ModelError, TornModel, UnsupportedModel
from mesh_loader.gguf_file import MetadataValue, read_header
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


def refusal(tmp_path: Path, kind: type[ModelError] = ModelError, said: str = "") -> ModelError:
    """What the import of m.gguf is refused with; the store must be as empty as before."""
    store = ModelStore(tmp_path / "store")
    with pytest.raises(kind) as caught:
        store.import_model(f"file://{tmp_path}/m.gguf")
    assert said in caught.value.message
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
    error = refusal(tmp_path, TornModel, "m.gguf is truncated")
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


def test_flipped_bytes_in_the_header_never_raise_anything_but_a_model_error(tmp_path: Path) -> None:
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
    refusal(tmp_path, TornModel, "m.gguf is not a GGUF file: it does not begin with b'GGUF'")


def test_a_version_from_the_future_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    refusal(tmp_path, UnsupportedModel, "version 9")


def test_an_architecture_that_mesh_does_not_run_is_named_with_those_it_does(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", "gptneox", tensors=random_tensors("llama", VOCABULARY))
    error = refusal(tmp_path, UnsupportedModel, "m.gguf: architecture gptneox is not supported")
    assert "llama, qwen2, qwen3, phi3, gemma3" in error.hint


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"split.count": 3}, "one part of 3"),
        ({"llama.rope.dimension_count": 8}, "rotary part of 8"),
        ({"llama.rope.scaling.type": "su"}, "rotary scaling su"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor = 1.5"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
        ({"llama.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor = 2"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1"),
        ({"llama.attention.scale": 0.5}, "attention.scale = 0.5"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv = 8"),
        ({"llama.logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"llama.residual_scale": 0.5}, "residual_scale = 0.5"),
        ({"llama.embedding_scale": 12.0}, "embedding_scale = 12"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"general.type": "mmproj"}, "general.type is 'mmproj'"),
        ({"llama.attention.causal": False}, "attention.causal = false"),
        ({"llama.pooling_type": 4}, "pooling_type = 4"),
        ({"llama.pooling_type": 0}, "pooling_type = 0"),
    ],
)
def test_features_that_would_be_left_out_are_unsupported(
    tmp_path: Path, metadata: dict[str, int | float | str], said: str
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    refusal(tmp_path, UnsupportedModel, said)


COUNTS = (
    *("context_length", "embedding_length", "feed_forward_length", "block_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("rope.dimension_count", "attention.sliding_window", "expert_count"),
)


@pytest.mark.parametrize("key", COUNTS)
def test_a_count_that_is_none_is_corrupt(tmp_path: Path, key: str) -> None:
    values: list[MetadataValue] = [-1, 2**40, 10**15, 1.5, float("nan"), True, "8", [8], [8] * 999]
    for value in values:
        write_tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value})
        error = refusal(tmp_path)
        assert isinstance(error, TornModel)
        assert f"m.gguf is corrupt: metadata llama.{key} should be an integer" in error.message
        assert len(error.message) < 300


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("context_length", 2**31 - 1, "max_position_embeddings should be an integer from 1"),
        ("context_length", 0, "max_position_embeddings should be an integer from 1"),
        ("attention.key_length", 2**31 - 1, "keys of 2147483647, values of 16"),
        ("attention.head_count", 0, "0 heads over an embedding of 64"),
        ("attention.head_count_kv", 3, "4 heads do not divide into 3 KV heads"),
        ("block_count", 10**9, "num_hidden_layers should be an integer from 1 to 1024"),
        ("rope.freq_base", float("nan"), "freq_base should be a number"),
        ("rope.freq_base", -1.0, "rope_theta should be a number above 0"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "epsilon should be a number"),
        ("rope.scaling.type", 3, "scaling.type should be a text"),
    ],
)
def test_wrong_metadata_is_named(tmp_path: Path, key: str, value: MetadataValue, said: str) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value})
    assert said in refusal(tmp_path).message


def test_a_head_of_two_billion_elements_takes_no_memory(tmp_path: Path) -> None:
    sizes = ("key_length", "value_length")
    metadata: dict[str, MetadataValue] = {f"llama.attention.{size}": 2**31 - 2 for size in sizes}
    metadata["llama.rope.dimension_count"] = 2**31 - 2
    extra = {"rope_freqs.weight": np.ones(4, np.float32)}
    write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata, extra=extra)
    assert "head_dim should be an integer from 1 to 16384" in refusal(tmp_path).message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.bos_token_id", 2**40),
        ("tokenizer.ggml.add_bos_token", "false"),
        ("tokenizer.ggml.add_space_prefix", [True]),
        ("tokenizer.ggml.eot_token_id", -5),
        ("tokenizer.chat_template", 3),
    ],
)
def test_a_tokenizers_metadata_is_checked(tmp_path: Path, key: str, value: MetadataValue) -> None:
    tokens = [*(f"<0x{n:02X}>" for n in range(256)), "\u2581", "a"]
    tokenizer = TinyTokenizer(
        model="llama", tokens=tokens, types=[6] * 256 + [1, 1], scores=[0.0] * 258
    )
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer, metadata={key: value})
    assert f"{key.rpartition('.')[2]} should be" in refusal(tmp_path).message


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_numbers_are_corrupt(tmp_path: Path, score: float) -> None:
    tokenizer = TinyTokenizer(model="llama", tokens=["a", "b"], types=[1, 1], scores=[score, 0.0])
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    assert "tokenizer.ggml.scores should be a list" in refusal(tmp_path).message


def text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def header(*entries: bytes, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries)) + b"".join(entries)


def tensor(name: bytes, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


BYTES, TEXTS, LISTS, TEXT = 0, 8, 9, 8
LIST_OF_ONE = struct.pack("<IQ", LISTS, 1)
ENTRY = text(b"k") + struct.pack("<I", TEXT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header(ENTRY + struct.pack("<Q", 1 << 40)), "is truncated"),
        (header(ENTRY + struct.pack("<Q", 2**64 - 1)), "is truncated"),
        (header(text(b"k") + struct.pack("<IIQ", 9, BYTES, 10**9)), "is truncated"),
        (header(text(b"k") + struct.pack("<IIQ", 9, TEXTS, 2**63)), "is truncated"),
        (header(text(b"k") + struct.pack("<I", LISTS) + LIST_OF_ONE * 3), "metadata type 9"),
        (header(text(b"k") + struct.pack("<I", 99)), "metadata type 99"),
        (header(ENTRY + text(b"a"), ENTRY + text(b"b")), "metadata 'k' appears twice"),
        (header(ENTRY + text(b"\xff")), "is not UTF-8"),
        (header(text(b"\xed\xa0\x80") + b"\0" * 9), "is not UTF-8"),
        (header() + b"", "holds no tensors"),
        (header(tensors=2**40), "it claims 1099511627776 tensors"),
        (header(tensors=1) + tensor(b"t", *[2] * 5), "claims 5 dimensions"),
        (header(tensors=1) + tensor(b"t", 2**63, 2**63, 2**63, 2**63), "is truncated"),
        (header(tensors=1) + tensor(b"t", 4, offset=2**63), "is truncated"),
        (header(tensors=1) + tensor(b"t", 4, offset=3), "is not aligned to 32"),
        (header(tensors=1) + tensor(b"t", 4, kind=999), "type 999"),
        (header(tensors=1) + tensor(b"t" * 10**5, 4, kind=999), "type 999"),
        (
            header(tensors=2) + tensor(b"t", 99) + tensor(b"u", 99, offset=32) + b"\0" * 999,
            "tensors 't' and 'u' overlap",
        ),
        (
            header(text(b"general.alignment") + struct.pack("<II", 4, 3), tensors=1)
            + tensor(b"t", 1),
            "general.alignment is 3",
        ),
    ],
)
def test_a_hostile_header_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    error = refusal(tmp_path)
    assert said in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize("kind", [BYTES, TEXTS])
def test_a_sparse_file_is_not_read_however_long_it_is(tmp_path: Path, kind: int) -> None:
    """A text, or an array, of a terabyte that the file seems to hold takes no memory."""
    for content in (
        header(ENTRY + struct.pack("<Q", 1 << 39)),
        header(text(b"k") + struct.pack("<IIQ", 9, kind, 1 << 33)),
        header(*[text(b"%d" % n) + struct.pack("<IIQ", 9, kind, 1 << 22) for n in range(9)]),
    ):
        with (tmp_path / "m.gguf").open("wb") as file:
            file.write(content)
            file.truncate(1 << 40)
        with pytest.raises(TornModel, match="is corrupt"):
            read_header(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors("llama", VOCABULARY)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    refusal(tmp_path, TornModel, "m.gguf lacks tensor blk.1.ffn_up.weight")


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = random_tensors("llama", VOCABULARY)
    tensors["model.norm.weight"] = np.ones(HIDDEN + 32, np.float32)
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    refusal(tmp_path, TornModel, "output_norm.weight has shape (96,), its metadata calls for (64,)")


def test_a_tensor_without_a_place_is_refused_instead_of_left_out(tmp_path: Path) -> None:
    name = f"blk.{LAYERS - 1}.attn_sinks.weight"
    write_tiny_gguf(tmp_path / "m.gguf", extra={name: np.ones(4, np.float32)})
    error = refusal(tmp_path, UnsupportedModel)
    assert name in error.message


def test_rotary_factors_of_another_recipe_are_unsupported(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    write_tiny_gguf(tmp_path / "m.gguf", extra=extra)
    assert "rope_freqs.weight is not Llama 3's" in refusal(tmp_path).message


def test_weights_that_are_no_numbers_are_torn(tmp_path: Path) -> None:
    tensors = random_tensors("llama", VOCABULARY)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.nan
    write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    refusal(tmp_path, TornModel, "blk.0.ffn_up.weight holds values that are not finite")


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (byte_tokenizer("cuneiform"), "pre-tokenizer cuneiform is not supported"),
        (TinyTokenizer(model="bert", tokens=["[PAD]", "a"], types=[3, 1]), "tokenizer bert"),
    ],
    ids=["pre-tokenizer", "model"],
)
def test_an_unknown_tokenizer_is_named(tmp_path: Path, tokenizer: TinyTokenizer, said: str) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    refusal(tmp_path, UnsupportedModel, said)


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
def test_a_vocabulary_may_not_contradict_itself(tmp_path: Path, tokenizer: TinyTokenizer) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    refusal(tmp_path, TornModel, "m.gguf is corrupt")
