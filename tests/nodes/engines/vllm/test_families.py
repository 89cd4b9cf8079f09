"""Tiny models of every family, imported into the store, compute transformers' tokens on vLLM, too.

In float32, in which vLLM computes on CPUs; Gemma 2 with its capped attention as well, which the
OpenVINO engine refuses.
"""

from pathlib import Path

import pytest

from mesh.domain.request import SamplingParams
from mesh_loader.store import ModelStore
from mesh_nodes.engines.vllm import VllmEngine
from tests.nodes.engines.openvino.families import families, write_family
from tests.nodes.engines.serving import INSTANCE, load, request, run


@pytest.mark.parametrize("name", list(families()))
def test_tokens_equal_transformers(engine: VllmEngine, tmp_path: Path, name: str) -> None:
    family = families()[name]
    folder = write_family(tmp_path / "made", family["config"], family["shapes"])
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    load(engine, stored.info, stored.path)
    requests = [
        request(f"r{n}", case["prompt"], SamplingParams(max_tokens=32, ignore_eos=True))
        for n, case in enumerate(family["cases"])
    ]
    expected = {f"r{n}": case["output"] for n, case in enumerate(family["cases"])}
    assert run(engine, *requests).tokens == expected
    engine.unload(INSTANCE)
