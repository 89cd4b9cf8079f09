"""Configurations that cannot be meant are refused when they are imported, by key and value."""

import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.errors import ModelError, TornModel, UnsupportedModel
from mesh.domain.model import ModelInfo
from mesh_loader.architectures import shape_of
from mesh_loader.config_keys import CONFIG, ROPE, shown
from mesh_loader.hf_config import normalised
from mesh_loader.hf_import import HfPlan, plan_hf
from mesh_loader.model_info import read_json, stop_token_ids
from mesh_loader.model_plan import plan_import
from mesh_loader.safetensors_file import read_whole
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino.architecture import parse_architecture
from tests.nodes.engines.openvino.families import families
from tests.support.tiny_model import write_tiny_llama

INTEGERS = sorted(
    key
    for key, kind in CONFIG.items()
    if str(kind).startswith("an integer") and not key.endswith("token_id")
)
NO_INTEGERS: tuple[Any, ...] = (
    *(-1, 2**31, 2**32, 2**63, 2**70, 10**18, 10**400),
    *(1.0, 2.5, float("nan"), float("inf"), True, "8", "", [8], [8] * 10**4, {"a": 8}),
)
NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
NO_NUMBERS: tuple[Any, ...] = (
    *(-1.0, float("nan"), float("inf"), -float("inf"), 10**400, True, "10000.0", [1.0], {}),
)


def refused(folder: Path, changed: dict[str, Any], file: str = "config.json") -> ModelError:
    said = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**said, **changed}))
    with pytest.raises(ModelError) as caught:
        plan_hf(folder, own_files=False)
    assert len(caught.value.message) < 400
    assert "try again" not in caught.value.hint
    return caught.value


@pytest.mark.parametrize("key", INTEGERS)
def test_an_integer_that_is_none_or_beyond_its_range_is_refused(folder: Path, key: str) -> None:
    for value in NO_INTEGERS:
        error = refused(folder, {key: value})
        assert isinstance(error, TornModel)
        assert f"config.json: {key} should be an integer from " in error.message, value


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "head_dim"])
def test_no_size_is_zero(folder: Path, key: str) -> None:
    assert f"{key} should be an integer from 1" in refused(folder, {key: 0}).message


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none_or_not_finite_is_refused(folder: Path, key: str) -> None:
    for value in NO_NUMBERS:
        assert f"config.json: {key} should be a number" in refused(folder, {key: value}).message


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", ["false", 0, 1, [], 0.0])
def test_a_truth_value_is_true_or_false(folder: Path, key: str, value: Any) -> None:
    assert f"{key} should be true or false" in refused(folder, {key: value}).message


@pytest.mark.parametrize("key", sorted(ROPE))
@pytest.mark.parametrize("inside", ["rope_scaling", "rope_parameters", "of a layer"])
def test_a_rotary_scaling_is_checked_everywhere(folder: Path, key: str, inside: str) -> None:
    values: tuple[Any, ...] = (-1, float("nan"), {"a": []}, [[]], True)
    for value in values:
        scaling: dict[str, Any] = {key: value}
        where, name = inside, inside
        if inside == "of a layer":
            where, name = "rope_parameters", "rope_parameters: full_attention"
            scaling = {"full_attention": scaling}
        message = refused(folder, {where: scaling}).message
        assert f"config.json: {name}: {key} should be" in message


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling should be an object"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention should be an object"),
        ({"rope_scaling": {"sliding_attention": [1]}}, "sliding_attention should be an object"),
        ({"hidden_act": ["silu"]}, "hidden_act should be a text"),
        ({"model_type": 3}, "model_type should be a text"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": "full"}, "layer_types should be a list"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "do not divide into 2 KV heads"),
        ({"head_dim": 7}, "in pairs"),
        ({"partial_rotary_factor": 0.01}, "0 are to be rotated"),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "3 are to be rotated"),
        ({"eos_token_id": 2**70}, "eos_token_id should be an integer"),
        ({"eos_token_id": [0] * 10**6}, "eos_token_id should be an integer"),
        ({"eos_token_id": "</s>"}, "eos_token_id should be an integer"),
        ({"eos_token_id": [True]}, "eos_token_id should be an integer"),
    ],
)
def test_contradictions_are_refused(folder: Path, changed: dict[str, Any], said: str) -> None:
    assert said in refused(folder, changed).message


@pytest.mark.parametrize(
    ("file", "changed", "said"),
    [
        ("generation_config.json", {"eos_token_id": 2**70}, "eos_token_id should be"),
        ("generation_config.json", {"temperature": "0.7"}, "temperature should be a number"),
        ("generation_config.json", {"min_p": float("nan")}, "min_p should be a number"),
        ("generation_config.json", {"top_k": 2**40}, "top_k should be an integer"),
        ("tokenizer_config.json", {"add_bos_token": "false"}, "add_bos_token should be true"),
        ("tokenizer_config.json", {"eos_token": ["</s>"]}, "eos_token should be a text"),
        ("tokenizer_config.json", {"bos_token": "\ud800"}, "bos_token should be a text"),
        ("tokenizer_config.json", {"chat_template": "\udcff"}, "chat_template should be a text"),
        ("tokenizer_config.json", {"chat_template": "x" * (2 << 20)}, "chat_template should be"),
    ],
)
def test_other_files_are_too(folder: Path, file: str, changed: dict[str, Any], said: str) -> None:
    assert f"{file}: {said}" in refused(folder, changed, file).message


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"vocab_size": ' + "9" * 5000 + "}",
        "{",
        "\xff",
        "3",
        "[]",
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_cannot_be_read_is_torn(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text, encoding="latin-1")
    with pytest.raises(TornModel, match=file):
        plan_hf(folder, own_files=False)


def test_a_configuration_of_gigabytes_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(8 << 30)
    with pytest.raises(TornModel, match=r"config\.json holds 8589934592 bytes"):
        read_json(folder / "config.json")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_configuration_of_a_million_lists_is_not_read(folder: Path, file: str) -> None:
    (folder / file).write_text('{"a": [' + "[]," * 1_000_000 + "1]}")
    with pytest.raises(TornModel, match=f"{file} holds 1000002 lists and objects"):
        plan_hf(folder, own_files=False)


def test_a_model_within_all_ranges_fits_a_message(folder: Path, tmp_path: Path) -> None:
    said = json.loads((folder / "config.json").read_text())
    said |= {"max_position_embeddings": 1 << 24, "eos_token_id": [-1, 2**31 - 1]}
    (folder / "config.json").write_text(json.dumps(said))
    info: ModelInfo = ModelStore(tmp_path / "store").import_model(f"file://{folder}").info
    assert (info.context_tokens_max, info.stop_token_ids) == (1 << 24, (1,))


def test_the_engine_checks_what_was_stored_before(folder: Path) -> None:
    said = json.loads((folder / "config.json").read_text())
    assert parse_architecture(said).layers == 2
    with pytest.raises(TornModel, match="rope_theta should be a number above 0"):
        parse_architecture({**said, "rope_theta": float("nan")})
    with pytest.raises(TornModel, match="tie_word_embeddings should be true or false"):
        parse_architecture({**said, "tie_word_embeddings": "false"})


@pytest.mark.parametrize("key", [*CONFIG, "torch_dtype", "quantization_config"])
def test_null_is_as_absent_or_refused_by_name(folder: Path, key: str) -> None:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, key: None}))
    with suppress(ModelError):
        plan = plan_hf(folder, own_files=False)
        assert isinstance(plan, HfPlan)
        parse_architecture(plan.config)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, "rms_norm_eps") for name in families()),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma3", "rope_local_base_freq"),
        ("mistral", "rope_theta"),
    ],
)
def test_null_where_a_number_is_computed_with_is_refused_at_import(name: str, key: str) -> None:
    """By name, and as what it should be."""
    config = {**families()[name]["config"], "rope_parameters": None, key: None}
    with pytest.raises(TornModel, match=f"config.json: {key} should be a number .*, it is null"):
        normalised(config, shape_of(config, "config.json"), "config.json")


@pytest.mark.parametrize(
    ("rope_type", "key"),
    [("linear", "factor"), ("llama3", "factor"), ("llama3", "low_freq_factor")],
)
def test_null_and_a_missing_number_of_rope_scaling_are_named(rope_type: str, key: str) -> None:
    scaling = {"rope_type": rope_type, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4}
    config = {**families()["mistral"]["config"], "rope_parameters": None}
    missing = {name: value for name, value in scaling.items() if name != key}
    for said, left in (("null", {**scaling, key: None}), ("missing", missing)):
        with pytest.raises(TornModel, match=f"{key} should be a number above 0 .*, it is {said}"):
            parse_architecture({**config, "rope_scaling": left})
        with pytest.raises(TornModel, match=f"{key} should be a number above 0 .*, it is {said}"):
            normalised({**config, "rope_scaling": left}, shape_of(config, ""), "config.json")


@pytest.mark.parametrize(
    "changed",
    [
        *({"model_type": name} for name in ("x" * 10**6, ["x" * 10**6])),
        {"quantization_config": {"quant_method": "x" * 10**6}},
    ],
)
def test_a_name_of_a_megabyte_is_not_repeated(folder: Path, changed: dict[str, Any]) -> None:
    refused(folder, changed)


def test_a_name_of_a_megabyte_in_an_index_or_a_header_is_not_repeated(folder: Path) -> None:
    name = "x" * 10**6
    weights = folder / "model.safetensors"
    header = json.dumps({name: {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    weights.write_bytes(struct.pack("<Q", len(header)) + header + b"ab")
    refused(folder, {})
    weights.unlink()
    refused(folder, {"weight_map": {"a": name}}, "model.safetensors.index.json")


def test_a_part_to_rotate_of_null_is_all() -> None:
    config = {**families()["mistral"]["config"], "partial_rotary_factor": None}
    parsed = parse_architecture(config)
    assert parsed.rotary_size == parsed.head_size


def test_a_key_that_nobody_reads_may_hold_anything(folder: Path, tmp_path: Path) -> None:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "comment": "\ud800"}))
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    assert json.loads((stored.path / "config.json").read_text())["comment"] == "\ud800"


def test_added_tokens_of_null_are_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": null}')
    assert stop_token_ids(tmp_path, {"eos_token_id": [3, None]}, 8) == (3,)


def header(entries: str, data: bytes = b"\0" * 8) -> bytes:
    return struct.pack("<Q", len(entries.encode("latin-1"))) + entries.encode("latin-1") + data


def entry(dtype: str = '"F16"', shape: str = "[4]", offsets: str = "[0, 8]") -> str:
    return f'{{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}'


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 7, struct.pack("<Q", 2**64 - 1), struct.pack("<Q", 10**9) + b"{}",
        header("[" * 100_000), header('{"a":' * 100_000), header("[]"), header("\xff"),
        header(f'{{"a": {entry()}, "a": {entry()}}}'),
        header(f'{{"a": {entry()}, "b": {entry()}}}'),
        header(f'{{"a": {entry(offsets="[1, 9]")}}}', b"\0" * 9),
        header(f'{{"a": {entry(offsets="[0, 4]", shape="[2]")}, '
               f'"b": {entry(offsets="[2, 8]", shape="[3]")}}}'),
        *(header(f'{{"a": {entry(shape=shape)}}}') for shape in (
            "4", "null", "[4.0]", '["4"]', "[true]", "[-4]", "[[4]]", "{}", f"[{10**30}]",
            "[9223372036854775807, 9223372036854775807]", str([10**18] * 10_000),
        )),
        *(header(f'{{"a": {entry(offsets=offsets)}}}') for offsets in (
            "8", "null", "[0]", "[0, 8, 8]", "[0, 8.0]", "[8, 0]", "[-8, 0]", f"[0, {10**30}]",
            "[0, 16]", '["0", "8"]',
        )),
        *(header(f'{{"a": {entry(dtype=dtype)}}}') for dtype in ('"F7"', "3", "null", "[]")),
        *(header(f'{{"a": {value}}}') for value in ("3", "null", "[]", '"x"', "{}")),
    ],
)  # fmt: skip
def test_a_broken_header_of_safetensors_is_the_files_fault(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises((TornModel, UnsupportedModel), match=r"model\.safetensors") as caught:
        read_whole(path)
    assert len(caught.value.message) < 400


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "gone")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (a_pipe, "is a named pipe"),
        (a_socket, "is a socket"),
        (a_device, "in .* is a link that leads out of the folder"),
        (a_link_to_nothing, "is a link to a file that is not there"),
    ],
)
@pytest.mark.timeout(20)
def test_what_is_no_plain_file_is_named_and_never_waited_for(
    tmp_path: Path, put: Callable[[Path], None], said: str, name: str
) -> None:
    folder = write_tiny_llama(tmp_path / "t")
    (folder / name).unlink()
    put(folder / name)
    store = ModelStore(tmp_path / "store")
    with pytest.raises(ModelError, match=f"{name} {said}"):
        store.import_model(f"file://{folder}")
    with pytest.raises(TornModel):
        plan_import(folder, own_files=False)
    assert store.models() == []


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(TornModel, match=r"m\.gguf is a named pipe"):
        ModelStore(tmp_path / "store").import_model(f"file://{tmp_path}/m.gguf")


def test_a_value_of_any_length_is_shown_short() -> None:
    for value in ("x" * 10**6, [1] * 10**6, 10**4000, "\ud800", {"a": ["b"] * 1000}):
        assert len(shown(value).encode()) < 200
