"""Triton's own client for Python: whole and streamed, by callbacks and asyncio, and its errors."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import KSERVE_DOC, ROOT, Served, run, run_text

FOLDER = ROOT / ".venv-clients-triton"
pytestmark = pytest.mark.skipif(
    not (FOLDER / ".installed").exists(), reason="make test-clients has it"
)
PYTHON = FOLDER / "bin" / "python"
CALLS = Path(__file__).with_name("triton_calls.py")
WHOLE = {"id": "7", "text": "aaaa", "final": True}


async def told(served: Served, call: str) -> Any:
    return await run([str(PYTHON), str(CALLS), served.cell.address, call])


async def test_what_there_is(served: Served) -> None:
    assert await told(served, "about") == {
        "live": True,
        "ready": True,
        "models": [True, False],
        "server": "mesh",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": ["1"]}],
    }


@pytest.mark.parametrize("call", ["whole", "whole_by_callback"])
async def test_a_whole_answer(served: Served, call: str) -> None:
    assert await told(served, call) == WHOLE


async def test_a_stream_of_three_requests_of_which_one_fails(served: Served) -> None:
    found = await told(served, "streamed")
    assert WHOLE in found["pieces"]
    found["pieces"].remove(WHOLE)
    assert "".join(piece["text"] for piece in found["pieces"]) == "aaaa"
    assert [piece["final"] for piece in found["pieces"]][-1]
    assert found["errors"] == ["there is no deployment 'chta' (did you mean chat?)"]


async def test_errors_have_their_status(served: Served) -> None:
    missing, long, empty = await told(served, "errors")
    assert missing == ["StatusCode.NOT_FOUND", "there is no deployment 'chta'"]
    assert long[0] == empty[0] == "StatusCode.INVALID_ARGUMENT"
    assert "600 tokens" in long[1]
    assert "lacks the input 'text_input'" in empty[1]


async def test_its_client_for_asyncio(served: Served) -> None:
    found = await told(served, "aio")
    assert found["whole"] == WHOLE
    assert "".join(piece["text"] for piece in found["pieces"]) == "aaaa" * 2


async def test_the_documented_clients_print_the_answer(served: Served) -> None:
    scripts = re.findall(r"^```python\n(.*?)^```", KSERVE_DOC, re.M | re.S)
    assert len(scripts) == 2
    for script in scripts:
        ours = script.replace("chat-small", "chat").replace("127.0.0.1:7070", served.cell.address)
        assert (await run_text([str(PYTHON), "-c", ours])).split() == ["a" * 24]
