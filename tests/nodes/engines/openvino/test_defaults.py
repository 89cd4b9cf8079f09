"""A key that a configuration leaves out means what it means to transformers and to llama.cpp.

`tests/data/defaults.json` has their values (`scripts/golden_defaults.py`); where transformers is
installed, its classes are read, too.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from mesh_loader.architectures import NATIVE_ARCHITECTURES, shape_of, with_defaults
from mesh_loader.gguf_config import config_of
from mesh_loader.gguf_file import read_header
from mesh_loader.hf_config import normalised
from mesh_nodes.engines.openvino.architecture import Rope, parse_architecture
from tests.loader.tiny_gguf import write_tiny_gguf

DATA = Path(__file__).resolve().parents[3] / "data" / "defaults.json"
THEIRS: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
FAMILIES: dict[str, Any] = THEIRS["transformers"]["families"]
SIZES: dict[str, Any] = THEIRS["transformers"]["sizes"]
ON_PURPOSE = {
    # Refused where they are missing: no model has its family's sizes without saying so.
    *SIZES,
    # Read from the tokenizer, which knows its own ids; the classes' are those of one vocabulary.
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
UNCAPPED = {"attn_logit_softcapping": None}
"""OpenVINO refuses Gemma 2's default."""


def defaults_that_differ() -> list[str]:
    return [
        f"{kind}.{key}: {with_defaults({'model_type': kind}).get(key)!r}, not {value!r}"
        for kind, family in FAMILIES.items()
        for key, value in family["fields"].items()
        if key not in ON_PURPOSE and with_defaults({"model_type": kind}).get(key) != value
    ]


def test_every_family_is_in_the_table() -> None:
    assert sorted(FAMILIES) == sorted(NATIVE_ARCHITECTURES)


def test_every_default_is_that_of_transformers() -> None:
    assert defaults_that_differ() == []


def test_the_table_is_what_the_installed_transformers_says() -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != THEIRS["transformers"]["version"]:
        pytest.skip(f"the table is of {THEIRS['transformers']['version']}")
    script = importlib.import_module("scripts.golden_defaults")
    assert json.loads(json.dumps(script.table())) == THEIRS


def windows_of(made: dict[str, Any]) -> tuple[int, ...]:
    window: int = made["sliding_window"] or 0
    types: list[str] | None = made["layer_types"]
    if types is None:
        return (window,) * int(SIZES["num_hidden_layers"])
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_layer_has_the_window_that_transformers_gives_it(kind: str) -> None:
    config = {"model_type": kind, **SIZES, **UNCAPPED}
    if kind.startswith("qwen"):
        assert parse_architecture(config).windows == ()
        config["use_sliding_window"] = True
    windows = parse_architecture(config).windows or (0,) * SIZES["num_hidden_layers"]
    assert windows == windows_of(FAMILIES[kind]["windows"])


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_the_import_writes_is_computed_as_what_it_read(kind: str) -> None:
    """And the rotary embedding is transformers', with two bases in Gemma 3."""
    config = {"model_type": kind, **SIZES, **UNCAPPED}
    computed = parse_architecture(config)
    assert parse_architecture(normalised(config, shape_of(config, "c"), "c")) == computed
    rope = FAMILIES[kind]["made"]["rope_parameters"]
    full = rope.get("full_attention", rope)
    assert computed.rope == Rope(theta=full["rope_theta"])
    local = rope.get("sliding_attention")
    assert computed.local_rope == (local and Rope(theta=local["rope_theta"]))


def read_rope(change: dict[str, Any], kind: str = "llama") -> Rope:
    config = {"model_type": kind, **SIZES, **change}
    return parse_architecture(normalised(config, shape_of(config, "c"), "c")).rope


def test_a_stretched_context_was_the_whole_one_before_unless_something_else_is_said() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read_rope({"rope_scaling": llama3}).original_context_tokens == 8192
    said = {"rope_scaling": llama3, "original_max_position_embeddings": 512}
    assert read_rope(said).original_context_tokens == 512


LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi_3_has_one_scaling_under_three_names_and_4096_tokens_before_it(name: str) -> None:
    rope = read_rope({"rope_scaling": {"type": name, **LONG}}, "phi3")
    assert (rope.scaling, rope.original_context_tokens) == ("longrope", 4096)
    assert rope.table_factor == pytest.approx((1 + 1 / 12) ** 0.5)  # the root of 1 + ln 2 / ln 4096
    given = read_rope({"rope_scaling": {"type": name, "factor": 8.0, **LONG}}, "phi3")
    assert given.table_factor == pytest.approx((1 + 3 / 12) ** 0.5)


def test_the_scaling_under_the_older_name_comes_first() -> None:
    both = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    }
    assert read_rope(both) == Rope(theta=1e4, scaling="linear", factor=2.0)


def gguf_config(
    folder: Path, kind: str = "llama", /, **metadata: int | float | str
) -> dict[str, Any]:
    keys = {f"{kind}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    write_tiny_gguf(folder / "m.gguf", kind, metadata=keys)
    return config_of(read_header(folder / "m.gguf"))


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, None),
        ({"rope__scaling__factor": 4.0}, LINEAR),
        ({"rope__scale_linear": 4.0}, LINEAR),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, LINEAR),
        ({"rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__type": "linear"}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, YARN),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__yarn_beta_fast": 64.0,
                "rope__scaling__yarn_ext_factor": 1.0,
            },
            {**YARN, "beta_fast": 64.0},
        ),
    ],
)
def test_a_gguf_file_is_scaled_as_llama_cpp_scales_it(
    tmp_path: Path, metadata: dict[str, float | str], scaling: dict[str, Any] | None
) -> None:
    assert THEIRS["llama.cpp"]["all"]["rope.scaling.type"] == "linear"
    assert gguf_config(tmp_path, **metadata)["rope_scaling"] == scaling


def test_gemma_3_from_gguf_has_llama_cpps_defaults(tmp_path: Path) -> None:
    theirs = THEIRS["llama.cpp"]["gemma3"]
    found = gguf_config(tmp_path, "gemma3", attention__sliding_window=512)
    assert found["rope_local_base_freq"] == theirs["rope.freq_base_swa"]
    assert found["sliding_window_pattern"] == theirs["attention.sliding_window_pattern"]
    assert found["final_logit_softcapping"] == theirs["final_logit_softcapping"]
    said = {"attention__sliding_window_pattern": 2, "final_logit_softcapping": 30.0}
    other = gguf_config(tmp_path, "gemma3", attention__sliding_window=512, **said)
    assert (other["sliding_window_pattern"], other["final_logit_softcapping"]) == (2, 30.0)
