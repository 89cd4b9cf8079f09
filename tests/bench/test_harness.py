"""The harness, and what small benchmarks measure, by cases that can be reckoned by hand."""

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import pytest

from bench.__main__ import main, sentences
from bench.faults import Total, played, report, runs
from bench.harness import Report, Table, errors_told, in_turn, performed
from bench.http import by_grpc, by_http
from bench.importing import CACHED, PREPARE, STORED, Mark, measured, seconds_by_step, served
from bench.load_client import Heard, Shares, measure
from bench.overhead import HOPS, hops_ms
from bench.peer import Peer
from bench.replay import LOAD, are_of, file_lengths, rate_scale, scaled, tokens_scale, trace_lengths
from mesh.domain.errors import NotFound, Unavailable
from mesh.domain.events import ControllerEvent, InvokeRequested, NodeReported
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import SubmitRequest, TokensReport
from mesh.domain.node_events import CommandReceived, NodeEvent, StepFinished
from mesh.domain.request import Request, RequestOrder, RequestTokens, SamplingParams
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer
from mesh.policy.registry import DEFAULT_POLICY
from mesh.runtime.journal import ControllerStart, JournalHeader, NodeStart, open_journal
from mesh.sim.scenario import Scenario
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_workloads.asked import Asked
from mesh_workloads.reading import read
from mesh_workloads.trace import Arrival, Trace
from tests.bench.contenders import doubling, leaving
from tests.controller.live import SPEC
from tests.core.cells import step_result
from tests.http.edge import edge
from tests.loader.tiny_gguf import write_tiny_gguf
from tests.sim.scenarios import SMALL, scenario
from tests.workloads import samples


@pytest.mark.parametrize(
    ("hint", "told"),
    [("", "error: it is gone"), ("wait for it", "error: it is gone\nhint: wait for it")],
)
def test_an_error_ends_it_with_what_to_do(hint: str, told: str) -> None:
    with pytest.raises(SystemExit) as ended, errors_told():
        raise Unavailable("it is gone", hint=hint)
    assert ended.value.code == told


def test_an_interrupt_ends_it_as_it_ends_the_command() -> None:
    with pytest.raises(SystemExit) as ended, errors_told():
        raise KeyboardInterrupt
    assert ended.value.code == 130


def test_a_missed_target_is_named_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"late": 2, "met": [1.0, 0.9], "slow": None}
    targets: dict[str, str | bool] = {"late": "== 0", "met": ">= 0.95", "slow": "<= 1"}
    targets |= {"served": False, "whole": True}
    assert Report(figures=figures, targets=targets).end() == 1
    said = capsys.readouterr()
    assert said.err == (
        "missed: late is 2, not == 0; met is [1.0, 0.9], not >= 0.95; slow is None, not <= 1; "
        "served\n"
    )
    assert json.loads(said.out.splitlines()[-1]) == {**figures, "surveyed": False}
    assert Report(figures=figures, targets={"late": "<= 2"}).end() == 0
    assert "all targets reached" in capsys.readouterr().err


def test_contenders_take_turns_and_change_who_begins() -> None:
    turns = [(number, name) for number, name, _ in in_turn({"a": 1, "b": 2}, 2, warm_ups=1)]
    assert turns == [(0, "b"), (0, "a"), (1, "a"), (1, "b"), (2, "b"), (2, "a")]


def bench(
    *traces: Path,
    rounds: int = 3,
    park: float = 0.0,
    seed: int = 1,
    rates: Annotated[tuple[float, ...], "calls a second"] = (),
    scene: Literal["one", "two"] | None = None,
    quick: bool = False,
    peers: bool = True,
) -> Report:
    given = [list(map(str, traces)), rounds, park, seed, list(rates), scene, quick, peers]
    table = Table(headings=("a", "b"), rows=[("c", "1")], title="t")
    return Report(figures={"given": given}, shown=[table])


def run(*arguments: str) -> int:
    return performed("some", bench, "It measures something.", arguments)


def test_parameters_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("f") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["given"] == [["f"], 3, 0.0, 1, [], None, False, True]
    words = "f g --rounds 2 --seed 0 --rates 0.5 1 --scene two --quick --no-peers --markdown"
    assert run(*words.split()) == 0
    *_, last = lines = capsys.readouterr().out.splitlines()
    assert json.loads(last)["given"] == [["f", "g"], 2, 0.0, 0, [0.5, 1.0], "two", True, False]
    assert "| c | 1 |" in lines


@pytest.mark.parametrize(
    "wrong",
    ["--rounds 0", "--rounds x", "--park -1", "--park nan", "--rates 1 0", "--scene three", "--n"],
)
def test_a_wrong_option_is_a_usage_error(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("f", *wrong.split())
    assert ended.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err


def test_every_benchmark_is_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(sentences()) >= 28
    assert all(line.endswith(".") for line in lines)
    assert main(["no-such"]) == 2
    assert "no benchmark no-such" in capsys.readouterr().err


def test_a_benchmark_runs_to_its_last_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.admission.WARM_UP", 4)
    smallest = ["--nodes", "1", "--decisions", "16", "--rounds", "1"]
    assert main(["admission", *smallest]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told["decisions_per_s"]) == {"1"}


CALLS = [(0.0, 4), (0.01, 1), (0.0, 6)]


async def test_both_hear_every_answer_to_its_end(tmp_path: Path) -> None:
    async with edge(tmp_path) as http:
        await http.cell.deployed()
        assert http.cell.http is not None
        for ask, address in ((by_grpc, http.cell.address), (by_http, http.cell.http)):
            heard = await asyncio.to_thread(ask, address, SPEC.name, CALLS)
            assert len(heard) == len(CALLS)
            assert all(0.0 < one.first_s <= one.last_s for one in heard)
            with pytest.raises(Unavailable, match=r"torn|not answered in full"):
                await asyncio.to_thread(ask, address, DeploymentName("none"), CALLS)


def test_a_phase_lasts_until_another_one() -> None:
    phases = ["download m.gguf, 1 B of 9 B", "download m.gguf, 9 B of 9 B", "hash", "done"]
    marks = [Mark(at_s=float(number), phase=phase) for number, phase in enumerate(phases)]
    assert seconds_by_step(marks, 3.5) == {"download": 2.0, "hash": 1.0, "done": 0.5}


def test_a_model_is_fetched_imported_prepared_and_checked(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    write_tiny_gguf(tmp_path / "from" / "m.gguf")
    with served(tmp_path / "from") as address:
        found = measured(f"{address}/m.gguf", tmp_path / "store", OpenVinoEngine(threads=1))
    steps = {"download", "hash", "convert weights", "write digests", PREPARE, CACHED, STORED}
    assert steps <= set(found)
    assert all(seconds >= 0.0 for seconds in found.values())


def test_what_is_not_served_is_an_error(tmp_path: Path) -> None:
    with served(tmp_path) as address, pytest.raises(NotFound, match="is not at its URL"):
        measured(f"{address}/m.gguf", tmp_path / "store", OpenVinoEngine(threads=1))


def test_shares_leave_the_server_s_time_out() -> None:
    shares = Shares()
    heard = Heard(due_s=9.99, sent_s=10.0, tokens_s=[10.205, 10.303, 10.401])
    shares.add(heard, 10.002, [10.202, 10.302, 10.402], tokens=4)
    assert shares.ttft_ms == pytest.approx([5.0])
    assert shares.token_ms == pytest.approx([1.0, -1.0])
    assert shares.late_ms == pytest.approx([10.0])
    assert shares.figures()["missing_tokens"] == 1.0


def test_both_clients_hear_every_token_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load_client.SPREAD_S", 0.2)
    found = measure(streams=8, tokens=5, token_s=0.05, rounds=1)
    for shares in found.values():
        figures = shares.figures()
        assert figures["missing_tokens"] == 0.0
        assert len(shares.ttft_ms) == 8
        assert len(shares.token_ms) == 32
        assert 0.0 < figures["ttft_share_ms_p50"] < 2000.0
        assert -1.0 < figures["token_share_ms_p50"] < 1000.0


def test_a_peer_answers_from_its_own_environment(capfd: pytest.CaptureFixture[str]) -> None:
    with Peer("doubling", doubling, "a", environment={"MORE": "b"}) as peer:
        peer.wait_ready()
        word, number, pid = peer.ask(21)
        assert (word, number) == ("ab", 42)
        assert pid != os.getpid()
        assert peer.cpu_s() > 0
    assert not capfd.readouterr().out
    assert "MORE" not in os.environ


def test_a_peer_that_fails_or_ends_is_told_with_the_end_of_its_log() -> None:
    with Peer("doubling", doubling, "a", environment={"MORE": ""}) as peer:
        peer.wait_ready()
        with pytest.raises(Unavailable, match=r"doubling: ValueError: below zero\n(.*\n)*.* raise"):
            peer.ask(-1)
        peer._process.join()
        with pytest.raises(Unavailable, match="doubling ended before it was done"):
            peer.ask(1)
    with Peer("leaving", leaving) as peer:
        peer.wait_ready()
        with pytest.raises(Unavailable, match="leaving ended before it was done"):
            peer.ask()


@pytest.mark.parametrize(
    ("text", "suffix", "seconds"),
    [
        (samples.PLAIN, ".csv", 1.0),
        (samples.AZURE_LLM_2023, ".csv", 60.0),
        (samples.AZURE_LLM_2024, ".csv", 0.4),
        (samples.BURSTGPT, ".csv", 600.0),
        (samples.MOONCAKE.replace("\n\n", "\n"), ".jsonl", 2.0),
        (samples.MOONCAKE.replace("\n\n", "\n"), ".jsonl", 60.0),
    ],
)
def test_both_readings_are_the_same(tmp_path: Path, text: str, suffix: str, seconds: float) -> None:
    path = tmp_path / f"trace{suffix}"
    path.write_text(text)
    trace = read(path, Asked(duration_s=seconds))
    assert file_lengths(path, seconds) == trace_lengths(trace)


def test_what_was_sent_is_there_as_often_and_cut_to_the_context() -> None:
    there = [(10, 5), (10, 5), (900, 200)]
    assert are_of(Counter([(10, 5), (10, 5)]), there, 1024)
    assert are_of(Counter([(824, 200)]), there, 1024)
    assert not are_of(Counter([(10, 5)] * 3), there, 1024)
    assert not are_of(Counter([(900, 200)]), there, 1024)
    assert not are_of(Counter([(11, 5)]), there, 1024)


def test_the_rate_is_what_the_cores_hold_and_never_above_the_traces() -> None:
    lengths = [(400, 200)] * 100
    assert rate_scale(lengths, 100.0) == pytest.approx(LOAD / 2)
    assert rate_scale(lengths, 1000.0) == 1.0


def test_lengths_are_scaled_only_where_many_rows_are_too_long() -> None:
    def made(*inputs: int) -> Trace:
        arrivals = (
            Arrival(t_s=float(n), function=0, input_tokens=tokens, output_tokens=48)
            for n, tokens in enumerate(inputs)
        )
        return Trace(name="t", arrivals=tuple(arrivals), duration_s=100.0)

    assert tokens_scale(made(*[2000] * 20, 9000)) == 1.0
    assert tokens_scale(made(*[8144] * 20)) == 0.25
    assert list(scaled(Counter({(10, 3): 2}), 0.25)) == [(2, 1), (2, 1)]


FAULTS = """
[faults]
until_s = 8
per_minute = { crash = 30, cancel = 30 }
"""


@pytest.fixture
def fault_seeds(tmp_path: Path) -> Scenario:
    return scenario(tmp_path, SMALL + FAULTS)


def test_seeds_are_added_up(fault_seeds: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    total = Total()
    for ran in runs(fault_seeds, range(3, 5), jobs=1):
        total.add(ran)
    alone = [played(fault_seeds, seed) for seed in (3, 4)]
    report(total, 1.0, Path("small.toml")).end()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["seeds"], told["seeds_broken"]) == (2, [])
    assert told["requests"] == sum(sum(ran.ends.values()) for ran in alone) > 10
    assert told["faults"]["crash"] == sum(ran.faults["crash"] for ran in alone) > 0
    assert told["checks"]["decisions"] > 100


def test_a_seed_that_fails_is_named_with_its_command_and_the_others_go_on(
    fault_seeds: Scenario, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total = Total()
    with monkeypatch.context() as broken:
        broken.setattr("mesh.sim.checking.STUCK_S", -1e6)
        total.add(played(fault_seeds, 3))
    total.add(played(fault_seeds, 4))
    report(total, 1.0, Path("small.toml")).end()
    out = capsys.readouterr().out
    assert "broken: RuleBroken: requests are stuck" in out
    assert "again: mesh sim small.toml --check --seed 3\n" in out
    told = json.loads(out.splitlines()[-1])
    assert (told["seeds"], told["seeds_broken"]) == (2, [3])


R1, I1 = RequestId("r1-1"), InstanceId("i")


def kept(
    path: Path, start: JournalHeader, *told: tuple[float, ControllerEvent | NodeEvent]
) -> Path:
    journal = open_journal(path, start)
    for now_s, event in told:
        journal.record(now_s, event, ())
    journal.close()
    return path


def test_hops_are_between_the_moments_of_both_journals(tmp_path: Path) -> None:
    request = Request(
        request_id=R1,
        deployment=DeploymentName("chat"),
        prompt_tokens=(1,),
        sampling=SamplingParams(max_tokens=1),
    )
    order = RequestOrder(
        request=request, attempt=1, slo=Slo(ttft_s=1, tpot_s=1), age_s=0.0, due_in_s=1.0
    )
    outputs = (RequestTokens(request_id=R1, attempt=1, first_index=0, token_ids=(7,), text="x"),)
    result = step_result(outputs=outputs, prefill_tokens=1, elapsed_s=0.020)
    report = TokensReport(instance_id=I1, outputs=outputs)
    controller = kept(
        tmp_path / "controller",
        ControllerStart(
            version="0", epoch=1, policy=DEFAULT_POLICY, limits=CellLimits(), deployments=()
        ),
        (10.001, InvokeRequested(request=request)),
        (10.034, NodeReported(link_id=1, report=report)),
    )
    node = kept(
        tmp_path / "node",
        NodeStart(version="0", limits=NodeLimits()),
        (10.003, CommandReceived(command=SubmitRequest(instance_id=I1, order=order))),
        (10.028, StepFinished(instance_id=I1, result=result)),
    )
    answer = Answer(sent_s=10.0, ended_s=0.05, tokens_s=(0.041,), request_id=R1)
    found = hops_ms(controller, node, [answer])
    assert tuple(found) == HOPS
    assert list(found.values()) == pytest.approx([1, 2, 5, 20, 6, 7])
