"""Tiny models of every family compute, imported and loaded, the tokens that transformers computes.

Weights are f16 and the KV cache f32; `scripts/golden_families.py` made the expectation.
"""

from pathlib import Path
from typing import Any

import pytest

from mesh.domain.request import SamplingParams
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.openvino import OpenVinoEngine
from tests.nodes.engines.openvino.families import families, write_family
from tests.nodes.engines.serving import INSTANCE, load, request, run


def imported(tmp_path: Path, family: dict[str, Any], **changes: object) -> StoredModel:
    folder = write_family(tmp_path / "made", family["config"] | changes, family["shapes"])
    return ModelStore(tmp_path / "store").import_model(f"file://{folder}")


@pytest.mark.parametrize("name", list(families()))
def test_tokens_equal_transformers(engine: OpenVinoEngine, tmp_path: Path, name: str) -> None:
    """In chunks that cut blocks and windows, all three prompts beside each other."""
    family = families()[name]
    stored = imported(tmp_path, family)
    load(engine, stored.info, stored.path)
    expected = {f"r{n}": case["output"] for n, case in enumerate(family["cases"])}
    requests = [
        request(f"r{n}", case["prompt"], SamplingParams(max_tokens=32, ignore_eos=True))
        for n, case in enumerate(family["cases"])
    ]
    assert run(engine, *requests, prefill_tokens_max=24).tokens == expected
    engine.unload(INSTANCE)
