"""`mesh up` and `mesh demo` as processes: what they start, and that none of it stays."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import requests

from mesh.cli.restarts import RestartLimits
from mesh.controller.registry import SqliteRegistry
from mesh_nodes import topology
from tests.cli.running import mesh, mesh_process
from tests.e2e.live_cell import SETTLED
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import until

READY_S_MAX = 150.0
GONE_S_MAX = 60.0


def mentioning(path: Path) -> list[psutil.Process]:
    """The processes with an argument at or below this path; those already dead do not count."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            word.startswith(str(path)) for word in words
        ):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of a tiny model."""
    return f"file://{write_tiny_llama(tmp_path_factory.mktemp('model') / 'tiny')}"


def _lines_until_ready(process: "subprocess.Popen[str]", err: Path) -> Iterator[str]:
    assert process.stdout is not None
    until_s = time.monotonic() + READY_S_MAX
    for line in process.stdout:
        yield line.rstrip("\n")
        if line.startswith("next"):
            return
        assert time.monotonic() < until_s
    raise AssertionError(err.read_text())


NEEDED = {"grpc", "openvino"}
EXTRAS = {"asyncpg", "boto3", "locust", "matplotlib", "opentelemetry", "ray"}
NOTES_IMPORTS = """
import sys

class Notes:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            with open({noted!r}, "a") as noted:
                print(name, file=noted)

sys.meta_path.insert(0, Notes())
"""
"""What processes run first that are to note what they import, whether that is there or not."""


def noting(noted: Path) -> dict[str, str]:
    """The environment of processes that note which of NEEDED and EXTRAS they import."""
    script = NOTES_IMPORTS.format(names=sorted(NEEDED | EXTRAS), noted=str(noted))
    (noted.parent / "sitecustomize.py").write_text(script)
    return {**os.environ, "PYTHONPATH": str(noted.parent)}


def test_up_serves_without_extras_a_second_one_touches_nothing_and_ctrl_c_stops_all_of_it(
    tmp_path: Path,
) -> None:
    home, err, noted = (tmp_path / name for name in ("a home", "err", "noted"))
    where = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--home", str(home))
    small = ("--memory", "256MiB", "--threads", "1", *SETTLED)
    with mesh_process("up", *where, *small, environ=noting(noted), err=err) as process:
        lines = list(_lines_until_ready(process, err))
        words = [line.split() for line in lines]
        assert [first for first, *_ in words] == ["controller", "http", "page", "node", "next"]
        assert words[3] == ["node", "cpu0"]
        address = words[0][1]
        assert lines[4].endswith(f"mesh deploy MODEL.yaml --controller {address}")
        assert requests.get(words[2][1], timeout=10).json()["name"] == "mesh"
        assert requests.get(f"{words[1][1]}/models", timeout=10).json()["data"] == []
        logs = {path: path.stat().st_ino for path in (home / "logs").iterdir()}
        assert {path.name for path in logs} >= {"controller.log", "node-cpu0.log"}

        begun_s = time.monotonic()
        ran = mesh("up", "--listen", "127.0.0.1:0", "--http", "off", "--home", str(home))
        assert time.monotonic() - begun_s < 30.0
        assert ran.code == 1
        error, hint = ran.error_lines
        assert f"{home}: process {process.pid}" in error
        assert "stop it first" in hint
        assert {path: path.stat().st_ino for path in (home / "logs").iterdir()} == logs

        assert mesh("status", "--controller", address).code == 0
        own = [child.cmdline() for child in psutil.Process(process.pid).children()]
        for module in ("mesh.controller", "mesh_nodes"):
            assert sum(module in words for words in own) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GONE_S_MAX) == 0
    assert mentioning(home) == []
    assert err.read_text() == "stopping\n"
    assert set(noted.read_text().split()) == NEEDED


@pytest.mark.parametrize("name", ["registry", "usage", "keys"])
def test_state_that_is_no_database_starts_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "controller").mkdir()
    damaged = tmp_path / "controller" / f"{name}.sqlite3"
    damaged.write_bytes(b"no database at all, " * 500)
    ran = mesh("up", "--listen", "127.0.0.1:0", "--http", "off", "--home", str(tmp_path))
    assert ran.code == 1
    error, hint = ran.error_lines
    assert str(damaged) in error
    assert "database" in error
    assert hint
    assert not (tmp_path / "logs").exists()


def test_a_home_whose_controller_runs_alone_is_refused_at_once(tmp_path: Path) -> None:
    with closing(SqliteRegistry(tmp_path / "controller")):
        ran = mesh("up", "--listen", "127.0.0.1:0", "--http", "off", "--home", str(tmp_path))
    assert ran.code == 1
    assert "in use by another controller" in ran.error_lines[0]
    assert not (tmp_path / "logs").exists()


def test_a_node_is_bound_to_its_numa_node_and_told_its_precisions(tmp_path: Path) -> None:
    there = topology.numa_nodes(topology.usable_cpus())
    if not there:
        pytest.skip("this kernel tells of no NUMA node")
    home, err = tmp_path / "home", tmp_path / "err"
    arguments = ["up", "--listen", "127.0.0.1:0", "--http", "off", "--home", str(home)]
    arguments += ["--numa", *SETTLED]
    with mesh_process(*arguments, environ=os.environ, err=err) as process:
        lines = list(_lines_until_ready(process, err))
        nodes = {
            int(words[words.index("--numa") + 1]): child
            for child in mentioning(home)
            if "mesh_nodes" in (words := child.cmdline())
        }
        assert [f"cpu{node.number}" for node in there] == [
            line.split()[1] for line in lines if line.startswith("node")
        ]
        for node in there:
            child = nodes[node.number]
            assert set(child.cpu_affinity()) == node.cpus
            words = child.cmdline()
            for option, value in zip(SETTLED[::2], SETTLED[1::2], strict=True):
                assert words[words.index(option) + 1] == value
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GONE_S_MAX) == 0


def test_certificates_and_keys_are_for_all_parts_which_end_with_a_killed_up(tmp_path: Path) -> None:
    """Both protocols are encrypted, and closed to whoever shows nothing."""
    home, err, tls = tmp_path / "home", tmp_path / "err", tmp_path / "tls"
    assert mesh("tls", "init", str(tls)).code == 0
    key = mesh("key", "create", "--role", "admin", "--home", str(home)).out.strip()
    where = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--home", str(home))
    small = ("--memory", "256MiB", "--threads", "1", *SETTLED)
    arguments = ("up", *where, *small, "--keys", "--tls", str(tls))
    with mesh_process(*arguments, environ={**os.environ, "MESH_KEY": key}, err=err) as process:
        try:
            lines = list(_lines_until_ready(process, err))
            assert len(mentioning(home)) >= 3
            address, url = lines[0].split()[1], lines[1].split()[1]
            assert lines[-1].split()[1:4] == ["mesh", "--tls", str(tls)]
            assert url.startswith("https://")
            for shown, status in (({}, 401), ({"Authorization": f"Bearer {key}"}, 200)):
                answer = requests.get(
                    f"{url}/models", headers=shown, verify=str(tls / "ca.pem"), timeout=10
                )
                assert answer.status_code == status
            assert mesh("nodes", "--controller", address).code == 1
            told = mesh(
                "--tls", str(tls), "nodes", "--controller", address, environ={"MESH_KEY": key}
            )
            assert "cpu0" in told.out, told.err
        finally:
            process.kill()
            process.wait()
            until(lambda: not mentioning(home), GONE_S_MAX)


def test_a_key_that_may_not_look_after_the_cell_is_said_at_once(tmp_path: Path) -> None:
    for role in ("admin", "node"):
        key = mesh("key", "create", "--role", role, "--home", str(tmp_path)).out.strip()
    where = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--home", str(tmp_path))
    ran = mesh("up", *where, "--memory", "256MiB", "--keys", environ={"MESH_KEY": key})
    assert ran.code == 1
    assert "hint: MESH_KEY is to be an operator's" in ran.err


def test_a_node_that_cannot_start_again_ends_the_cell_after_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RestartLimits(in_a_row_max=2, pause_s_min=0.05)
    monkeypatch.setattr("mesh.cli.verbs.up.RestartLimits", lambda: limits)
    (tmp_path / "store").write_text("where the store should be")
    ran = mesh(
        *("up", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--home", str(tmp_path)),
        *("--memory", "256MiB"),
    )
    assert ran.code == 1
    assert ran.out.startswith("controller  ")
    *told, error, hint = ran.err.splitlines()
    log = tmp_path / "logs" / "node-cpu0.log"
    assert error == "error: node cpu0 exited with code 1 after restart 2 of 2 in a row"
    assert hint == f"hint: its whole log is {log}"
    assert [line for line in told if not line.startswith("  ")] == [
        "node cpu0 exited with code 1; restart 1 of 2 in 0.05 s",
        "node cpu0 exited with code 1; restart 2 of 2 in 0.1 s",
    ]
    assert "the model store" in told[-2], "each time with the end of its log"
    assert log.read_text().count("error: the model store") == 3
    assert mentioning(tmp_path) == []


def test_ctrl_c_in_the_pause_before_a_restart_stops_everything(tmp_path: Path) -> None:
    home, err = tmp_path / "home", tmp_path / "err"
    home.mkdir()
    (home / "store").write_text("where the store should be")
    arguments = (
        *("up", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--home", str(home)),
        *("--memory", "256MiB"),
    )
    with mesh_process(*arguments, environ=os.environ, err=err) as process:
        until(lambda: "restart 1 of 5 in 0.5 s" in err.read_text(), READY_S_MAX)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GONE_S_MAX) == 0
    assert err.read_text().splitlines()[-2:] == [
        "node cpu0 exited with code 1; restart 1 of 5 in 0.5 s",
        "stopping",
    ]
    assert mentioning(home) == []


def test_a_node_that_cannot_start_is_named_with_its_own_words(tmp_path: Path) -> None:
    ran = mesh(
        *("up", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--home", str(tmp_path)),
        *("--memory", "4096TiB"),
    )
    assert ran.code == 1
    *tail, error, hint = ran.err.splitlines()
    assert error == "error: node cpu0 exited with code 2"
    assert "node-cpu0.log" in hint
    assert any("--memory" in line for line in tail)
    assert mentioning(tmp_path) == []


def test_the_demo_answers_prints_its_table_and_leaves_nothing(tmp_path: Path, tiny: str) -> None:
    """From a cold store, through the real engine, with a model that makes no sense."""
    home, temporary = tmp_path / "a home", tmp_path / "temporary"
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary)}
    arguments = ("demo", "--home", str(home), "--source", tiny)
    with mesh_process(*arguments, environ=environ, err=tmp_path / "err") as process:
        assert process.stdout is not None
        shown = process.stdout.read()
        assert process.wait(timeout=GONE_S_MAX) == 0, (tmp_path / "err").read_text()
    answers, _, table = shown.partition("\nDEPLOYMENT")
    assert sum(line.startswith("chat-") for line in answers.splitlines()) == 6
    header, *rows = table.splitlines()
    assert header.split() == [
        *("PROMPT", "TOKENS", "TTFT_S", "TTFT_SLO_S", "TPOT_S", "TPOT_SLO_S"),
        *("TOLD_LATE_BY_S", "MET", "IN_TIME"),
    ]
    assert [row.split()[0] for row in rows] == ["chat-small", "chat-fast"] * 3
    assert list(temporary.iterdir()) == []
    assert (home / "store" / "models").is_dir()
    assert mentioning(temporary) == []


def test_ctrl_c_in_the_demo_stops_everything(tmp_path: Path, tiny: str) -> None:
    temporary, err = tmp_path / "temporary", tmp_path / "err"
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary)}
    arguments = ("demo", "--home", str(tmp_path / "home"), "--source", tiny)
    with mesh_process(*arguments, environ=environ, err=err) as process:
        until(lambda: "controller" in err.read_text(), READY_S_MAX)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GONE_S_MAX) == 130
    assert "error" not in err.read_text()
    assert list(temporary.iterdir()) == []
    assert mentioning(temporary) == []
