"""A batch file outlives the node that computes it and the controller that runs it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import requests

from tests.e2e.live_cell import WAIT_S_MAX, LiveCell, free_port

LINES = 300
KILLS = 1
"""So often a node is killed, and then the controller."""
STEP = ("--step-s", "0.03")


def test_every_line_is_answered_once_through_kills_of_nodes_and_controllers(
    cell: LiveCell, tiny_model: Path
) -> None:
    http = f"127.0.0.1:{free_port()}"
    url = f"http://{http}/v1"
    controller = cell.start_controller("--http", http)
    nodes = [cell.start_node(name, *STEP) for name in ("n1", "n2")]
    cell.deploy("chat", tiny_model, replicas_max=2)
    content = b"".join(
        json.dumps(
            {
                "custom_id": f"line-{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "chat", "prompt": f"line {n}", "max_tokens": 8, "seed": n},
            }
        ).encode()
        + b"\n"
        for n in range(LINES)
    )
    sent = requests.post(
        f"{url}/files", data={"purpose": "batch"}, files={"file": content}, timeout=WAIT_S_MAX
    )
    given = {
        "input_file_id": sent.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    begun = requests.post(f"{url}/batches", json=given, timeout=WAIT_S_MAX).json()

    def batch() -> Any:
        try:
            told = requests.get(f"{url}/batches/{begun['id']}", timeout=WAIT_S_MAX)
        except requests.ConnectionError:
            return None
        return told.json()

    def done(lines: float) -> bool:
        one = batch()
        return bool(one and one["request_counts"]["completed"] >= lines)

    for kill in range(KILLS):
        cell.wait_for("some lines", partial(done, (2 * kill + 1) * LINES / 20))
        nodes.pop(0).kill()
        nodes.append(cell.start_node(f"n{3 + kill}", *STEP, join=False))
        cell.wait_for("more lines", partial(done, (2 * kill + 2) * LINES / 20))
        before = batch()
        assert before["status"] == "in_progress"
        controller.kill()
        controller = cell.start_controller("--http", http)
        answered = before["request_counts"]["completed"]
        cell.wait_for("what was answered", partial(done, answered))
    ended = cell.wait_for(
        "the batch to end", lambda: (b := batch()) and b["status"] == "completed" and b, 240.0
    )
    assert ended["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    answers = requests.get(f"{url}/files/{ended['output_file_id']}/content", timeout=WAIT_S_MAX)
    lines = [json.loads(one) for one in answers.content.splitlines()]
    assert sorted(one["custom_id"] for one in lines) == sorted(f"line-{n}" for n in range(LINES))
    for one in lines:
        body = one["response"]["body"]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 8
    cell.wait_for("nothing to run", lambda: cell.client.status().running == 0)
