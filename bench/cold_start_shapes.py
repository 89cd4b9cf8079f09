"""The models of which starts are measured, each in the form that every engine takes.

All come from one 8-bit GGUF: the demo model's, or one with random weights and the demo model's
vocabulary. llama.cpp loads that; OpenVINO GenAI the graph that it exports itself from it; mesh a
store that has imported it, with its prepared weights and without the originals.

They are made in a process of their own, which takes memory that the measurements want.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from bench.demo_model import demo_gguf
from bench.gguf_files import requantise, write_random
from bench.peer import in_own_process
from mesh_loader.disk import require_free
from mesh_loader.store import ModelStore
from mesh_loader.upkeep import collect
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.support.tiny_model import LlamaShape

DEMO = "135M"
SHAPES: dict[str, LlamaShape | None] = {
    DEMO: None,
    "0.4B": LlamaShape(
        hidden=960, intermediate=2560, layers=36, heads=15, kv_heads=5, head_size=64
    ),
    "1B": LlamaShape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_size=64),
    "3B": LlamaShape(
        hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8, head_size=128
    ),
}
"""The demo model; SmolLM2-360M with four more layers; Llama 3.2 but for the vocabulary."""
PARAMETERS = {DEMO: 0.14e9, "0.4B": 0.4e9, "1B": 1.1e9, "3B": 3.0e9}
FILES_BYTES = 7
"""A parameter, of disk: the GGUF, GenAI's graph and its cache, prepared weights, f16 on the way."""
MAKE_S_MAX = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Where each engine finds the model."""

    name: str
    folder: Path

    @property
    def gguf(self) -> Path:
        return self.folder / "model.gguf"

    @property
    def source(self) -> str:
        return f"file://{self.gguf}"

    @property
    def genai(self) -> Path:
        """Its graph, and its cache once it has made one."""
        return self.folder / "genai"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def prepared(self) -> Path:
        """The weights as mesh loads them."""
        (found,) = self.store.glob("models/*/prepared/*/*.bin")
        return found

    @property
    def weights_bytes(self) -> int:
        return self.prepared.stat().st_size


def made(name: str, folder: Path) -> Forms:
    """Make the model in this empty folder. Raises StorageError, or Unavailable when it cannot."""
    require_free(folder, int(PARAMETERS[name] * FILES_BYTES), f"the model of {name}")
    forms = Forms(name=name, folder=folder)
    in_own_process(f"the making of {name}", _make, forms, s_max=MAKE_S_MAX)
    return forms


def _make(forms: Forms) -> None:
    shape = SHAPES[forms.name]
    if shape is None:
        requantise(demo_gguf(), forms.gguf, gguf.GGMLQuantizationType.Q8_0)
    else:
        write_random(forms.gguf, shape, vocabulary=demo_gguf())
    if importlib.util.find_spec("openvino_genai") is not None:
        _export(forms)
    store = ModelStore(forms.store)
    stored = store.import_model(forms.source)
    OpenVinoEngine().prepare(stored.info, stored.path, lambda phase, share: None)
    list(collect(store, originals=True))


def _export(forms: Forms) -> None:
    """OpenVINO GenAI writes its graph beside the GGUF that it is given."""
    library: Any = importlib.import_module("openvino_genai")
    forms.genai.mkdir()
    linked = forms.genai / forms.gguf.name
    os.link(forms.gguf, linked)
    library.LLMPipeline(str(linked), "CPU", enable_save_ov_model=True)
    linked.unlink()
