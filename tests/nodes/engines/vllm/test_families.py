"""Tiny models of every family, imported into the store, compute transformers' tokens on vLLM, too.

In float32, in which vLLM computes on CPUs; Gemma 2 with its capped attention as well, which the
OpenVINO engine refuses.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesh.domain.errors import EngineError
from mesh.domain.request import SamplingParams
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.engine_contract import vllm_spawner
from tests.nodes.engines.openvino.families import families, write_family
from tests.nodes.engines.serving import INSTANCE, load, request, run

WINDOWS_IN_SOME = "qwen2-window"
"""Some of its layers have a window: vLLM knows no such Qwen2."""
CONTEXT_TOKENS = 256
"""Longrope's original: beyond it vLLM takes the long factors for all sequences."""


def imported(tmp_path: Path, family: dict[str, Any]) -> StoredModel:
    folder = write_family(tmp_path / "made", family["config"], family["shapes"])
    return ModelStore(tmp_path / "store").import_model(f"file://{folder}")


@pytest.mark.parametrize("name", [name for name in families() if name != WINDOWS_IN_SOME])
def test_tokens_equal_transformers(engine: VllmEngine, tmp_path: Path, name: str) -> None:
    family = families()[name]
    stored = imported(tmp_path, family)
    load(engine, stored.info, stored.path, context_tokens_max=CONTEXT_TOKENS)
    requests = [
        request(f"r{n}", case["prompt"], SamplingParams(max_tokens=32, ignore_eos=True))
        for n, case in enumerate(family["cases"])
    ]
    expected = {f"r{n}": case["output"] for n, case in enumerate(family["cases"])}
    assert run(engine, *requests).tokens == expected
    engine.unload(INSTANCE)


def test_what_vllm_does_not_compute_is_refused_in_its_words(
    engine: VllmEngine, tmp_path: Path
) -> None:
    stored = imported(tmp_path, families()[WINDOWS_IN_SOME])
    with pytest.raises(EngineError, match=r"vLLM failed: .*Sliding window for some but all layers"):
        load(engine, stored.info, stored.path)


def test_a_quantised_checkpoint_is_computed_as_it_is(tmp_path: Path) -> None:
    """8-bit matrices with a scale for each row, as compressed-tensors writes them. vLLM's product
    of them takes f16 on CPUs; with symmetric activations it would ask for more of those with AMX.
    """
    engine = VllmEngine(spawner=vllm_spawner(), dtype="float16")
    family = families()["mistral"]
    config = family["config"] | {"sliding_window": None}
    folder = write_family(tmp_path / "made", config, family["shapes"], layers_gain=0.3)
    plain = ModelStore(tmp_path / "plain").import_model(f"file://{folder}")
    quantise(folder)
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    assert stored.info.parameters == plain.info.parameters
    asked = request("r", range(2, 60), SamplingParams(max_tokens=8, ignore_eos=True))
    tokens = []
    for model in (plain, stored):
        load(engine, model.info, model.path, context_tokens_max=CONTEXT_TOKENS)
        tokens.append(run(engine, asked).tokens["r"])
        engine.unload(INSTANCE)
    engine.close()
    assert tokens[1][:4] == tokens[0][:4]


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    held: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**held, "strategy": "channel", "dynamic": False},
        "input_activations": {**held, "symmetric": False, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weights = tensors[name].astype(np.float32)
        scale = np.abs(weights).max(axis=1, keepdims=True) / 127
        tensors[name] = np.rint(weights / scale).astype(np.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
