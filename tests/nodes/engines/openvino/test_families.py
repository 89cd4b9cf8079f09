"""Tiny models of every family compute, imported and loaded, the tokens that transformers computes.

Weights are f16 and the KV cache f32; `scripts/golden_families.py` made the expectation.
"""

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesh.domain.errors import UnsupportedModel
from mesh.domain.model import KvPrecision, Mixture, WeightPrecision
from mesh.domain.request import SamplingParams
from mesh_loader.prepared_key import openvino_key
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.blob_maker import BlobJob, make_blob
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.footprint import activation_bytes
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions
from mesh_nodes.engines.openvino.probe import probe_logits
from tests.nodes.engines.openvino.families import families, write_family
from tests.nodes.engines.openvino.preparing import prepare_here
from tests.nodes.engines.serving import INSTANCE, load, request, run
from tests.support.depth import DEEP

CONTEXT_TOKENS = 256
CAPPED = "gemma2-capped"
"""Which OpenVINO does not compute."""
COMPUTED = [name for name in families() if name != CAPPED]
ROUNDED = ["gemma3", "mistral", "phi3-longrope", "qwen2-moe", "qwen3-moe"]
"""A family for each kind of layer: the others have the same ones, with other sizes or factors."""
BOTH = (WeightPrecision.F16, WeightPrecision.I8)
"""Precisions in which mixtures of both families are compiled."""


def imported(tmp_path: Path, family: dict[str, Any], **changes: object) -> StoredModel:
    folder = write_family(tmp_path / "made", family["config"] | changes, family["shapes"])
    return ModelStore(tmp_path / "store").import_model(f"file://{folder}")


@pytest.mark.parametrize("name", COMPUTED)
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


@pytest.mark.parametrize(("name", "tables"), [("mistral", 1), ("gemma3", 2), ("phi3-longrope", 1)])
def test_a_load_states_the_rope_tables_of_its_kind(
    engine: OpenVinoEngine, tmp_path: Path, name: str, tables: int
) -> None:
    """And before it, no less."""
    stored = imported(tmp_path, families()[name])
    config = read_architecture(stored.path)
    rotary_size = config.rotary_size or config.head_size
    loaded = load(engine, stored.info, stored.path).footprint
    assert loaded.context_token_bytes == tables * 2 * 4 * rotary_size
    assert engine.footprint(stored.info).context_token_bytes >= loaded.context_token_bytes
    engine.unload(INSTANCE)


@pytest.mark.parametrize(
    ("name", "weights"),
    [("gemma3", WeightPrecision.I8), ("phi3-longrope", WeightPrecision.I4)],
)
def test_what_was_compiled_is_imported_with_the_same_logits(
    tmp_path: Path, name: str, weights: WeightPrecision
) -> None:
    """`make_blob` compares them, bit by bit."""
    stored = imported(tmp_path, families()[name])
    blobs = BlobFolder(tmp_path / "blobs")
    compiler = Compiler(threads=1, weights=weights, precisions=PLAIN, blobs=blobs)
    with blobs.scratch() as scratch:
        make_blob(prepared_job(compiler, stored, tmp_path / "blobs", weights), scratch)
    assert compiler.compile(stored.info, stored.path, CONTEXT_TOKENS, lambda *_: None).imported


def prepared_job(
    compiler: Compiler, stored: StoredModel, folder: Path, weights: WeightPrecision
) -> BlobJob:
    prepare_here(stored.path, weights)
    layout = compiler.layout(stored.path)
    assert layout is not None
    return BlobJob(
        key=compiler.blob_key(read_architecture(stored.path), CONTEXT_TOKENS, layout),
        folder=str(folder),
        model_path=str(stored.path),
        context_tokens_max=CONTEXT_TOKENS,
        threads=1,
        weights=weights,
        precisions=PLAIN,
    )


def test_of_a_mixture_openvino_exports_an_operation_that_no_import_knows(tmp_path: Path) -> None:
    """Where it does, mixtures can have blobs, too: see `Compiler._bring_up`."""
    stored = imported(tmp_path, families()["qwen3-moe"])
    blobs = BlobFolder(tmp_path / "blobs")
    compiler = Compiler(threads=1, weights=WeightPrecision.I8, precisions=PLAIN)
    job = prepared_job(compiler, stored, tmp_path / "blobs", WeightPrecision.I8)
    unknown = "Cannot create GatherMatmulCompressed layer .* from unsupported opset"
    with blobs.scratch() as scratch, pytest.raises(RuntimeError, match=unknown):
        make_blob(job, scratch)


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe"])
def test_the_store_tells_what_of_a_mixture_a_token_takes(tmp_path: Path, name: str) -> None:
    family = families()[name]
    info = imported(tmp_path, family).info
    experts = sum(prod(shape) for key, shape in family["shapes"].items() if ".experts." in key)
    assert info.mixture == Mixture(experts=8, chosen=2, parameters=experts)
    assert info.active_parameters == info.parameters - experts * 3 // 4
    of_all = replace(info, mixture=None)
    taken, most = (activation_bytes(model, tokens=1, rows=0) for model in (info, of_all))
    assert taken < most, "activations of the experts that a token takes, not of all"


def test_the_process_of_a_node_prepares_a_mixture_as_tests_do(tmp_path: Path) -> None:
    weights = WeightPrecision.I4
    stored = imported(tmp_path, families()["qwen3-moe"])
    folder = stored.path / "prepared" / openvino_key(weights)
    prepare_here(stored.path, weights)
    here = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    engine = OpenVinoEngine(threads=1, weights=weights)
    engine.prepare(stored.info, stored.path, lambda *_: None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == here
    engine.close()


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *(("qwen3-moe", weights) for weights in WeightPrecision),
        *(("qwen2-moe", weights) for weights in WeightPrecision if DEEP or weights in BOTH),
    ],
)
def test_only_chosen_experts_compute(tmp_path: Path, name: str, weights: WeightPrecision) -> None:
    """The plugin has recognised each product; no blob is wished for that could not be imported."""
    stored = imported(tmp_path, families()[name])
    compiler = Compiler(threads=1, weights=weights, precisions=PLAIN)
    prepare_here(stored.path, weights)
    graph = compiler.compile(stored.info, stored.path, CONTEXT_TOKENS, lambda *_: None)
    experts = read_architecture(stored.path).experts
    assert experts is not None
    operations = graph.model.get_runtime_model().get_ops()
    kinds = [operation.get_rt_info()["layerType"].astype(str) for operation in operations]
    assert kinds.count("GatherMatmul") == 3 * len(experts.layers)
    assert "Tile" not in kinds
    assert graph.blob_key is None


@pytest.mark.parametrize("name", COMPUTED if DEEP else ROUNDED)
def test_rounded_weights_stay_close(tmp_path: Path, name: str) -> None:
    """Logits differ by a small share of their spread, where layers add little to each other: the
    drawn ones else make much of any rounding.
    """
    family = families()[name]
    folder = write_family(tmp_path / "made", family["config"], family["shapes"], layers_gain=0.3)
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    exact, i8, i4 = (
        probe_logits(
            Compiler(threads=1, weights=held, precisions=Precisions(kv=KvPrecision.F32)).compile(
                stored.info, stored.path, CONTEXT_TOKENS, lambda *_: None
            ),
            vocabulary_tokens=stored.info.vocabulary_tokens,
            context_tokens_max=CONTEXT_TOKENS,
        )[0]
        for held in (WeightPrecision.F16, WeightPrecision.I8, WeightPrecision.I4)
    )
    assert np.std(i8 - exact) < 0.05 * np.std(exact)
    assert np.std(i4 - exact) < 0.25 * np.std(exact)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (CAPPED, {}, "attn_logit_softcapping 4.0: OpenVINO's"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling 'yarn'"),
    ],
)
def test_what_vllm_alone_computes_is_refused_before_any_load(
    engine: OpenVinoEngine, tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    """With the engine and the reason; the store takes it, for GPU nodes."""
    stored = imported(tmp_path, families()[name], **changes)
    with pytest.raises(UnsupportedModel, match="the OpenVINO engine does not run") as refused:
        engine.prepare(stored.info, stored.path, lambda *_: None)
    assert said in refused.value.message


def test_longrope_beyond_its_short_factors_is_refused_with_both_numbers(
    engine: OpenVinoEngine, tmp_path: Path
) -> None:
    stored = imported(tmp_path, families()["phi3-longrope"])
    with pytest.raises(UnsupportedModel, match="512 tokens, more than the 256") as refused:
        load(engine, stored.info, stored.path, context_tokens_max=512)
    assert refused.value.hint.startswith("set spec.context_tokens_max to 256")


def test_windows_matter_in_these_tokens(engine: OpenVinoEngine, tmp_path: Path) -> None:
    """Else the comparison could not see them."""
    family = families()["mistral"]
    stored = imported(tmp_path, family, sliding_window=None)
    load(engine, stored.info, stored.path)
    case = family["cases"][-1]
    asked = request("r", case["prompt"], SamplingParams(max_tokens=32, ignore_eos=True))
    assert run(engine, asked).tokens["r"] != case["output"]


def test_weights_beyond_f16_are_refused(engine: OpenVinoEngine, tmp_path: Path) -> None:
    """bf16 and f32 reach further; in i8 such a checkpoint loads."""
    family = families()["mistral"]
    folder = write_family(tmp_path / "made", family["config"], family["shapes"])
    tensors = {n: t.astype(np.float32) for n, t in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = -70000.0
    save_file(tensors, folder / "model.safetensors")
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    with pytest.raises(UnsupportedModel, match=r"up_proj.*70000.*65504"):
        load(engine, stored.info, stored.path)
