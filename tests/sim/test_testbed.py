"""The tables that ship with mesh: what was measured is what is predicted."""

import json
from importlib import resources

import pytest

from mesh.compute.times import Times
from mesh.domain.errors import NotFound
from mesh.sim.testbed import known_model, known_models

RAW = json.loads(resources.files("mesh.sim").joinpath("llm_mesh_testbed.json").read_text())
TABLES = [(name, key) for name in RAW["models"] for key in RAW["models"][name]["hardware"]]


@pytest.mark.parametrize(("name", "key"), TABLES)
def test_every_measured_point_is_predicted_as_measured(name: str, key: str) -> None:
    table = RAW["models"][name]["hardware"][key]
    times = Times(known_model(name).costs[key].profile)
    prefill = table["prefill"]
    for tokens, seconds in zip(prefill["tokens"], prefill["seconds"], strict=True):
        assert times.prefill_s(tokens, 0) == pytest.approx(seconds)
    for row in table["decode"]:
        for batch, seconds in zip(row["batch"], row["seconds"], strict=True):
            assert times.decode_s(batch, row["context_tokens"]) == pytest.approx(seconds)


@pytest.mark.parametrize(("name", "key"), TABLES)
def test_the_chunks_of_a_prompt_take_about_as_long_as_the_whole(name: str, key: str) -> None:
    times = Times(known_model(name).costs[key].profile)
    for tokens in (1024, 4096):
        whole_s = times.prefill_s(tokens, 0)
        chunks_s = sum(times.prefill_s(256, past) for past in range(0, tokens, 256))
        assert whole_s * 0.99 <= chunks_s <= whole_s * 2.1


def test_kv_bytes_follow_from_the_shape() -> None:
    """512 KiB a token for a 7B model with all of its heads, 112 KiB for the 3B one."""
    kib = {name: known.info.kv_bytes_per_token() / 1024 for name, known in known_models().items()}
    assert kib == {"llama-3.2-3b": 112, "llama-2-7b": 512, "llama-3.1-8b": 128, "llama-2-13b": 800}


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(NotFound, match="gpt-9"):
        known_model("gpt-9")
