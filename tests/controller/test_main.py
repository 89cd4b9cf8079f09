"""The controller as a process: it serves, stops on a signal, and fails in two lines."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mesh.controller.main import main, read_node_ranges
from mesh.domain.errors import InvalidInput, Unavailable
from mesh.domain.reasons import DeviceKind
from mesh.runtime.journal import ControllerStart, read_journal
from mesh.wire.client import MeshClient

START_S_MAX = 60.0
STOP_S_MAX = 60.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mesh.controller", *arguments]


@contextmanager
def controller(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A controller process and the address that its log gives."""
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"serves at (\S+)", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    journal = tmp_path / "journal"
    arguments = ("--home", str(tmp_path), "--listen", "127.0.0.1:0", "--journal", str(journal))
    with controller(*arguments) as (process, address):
        with MeshClient(address) as client:
            assert client.status().nodes == 0
        process.send_signal(number)
        assert process.wait(STOP_S_MAX) == 0
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))
    assert not list(tmp_path.rglob("*-wal"))
    start, decisions = read_journal(journal)
    assert isinstance(start, ControllerStart)
    assert type(list(decisions)[-1].event).__name__ == "ShutdownRequested"


def test_it_stops_in_time_beside_a_watcher_and_a_health_check(tmp_path: Path) -> None:
    with (
        controller("--home", str(tmp_path), "--listen", "127.0.0.1:0") as (process, address),
        MeshClient(address) as client,
    ):
        # With a backlog: a watch that begins only after the signal is told of it, too.
        events = client.watch(backlog=1, follow=True)
        client.status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S_MAX) == 0
        assert [event.line.text for event in events][-1:] == ["stopping"]


def test_a_client_is_told_when_the_controller_is_killed_under_it(tmp_path: Path) -> None:
    with (
        controller("--home", str(tmp_path), "--listen", "127.0.0.1:0") as (process, address),
        MeshClient(address) as client,
    ):
        events = client.watch(follow=True)
        client.status()
        process.kill()
        with pytest.raises(Unavailable, match=address):
            list(events)
        with pytest.raises(Unavailable, match="no controller answers at") as caught:
            client.status()
        assert "mesh up" in caught.value.hint


def test_a_client_that_polls_sees_a_controller_soon_after_it_started(tmp_path: Path) -> None:
    """gRPC alone would wait longer after each failure, up to two minutes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with MeshClient(address) as client:
        for _ in range(20):
            with pytest.raises(Unavailable):
                client.status()
            time.sleep(0.1)
        with controller("--home", str(tmp_path), "--listen", address):
            for _ in range(60):
                with suppress(Unavailable):
                    client.status()
                    break
                time.sleep(0.05)
            else:
                pytest.fail("it is not seen within three seconds of looking")


def failed(*arguments: str) -> tuple[int, list[str]]:
    ended = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=START_S_MAX, check=False
    )
    assert ended.stdout == ""
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--listen", "nowhere"], 2, "error: 'nowhere' is no address"),
        (["--policy", "dice"], 2, "error: there is no policy 'dice'"),
        (["--turn", "2"], 2, "error: --turn: '2' is no number of seconds from 0 to 1"),
        (["--turn", "soon"], 2, "error: --turn: 'soon' is no number of seconds from 0 to 1"),
        (["--home", os.devnull], 1, "error: cannot make the state folder"),
        (["--journal", "/"], 1, "error: cannot write the journal"),
    ],
)
def test_what_it_cannot_start_with_is_two_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert main(["--listen", "127.0.0.1:0", "--home", str(tmp_path), *arguments]) == code
    shown = capfd.readouterr()
    error, hint = shown.err.splitlines()
    assert (shown.out, error[: len(said)], hint[:6]) == ("", said, "hint: ")


def test_a_second_controller_on_the_folder_or_the_port_is_turned_away(tmp_path: Path) -> None:
    arguments = ("--home", str(tmp_path / "one"), "--listen", "127.0.0.1:0")
    with controller(*arguments) as (_, address):
        other = ("--home", str(tmp_path / "other"), "--listen", address)
        for given, said in (
            (arguments, "in use by another controller"),
            (other, f"error: port {address.rpartition(':')[2]} is in use"),
        ):
            code, (error, hint) = failed(*given)
            assert (code, said in error, hint[:6]) == (1, True, "hint: ")


@pytest.mark.parametrize(
    "given", [["cpu"], ["cpu=1"], ["tpu=1..2"], ["cpu=3..2"], ["cpu=0..0"], ["cpu=1..9999"]]
)
def test_ranges_of_nodes_that_are_none_are_refused(given: list[str]) -> None:
    with pytest.raises(InvalidInput, match=r"KIND=LEAST\.\.MOST"):
        read_node_ranges(given)


def test_each_kind_of_nodes_has_one_range() -> None:
    cpu, gpu = read_node_ranges(["cpu=1..8", "gpu=0..4"])
    assert (cpu.device, cpu.least, cpu.most) == (DeviceKind.CPU, 1, 8)
    assert (gpu.device, gpu.least, gpu.most) == (DeviceKind.GPU, 0, 4)
    with pytest.raises(InvalidInput, match="twice"):
        read_node_ranges(["cpu=1..8", "cpu=1..2"])
