"""The scripts for a sitting with a GPU run to their end without one, and find themselves right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.operators import Phase, Role, ShareCurve
from mesh.sim.operators.tables import read_operators

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


def test_without_time_it_says_what_it_left_out() -> None:
    figures, table = dry("operators", "--seconds", "1")
    left_out = skipped(figures)
    assert left_out
    assert all("s are left" in why for why in left_out.values())
    assert all(key in table for key in left_out)
