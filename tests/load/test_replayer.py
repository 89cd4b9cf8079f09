"""An open loop: calls go out at their times, what is noted of them, and locust's own numbers."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest

from mesh.domain.errors import InvalidInput, NotFound
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.evaluation.load_client import NOT_SENT, STOPPED, Answer, Call, outcome_of
from mesh.wire.certificates import Part, make_folder, read_tls
from mesh.wire.credentials import Credentials, credentials, show
from mesh_load.options import Options, add_options, read_options, show_credentials
from mesh_load.replayer import Replayer
from mesh_load.sender import ask
from mesh_workloads import replay_plan
from tests.load.speaking import ScriptedSender, as_sent, planned


class Run:
    def __init__(
        self,
        *calls: tuple[float, str, int],
        open_max: int = 100,
        drawn: Callable[[int], object] = lambda number: None,
    ) -> None:
        """`drawn` is told of each call before it is sent."""
        self.answers: dict[int, Answer] = {}
        self.sender = ScriptedSender()
        pairs = ((call, as_sent(call)) for call in planned(*calls) if not drawn(call.number))
        self.replayer = Replayer(self.sender, pairs, self._ended, open_max=open_max)

    def _ended(self, plan: replay_plan.Call, call: Call, answer: Answer) -> None:
        assert plan.number not in self.answers, "told twice"
        self.answers[plan.number] = answer


def test_a_slow_answer_makes_no_later_call_wait() -> None:
    run = Run((0.0, "slow", 40), (0.2, "quick", 2), (0.4, "quick", 2))
    run.replayer.run(time.monotonic())
    assert list(run.answers) == [1, 2, 0]
    assert run.answers[0].ended_s >= 40 * 0.045


def test_what_is_late_says_by_how_much_and_goes_out_at_once() -> None:
    run = Run((0.0, "quick", 1), (0.5, "quick", 1), (30.0, "quick", 1))
    run.replayer.run(time.monotonic() - 30.0)
    assert [answer.lag_s for answer in run.answers.values()] == pytest.approx(
        [30.0, 29.5, 0.0], abs=10.0
    )


def test_one_call_too_many_is_not_sent_and_counted() -> None:
    run = Run((0.0, "slow", 20), (0.1, "slow", 20), (0.2, "quick", 1), open_max=2)
    run.replayer.run(time.monotonic())
    assert run.answers[2].failed == NOT_SENT
    assert len(run.sender.sent) == 2


def test_stopped_it_leaves_what_is_open_and_sends_nothing_more() -> None:
    run = Run((0.0, "slow", 1000), (0.1, "quick", 1), (60.0, "quick", 1))
    running = gevent.spawn(run.replayer.run, time.monotonic())
    with gevent.Timeout(20.0):
        while 1 not in run.answers:
            gevent.sleep(0.01)
    run.replayer.stop()
    running.join(timeout=5.0)
    assert running.ready()
    assert {number: answer.failed for number, answer in run.answers.items()} == {
        0: STOPPED,
        1: "",
    }


def test_a_call_that_is_stopped_before_its_greenlet_runs_is_told_of() -> None:
    def drawn(number: int) -> None:
        if number == 1:
            run.replayer.stop()

    run = Run((0.0, "quick", 1), (60.0, "quick", 1), drawn=drawn)
    run.replayer.run(time.monotonic())
    assert not run.sender.sent
    assert {number: answer.failed for number, answer in run.answers.items()} == {0: STOPPED}


def asked(deployment: str, tokens: int) -> tuple[Answer, Outcome]:
    call = as_sent(planned((0.0, deployment, tokens))[0])
    answer = ask(ScriptedSender(), call, due_s=time.monotonic() - 0.25, timeout_s=60.0)
    return answer, outcome_of(call, answer, answer.sent_s)


def test_tokens_are_noted_as_they_come_and_how_late_the_call_was_sent() -> None:
    answer, outcome = asked("slow", 4)
    steps = [b - a for a, b in zip(answer.tokens_s, answer.tokens_s[1:], strict=False)]
    assert len(answer.tokens_s) == 4
    assert all(step >= 0.045 for step in steps)
    assert 0.25 <= answer.lag_s < 30.0
    assert (answer.finishes, answer.grace_s, answer.in_order) == (1, 0.5, True)
    assert outcome.end is FinishReason.LENGTH
    assert outcome.met


def test_a_refusal_keeps_its_reason() -> None:
    refused, outcome = asked("full", 4)
    assert (refused.refused, refused.failed) == ("memory_full", "")
    assert refused.retry_after_s == 2.0
    assert outcome.end is RefusalReason.MEMORY_FULL


@pytest.mark.parametrize(
    ("deployment", "status"),
    [("gone", "unavailable"), ("left", "cancelled"), ("late", "deadline_exceeded")],
)
def test_a_failure_keeps_its_status(deployment: str, status: str) -> None:
    failed, outcome = asked(deployment, 4)
    assert (failed.refused, failed.failed) == ("", status)
    assert outcome.end is FinishReason.FAILED


def test_a_greenlet_that_is_killed_returns_what_came() -> None:
    call = as_sent(planned((0.0, "slow", 1000))[0])
    asking = gevent.spawn(ask, ScriptedSender(), call, due_s=time.monotonic(), timeout_s=60.0)
    gevent.sleep(0.2)
    asking.kill()
    answer = asking.value
    assert isinstance(answer, Answer)
    assert answer.failed == STOPPED
    assert 0 < len(answer.tokens_s) < 1000
    assert outcome_of(call, answer).end is FinishReason.CANCELLED


SCRIPT = """
import json
from locust.env import Environment
from mesh_load import entries
from tests.evaluation.replay.made import RESULTS

environment = Environment()
environment.create_local_runner()
for result in RESULTS:
    entries.log(environment, result)
stats = environment.stats
rows = {" ".join(key): (e.num_requests, e.num_failures) for key, e in stats.entries.items()}
reasons = sorted(str(error.error) for error in stats.errors.values())
print(json.dumps({"rows": rows, "total": stats.total.num_requests, "reasons": reasons}))
"""


def test_entries_of_the_slo_are_of_the_calls_that_are_judged() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60.0
    )
    found = json.loads(ran.stdout)
    # Of chat, one was not sent and one left when the run was stopped.
    assert found["rows"] == {
        "chat call": [6, 3],
        "chat TTFT": [3, 0],
        "chat TPOT": [3, 0],
        "chat SLO mean": [4, 2],
        "chat SLO each": [4, 2],
        "code call": [2, 1],
        "code TTFT": [1, 0],
        "code TPOT": [1, 0],
        "code SLO mean": [2, 2],
        "code SLO each": [2, 2],
    }
    assert found["total"] == 8
    assert "refused: memory_full" in " ".join(found["reasons"])


class Parser(argparse.ArgumentParser):
    """Takes what locust's takes beside argparse's."""

    def add_argument(self, *names: Any, include_in_web_ui: bool = True, **more: Any) -> Any:
        assert names == ("-h", "--help") or not include_in_web_ui
        return super().add_argument(*names, **more)


def read(*words: str, host: str | None = None) -> Options:
    parser = Parser()
    add_options(parser)
    parsed = parser.parse_args(list(words))
    parsed.host = host
    return read_options(parsed)


def test_defaults_are_those_of_mesh_replay() -> None:
    found = read()
    assert (found.address, found.trace, found.report) == ("127.0.0.1:7070", None, None)
    assert (found.given["rate_scale"], found.given["clip"]) == (1.0, True)


def test_options_flags_and_a_file_of_options_are_taken(tmp_path: Path) -> None:
    config = tmp_path / "replay.toml"
    config.write_text("rate_scale = 0.5\nseed = 7\n")
    words = ("--trace", "t.csv", "--replay-config", str(config), "--seed", "0", "--no-clip")
    found = read(*words, "--map", "popularity", host="127.0.0.1:1234")
    assert (found.trace, found.address) == (Path("t.csv"), "127.0.0.1:1234")
    given = found.given
    assert (given["rate_scale"], given["seed"], given["clip"]) == (0.5, 0, False)
    assert given["how"] == "popularity"


def test_calls_go_by_openais_protocol_where_that_is_served(tmp_path: Path) -> None:
    assert read().http is None
    found = read("--http", "127.0.0.1:8070")
    assert (found.http, found.address) == ("127.0.0.1:8070", "127.0.0.1:7070")
    with pytest.raises(InvalidInput, match="nowhere"):
        read("--http", "nowhere")


def test_the_key_and_the_certificate_are_those_of_mesh(tmp_path: Path) -> None:
    parser = Parser()
    add_options(parser)
    make_folder(tmp_path / "tls", ("localhost",), 1)
    (tmp_path / "key").write_text("mesh_b\n")
    environ = {"MESH_KEY": "mesh_a", "MESH_TLS": str(tmp_path / "tls")}
    try:
        show_credentials(parser.parse_args([]), environ)
        assert credentials().key == "mesh_a"
        assert credentials().tls == read_tls(tmp_path / "tls", Part.CLIENT)
        show_credentials(parser.parse_args(["--key-file", str(tmp_path / "key")]), {})
        assert credentials() == Credentials(key="mesh_b")
    finally:
        show(Credentials())


def test_what_mesh_replay_would_not_take_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="time-scale"):
        read("--time-scale", "-1")
    with pytest.raises(InvalidInput, match="not-an-address"):
        read(host="not-an-address")
    with pytest.raises(NotFound):
        read("--replay-config", "nowhere.toml")
    with pytest.raises(InvalidInput, match="no folder 'nowhere'"):
        read("--report", "nowhere/page.html")


def test_locust_listens_on_the_loopback_alone() -> None:
    parser = Parser()
    add_options(parser)
    parsed = parser.parse_args([])
    assert (parsed.master_bind_host, parsed.web_host) == ("127.0.0.1", "127.0.0.1")
