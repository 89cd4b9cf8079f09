"""The harness: what a benchmark's options are, how rounds take turns, and how it ends."""

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest

from bench.__main__ import main, sentences
from bench.harness import Report, Table, errors_told, in_turn, performed
from mesh.domain.errors import Unavailable


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


def test_a_target_that_is_missed_is_named_and_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
