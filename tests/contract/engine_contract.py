"""The engines that are put through the contract suite, and how each is made.

An engine joins by one more entry in `ENGINES`; no test of the suite knows which engine it drives.
It must choose greedy tokens that do not depend on the batch, so it is made in its exact form.
"""

import atexit
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mesh.domain.ids import DeploymentName, InstanceId, ModelId
from mesh.domain.model import Footprint, ModelFormat, ModelInfo
from mesh.runtime.engine import Engine, LoadOrder
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.engine import CostEngine
from tests.support.profiles import profile
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_model import HEAD_SIZE, write_tiny_llama

if TYPE_CHECKING:
    from mesh_nodes.engines.vllm.spawner import Spawner

MODEL_ID = ModelId("sha256-00000000c0274ac7")
CONTEXT_TOKENS_MAX = 256
BATCH_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    """One engine and a small model that it can load."""

    name: str
    make: Callable[[], Engine]
    write_model: Callable[[Path], ModelInfo]
    """Fills an absent folder as the store would; the model allows CONTEXT_TOKENS_MAX at least."""
    needs: str | None = None
    """The package without which there is nothing to test."""
    optional: bool = False
    """Left out where that package is missing, not skipped: it has an environment of its own."""
    spare_blocks_per_request: int = 0
    """KV blocks that a request may hold beyond those its computed tokens fill."""
    walks: int = 120
    """Random walks of the state machine with `MESH_DEEP` set; else a sixth of them."""
    kv_alone: bool = False
    """It differs from another engine here in its KV cache alone, and in what it does with instances
    that it unloads.
    """
    reads_folders: bool = True
    """It loads what is in the model's folder."""

    @property
    def available(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """The small model of an engine under test, in its folder."""

    path: Path
    info: ModelInfo

    def order(
        self,
        instance_id: InstanceId,
        *,
        kv_blocks: int = 64,
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        batch_max: int = BATCH_MAX,
    ) -> LoadOrder:
        return LoadOrder(
            instance_id=instance_id,
            deployment=DeploymentName("contract"),
            model=self.info,
            model_path=self.path,
            kv_blocks=kv_blocks,
            context_tokens_max=context_tokens_max,
            batch_max=batch_max,
        )


def write_tiny_model(folder: Path, head_size: int = HEAD_SIZE) -> ModelInfo:
    """Two random layers and one token a byte, as the store makes it of a Hugging Face folder."""
    write_tiny_llama(folder, seed=1, head_size=head_size)
    config = json.loads((folder / "config.json").read_text())
    return ModelInfo(
        model_id=MODEL_ID,
        source="made by the test",
        format=ModelFormat.SAFETENSORS,
        architecture=config["model_type"],
        context_tokens_max=config["max_position_embeddings"],
        vocabulary_tokens=config["vocab_size"],
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        attention_heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        parameters=(folder / "model.safetensors").stat().st_size // 2,
        disk_bytes=(folder / "model.safetensors").stat().st_size,
        stop_token_ids=(config["eos_token_id"],),
    )


def _scripted_with_text() -> Engine:
    from mesh_nodes.text_engine import TextEngine

    return TextEngine(ScriptedEngine())


def _cost_model() -> Engine:
    footprint = Footprint(
        weights_bytes=1 << 20, kv_block_bytes=1 << 14, block_tokens=32, stays_bytes=1 << 18
    )
    costs = ModelCosts(profile=profile(model_id=MODEL_ID), footprint=footprint)
    return CostEngine(
        models={MODEL_ID: costs},
        costs=NodeCosts(),
        memory_bytes=1 << 30,
        spend=lambda seconds: None,
    )


def _openvino() -> Engine:
    from mesh.domain.model import KvPrecision, WeightPrecision
    from mesh_nodes.engines.openvino.engine import OpenVinoEngine

    return OpenVinoEngine(threads=1, weights=WeightPrecision.F16, kv=KvPrecision.F32)


def _openvino_copying() -> Engine:
    from mesh.domain.model import KvPrecision, WeightPrecision
    from mesh_nodes.engines.openvino.engine import OpenVinoEngine
    from mesh_nodes.engines.openvino.kv_cache import KvResize

    return OpenVinoEngine(
        threads=1,
        weights=WeightPrecision.F16,
        kv=KvPrecision.F32,
        kv_resize=KvResize.COPYING,
    )


@cache
def vllm_spawner() -> "Spawner":
    """One for the whole suite: importing vLLM anew for every test would take most of its time."""
    from mesh_nodes.engines.vllm import start_spawner

    spawner = start_spawner(threads=1)
    atexit.register(spawner.close)
    return spawner


def _vllm() -> Engine:
    from mesh_nodes.engines.vllm import VllmEngine

    return VllmEngine(spawner=vllm_spawner())


@cache
def mapped_spawner() -> "Spawner":
    """KV caches of its engine processes lie in virtual memory, of a driver that stands in."""
    from mesh_nodes.engines.vllm.environment import ENVIRONMENT
    from mesh_nodes.engines.vllm.spawner import Spawner

    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    spawner = Spawner(environment, "tests.support.mapped_forkserver")
    atexit.register(spawner.close)
    return spawner


def _vllm_mapped() -> Engine:
    """As on GPUs: instances sleep, too."""
    from mesh_nodes.engines.vllm import VllmEngine

    return VllmEngine(spawner=mapped_spawner(), asleep_max=2)


def _vllm_copying() -> Engine:
    """As on GPUs: instances sleep, too."""
    from mesh_nodes.engines.vllm import VllmEngine

    return VllmEngine(spawner=vllm_spawner(), elastic=False, asleep_max=2)


ENGINES = (
    EngineUnderTest(name="scripted", make=ScriptedEngine, write_model=write_tiny_model),
    EngineUnderTest(
        name="scripted-with-text", make=_scripted_with_text, write_model=write_tiny_model, walks=60
    ),
    EngineUnderTest(
        name="cost-model", make=_cost_model, write_model=write_tiny_model, reads_folders=False
    ),
    EngineUnderTest(
        name="openvino", make=_openvino, write_model=write_tiny_model, needs="openvino", walks=60
    ),
    EngineUnderTest(
        name="openvino-copying",
        make=_openvino_copying,
        write_model=write_tiny_model,
        needs="openvino",
        walks=30,
        kv_alone=True,
    ),
    EngineUnderTest(
        name="vllm",
        make=_vllm,
        write_model=partial(write_tiny_model, head_size=32),
        needs="vllm",
        optional=True,
        walks=30,
    ),
    EngineUnderTest(
        name="vllm-mapped",
        make=_vllm_mapped,
        write_model=partial(write_tiny_model, head_size=32),
        needs="vllm",
        optional=True,
        walks=30,
        kv_alone=True,
    ),
    EngineUnderTest(
        name="vllm-copying",
        make=_vllm_copying,
        write_model=partial(write_tiny_model, head_size=32),
        needs="vllm",
        optional=True,
        walks=30,
        kv_alone=True,
    ),
)
