"""Hugging Face folders are checked against their config and taken as they are."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from mesh.domain.errors import MeshError, ModelError, TornModel, UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh.text.assets import read_assets
from mesh_loader import convert_import
from mesh_loader.safetensors_file import StoredTensor, header_bytes, read_whole
from mesh_loader.store import ModelStore, StoredModel
from mesh_loader.tensor_values import check_finite, located
from mesh_nodes.engines.openvino.architecture import read_architecture
from tests.support.tiny_model import CHAT_TEMPLATE


def refusal(
    store: ModelStore, folder: Path, kind: type[ModelError] = ModelError, said: str = ""
) -> MeshError:
    with pytest.raises(kind) as caught:
        store.import_model(f"file://{folder}")
    assert said in caught.value.message
    assert store.models() == []
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def refusal_beside(store: ModelStore, folder: Path) -> MeshError:
    """Where other models are in the store."""
    with pytest.raises(ModelError) as caught:
        store.import_model(f"file://{folder}")
    return caught.value


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def config(stored: StoredModel) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((stored.path / "config.json").read_text())
    return value


def test_a_folder_is_imported_whole(store: ModelStore, folder: Path) -> None:
    stored = store.import_model(f"file://{folder}")
    assert stored.info.format is ModelFormat.SAFETENSORS
    assert (stored.info.architecture, stored.info.layers) == ("llama", 2)
    assert stored.info.stop_token_ids == (1,)
    assert (stored.path / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    ours, theirs = (load_file(where / "model.safetensors") for where in (stored.path, folder))
    assert sorted(ours) == sorted(theirs)
    assert stored.info.parameters == sum(array.size for array in theirs.values())


def test_stored_weights_do_not_follow_the_users_file(store: ModelStore, folder: Path) -> None:
    """A user's file is copied, never linked: a later write to it must not reach the store."""
    stored = store.import_model(f"file://{folder}")
    before = (stored.path / "model.safetensors").read_bytes()
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert (stored.path / "model.safetensors").read_bytes() == before


def split_into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, chosen in enumerate((names[:9], names[9:]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / shard)
        weight_map |= dict.fromkeys(chosen, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_stay_shards_with_their_index(store: ModelStore, folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    split_into_shards(folder)
    stored = store.import_model(f"file://{folder}")
    index = json.loads((stored.path / "model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(stored.path / shard)[name], whole[name])
    assert not (stored.path / "model.safetensors").exists()


def test_a_missing_shard_is_named(store: ModelStore, folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refusal(store, folder, TornModel, "tiny lacks model-00002-of-00002.safetensors")


def test_a_single_safetensors_file_of_any_name_will_do(store: ModelStore, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert (store.import_model(f"file://{folder}").path / "model.safetensors").is_file()


@pytest.mark.parametrize("cut_bytes", [1, 1000, 72_000])
def test_a_cut_off_file_is_torn_by_sizes(store: ModelStore, folder: Path, cut_bytes: int) -> None:
    path = folder / "model.safetensors"
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size_bytes - cut_bytes)
    error = refusal(store, folder, TornModel, "model.safetensors")
    assert f"the file has {size_bytes - cut_bytes}" in error.message


def test_a_missing_tensor_is_named(store: ModelStore, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    refusal(store, folder, TornModel, "tiny lacks tensor model.layers.1.mlp.down_proj.weight")


def test_shapes_that_contradict_the_config_are_named(store: ModelStore, folder: Path) -> None:
    change_config(folder, lambda c: c.update(intermediate_size=128))
    refusal(store, folder, TornModel, "has shape (64, 32), config.json calls for (128, 32)")


def test_integer_weights_are_unsupported(store: ModelStore, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    refusal(store, folder, UnsupportedModel, f"{name} has type I8")


def test_a_missing_tokenizer_is_named_with_a_remedy(store: ModelStore, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    error = refusal(store, folder, UnsupportedModel, "tiny has no tokenizer.json")
    assert "save_pretrained" in error.hint


def test_a_broken_tokenizer_is_torn(store: ModelStore, folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    refusal(store, folder, TornModel, "tokenizer.json is corrupt")


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}'])
def test_a_broken_config_is_torn(store: ModelStore, folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refusal(store, folder, TornModel, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "spiral", "factor": 2.0}),
    ],
)
def test_features_that_would_be_left_out_are_unsupported(
    store: ModelStore, folder: Path, key: str, value: object
) -> None:
    change_config(folder, lambda c: c.update({key: value}))
    refusal(store, folder, UnsupportedModel)


def test_another_architecture_names_itself_the_native_ones_and_the_extra(
    store: ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_import, "_exporter_installed", lambda: False)
    change_config(folder, lambda c: c.update(model_type="gpt_neox"))
    error = refusal(store, folder, UnsupportedModel, "architecture gpt_neox")
    assert "llama, qwen2, qwen3" in error.message
    assert error.hint == "pip install 'mesh-serve[convert]'"


def test_pickled_weights_alone_need_the_extra(
    store: ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_import, "_exporter_installed", lambda: False)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(store, folder, UnsupportedModel, "tiny has no safetensors weights")
    assert error.hint == "pip install 'mesh-serve[convert]'"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "no weights that can be read"),
        ("model.onnx", "mesh reads no model.onnx"),
        ("onnx/model.onnx", "mesh reads no onnx/model.onnx"),
        ("tf_model.h5", "mesh reads no tf_model.h5"),
        ("flax_model.msgpack", "mesh reads no flax_model.msgpack"),
        ("consolidated.00.pth", "mesh reads no consolidated.00.pth"),
        ("openvino_language_model.xml", "mesh reads no openvino_language_model.xml"),
    ],
)
def test_weights_of_other_formats_are_named(
    store: ModelStore, folder: Path, name: str, said: str
) -> None:
    """No extra can export them."""
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    if name:
        (folder / name).write_bytes(b"x")
    assert ".safetensors" in refusal(store, folder, UnsupportedModel, said).hint


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_of_a_folder_is_answered_with_the_folder(
    store: ModelStore, folder: Path, name: str
) -> None:
    assert f"file://{folder}" in refusal(store, folder / name, UnsupportedModel).hint


def test_a_folder_of_models_is_answered_with_the_last_one(
    store: ModelStore, folder: Path, tmp_path: Path
) -> None:
    for step in (500, 1000):
        shutil.copytree(folder, tmp_path / "runs" / f"checkpoint-{step}")
        config = tmp_path / "runs" / f"checkpoint-{step}" / "config.json"
        os.utime(config, (step, step))
    assert refusal(store, tmp_path / "runs").hint.endswith("/runs/checkpoint-1000")


def test_a_config_without_a_model_type_is_torn(store: ModelStore, folder: Path) -> None:
    change_config(folder, lambda c: c.pop("model_type"))
    refusal(store, folder, TornModel, "names no model_type")


def test_a_folder_without_a_model_says_what_would_be_one(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = refusal(store, tmp_path / "empty")
    assert "holds no model" in error.message
    assert ".gguf" in error.hint


def test_a_folder_of_gguf_files_asks_for_one_of_them(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for name in ("mmproj-a.gguf", "real.gguf"):
        (tmp_path / "many" / name).write_bytes(b"GGUF")
    assert refusal(store, tmp_path / "many").hint.endswith("/many/real.gguf")


def test_newer_configs_are_brought_into_the_classic_form(store: ModelStore, folder: Path) -> None:
    """transformers 5 writes rope_parameters and dtype, and leaves defaults out."""

    def renew(c: dict[str, Any]) -> None:
        for key in ("rope_theta", "rope_scaling", "head_dim", "attention_bias", "torch_dtype"):
            c.pop(key)
        c["rope_parameters"] = {"rope_theta": 500000.0, "rope_type": "default"}
        c["dtype"] = "float16"

    change_config(folder, renew)
    found = config(store.import_model(f"file://{folder}"))
    assert found["rope_theta"] == 500000.0
    assert found["rope_scaling"] is None
    assert (found["head_dim"], found["attention_bias"]) == (8, False)
    assert found["torch_dtype"] == "float16"


def test_a_rotary_scaling_keeps_parameters_in_any_form(store: ModelStore, folder: Path) -> None:
    change_config(folder, lambda c: c.update(rope_scaling={"type": "linear", "factor": 2.0}))
    first = config(store.import_model(f"file://{folder}"))
    assert first["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    renewed = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    change_config(folder, lambda c: (c.pop("rope_scaling"), c.update(rope_parameters=renewed)))
    second = config(store.import_model(f"file://{folder}"))
    assert second["rope_scaling"] == first["rope_scaling"]


def test_stop_tokens_come_from_every_place_that_names_them(store: ModelStore, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    change_config(folder, lambda c: c.update(eos_token_id=[5]))
    # 1 is the tokenizer's own </s>.
    assert store.import_model(f"file://{folder}").info.stop_token_ids == (1, 5, 7, 9)


def test_templates_in_a_folder_make_another_model(store: ModelStore, folder: Path) -> None:
    without = store.import_model(f"file://{folder}")
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("T")
    (templates / "rag.jinja").write_text("R")
    given = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    stored = store.import_model(f"file://{folder}")
    assert stored.info.model_id != without.info.model_id
    assets = read_assets(stored.path)
    assert (assets.chat_template, assets.tool_template) == (given, "T")
    (templates / "tool_use.jinja").write_bytes(b"\xff")
    assert "additional_chat_templates cannot be read" in refusal_beside(store, folder).message


def added_token(content: str, **flags: bool) -> dict[str, object]:
    return {"content": content, "special": True, **flags}


@pytest.mark.parametrize(
    ("files", "text", "ids"),
    [
        # An id that is free, one beyond others, and one that a vocabulary gives to something else.
        ({"258": added_token("<|new|>")}, "b<|new|>", [67, 258]),
        ({"300": added_token("<|new|>")}, "<|new|>b", [300, 67]),
        ({"66": added_token("<|new|>")}, "b<|new|>b", [67, 66, 67]),
        ({"1": added_token("<|eot|>")}, "<|eot|></s>", [1, *[29, 16, 84, 31]]),
        ({"0": added_token("<s>"), "258": added_token("<x>", special=False)}, "<x><s>", [258, 0]),
        # What is no token is none: spelled out, as before.
        (
            {"-1": added_token("a"), "x": added_token("a"), "9999999999": added_token("a")},
            "a",
            [66],
        ),
        ({"258": "a", "259": {"content": 7}, "260": {}}, "a", [66]),
    ],
)
def test_added_tokens_that_tokenizer_json_lacks_are_tokens(
    store: ModelStore, folder: Path, files: dict[str, object], text: str, ids: list[int]
) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": files}))
    tokenizer = Tokenizer.from_file(
        str(store.import_model(f"file://{folder}").path / "tokenizer.json")
    )
    assert tokenizer.encode(text).ids == ids


def test_older_files_name_added_and_special_tokens_too(store: ModelStore, folder: Path) -> None:
    """added_tokens.json, and special tokens which only the vocabulary holds."""
    (folder / "added_tokens.json").write_text(json.dumps({"<|a|>": 258, "<|b|>": 259}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"additional_special_tokens": ["<|a|>"], "pad_token": "b", "eos_token": "<|b|>"})
    )
    stored = store.import_model(f"file://{folder}")
    tokenizer = Tokenizer.from_file(str(stored.path / "tokenizer.json"))
    assert tokenizer.encode("<|a|><|b|>ab").ids == [258, 259, 66, 67]
    special = {n for n, one in tokenizer.get_added_tokens_decoder().items() if one.special}
    assert special == {0, 1, 67, 258, 259}
    assert stored.info.stop_token_ids == (1,), "the model has no row for <|b|>"


def test_the_default_of_several_chat_templates_is_taken(store: ModelStore, folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text())
    said["chat_template"] = [
        {"name": "tools", "template": "T"},
        {"name": "default", "template": "D"},
    ]
    path.write_text(json.dumps(said))
    stored = store.import_model(f"file://{folder}")
    assert (stored.path / "chat_template.jinja").read_text() == "D"


def test_a_whole_file_comes_before_a_left_over_index(store: ModelStore, folder: Path) -> None:
    """As in transformers: the shards that the index names may be gone."""
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = store.import_model(f"file://{folder}")
    assert (stored.path / "model.safetensors").is_file()
    assert not (stored.path / "model.safetensors.index.json").exists()


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named(store: ModelStore, folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    error = refusal(store, folder)
    assert f"{name} is a pointer of Git LFS" in error.message
    assert "git lfs pull" in error.hint


def test_a_gguf_that_is_a_pointer_of_git_lfs_is_named(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text(POINTER)
    assert "m.gguf is a pointer of Git LFS" in refusal(store, tmp_path / "m.gguf").message


@pytest.mark.parametrize("beside_a_config", [True, False])
def test_a_lora_adapter_is_named(store: ModelStore, folder: Path, beside_a_config: bool) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    if not beside_a_config:
        (folder / "config.json").unlink()
    error = refusal(
        store, folder, UnsupportedModel, "tiny is a LoRA adapter of 'org/base', not a whole model"
    )
    assert "merge" in error.hint


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_whole_model_beside_an_adapter_is_imported(
    store: ModelStore, folder: Path, name: str
) -> None:
    (folder / "model.safetensors").rename(folder / name)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / "adapter_config.json").write_text("{}")
    assert store.import_model(f"file://{folder}").info.layers == 2


def test_a_hugging_face_cache_is_answered_with_the_snapshot_to_name(
    store: ModelStore, folder: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    (repository / "snapshots" / ("b" * 40)).mkdir()  # of a fetch that was broken off
    folder.rename(snapshot)
    (repository / "snapshots" / "notes.txt").touch()
    for named in (repository, repository / "snapshots"):
        assert f"file://{snapshot}" in refusal(store, named).hint
    assert "hf://org/tiny" in refusal(store, tmp_path / "hub").hint


def test_a_tokenizer_as_large_as_those_in_use_is_taken(store: ModelStore, folder: Path) -> None:
    """Those of Llama 3 and Qwen have 7 to 11 MB; a configuration may have 4."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + " " * (5 << 20))
    stored = store.import_model(f"file://{folder}")
    assert len(read_assets(stored.path).tokenizer_json) > 5 << 20


def test_files_beyond_any_such_file_are_refused(store: ModelStore, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x" * ((1 << 20) + 1))
    assert "chat_template.jinja holds 1048577 bytes" in refusal(store, folder).message
    (folder / "chat_template.jinja").unlink()
    template = folder / "additional_chat_templates" / "rag.jinja"
    template.parent.mkdir()
    template.write_text("x" * ((1 << 20) + 1))
    assert "rag.jinja holds 1048577 bytes" in refusal_beside(store, folder).message


@pytest.mark.parametrize("name", ["notes.txt", "other.bin", "unused.json"])
def test_a_file_of_a_terabyte_of_nothing_is_refused_before_it_is_hashed(
    store: ModelStore, folder: Path, name: str
) -> None:
    """Hashing it would take hours, in which a node imports nothing else."""
    with (folder / name).open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 40)
    assert f"{name} " in refusal(store, folder).message


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "own"),
    [
        (lambda head: head, False),
        (lambda head: head.astype(np.float32), False),
        (lambda head: head + np.float16(0.25) * (np.arange(len(head)) == 257)[:, None], True),
        (lambda head: head.astype(np.float32) * np.float32(1.0001), True),
    ],
)
def test_a_head_beside_tied_embeddings_is_used_where_it_is_another(
    store: ModelStore, folder: Path, change: Callable[[Any], Any], own: bool
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = np.ascontiguousarray(change(tensors[EMBEDDING]))
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, lambda c: c.update(tie_word_embeddings=True))
    stored = store.import_model(f"file://{folder}")
    assert config(stored)["tie_word_embeddings"] is not own
    assert stored.info.parameters == sum(
        array.size for name, array in tensors.items() if own or name != HEAD
    )
    assert read_architecture(stored.path).tied_embeddings is not own


def test_a_head_of_another_shape_is_named_though_tied(store: ModelStore, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[HEAD][:100]
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, lambda c: c.update(tie_word_embeddings=True))
    assert f"tensor {HEAD} has shape (100, 32)" in refusal(store, folder).message


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.bias",
        "model.lm_head.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.mlp.up_proj.weight",
    ],
)
def test_a_tensor_left_out_is_refused_by_name(store: ModelStore, folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: np.ones(32, np.float16)}, folder / "model.safetensors")
    refusal(store, folder, UnsupportedModel, f"tensor {name} has no place in a llama model")


def test_old_checkpoints_rotary_embeddings_are_left_out(store: ModelStore, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert store.import_model(f"file://{folder}").info.layers == 2


def bits_of(dtype: str, negative: bool, kind: str) -> int:
    """An infinity, or the NaN with the fewest bits set."""
    exponent, mantissa = {"F16": (5, 10), "BF16": (8, 7), "F32": (8, 23)}[dtype]
    largest = ((1 << exponent) - 1) << mantissa
    return negative << (exponent + mantissa) | largest | (kind == "NaN")


@pytest.mark.parametrize("kind", ["NaN", "Inf"])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("place", [0, -1])
def test_weights_that_are_not_finite_are_refused_by_their_tensors_name(
    store: ModelStore, folder: Path, dtype: str, negative: bool, kind: str, place: int
) -> None:
    """Whatever the type, and at both ends of a tensor; the largest finite number passes."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    integer = np.uint32 if dtype == "F32" else np.uint16
    values = np.zeros(tensors[name].size, integer)
    values[place] = bits_of(dtype, negative, "Inf") - 1
    write_as(folder, tensors, name, dtype, values)
    assert store.import_model(f"file://{folder}").info.layers == 2
    values[place] = bits_of(dtype, negative, kind)
    write_as(folder, tensors, name, dtype, values)
    fresh = ModelStore(folder.parent / "fresh")
    refusal(
        fresh,
        folder,
        TornModel,
        f"model.safetensors: tensor {name} holds values that are not finite",
    )


def write_as(
    folder: Path, tensors: dict[str, Any], name: str, dtype: str, values: npt.NDArray[Any]
) -> None:
    """The model with one tensor of these bits."""
    kept = {key: array for key, array in tensors.items() if key != name}
    entries = {key: StoredTensor(dtype="F16", shape=array.shape) for key, array in kept.items()}
    entries[name] = StoredTensor(dtype=dtype, shape=tensors[name].shape)
    data = b"".join(array.tobytes() for array in kept.values()) + values.tobytes()
    (folder / "model.safetensors").write_bytes(header_bytes(entries.items()) + data)


@pytest.mark.parametrize(
    ("dtype", "bits", "bad"),
    [
        *(("F8_E4M3", 0x7E, False), ("F8_E4M3", 0x7F, True), ("F8_E4M3", 0xFF, True)),
        *(("F8_E5M2", 0x7B, False), ("F8_E5M2", 0x7C, True), ("F8_E5M2", 0xFD, True)),
        *(("F8_E8M0", 0xFE, False), ("F8_E8M0", 0xFF, True)),
        ("I8", 0xFF, False),
    ],
)
def test_so_are_eight_bits_of_weights(tmp_path: Path, dtype: str, bits: int, bad: bool) -> None:
    path = tmp_path / "m.safetensors"
    entry = StoredTensor(dtype=dtype, shape=(5,))
    path.write_bytes(header_bytes([("w", entry)]) + bytes([0, 1, 2, 3, bits]))
    found = located(path, read_whole(path))
    if not bad:
        check_finite(found, lambda phase, share: None)
        return
    with pytest.raises(TornModel, match="tensor w holds values that are not finite"):
        check_finite(found, lambda phase, share: None)
