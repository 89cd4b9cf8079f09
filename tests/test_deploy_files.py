"""What `deploy/` offers to operators is what its tools accept."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1] / "deploy"
BIN = Path(sys.executable).parent
INSTALLED = "/opt/mesh/bin/mesh"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", sorted(p.name for p in (DEPLOY / "systemd").iterdir()))
def test_systemd_takes_the_unit_as_it_is(unit: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / unit).read_text()
    assert INSTALLED in text
    (tmp_path / unit).write_text(text.replace(INSTALLED, str(BIN / "mesh")))
    command = ["systemd-analyze", "verify", str(tmp_path / unit)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_container_file_is_well_made() -> None:
    command = [str(BIN / "hadolint"), str(DEPLOY / "Containerfile")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")
