"""Quantised checkpoints, and architectures that vLLM alone computes, are taken as they are; what no
engine computes is refused by name.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from mesh.domain.errors import ModelError, TornModel, UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh_loader.config_keys import NORMALISED, POOLING
from mesh_loader.hf_import import EMBEDDING, HEAD
from mesh_loader.importing import ImportRules, import_in_child
from mesh_loader.quantisation import MODELOPT_CONFIG
from mesh_loader.safetensors_file import StoredTensor, header_bytes
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino.architecture import read_architecture
from tests.nodes.engines.openvino.embedders import write_embedder

WEIGHTS = "model.safetensors"
GROUP = 32
BYTES = {"F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}


def packed(name: str, rows: int, columns: int) -> dict[str, StoredTensor]:
    """A matrix of 4 bits as AWQ and GPTQ have it, but for the order."""
    part, groups = name.removesuffix(".weight"), columns // GROUP
    return {
        f"{part}.qweight": StoredTensor(dtype="I32", shape=(columns, rows // 8)),
        f"{part}.qzeros": StoredTensor(dtype="I32", shape=(groups, rows // 8)),
        f"{part}.scales": StoredTensor(dtype="F16", shape=(groups, rows)),
    }


def packed_in_order(name: str, rows: int, columns: int) -> dict[str, StoredTensor]:
    order = StoredTensor(dtype="I32", shape=(columns,))
    return packed(name, rows, columns) | {f"{name.removesuffix('.weight')}.g_idx": order}


def eight_bits(name: str, rows: int, columns: int) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(dtype="F8_E4M3", shape=(rows, columns)),
        f"{name}_scale_inv": StoredTensor(dtype="F32", shape=(1, 1)),
    }


def compressed(name: str, rows: int, columns: int) -> dict[str, StoredTensor]:
    return {
        f"{name}_packed": StoredTensor(dtype="I32", shape=(rows, columns // 8)),
        f"{name}_scale": StoredTensor(dtype="F16", shape=(rows, columns // GROUP)),
        f"{name}_shape": StoredTensor(dtype="I64", shape=(2,)),
    }


METHODS = {
    "awq": packed,
    "gptq": packed_in_order,
    "fp8": eight_bits,
    "compressed-tensors": compressed,
}


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def quantise(folder: Path, method: str) -> None:
    """The same model as the method would have it: names, types and shapes; no values."""
    tensors: dict[str, StoredTensor] = {}
    for name, array in load_file(folder / WEIGHTS).items():
        if name.endswith("_proj.weight"):
            tensors |= METHODS[method](name, *array.shape)
        else:
            tensors[name] = StoredTensor(dtype="F16", shape=array.shape)
    size = sum(math.prod(tensor.shape) * BYTES[tensor.dtype] for tensor in tensors.values())
    (folder / WEIGHTS).write_bytes(header_bytes(tensors.items()) + bytes(size))
    change(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": GROUP})


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_keeps_its_tensors_and_its_books_are_its_files(
    tmp_path: Path, folder: Path, method: str
) -> None:
    plain = ModelStore(tmp_path / "plain").import_model(f"file://{folder}").info
    quantise(folder, method)
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    assert (stored.path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert (stored.info.quantisation, plain.quantisation) == (method, "")
    assert stored.info.parameters == plain.parameters
    assert stored.info.disk_bytes < plain.disk_bytes
    assert stored.info.shape != plain.shape, "what one takes says nothing of the other"
    assert ModelStore(tmp_path / "store").models() == [stored]
    with pytest.raises(UnsupportedModel, match=f"OpenVINO engine .* quantised by '{method}'") as no:
        read_architecture(stored.path)
    assert "vLLM nodes" in no.value.hint


def test_what_modelopt_says_beside_the_config_comes_along(tmp_path: Path, folder: Path) -> None:
    quantise(folder, "fp8")
    change(folder, quantization_config=None)
    (folder / MODELOPT_CONFIG).write_text('{"quantization": {"quant_algo": "FP8"}}')
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    assert stored.info.quantisation == "modelopt"
    assert "FP8" in (stored.path / MODELOPT_CONFIG).read_text()


def refused(
    tmp_path: Path, folder: Path, error: type[ModelError], match: str, *as_is: str
) -> ModelError:
    store = ModelStore(tmp_path / "store", as_is=as_is)
    with pytest.raises(error, match=match) as caught:
        store.import_model(f"file://{folder}")
    assert store.models() == []
    return caught.value


def test_a_node_of_plain_weights_imports_no_others(tmp_path: Path, folder: Path) -> None:
    quantise(folder, "fp8")
    store = ModelStore(tmp_path / "store", plain=True)
    with pytest.raises(UnsupportedModel, match="quantised by 'fp8', which the engine of this node"):
        store.import_model(f"file://{folder}")
    assert store.models() == []


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("method", ["hqq", "bitsandbytes"])
def test_a_method_of_no_engine_is_refused(
    tmp_path: Path, folder: Path, method: str, plain: bool
) -> None:
    """A node of plain weights sends nobody to vLLM for it."""
    change(folder, quantization_config={"quant_method": method})
    store = ModelStore(tmp_path / "store", plain=plain)
    said = f"quantised by '{method}', which no engine computes: vLLM has .*awq.* OpenVINO none"
    with pytest.raises(UnsupportedModel, match=said):
        store.import_model(f"file://{folder}")
    assert store.models() == []


def test_what_the_folder_states_of_embeddings_comes_along(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "made", "mistral", normalised=False)
    change(folder, quantization_config={"quant_method": "fp8"})
    tensors = {f"model.{name}": array for name, array in load_file(folder / WEIGHTS).items()}
    save_file(tensors | {HEAD: tensors[f"model.{EMBEDDING}"]}, folder / WEIGHTS, {"format": "pt"})
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    config = json.loads((stored.path / "config.json").read_text())
    assert (config[POOLING], config[NORMALISED]) == ("mean", False)


def test_a_quantised_encoder_is_refused(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "made", "bert")
    change(folder, quantization_config={"quant_method": "fp8"})
    refused(tmp_path, folder, UnsupportedModel, "is an encoder that is quantised by 'fp8'")


def test_a_part_without_any_tensor_is_torn(tmp_path: Path, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    lost = "model.layers.1.mlp.down_proj"
    del tensors[f"{lost}.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    change(folder, quantization_config={"quant_method": "fp8"})
    refused(tmp_path, folder, TornModel, f"tiny lacks all tensors of {lost}")


def test_a_quantisation_without_a_method_is_torn(tmp_path: Path, folder: Path) -> None:
    change(folder, quantization_config={"bits": 4})
    refused(tmp_path, folder, TornModel, "quantization_config names no quant_method")


def test_an_architecture_that_vllm_alone_has_is_taken_whole(tmp_path: Path, folder: Path) -> None:
    change(folder, model_type="olmo2", architectures=["Olmo2ForCausalLM"], rope_theta=5e5)
    store = ModelStore(tmp_path / "store", as_is=("GPT2LMHeadModel", "Olmo2ForCausalLM"))
    stored = store.import_model(f"file://{folder}")
    info = stored.info
    assert (info.format, info.architecture) == (ModelFormat.SAFETENSORS, "olmo2")
    assert info.parameters == sum(array.size for array in load_file(folder / WEIGHTS).values())
    assert (stored.path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    ours, theirs = (
        json.loads((path / "config.json").read_text()) for path in (stored.path, folder)
    )
    assert ours == theirs
    with pytest.raises(UnsupportedModel, match="OpenVINO engine does not run model_type 'olmo2'"):
        read_architecture(stored.path)


def test_vllm_may_compute_what_mesh_leaves_out(tmp_path: Path, folder: Path) -> None:
    change(folder, hidden_act="gelu", architectures=["LlamaForCausalLM"])
    refused(tmp_path, folder, UnsupportedModel, "llama with hidden_act = 'gelu'")
    store = ModelStore(tmp_path / "store", as_is=("LlamaForCausalLM",))
    stored = store.import_model(f"file://{folder}")
    with pytest.raises(UnsupportedModel, match="OpenVINO engine does not run hidden_act 'gelu'"):
        read_architecture(stored.path)


def test_an_architecture_of_neither_is_refused(tmp_path: Path, folder: Path) -> None:
    change(folder, model_type="novel", architectures=["NovelForCausalLM"])
    error = refused(
        *(tmp_path, folder, UnsupportedModel),
        *("NovelForCausalLM is none that the vLLM of this node computes", "Olmo2ForCausalLM"),
    )
    assert "llama, qwen2" in error.hint


def test_a_config_without_what_a_model_takes_is_refused(tmp_path: Path, folder: Path) -> None:
    change(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"], num_hidden_layers=None)
    refused(
        *(tmp_path, folder, UnsupportedModel),
        *("num_hidden_layers .* nobody knows what GPT2LMHeadModel takes", "GPT2LMHeadModel"),
    )


async def test_a_child_is_told_what_vllm_has(tmp_path: Path, folder: Path) -> None:
    change(folder, model_type="olmo2", architectures=["Olmo2ForCausalLM"])
    stored = await import_in_child(
        f"file://{folder}",
        tmp_path / "store",
        lambda phase, share: None,
        timeout_s=60,
        rules=ImportRules(as_is=("GPT2LMHeadModel", "Olmo2ForCausalLM")),
    )
    assert stored.info.architecture == "olmo2"
