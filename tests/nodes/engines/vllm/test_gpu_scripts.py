"""The scripts for a sitting with a GPU run to their end without one, and find themselves right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.ids import ModelId
from mesh.domain.operators import Phase, Role, ShareCurve
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind, ProfileSource
from mesh.sim.operators.tables import read_operators
from mesh.v1 import profile_pb2
from mesh.wire.codec import from_wire, to_wire

ROOT = Path(__file__).resolve().parents[4]


def dry(script: str, *more: str) -> tuple[dict[str, Any], str]:
    """Its figures, and the table before them."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"scripts.gpu.{script}", "--dry", *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert figures["script"] == script
    assert figures["dry"] is True
    return figures, "\n".join(table)


def skipped(figures: dict[str, Any]) -> dict[str, str]:
    return {
        key: value["skipped"]
        for key, value in figures.items()
        if isinstance(value, dict) and "skipped" in value
    }


def test_weights_sleep_and_caches_are_copied() -> None:
    figures, table = dry("sleep_and_resize")
    assert not skipped(figures)
    assert figures["weights_same"] is True
    assert figures["fixed_16_graph_right"] is figures["fixed_128_graph_right"] is True
    assert figures["fixed_16_freed_share"] == figures["fixed_128_freed_share"] == 1
    for size_gb in (1, 10, 40):
        assert figures[f"copy_{size_gb}gb_kept"] is True
        assert f"copy_{size_gb}gb_grow_ms" in table


def test_caches_in_virtual_memory_keep_their_tokens_and_the_books() -> None:
    figures, table = dry("virtual_kv")
    assert not skipped(figures)
    assert figures["forked"] == "ok"
    for size_gb in (1, 10, 40):
        assert figures[f"map_{size_gb}gb_kept"] is True
        assert figures[f"map_{size_gb}gb_off_books_mib"] == 0
        assert figures[f"map_{size_gb}gb_left_mib"] == 0
        assert figures[f"map_{size_gb}gb_grow_ms_per_gb"] > 0
    assert figures["beside_same"] is True
    assert figures["graph_replays_right"] is True
    assert "ms/GB, 16 pieces of 0.25 MiB, all at once" in table


def test_iterations_are_measured_with_vllm_and_without() -> None:
    figures, _ = dry("vllm_steps")
    assert not skipped(figures)
    assert "tests collected" in figures["contract"]
    assert figures["vllm_eager_ms"] > 0
    assert figures["agent_ms"] > 0
    assert figures["engine_held_mib"] >= 0
    assert figures["torch_eager_ms"] > 0
    assert figures["drawn_on_host_ms"] > 0
    told = figures["profile_tiny"]
    grids = {
        name: Grid(
            rows=tuple(told[name]["rows"]),
            columns=tuple(told[name]["columns"]),
            seconds=tuple(map(tuple, told[name]["seconds"])),
        )
        for name in ("prefill", "decode")
    }
    names = {"model_id": ModelId(told["model_id"]), "device": DeviceKind(told["device"])}
    names["source"] = ProfileSource(told["source"])
    assert (told["operators"], told["by_cores"]) == ([], [])  # nothing is counted on a GPU
    profile = Profile(**{**told, **grids, **names, "operators": (), "by_cores": ()})
    assert from_wire(to_wire(profile, profile_pb2.Profile), Profile) == profile


def test_operators_are_measured_and_their_table_is_read() -> None:
    figures, table = dry("operators")
    assert not skipped(figures)
    assert "operator_sum_error" in table
    file = figures["table"]
    for model, raw in file["models"].items():
        for devices in (1, 2):
            operators = read_operators(model, raw, file, devices)
            assert sum(each.seconds(Phase.DECODE, (64, 64)) for each in operators) > 0
    measured = file["models"]["mixtral-8x7b"]["milliseconds"]
    assert len(measured[Role.EXPERTS]) == len(file["tokens"])
    shares = tuple(file["curves"].pop("shares"))
    for curves in file["curves"].values():
        for ratios in curves.values():
            assert ShareCurve(shares=shares, ratios=tuple(ratios)).ratio(1.0) == 1.0
    assert figures["power_prefill_watts"] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("script", ["sleep_and_resize", "virtual_kv", "operators"])
def test_without_time_it_says_what_it_left_out(script: str) -> None:
    figures, table = dry(script, "--seconds", "1")
    left_out = skipped(figures)
    assert left_out
    assert all("s are left" in why for why in left_out.values())
    assert all(key in table for key in left_out)
