"""The commands of docs/first-policy.md give the table that the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/first-policy.md").read_text()
COMMANDS = re.findall(r"^\$ mesh (sim .*--policy (\S+))$", PAGE, re.M)


def test_the_page_compares_two_policies() -> None:
    assert len(COMMANDS) == 2


@pytest.mark.parametrize(("command", "policy"), COMMANDS)
def test_a_command_gives_its_row(command: str, policy: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mesh", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shown = dict(re.findall(r"^(\S.*?)  +(\S.*)$", ran.stdout, re.M))
    row = f"| `{policy}` | {shown['requests']} | {shown['SLO met, every token']} |"
    assert row in PAGE
