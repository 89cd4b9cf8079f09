"""The commands of docs/openai.md and docs/anthropic.md do what it says they do."""

import asyncio
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.ids import DeploymentName
from tests.controller.live import SPEC
from tests.http.edge import Edge

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = re.compile(r"^\$ (curl .*?)\n(?=[{\[de])(.*?)$", re.M | re.S)


def members(value: Any) -> Any:
    """The names of a JSON value's members, all the way down."""
    if isinstance(value, dict):
        return {name: members(one) for name, one in value.items()}
    return [members(value[0])] if isinstance(value, list) and value else None


def first(output: str) -> Any:
    """The first JSON value, whole or an event's; else its name."""
    line = output.splitlines()[0]
    return line if line.startswith("event: ") else json.loads(line.removeprefix("data: "))


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("page", "commands"), [("openai.md", 4), ("anthropic.md", 3)])
async def test_the_commands_answer_what_is_shown(http: Edge, page: str, commands: int) -> None:
    await http.cell.node()
    spec = replace(SPEC, name=DeploymentName("chat-small"))
    await http.cell.ask(http.cell.client.deploy, spec)
    shown = SHOWN.findall((DOCS / page).read_text())
    assert len(shown) == commands
    for command, output in shown:
        ours = command.replace("http://127.0.0.1:8070", http.url)
        ran = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", ours], capture_output=True, text=True, check=True
        )
        assert members(first(ran.stdout)) == members(first(output)), command
