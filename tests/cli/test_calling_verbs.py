"""Calls by the command line against a real cell: invocations, chats, and what is under way."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import RunningCell
from tests.cli.running import mesh_process
from tests.support.waiting import until


def test_invoke_prints_the_same_answer_in_every_form(
    cell: RunningCell, chat: str, tmp_path: Path
) -> None:
    asked = ("invoke", "chat", "Tell me", "--max-tokens", "12", "--seed", "1")
    whole = cell.mesh(*asked, "--no-stream")
    streamed = cell.mesh(*asked)
    assert (streamed.code, streamed.err) == (0, "")
    assert whole.out == streamed.out
    ran = cell.mesh(*asked, "-o", "json")
    answer = json.loads(ran.out)
    assert answer["text"] + "\n" == streamed.out
    assert len(answer["token_ids"]) == answer["output_tokens"] <= 12
    assert answer["deployment"] == "chat"
    assert answer["finish_reason"] in ("length", "stop")
    assert answer["ttft_limit_s"] == 30.0
    assert answer["slo_met"] is True
    shown = cell.mesh("report").out
    assert shown.startswith("Deployments. SLO_MET_%")
    assert "chat" in shown
    before, both = tmp_path / "before.json", tmp_path / "both.html"
    before.write_text(cell.mesh("report", "-o", "json").out)
    ran = cell.mesh("report", "--html", str(both), "--beside", str(before))
    assert (ran.code, ran.out) == (0, ""), ran.err
    assert ">before<" in both.read_text(), "the other is named as its file is"


def test_invoke_shows_log_probabilities_of_each_token(cell: RunningCell, chat: str) -> None:
    asked = ("invoke", "chat", "hi", "--max-tokens", "5", "--ignore-eos", "--logprobs", "2")
    penalties = ("--min-p", "0.1", "--presence-penalty", "0.5", "--frequency-penalty", "-1")
    answer = json.loads(cell.mesh(*asked, *penalties, "-o", "json").out)
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 5
    assert all(one["logprob"] <= 0 and one["top"] for one in answer["logprobs"])
    table = cell.mesh(*asked).out.splitlines()
    assert "LOGPROB" in table[-6]
    refused = cell.mesh(*asked[:-1], "21")
    assert refused.code == 2
    assert "logprobs is 21; it must be from 0 to 20" in refused.err


def test_prompts_are_read_from_everywhere(cell: RunningCell, chat: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    file = str(tmp_path / "prompt.txt")
    asked = ("invoke", "chat", "--max-tokens", "4", "-o", "json")
    prompts = [
        cell.mesh(*asked, "Grüße"),
        cell.mesh(*asked, "--file", file),
        cell.mesh(*asked, "-", stdin="Grüße\n".encode()),
        cell.mesh(*asked, stdin="Grüße".encode()),
    ]
    answers = [json.loads(ran.out) for ran in prompts]
    seen = [(answer["prompt_tokens"], answer["text"]) for answer in answers]
    assert len(set(seen)) == 1
    raw = json.loads(cell.mesh(*asked, "--raw", "Grüße").out)
    assert raw["prompt_tokens"] == len("Grüße".encode()) < seen[0][0]


def test_stats_stand_on_stderr(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("invoke", "chat", "hi", "--max-tokens", "3", "--stats")
    assert ran.code == 0
    (line,) = ran.err.splitlines()
    assert "SLO 30" in line
    assert "TPOT" in line


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("nobody", "hi"), 1, "nobody"),
        (("chat", "x" * 2000), 1, "256"),
        (("chat", "hi", "--max-tokens", "0"), 2, "max_tokens"),
        (("chat", "hi", "--max-tokens", "-5"), 2, "max_tokens"),
        (("chat", "hi", "--temperature", "-1"), 2, "temperature"),
        (("chat", "hi", "--top-p", "0"), 2, "top_p"),
        (("chat", "hi", "--max-tokens", "200", "--timeout", "0.2"), 1, "0.2 s"),
    ],
)
def test_a_refused_invocation_is_two_lines(
    arguments: tuple[str, ...], code: int, error: str, cell: RunningCell, chat: str
) -> None:
    ran = cell.mesh("invoke", *arguments)
    assert ran.code == code, ran
    assert error in ran.error_lines[0]
    assert ran.error_lines[1]
    assert cell.mesh("invoke", "chat", "still there?", "--max-tokens", "1").code == 0


def test_chat_keeps_its_history_until_it_is_reset(cell: RunningCell, chat: str) -> None:
    """Down a pipe: an answer a line, and nothing of the commands on stdout."""
    lines = b"one\n\n/system be brief\ntwo\n/reset\n/nonsense\none\n/quit\nnever asked\n"
    before = json.loads(cell.mesh("status", "-o", "json").out)["served"]
    ran = cell.mesh("chat", "chat", "--max-tokens", "5", stdin=lines)
    assert ran.code == 0, ran.err
    assert json.loads(cell.mesh("status", "-o", "json").out)["served"] == before + 3
    assert "told so from now on" in ran.err
    assert "forgotten" in ran.err
    assert "/nonsense is no command" in ran.err
    assert "never" not in ran.out


def test_chat_down_a_pipe_ends_at_the_first_failure(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("chat", "chat", stdin=b"x" * 2000 + b"\nnext\n")
    assert ran.code == 1
    assert "256" in ran.error_lines[0]
    assert cell.mesh("chat", "nobody").code == 1


def test_requests_are_listed_and_cancelled(cell: RunningCell, chat: str, tmp_path: Path) -> None:
    asking = ("invoke", chat, "count", "--max-tokens", "200", "--controller", cell.address)
    with mesh_process(*asking, environ=os.environ, err=tmp_path / "err") as process:
        until(lambda: chat in cell.mesh("requests").out, 20.0)
        (listed,) = json.loads(cell.mesh("requests", "-o", "json").out)
        assert listed["deployment"] == chat
        ran = cell.mesh("cancel", listed["request_id"], "r0-0")
        assert ran.code == 1
        assert "cancelled" in ran.err
        assert "no open request 'r0-0'" in ran.err
        assert process.wait(20.0) == 1
