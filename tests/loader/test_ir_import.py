"""OpenVINO IR folders are taken when the graph is whole, stateful, and has all its weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from mesh.domain.errors import ModelError, TornModel, UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh_loader.store import ModelStore
from tests.support.tiny_model import write_tiny_llama

WEIGHT_ROWS, WEIGHT_COLUMNS = 8, 16


def write_ir(folder: Path, *, stateful: bool = True) -> Path:
    """An IR written by OpenVINO itself, with one weight, and one state if asked for."""
    tokenizer = write_tiny_llama(folder.with_name("tokenizer-of-ir"))
    folder.mkdir()
    given = ops.parameter([1, WEIGHT_ROWS], np.float32, name="input_ids")
    weight = ops.constant(np.ones((WEIGHT_ROWS, WEIGHT_COLUMNS), np.float32))
    result = ops.matmul(given, weight, False, False)
    sinks = []
    if stateful:
        past = ops.read_value(ops.constant(np.zeros((1, WEIGHT_COLUMNS), np.float32)), "past")
        result = ops.add(result, past)
        sinks = [ops.assign(result, "past")]
    model = ov.Model([ops.result(result)], sinks, [given], "tiny")
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_ir(tmp_path / "ir")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def refusal(store: ModelStore, folder: Path, kind: type[ModelError], said: str = "") -> ModelError:
    with pytest.raises(kind) as caught:
        store.import_model(f"file://{folder}")
    assert said in caught.value.message
    assert store.models() == []
    return caught.value


def test_a_whole_folder_is_imported_for_openvino(store: ModelStore, folder: Path) -> None:
    stored = store.import_model(f"file://{folder}")
    assert stored.info.format is ModelFormat.OPENVINO_IR
    assert stored.info.architecture == "llama"
    assert stored.info.parameters == (WEIGHT_ROWS + 1) * WEIGHT_COLUMNS
    model = ov.Core().read_model(stored.path / "openvino_model.xml")
    assert len(model.get_sinks()) == 1
    assert json.loads((stored.path / "tokenizer.json").read_text())["model"]["type"] == "BPE"


@pytest.mark.parametrize("said", [{"quant_method": "gptq"}, {"bits": 4}])
def test_how_what_it_was_exported_from_was_quantised_is_not_its_own(
    store: ModelStore, folder: Path, said: dict[str, object]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    assert store.import_model(f"file://{folder}").info.quantisation == ""


@pytest.mark.parametrize("name", ["openvino_model.bin", "config.json", "tokenizer.json"])
def test_a_missing_file_is_named(store: ModelStore, folder: Path, name: str) -> None:
    (folder / name).unlink()
    refusal(store, folder, TornModel, f"ir lacks {name}")


def test_cut_off_weights_are_torn_and_both_sizes_are_named(store: ModelStore, folder: Path) -> None:
    path = folder / "openvino_model.bin"
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size_bytes - 4)
    refusal(store, folder, TornModel, f"end at byte {size_bytes}, the file has {size_bytes - 4}")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_off_graph_is_torn(store: ModelStore, folder: Path, share: float) -> None:
    path = folder / "openvino_model.xml"
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * share)])
    refusal(store, folder, TornModel, "openvino_model.xml")


def test_other_xml_is_no_graph(store: ModelStore, folder: Path) -> None:
    (folder / "openvino_model.xml").write_text("<html><body/></html>")
    refusal(store, folder, TornModel)


def test_a_model_without_state_is_unsupported(store: ModelStore, tmp_path: Path) -> None:
    error = refusal(
        store, write_ir(tmp_path / "stateless", stateful=False), UnsupportedModel, "keeps no state"
    )
    assert "text-generation-with-past" in error.hint
