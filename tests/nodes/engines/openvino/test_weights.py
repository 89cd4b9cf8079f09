"""Weights are read, fused, quantised and kept beside the model without a change or a torn file."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesh.domain.errors import Cancelled, StorageError, TornModel, UnsupportedModel
from mesh.domain.model import WeightPrecision
from mesh_loader import locks
from mesh_loader.prepared_key import openvino_key
from mesh_nodes.engines.openvino import weights as weights_module
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.checkpoint import Checkpoint, StoredTensor
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.four_bits import GROUP, FourBits
from mesh_nodes.engines.openvino.prepared import (
    drop_prepared,
    prepared_path,
    read_prepared,
    write_prepared,
)
from mesh_nodes.engines.openvino.weights import Array, graph_weights
from tests.nodes.engines.openvino.tiny import HIDDEN, VOCABULARY, TinyModel, write_tiny

EMBEDDING = "model.embed_tokens.weight"


def weights_of(path: Path, precision: WeightPrecision) -> dict[str, Array]:
    return dict(graph_weights(read_architecture(path), Checkpoint(path), precision))


@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_fused_rows_are_those_of_the_sources(tmp_path: Path, precision: WeightPrecision) -> None:
    """In i8, within half a quantisation step of each row; in i4, nearly all of each group."""
    model = write_tiny(tmp_path / "m", "qwen2")
    source = load_file(model.path / "model.safetensors")
    names = [f"model.layers.1.self_attn.{n}_proj" for n in "qkv"]
    weights = weights_of(model.path, precision)
    expected = np.concatenate([source[f"{name}.weight"] for name in names]).astype(np.float64)
    got = weights["layers.1.qkv"].astype(np.float64)
    if precision in (WeightPrecision.I4, WeightPrecision.I4_G128):
        nibbles = weights["layers.1.qkv"].view(np.uint8)
        scale, offset, group = weights["layers.1.qkv.scale"].astype(np.float32), None, HIDDEN
        if precision is WeightPrecision.I4:
            rounded, group = weights["layers.1.qkv.offset"], GROUP
            assert rounded.dtype == np.int8
            offset_scale = weights["layers.1.qkv.offset.scale"].astype(np.float32)
            offset = rounded.astype(np.float32) * offset_scale
        lost = FourBits(nibbles, scale, offset).values()
        steps = np.repeat(np.abs(scale.astype(np.float64)[:, :, 0]), group, axis=1)
        assert np.mean(np.abs(lost - expected) <= steps / 2 * 1.001) > 0.95
    elif precision.quantised:
        scales = weights["layers.1.qkv.scale"].astype(np.float64)
        assert np.all(np.abs(got * scales - expected) <= scales / 2 * 1.001)
    else:
        np.testing.assert_array_equal(got, expected)
    biases = np.concatenate([source[f"{name}.bias"] for name in names])
    np.testing.assert_array_equal(weights["layers.1.qkv.bias"], biases.astype(np.float32))


def test_a_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    tensors = load_file(model.path / "model.safetensors")
    tensors[EMBEDDING][3] = 0
    save_file(tensors, model.path / "model.safetensors")
    weights = weights_of(model.path, WeightPrecision.I8)
    assert not weights["embedding"][3].any()
    assert np.isfinite(weights["embedding.scale"].astype(np.float64)).all()


def test_shards_and_bf16_read_as_one_f16_file_does(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole")
    tensors = load_file(whole.path / "model.safetensors")
    coarse = {n: t.astype(np.float32).view(np.uint32) >> 16 for n, t in tensors.items()}
    exact = {n: (t << 16).view(np.float32) for n, t in coarse.items()}
    save_file(exact, whole.path / "model.safetensors")
    parts = write_tiny(tmp_path / "parts")
    (parts.path / "model.safetensors").unlink()
    names = sorted(coarse)
    index: dict[str, str] = {}
    for shard, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{shard}.safetensors"
        save_file({n: coarse[n].astype(np.uint16) for n in chosen}, parts.path / file)
        text = (parts.path / file).read_bytes().replace(b'"U16"', b'"BF16"', -1)
        header_bytes = int.from_bytes(text[:8], "little") + len(chosen)
        (parts.path / file).write_bytes(header_bytes.to_bytes(8, "little") + text[8:])
        index |= dict.fromkeys(chosen, file)
    (parts.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for precision in WeightPrecision:
        expected, got = weights_of(whole.path, precision), weights_of(parts.path, precision)
        assert expected.keys() == got.keys()
        for name in expected:
            np.testing.assert_array_equal(expected[name], got[name])


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_cut_short_is_torn(tmp_path: Path, kept: int) -> None:
    model = write_tiny(tmp_path / "m")
    file = model.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(TornModel, match=r"model\.safetensors"):
        Checkpoint(model.path)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    tensors = load_file(model.path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, model.path / "model.safetensors")
    with pytest.raises(TornModel, match=r"no tensor model\.norm\.weight"):
        weights_of(model.path, WeightPrecision.F16)
    save_file(tensors | {"model.norm.weight": norm[:-1]}, model.path / "model.safetensors")
    with pytest.raises(TornModel, match=rf"\({HIDDEN - 1},\).*\({HIDDEN},\)"):
        weights_of(model.path, WeightPrecision.F16)


def test_an_element_type_it_does_not_read_is_refused(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    save_file(
        {EMBEDDING: np.zeros((VOCABULARY, HIDDEN), np.int8)}, model.path / "model.safetensors"
    )
    with pytest.raises(UnsupportedModel, match="I8") as refused:
        Checkpoint(model.path)
    assert "F16, BF16, F32" in refused.value.hint


def test_the_process_that_prepares_needs_no_openvino() -> None:
    """Whose import takes longer than all else of it."""
    code = "import sys, mesh_nodes.engines.openvino.preparing; sys.exit('openvino' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def prepare(model: TinyModel) -> list[float]:
    shares: list[float] = []
    OpenVinoEngine(threads=1).prepare(model.info, model.path, lambda _, share: shares.append(share))
    return shares


def test_prepare_writes_once_and_what_it_writes_is_what_a_load_would_derive(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    shares = prepare(model)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    (folder,) = (model.path / "prepared").iterdir()
    written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    prepare(model)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == written
    assert [path.name for path in (model.path / "prepared").iterdir()] == [folder.name]
    prepared = read_prepared(model.path, folder.name)
    assert prepared is not None
    derived = weights_of(model.path, WeightPrecision.I8)
    assert prepared[1].keys() == derived.keys()
    for name, array in derived.items():
        np.testing.assert_array_equal(prepared[1][name], array)
        assert prepared[1][name].dtype == array.dtype


def test_a_torn_prepared_folder_is_not_trusted_and_is_written_again(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    prepare(model)
    (folder,) = (model.path / "prepared").iterdir()
    whole = (folder / "weights.bin").read_bytes()
    (folder / "weights.bin").write_bytes(whole[:-1])
    assert read_prepared(model.path, folder.name) is None
    prepare(model)
    assert (folder / "weights.bin").read_bytes() == whole


def test_a_writer_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Array]]:
        yield "first", np.zeros(4, np.int8)
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        write_prepared(tmp_path, "key", failing())
    assert not prepared_path(tmp_path, "key").exists()
    assert not list((tmp_path / "prepared").iterdir())


def test_the_second_of_two_writers_loses_quietly(tmp_path: Path) -> None:
    first, second = np.zeros(4, np.int8), np.ones(4, np.int8)
    write_prepared(tmp_path, "key", iter([("a", first)]))
    write_prepared(tmp_path, "key", iter([("a", second)]))
    prepared = read_prepared(tmp_path, "key")
    assert prepared is not None
    np.testing.assert_array_equal(prepared[1]["a"], first)


def test_every_finite_f16_is_read_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    read = StoredTensor(finite, "F16", "every").as_f32()
    np.testing.assert_array_equal(read.view(np.uint32), finite.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("threads", [2, 7])
def test_threads_share_the_rows_of_a_matrix_and_change_nothing(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny(tmp_path / "m")
    expected = weights_of(model.path, WeightPrecision.I8)
    monkeypatch.setattr(weights_module, "_QUANTISED_ELEMENTS", 3 * HIDDEN)
    found = dict(
        graph_weights(
            read_architecture(model.path), Checkpoint(model.path), WeightPrecision.I8, threads
        )
    )
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_what_is_wrong_with_a_model_is_said_by_who_prepares_it(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    file = model.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TornModel, match=r"model\.safetensors"):
        prepare(model)
    assert not any((model.path / "prepared").glob("*"))


def test_a_stopped_or_killed_preparation_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    prepared = model.path / "prepared"
    engine = OpenVinoEngine(threads=1)

    told: list[float] = []

    def stop(phase: str, share: float) -> None:
        told.append(share)
        if len(told) == 2:  # its process has just been started
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        engine.prepare(model.info, model.path, stop)
    assert not engine.is_prepared(model.info, model.path)
    # As a writer that was killed leaves it.
    key = openvino_key("i8")
    left = prepared / f".{key}-left"
    left.mkdir(parents=True)
    (left / "weights.bin").write_bytes(b"half")
    os.utime(left, (time.time() - 60, time.time() - 60))
    with locks.locked_if_free(left):
        engine.prepare(model.info, model.path, lambda *_: None)
    assert left.exists(), "its writer lives"
    drop_prepared(model.path, key)
    engine.prepare(model.info, model.path, lambda *_: None)
    assert engine.is_prepared(model.info, model.path)
    assert [path.name for path in prepared.iterdir()] == [key]
