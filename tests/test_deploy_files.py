"""What `deploy/` offers to operators is what its tools accept."""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mesh.controller.metrics import CellMetrics, Meter
from mesh.domain.views import CellSnapshot
from mesh.wire.certificates import make_folder
from tests.cli.running import mesh
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


def test_a_node_that_drains_is_the_only_process_that_is_told_to_stop() -> None:
    unit = (DEPLOY / "systemd" / "mesh-node@.service").read_text()
    assert "--grace-s" in unit
    assert re.search(r"^KillMode=mixed$", unit, re.MULTILINE)


def test_the_container_file_is_well_made() -> None:
    command = [str(BIN / "hadolint"), str(DEPLOY / "Containerfile")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


def lines_of(file: str) -> list[str]:
    """The command lines of `mesh`, as an operator or systemd would call them; variables are words
    of their own.
    """
    text = (DEPLOY / file).read_text()
    lines = re.findall(r"podman run .*? mesh (\w.*)", text)
    lines += re.findall(r"^Exec\w+=-?/opt/mesh/bin/mesh (.*)", text, re.MULTILINE)
    lines += [" ".join(json.loads(words)) for words in re.findall(r"^CMD (.*)", text, re.MULTILINE)]
    given: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(?:Environment=|#   )(MESH_\w+)=(.*)$", text, re.MULTILINE):
        given.setdefault(name, []).append(value)
    for name, values in given.items():
        variable = rf"\$\{{?{name}\b\}}?"
        lines = [re.sub(variable, value, line) for line in lines for value in values]
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize(
    "file",
    ["Containerfile", *(f"systemd/{p.name}" for p in sorted((DEPLOY / "systemd").iterdir()))],
)
def test_what_is_called_there_is_what_mesh_takes(file: str, tmp_path: Path) -> None:
    """Options that there are not are said before any help."""
    make_folder(tmp_path / "tls", ("localhost",), 1)
    (tmp_path / "operator.key").write_text("mesh_of_nobody")
    lines = lines_of(file)
    assert lines
    for line in lines:
        ran = mesh(*shlex.split(line.replace("/etc/mesh", str(tmp_path))), "--help")
        assert ran.code == 0, ran.err


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
