"""What is vLLM's alone where requests end with vectors: sleeps, and models as they are."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mesh.domain.model import Task
from mesh.domain.steps import LoadTier
from mesh_loader.store import ModelStore
from mesh_nodes.engines.vllm import VllmEngine, served_architectures
from tests.contract.engine_contract import vllm_spawner
from tests.nodes.engines.openvino.embedders import (
    cosines,
    embedders,
    imported,
    vectors,
    write_embedder,
)
from tests.nodes.engines.serving import INSTANCE, load

PROMPTS = [list(range(10, 60)), list(range(200, 230))]
MAKE = """
import json, sys
import torch
from transformers import GraniteConfig, GraniteForCausalLM

folder, prompts = json.loads(sys.argv[1])
torch.manual_seed(7)
config = GraniteConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
    pad_token_id=None, bos_token_id=None, eos_token_id=1, initializer_range=0.3,
)
model = GraniteForCausalLM(config).eval()
model.save_pretrained(folder)
with torch.no_grad():
    states = [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
print(json.dumps([torch.nn.functional.normalize(each.mean(0), dim=0).tolist() for each in states]))
"""


@pytest.mark.parametrize("name", ["bert", "mistral"])
@pytest.mark.parametrize("elastic", [True, False])
def test_what_slept_wakes_with_the_same_vectors(tmp_path: Path, name: str, elastic: bool) -> None:
    engine = VllmEngine(spawner=vllm_spawner(), elastic=elastic, asleep_max=1)
    try:
        stored = imported(tmp_path, write_embedder(tmp_path / "made", name))
        cases = [case["prompt"] for case in embedders()[name]["cases"]]
        for tier in (LoadTier.DISK, LoadTier.HOST):
            done = load(engine, stored.info.serving(Task.EMBED), stored.path)
            assert done.tier is tier
            assert min(cosines(vectors(engine, *cases, budget=24), name)) >= 0.9999
            engine.unload(INSTANCE)
    finally:
        engine.close()


def test_a_model_that_is_taken_as_it_is_embeds_as_its_folder_states(
    engine: VllmEngine, tmp_path: Path
) -> None:
    folder = write_embedder(tmp_path / "made", "mistral")
    given = json.dumps([str(folder), PROMPTS])
    command = [sys.executable, "-W", "ignore", "-c", MAKE, given]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    expected = json.loads(done.stdout.splitlines()[-1])
    stored = ModelStore(tmp_path / "store", as_is=served_architectures()).import_model(
        f"file://{folder}"
    )
    load(engine, stored.info.serving(Task.EMBED), stored.path)
    found = vectors(engine, *PROMPTS, budget=24)
    assert min(np.sum(np.array(found) * np.array(expected), axis=1)) >= 0.9999
