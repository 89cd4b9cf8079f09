"""Folders that have to be converted, and folders of OpenVINO's own format."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from safetensors.numpy import save_file

from mesh.domain.errors import ModelError, TornModel, UnsupportedModel
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
