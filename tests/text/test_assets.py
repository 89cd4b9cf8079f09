"""A model's text assets: read as they are written by different tools, damage named."""

import json
import math
from pathlib import Path

import pytest

from mesh.domain.errors import TornModel
from mesh.domain.text import SamplingDefaults
from mesh.text.assets import read_assets


def write(path: Path, **config: object) -> Path:
    (path / "tokenizer.json").write_bytes(b"{}")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_tokens_and_templates_may_be_text_or_tables(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    path = write(tmp_path, bos_token={"content": "<s>"}, eos_token="</s>", chat_template=named)
    assets = read_assets(path)
    assert (assets.bos_token, assets.eos_token, assets.chat_template) == ("<s>", "</s>", "yes")


def test_the_template_for_tools_has_a_name_in_a_list_or_a_table(tmp_path: Path) -> None:
    table = {"default": "D", "tool_use": "T"}
    for given in (table, [{"name": name, "template": text} for name, text in table.items()]):
        assets = read_assets(write(tmp_path, chat_template=given))
        assert (assets.chat_template, assets.tool_template) == ("D", "T")
    assert read_assets(write(tmp_path, chat_template="D")).tool_template is None


@pytest.mark.parametrize(
    ("config", "mapped", "bos", "told"),
    [
        ({}, {"bos_token": "<s>", "pad_token": {"content": "<p>"}}, "<s>", {"pad_token": "<p>"}),
        ({"unk_token": "<u>"}, {"bos_token": "<s>"}, "<s>", {"unk_token": "<u>"}),
        # transformers has the map go first, and reads none beside a list of added tokens.
        ({"bos_token": "a"}, {"bos_token": "b"}, "b", {}),
        ({"bos_token": "a", "added_tokens_decoder": {}}, {"bos_token": "b"}, "a", {}),
        ({"bos_token": None, "added_tokens_decoder": {}}, {"bos_token": "b"}, None, {}),
        ({"added_tokens_decoder": {}}, {"bos_token": "b"}, "b", {}),
        (
            {"add_bos_token": True, "extra_special_tokens": {"image_token": "<i>"}},
            {"additional_special_tokens": ["<a>", {"content": "<b>"}]},
            None,
            {"image_token": "<i>", "additional_special_tokens": ["<a>", "<b>"]},
        ),
        ({"extra_special_tokens": ["<e>"]}, {}, None, {"additional_special_tokens": ["<e>"]}),
        ({"pad_token": 7, "model_specific_special_tokens": {"x": "<x>"}}, {}, None, {"x": "<x>"}),
    ],
)
def test_special_tokens_come_from_both_files(
    tmp_path: Path,
    config: dict[str, object],
    mapped: dict[str, object],
    bos: str | None,
    told: dict[str, object],
) -> None:
    path = write(tmp_path, **config)
    (path / "special_tokens_map.json").write_text(json.dumps(mapped))
    assets = read_assets(path)
    assert assets.bos_token == bos
    assert json.loads(assets.special_tokens or "{}") == told


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    path = write(tmp_path, chat_template="config")
    (path / "chat_template.jinja").write_text("file")
    assert read_assets(path).chat_template == "file"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path)
    (path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(TornModel, match=name):
        read_assets(path)


def test_a_model_without_a_tokenizer_is_torn(tmp_path: Path) -> None:
    with pytest.raises(TornModel, match=r"tokenizer\.json"):
        read_assets(tmp_path)


def test_recommended_sampling_is_what_the_makers_wrote_and_could_mean(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert read_assets(path).sampling == SamplingDefaults()
    given = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "min_p": 0.1,
    }
    (path / "generation_config.json").write_text(json.dumps({**given, "do_sample": False}))
    assert read_assets(path).sampling == SamplingDefaults(**given)  # type: ignore[arg-type]
    wrong = {"temperature": True, "top_p": 0, "top_k": -1, "repetition_penalty": "high", "min_p": 2}
    huge = dict.fromkeys(wrong, 10**400)
    for said in (wrong, huge, dict.fromkeys(wrong, math.nan), dict.fromkeys(wrong, math.inf)):
        (path / "generation_config.json").write_text(json.dumps(said))
        assert read_assets(path).sampling == SamplingDefaults()
    (path / "generation_config.json").write_text('{"repetition_penalty": 9007199254740993}')
    penalty = read_assets(path).sampling.repetition_penalty
    assert (penalty, type(penalty)) == (2.0**53, float)
    (path / "generation_config.json").write_text('{"top_k": 4294967296, "min_p": 1}')
    assert read_assets(path).sampling == SamplingDefaults(min_p=1)
