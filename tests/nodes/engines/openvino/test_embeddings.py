"""What folders say of embeddings is imported or refused; 8 bits stay close to transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import KvPrecision, Task, WeightPrecision
from mesh_loader.encoders import TEXT_TOKENS_MAX
from mesh_nodes.engines.openvino import footprint
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.openvino.embedders import (
    EMBED,
    cosines,
    embedders,
    imported,
    loaded,
    vectors,
    write_embedder,
)


@pytest.mark.parametrize("name", EMBED)
def test_embeddings_in_8_bits_stay_close(tmp_path: Path, name: str) -> None:
    engine = OpenVinoEngine(threads=1, weights=WeightPrecision.I8, kv=KvPrecision.F32)
    loaded(engine, tmp_path, name, Task.EMBED)
    found = vectors(engine, *[case["prompt"] for case in embedders()[name]["cases"]])
    engine.close()
    assert min(cosines(found, name)) >= 0.999


def test_an_encoder_takes_no_longer_text_than_is_booked_for(tmp_path: Path) -> None:
    """Whatever its positions are: a text is computed in one iteration."""
    model = embedders()["bert"]
    folder = write_embedder(tmp_path / "made", "bert", max_position_embeddings=600)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in model["shapes"] if name.endswith("position_embeddings.weight"))
    tensors[name] = np.zeros((600, tensors[name].shape[1]), np.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert imported(tmp_path, folder).info.context_tokens_max == TEXT_TOKENS_MAX + 1
    assert footprint._PREFILL_TOKENS >= TEXT_TOKENS_MAX


def test_a_model_says_what_it_is_unfit_for(tmp_path: Path) -> None:
    fit = {}
    for name in ("bert", "qwen3", "mistral", "bert-scores"):
        info = imported(tmp_path, write_embedder(tmp_path / name, name)).info
        fit[name] = [task for task in (None, Task.EMBED, Task.RERANK) if not info.unfit_for(task)]
    assert fit == {
        "bert": [Task.EMBED],
        "qwen3": [Task.EMBED],
        "mistral": [Task.EMBED],
        "bert-scores": [Task.RERANK],
    }


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        ([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], {}, "no module 'Den"),
        ([{"type": "x.Pooling", "path": "1_Pooling"}], {"pooling_mode_max_tokens": True}, "max_"),
        ([{"type": "x.Pooling", "path": "pooling"}], {}, "the folder 'pooling'"),
        ([{"type": "x.Pooling", "path": ""}], {}, "the folder ''"),
        ([{"type": "x.Pooling", "path": "../1"}], {}, "not a folder's name"),
        ({"type": 1}, {}, "no list of modules"),
    ],
)
def test_modules_that_mesh_lacks_are_refused_by_name(
    tmp_path: Path, modules: object, pooling: dict[str, bool], said: str
) -> None:
    folder = write_embedder(tmp_path / "made", "bert")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises((UnsupportedModel, TornModel)) as refused:
        imported(tmp_path, folder)
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("normaliser", "fits"),
    [
        (None, False),
        ({"type": "NFC"}, False),
        ({"type": "Lowercase"}, True),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, True),
    ],
)
def test_lower_case_is_the_tokenizers_or_refused(
    tmp_path: Path, normaliser: object, fits: bool
) -> None:
    folder = write_embedder(tmp_path / "made", "bert")
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": normaliser}))
    if fits:
        imported(tmp_path, folder)
    else:
        with pytest.raises(UnsupportedModel, match="do_lower_case"):
            imported(tmp_path, folder)


def test_pooling_is_part_of_what_a_model_is(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "made", "bert")
    first = imported(tmp_path, folder).info.model_id
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert imported(tmp_path, folder).info.model_id != first


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"is_decoder": True}, "is_decoder"),
        ({"is_decoder": "false"}, "is_decoder"),
        ({"num_attention_heads": 7}, "7 heads"),
    ],
)
def test_an_unusual_encoder_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = write_embedder(tmp_path / "made", "bert", **changes)
    with pytest.raises((UnsupportedModel, TornModel)) as refused:
        imported(tmp_path, folder)
    assert said in refused.value.message


def test_a_head_that_scores_more_than_one_class_is_refused(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "made", "bert-scores")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"classifier.weight": np.zeros((3, 64), np.float16)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TornModel, match=r"classifier.weight has shape \(3, 64\)"):
        imported(tmp_path, folder)
