"""The JDK's own HTTP client, on which LangChain4j and Spring AI rest: chats whole and streamed,
with the upgrade to HTTP/2 that it offers by default and without.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.clients.conftest import Served, run_text

pytestmark = pytest.mark.skipif(
    shutil.which("javac") is None, reason="there is no JDK here (Debian: openjdk-17-jdk-headless)"
)
CALLS = Path(__file__).with_name("JavaCalls.java")


async def test_java_net_http(served: Served) -> None:
    told = await run_text(["java", str(CALLS), served.url])
    clients = [json.loads(line) for line in told.splitlines()]
    assert len(clients) == 2, "one that offers HTTP/2, one that does not"
    for calls in clients:
        assert {call["version"] for call in calls} == {"HTTP_1_1"}
        *wholes, stream, wrong = calls
        for whole in wholes:
            assert whole["status"] == 200
            (choice,) = whole["body"]["choices"]
            assert choice["message"]["content"] == "aaa"
        *chunks, done = stream["body"]
        assert (stream["status"], done) == (200, "[DONE]")
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "aaa"
        assert (wrong["status"], wrong["body"]["error"]["param"]) == (400, "n")
