"""Tiny models of every family, imported into the store, compute transformers' tokens on vLLM, too.

In float32, in which vLLM computes on CPUs; Gemma 2 with its capped attention as well, which the
OpenVINO engine refuses.
"""

from pathlib import Path
from typing import Any

import pytest

from mesh.domain.errors import EngineError
from mesh.domain.request import SamplingParams
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from tests.nodes.engines.openvino.families import families, write_family
from tests.nodes.engines.serving import INSTANCE, load, request, run

WINDOWS_IN_SOME = "qwen2-window"
"""Of Qwen2's layers: vLLM has none such."""
CONTEXT_TOKENS = 192
"""Below longrope's original 256, from which on vLLM takes the long factors for all sequences."""


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
