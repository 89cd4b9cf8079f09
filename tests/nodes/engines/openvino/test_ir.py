"""A stateful IR runs paged, with the tokens of the model that it was exported from."""

from dataclasses import replace
from pathlib import Path

import openvino as ov
import openvino.opset13 as ops
import pytest

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh.domain.request import SamplingParams
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.openvino.tiny import TinyModel
from tests.nodes.engines.openvino.tiny_ir import write_tiny_ir
from tests.nodes.engines.serving import load, request, run

SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
REQUESTS = [request(f"r{n}", range(5 * n + 1), SAMPLING) for n in range(6)]


def test_an_ir_is_its_source(engine: OpenVinoEngine, tiny: TinyModel, tmp_path: Path) -> None:
    """In a batch, in chunks, with prompts of different lengths; in all but the rounding of f16."""
    load(engine, tiny.info, tiny.path)
    expected = run(engine, *REQUESTS, prefill_tokens_max=7).tokens
    engine.close()
    exported = write_tiny_ir(tmp_path / "ir", tiny)
    engine.prepare(exported.info, exported.path, lambda *_: None)
    load(engine, exported.info, exported.path)
    assert run(engine, *REQUESTS, prefill_tokens_max=7).tokens == expected


def test_a_stateless_ir_is_refused(engine: OpenVinoEngine, tiny: TinyModel, tmp_path: Path) -> None:
    x = ops.parameter([-1], ov.Type.i64, "input_ids")
    ov.save_model(ov.Model([ops.result(ops.relu(x))], [x], "none"), tmp_path / "openvino_model.xml")
    info = replace(tiny.info, format=ModelFormat.OPENVINO_IR)
    with pytest.raises(UnsupportedModel, match="not stateful") as refused:
        load(engine, info, tmp_path)
    assert "optimum-intel" in refused.value.hint


def test_a_torn_ir_is_refused(engine: OpenVinoEngine, tiny: TinyModel, tmp_path: Path) -> None:
    exported = write_tiny_ir(tmp_path / "ir", tiny)
    xml = exported.path / "openvino_model.xml"
    xml.write_text(xml.read_text()[:500])
    with pytest.raises(TornModel, match=r"openvino_model\.xml"):
        load(engine, exported.info, exported.path)


def test_an_ir_whose_weights_are_cut_short_is_refused(
    engine: OpenVinoEngine, tiny: TinyModel, tmp_path: Path
) -> None:
    exported = write_tiny_ir(tmp_path / "ir", tiny)
    weights = exported.path / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-5000])
    with pytest.raises(TornModel, match=r"openvino_model\.xml"):
        load(engine, exported.info, exported.path)
