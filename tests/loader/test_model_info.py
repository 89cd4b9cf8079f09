"""ModelInfo survives its way through JSON; a damaged model.json is named."""

import json
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import StorageError
from mesh.domain.ids import ModelId
from mesh.domain.model import Mixture, ModelFormat, ModelInfo
from mesh_loader.model_info import from_json, info_of_folder, stop_token_ids, to_json

SIZES = st.integers(min_value=0, max_value=1 << 50)
INFOS = st.builds(
    ModelInfo,
    model_id=st.from_regex(r"sha256-[0-9a-f]{16}", fullmatch=True).map(ModelId),
    source=st.text(),
    format=st.sampled_from(ModelFormat),
    architecture=st.text(),
    context_tokens_max=SIZES,
    vocabulary_tokens=SIZES,
    layers=SIZES,
    hidden_size=SIZES,
    attention_heads=SIZES,
    kv_heads=SIZES,
    head_size=SIZES,
    parameters=SIZES,
    disk_bytes=SIZES,
    stop_token_ids=st.lists(SIZES).map(tuple),
    mixture=st.none() | st.builds(Mixture, experts=SIZES, chosen=SIZES, parameters=SIZES),
)


@given(INFOS)
def test_a_model_info_comes_back_from_json_as_it_was(info: ModelInfo) -> None:
    assert from_json(json.loads(json.dumps(to_json(info)))) == info


@given(
    INFOS, st.sampled_from([field.name for field in fields(ModelInfo) if field.default is MISSING])
)
def test_a_missing_entry_is_a_storage_error(info: ModelInfo, name: str) -> None:
    value = to_json(info)
    del value[name]
    with pytest.raises(StorageError):
        from_json(value)


def test_an_eos_token_given_as_an_object_counts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {"added_tokens": [{"id": 3, "content": "</s>"}, {"id": 4, "content": "<|eot_id|>"}]}
        )
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert stop_token_ids(tmp_path, {"eos_token_id": None}, 5) == (3, 4)
    assert stop_token_ids(tmp_path, {"eos_token_id": [0, 4, 5, -1, True]}, 4) == (0, 3)


@pytest.mark.parametrize(("stated", "known"), [(64, 64), ([64, 32], 0), (None, 0), (True, 0)])
def test_an_inner_width_is_known_where_all_layers_have_one(
    tmp_path: Path, stated: object, known: int
) -> None:
    """vLLM runs models whose layers differ."""
    config = {
        "max_position_embeddings": 128,
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": stated,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    info = info_of_folder(
        tmp_path,
        model_id=ModelId("m"),
        source="file:///m",
        form=ModelFormat.SAFETENSORS,
        parameters=1,
    )
    assert info.intermediate_size == known
    assert (info.widths is not None) is bool(known)
