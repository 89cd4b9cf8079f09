"""Clients from npm: OpenAI's own for JavaScript, the AI SDK, pages in jsdom, which enforces CORS as
browsers do, and `buf curl`, which knows no proto file and asks for reflection.
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import KSERVE_DOC, ROOT, Served, run, run_text
from tests.http.edge import edge
from tests.http.test_docs import members

FOLDER = ROOT / ".venv-clients-npm"
pytestmark = pytest.mark.skipif(
    not (FOLDER / ".installed").exists() or shutil.which("node") is None,
    reason="make test-clients has it, where there are node and npm",
)
BUF = str(FOLDER / "node_modules" / ".bin" / "buf")


async def called(url: str, script: str, *arguments: str) -> Any:
    """Read from standard input, so that what it imports is looked for in the folder."""
    source = Path(__file__).with_name(script).read_text(encoding="utf-8")
    node = ["node", "--input-type=module", "-", url, *arguments]
    return await run(node, script=source, cwd=FOLDER)


async def test_openais_own_client(served: Served) -> None:
    assert await called(served.url, "openai_calls.mjs") == {
        "models": ["chat"],
        "whole": ["aaa", 3, "r1-1"],
        "streamed": "aaa",
        "helper": "aaa",
        "completion": "aa",
        "errors": [
            ["NotFoundError", 404, "model_not_found", None],
            ["BadRequestError", 400, "invalid_request", "n"],
        ],
    }


async def test_the_ai_sdk(served: Served) -> None:
    assert await called(served.url, "ai_calls.mjs") == {
        "whole": ["aaa", "length", 3],
        "streamed": "aaa",
        "ended": ["length", 3],
        "missing": [True, 404, "there is no deployment 'chta'", False],
    }


async def test_pages_in_a_browser(tmp_path: Path) -> None:
    """A page of an origin that is allowed reads answers and errors, and one of another nothing."""
    allowed, other = "http://chat.example", "http://other.example"
    async with edge(tmp_path, http_origins=(allowed,)) as http:
        await http.cell.deployed()
        found = await called(f"{http.url}/v1", "page_calls.mjs", allowed, other)
    assert found[other] == dict.fromkeys(found[allowed], "blocked")
    models, whole, streamed, wrong = found[allowed].values()
    assert (models[0], json.loads(models[2])["data"][0]["id"]) == (200, "chat")
    assert whole[:2] == [200, "r1-1"]
    assert json.loads(whole[2])["choices"][0]["message"]["content"] == "aaa"
    assert streamed[:2] == [200, "r1-2"]
    assert streamed[2].endswith("data: [DONE]\n\n")
    assert (wrong[0], json.loads(wrong[2])["error"]["param"]) == (400, "n")


async def test_buf_finds_the_service_by_reflection(served: Served) -> None:
    url = f"http://{served.cell.address}"
    listed = await run_text(
        [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--list-methods", url]
    )
    assert "inference.GRPCInferenceService/ModelInfer" in listed.split()


async def test_the_documented_commands_answer_what_is_shown(served: Served) -> None:
    shown = re.findall(r"^\$ (buf curl .*?)\n(?={)(.*?)(?=^\$|^```)", KSERVE_DOC, re.M | re.S)
    assert len(shown) == 2
    for command, output in shown:
        ours = command.replace("chat-small", "chat").replace("127.0.0.1:7070", served.cell.address)
        told = await run_text(["bash", "-c", ours.replace("buf", shlex.quote(BUF), 1)])
        assert members(json.loads(told)) == members(json.loads(output)), command
