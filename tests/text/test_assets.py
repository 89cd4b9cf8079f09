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


def test_recommended_sampling_is_what_the_makers_wrote_as_far_as_it_can_be_meant(
    tmp_path: Path,
) -> None:
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
