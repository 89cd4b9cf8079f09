"""What a GGUF file has in 4 bits is computed as it is; what is made of others' weights is close."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from mesh.domain.model import KvPrecision, WeightPrecision
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino import compilation
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.four_bits import (
    EXACT,
    GROUP,
    FourBits,
    from_blocks,
    quantise_groups,
    quantise_with_offsets,
)
from mesh_nodes.engines.openvino.probe import probe_logits
from mesh_nodes.engines.openvino.weights import Matrix, weight_plan
from tests.loader.tiny_gguf import byte_tokenizer, random_tensors, write_tiny_gguf
from tests.nodes.engines.openvino.preparing import prepare_here
from tests.nodes.engines.openvino.test_blobs import compiled, compiler, job, make
from tests.nodes.engines.openvino.test_graph import CHUNKS, computed_logits
from tests.nodes.engines.openvino.test_weights import weights_of
from tests.nodes.engines.openvino.tiny import (
    CONTEXT_TOKENS_MAX,
    TinyModel,
    reference_logits,
    write_tiny,
)
from tests.support.depth import DEEP

ROWS, COLUMNS = 24, 512
VOCABULARY = len(byte_tokenizer().tokens)


def gguf_model(
    folder: Path, kind: str = "Q4_1", *, tied: bool = False, seed: int = 0
) -> tuple[TinyModel, dict[str, npt.NDArray[np.float32]]]:
    """The imported model, and its tensors before they were quantised."""
    folder.mkdir(exist_ok=True)
    drawn = random_tensors("llama", VOCABULARY, tied=tied, seed=seed)
    tensors = {n: t * np.float32(0.15 if t.ndim == 2 else 1) for n, t in drawn.items()}
    quantisation = GGMLQuantizationType[kind]
    write_tiny_gguf(folder / "m.gguf", tensors=tensors, quantization=quantisation)
    stored = ModelStore(folder / "store").import_model(f"file://{folder}/m.gguf")
    return TinyModel(stored.path, stored.info), tensors


def assert_computes(
    model: TinyModel,
    weights: WeightPrecision,
    exact: Mapping[str, npt.NDArray[np.float32]],
    folder: Path,
) -> None:
    """What these tensors do, within f32's rounding."""
    folder.mkdir()
    shutil.copy(model.path / "config.json", folder)
    save_file(dict(exact), folder / "model.safetensors")
    vocabulary = model.info.vocabulary_tokens
    tokens = np.random.default_rng(1).integers(0, vocabulary, sum(CHUNKS)).tolist()
    expected = reference_logits(folder, tokens)
    logits = computed_logits(model, tokens, weights, KvPrecision.F32)
    for place, row in logits.items():
        np.testing.assert_allclose(row, expected[place], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", EXACT)
def test_blocks_mean_what_llama_cpp_means_by_them(kind: str) -> None:
    """Every nibble and every 6-bit scale, within f32's rounding of the sum of two products."""
    draw = np.random.default_rng(0)
    elements, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (ROWS, COLUMNS // elements, size_bytes)).astype(np.uint8)
    factors = draw.standard_normal((*blocks.shape[:2], 1 if kind == "Q4_0" else 2))
    packed = factors.astype(np.float16).view(np.uint8)
    blocks[:, :, : packed.shape[2]] = packed
    rows = blocks.reshape(ROWS, -1)
    expected = dequantize(rows, GGMLQuantizationType[kind])
    found = from_blocks(kind, rows).values()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("group", [GROUP, 128])
def test_groups_lose_less_than_by_rounding_to_their_largest_weight(group: int) -> None:
    weights = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    weights[0, :group] = 0
    values = quantise_groups(weights, group).values()
    assert not values[0, :group].any()
    grouped = weights.reshape(ROWS, -1, group)
    scale = np.abs(grouped).max(axis=2, keepdims=True) / 7
    rounded = np.rint(grouped / np.where(scale == 0, 1, scale)) * scale
    assert np.square(values - weights).sum() < 0.85 * np.square(rounded - grouped).sum()


@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 10), st.floats(-3, 3))
def test_groups_with_offsets_lose_less_than_by_rounding_between_their_ends(
    seed: int, spread: float, shift: float
) -> None:
    draw = np.random.default_rng(seed)
    weights = ((draw.standard_t(4, (4, 4 * GROUP)) + shift) * spread).astype(np.float32)
    weights[0, :GROUP] = spread
    grouped = weights.reshape(4, -1, GROUP)
    low, high = grouped.min(axis=2, keepdims=True), grouped.max(axis=2, keepdims=True)
    step = np.where(high == low, 1, high - low) / 15
    rounded = np.rint((grouped - low) / step) * step + low
    error = quantise_with_offsets(weights).values().reshape(grouped.shape) - grouped
    least = np.square(rounded - grouped).sum(axis=2)
    assert np.all(np.square(error).sum(axis=2) <= least + 1e-9 * np.square(grouped).sum(axis=2))
    assert np.square(error).sum() < 0.97 * least.sum()


def test_groups_with_offsets_find_a_files_four_bits_again() -> None:
    weights = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    kind = GGMLQuantizationType.Q4_1
    values = dequantize(quantize(weights, kind), kind)
    np.testing.assert_allclose(quantise_with_offsets(values).values(), values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_logits_are_those_of_the_files_own_values(
    tmp_path: Path, kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32 and within its rounding: no second quantisation."""
    model, tensors = gguf_model(tmp_path, kind, tied=tied)
    quantisation = GGMLQuantizationType[kind]
    exact = {
        name: dequantize(quantize(tensor, quantisation), quantisation)
        if tensor.ndim == 2
        else tensor
        for name, tensor in tensors.items()
    }
    monkeypatch.setattr(compilation, "GROUP", 0)  # activations in f32
    assert_computes(model, WeightPrecision.FILE, exact, tmp_path / "exact")


def test_logits_of_coarse_groups_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 128 weights in one group, rows of 64 in one of 64; in f32 and within its rounding."""
    model = write_tiny(tmp_path / "m")
    weights = weights_of(model.path, WeightPrecision.I4_G128)
    assert {weights[f"layers.0.{name}"].shape[1] for name in ("gate_up", "down")} == {1}
    exact = load_file(model.path / "model.safetensors")
    for plan in weight_plan(read_architecture(model.path)):
        values = weights[plan.name]
        if isinstance(plan, Matrix):
            scale = weights[f"{plan.name}.scale"].astype(np.float32)
            four_bits = values.dtype == np.uint8
            bits = values.view(np.uint8)
            values = FourBits(bits, scale).values() if four_bits else values.astype(float) * scale
            ends = np.cumsum([rows for _, rows in plan.sources])[:-1]
            for (name, _), part in zip(plan.sources, np.split(values, ends), strict=True):
                exact[f"{name}.weight"] = np.ascontiguousarray(part)
    monkeypatch.setattr(compilation, "ACTIVATION_GROUP", 0)  # activations in f32
    assert_computes(model, WeightPrecision.I4_G128, exact, tmp_path / "exact")


@pytest.mark.parametrize(
    ("weights", "tied"),
    [
        (WeightPrecision.FILE, False),
        (WeightPrecision.FILE, True),
        (WeightPrecision.I4, True),
        (WeightPrecision.I4_G128, False),
        *((WeightPrecision.I4, False), (WeightPrecision.I4_G128, True)) * DEEP,
    ],
)
def test_a_model_of_four_bits_is_imported_from_a_blob_of_its_shape(
    tmp_path: Path, weights: WeightPrecision, tied: bool
) -> None:
    """The weights of one, the blob of another; what is imported computes what is compiled."""
    first, second = (gguf_model(tmp_path / str(n), tied=tied, seed=n)[0] for n in (0, 1))
    compiler(weights=weights).prepare(first.info, first.path, lambda *_: None)
    prepare_here(second.path, weights)
    make(job(first, tmp_path / "blobs", weights=weights))
    imported = compiled(compiler(tmp_path / "blobs", weights=weights), second)
    expected = compiled(compiler(weights=weights), second)
    assert (imported.imported, expected.imported) == (True, False)
    found, wanted = (
        probe_logits(graph, vocabulary_tokens=VOCABULARY, context_tokens_max=CONTEXT_TOKENS_MAX)
        for graph in (imported, expected)
    )
    assert np.array_equal(found, wanted)
