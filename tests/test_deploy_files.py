"""What `deploy/` offers to operators is what its tools accept."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mesh.controller.metrics import CellMetrics, Meter
from mesh.domain.views import CellSnapshot
from tests.cli.views import CHAT_SMALL, NODE

DEPLOY = Path(__file__).parents[1] / "deploy"
BIN = Path(sys.executable).parent
CELL = CellSnapshot(
    deployments=(CHAT_SMALL,), nodes=(NODE,), queued=0, running=0, served=0, refused=()
)
INSTALLED = "/opt/mesh/bin/mesh"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", sorted(p.name for p in (DEPLOY / "systemd").iterdir()))
def test_systemd_takes_the_unit_as_it_is(unit: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / unit).read_text()
    assert INSTALLED in text
    (tmp_path / "mesh").symlink_to(BIN / "mesh")
    (tmp_path / unit).write_text(text.replace(INSTALLED, str(tmp_path / "mesh")))
    command = ["systemd-analyze", "verify", str(tmp_path / unit)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_container_file_is_well_made() -> None:
    command = [str(BIN / "hadolint"), str(DEPLOY / "Containerfile")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_rules_and_panels_ask_for_what_there_is() -> None:
    text = asyncio.run(CellMetrics(Meter(lambda name: True), lambda: CELL).exposition()).decode()
    there = set()
    for family in text_string_to_metric_families(text):
        plain = family.name + {"counter": "_total"}.get(family.type, "")
        parts = [f"{plain}_bucket", f"{plain}_count"] if family.type == "histogram" else []
        there |= {plain, *parts}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "mesh-rules.yaml").read_text())
    panels = json.loads((DEPLOY / "grafana" / "mesh.json").read_text())["panels"]
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked += [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in asked:
        names = re.findall(r"(?:mesh_|vllm:)\w+", expression)
        assert names, expression
        assert set(names) <= there, expression
