"""Weights come from the store's files, one or several, in memory or not; a torn folder is named."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mesh.domain.errors import TornModel
from mesh.domain.ids import InstanceId
from mesh_loader.page_cache import forget
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.driving import Driver, greedy, no_progress
from tests.contract.engine_contract import StoredModel
from tests.nodes.engines.vllm.test_ends import PROMPT, engine_processes

ONE_FILE = "model.safetensors"
TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def stored(model: StoredModel, tmp_path: Path) -> StoredModel:
    """A copy, to tear or to split."""
    path = tmp_path / "model"
    shutil.copytree(model.path, path)
    return StoredModel(info=model.info, path=path)


def tokens(engine: VllmEngine, stored: StoredModel, name: str = "i") -> list[int]:
    driver = Driver(engine, stored.order(InstanceId(name), kv_blocks=16))
    return driver.run("r", PROMPT, greedy(8))


def split(folder: Path) -> None:
    """Into two shards and their index, as large models come."""
    tensors = load_file(folder / ONE_FILE)
    (folder / ONE_FILE).unlink()
    weight_map: dict[str, str] = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number - 1 :: 2]}
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_that_no_cache_holds_load_like_one_file(
    engine: VllmEngine, model: StoredModel, stored: StoredModel
) -> None:
    split(stored.path)
    for path in stored.path.glob("*.safetensors"):
        forget(path)
    assert tokens(engine, stored, "shards") == tokens(engine, model, "one")


def test_a_missing_tensor_and_a_file_that_is_cut_short_are_named(
    engine: VllmEngine, stored: StoredModel
) -> None:
    before = engine_processes()
    file = stored.path / ONE_FILE
    whole = load_file(file)
    save_file({key: whole[key] for key in whole if key != TENSOR}, file, {"format": "pt"})
    with pytest.raises(TornModel, match=f"lacks 1 of its model's tensors, {TENSOR}"):
        engine.load(stored.order(InstanceId("i")), no_progress)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(TornModel, match=rf"{ONE_FILE} cannot be read"):
        engine.load(stored.order(InstanceId("i")), no_progress)
    assert engine.memory() == ()
    assert engine_processes() == before
