"""Exit codes, errors and signals of the command line, with nothing there to talk to."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click
import pytest

from mesh import __version__
from mesh.cli import main as cli
from mesh.cli.stopping import Stopping
from mesh.domain.errors import StorageError
from mesh.policy.registry import DEFAULT_POLICY, policy
from scripts.gen_cli import TARGET, page
from tests.cli.running import MESH, mesh


@pytest.fixture(autouse=True, scope="module")
def nobody_at() -> Iterator[str]:
    """The default address: bound, and therefore nobody else's, but not listening."""
    with socket.socket() as nobody, pytest.MonkeyPatch.context() as patch:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        patch.setenv("MESH_CONTROLLER", address)
        yield address


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_exists_and_says_what_it_does(verb: str) -> None:
    command = cli.mesh.get_command(click.Context(cli.mesh), verb)
    assert isinstance(command, click.Command)
    assert command.name == verb
    ran = mesh(verb, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"Usage: mesh {verb}")
    assert command.help
    assert " ".join(command.help.split()) in " ".join(ran.out.split())
    assert ran.err == ""


def test_help_lists_the_verbs_in_working_order() -> None:
    ran = mesh()
    assert ran.code == 0
    assert ran == mesh("--help") == mesh("-h")
    listed = [line.split()[0] for line in ran.out.partition("Commands:\n")[2].splitlines()]
    assert listed == list(cli.VERBS)


def test_the_version_is_told_in_both_ways() -> None:
    assert mesh("--version").out == mesh("version").out == f"mesh {__version__}\n"


def test_the_package_runs_as_the_command_does() -> None:
    for arguments, code in ((["version"], 0), (["nonsense"], 2)):
        as_module, as_command = (
            subprocess.run([*how, *arguments], capture_output=True, text=True, check=False)
            for how in ([sys.executable, "-m", "mesh"], MESH)
        )
        assert as_module.returncode == as_command.returncode == code
        assert (as_module.stdout, as_module.stderr) == (as_command.stdout, as_command.stderr)


def test_tests_run_in_the_background_of_a_script_can_interrupt_what_they_start() -> None:
    """Such a job ignores SIGINT, and so would its children."""
    code = "import signal, tests.conftest; signal.raise_signal(signal.SIGINT)"
    ran = subprocess.run(
        ["sh", "-c", f"trap '' INT; exec {sys.executable} -c '{code}'"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "KeyboardInterrupt" in ran.stderr


@pytest.mark.parametrize("verb", ["up", "controller"])
def test_help_names_the_policies_that_there_are(verb: str) -> None:
    shown = " ".join(mesh(verb, "--help").out.split()).replace("- ", "-")  # it wraps at hyphens
    named = re.search(r"take turns: (\S+) \(the default\) or (\S+)\.", shown)
    assert named is not None
    assert named[1] == DEFAULT_POLICY
    assert {policy(name).name for name in named.groups()} == set(named.groups())


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("gett", "there is no command 'gett'; did you mean get?", "`mesh --help`"),
        ("get --foo", "no such option '--foo'", "`mesh get --help`"),
        ("get -o xml", "invalid value for '-o'", "`mesh get --help`"),
        ("deploy", "missing argument 'FILE...'", "`mesh deploy --help`"),
        ("deploy nowhere.yaml", "nowhere.yaml: no such file or directory", "- for standard"),
        ("scale a", "nothing to change", "`mesh scale --help`"),
        ("scale a --min -1", "invalid value for '--min'", "`mesh scale --help`"),
        ("get --controller here", "'here' is no address", "HOST:PORT"),
        ("get --controller h:0", "'h:0' is nothing to connect to", "HOST:PORT"),
        ("logs -n -1", "invalid value for '-n'", "`mesh logs --help`"),
        ("invoke a b --file c", "the prompt is given twice", "`mesh invoke --help`"),
        ("invoke a --file nowhere.txt", "nowhere.txt: no such file", "prompt"),
        ("invoke a b --timeout 0", "invalid value for '--timeout'", "`mesh invoke --help`"),
        ("invoke a b --max-tokens many", "invalid value for '--max-tokens'", "--help"),
        ("invoke a b --top-k 99999999999", "value out of range", "--help"),
        ("drain a --undo --wait", "exclude each other", "`mesh drain --help`"),
        ("up --node tpu", "--node tpu: no such node (known devices: cpu, gpu)", "cpu=NAME"),
        ("up --node cpu=", "--node cpu=: no such node", "cpu=NAME"),
        ("up --node cpu=a --node cpu=a", "two nodes are named a", "of its own"),
        ("up --node cpu=A_B", "a node's name 'A_B' is no DNS label", "a-z"),
        ("up --memory lots", "'lots' is not a size in bytes", "4GiB"),
        ("up --threads 0", "invalid value for '--threads'", "`mesh up --help`"),
        ("profile", "missing argument 'NAME'", "`mesh profile --help`"),
        ("profile a --plot times.gif", "does not end in .png, .svg, .pdf", "profile --help`"),
        ("profile a --plot nowhere/a.png", "there is no folder 'nowhere'", "profile --help`"),
        ("bench operators --html nowhere/a.html", "there is no folder 'nowhere'", "--help`"),
        ("report --html nowhere/a.html", "there is no folder 'nowhere'", "report --help`"),
        ("sim a.toml --html nowhere/a.html", "there is no folder 'nowhere'", "sim --help`"),
        ("sim a.toml --journal nowhere/a", "there is no folder 'nowhere'", "sim --help`"),
        ("replay a.csv --report nowhere/a.html", "there is no folder 'nowhere'", "--help`"),
        ("up --listen 7070", "'7070' is no address", "HOST:PORT"),
    ],
)
def test_what_cannot_be_meant_is_two_lines_and_code_2(line: str, error: str, hint: str) -> None:
    ran = mesh(*line.split())
    assert ran.code == 2
    assert error in ran.error_lines[0]
    assert hint in ran.error_lines[1]
    assert ran.out == ""


@pytest.mark.parametrize(
    "line",
    [
        *("get", "get a", "describe a", "models", "nodes", "status", "top", "top -o json", "logs"),
        *("profile a", "profile a --show", "drain n", "delete a b", "scale a --min 1"),
        *("invoke a hello", "chat a", "deploy -"),
    ],
)
def test_a_controller_that_is_not_there_is_two_lines_and_code_1(line: str, nobody_at: str) -> None:
    manifest = b"apiVersion: mesh/v1\nkind: Model\nmetadata: {name: a}\nspec: {source: pkg://a/b}"
    ran = mesh(*line.split(), stdin=manifest)
    assert ran.code == 1
    assert ran.error_lines[0] == f"no controller answers at {nobody_at}"
    assert "mesh up" in ran.error_lines[1]
    assert ran.out == ""


@pytest.mark.parametrize(
    ("arguments", "stdin", "error"),
    [
        (("-",), "ü".encode() + b"\xff", "standard input is not valid UTF-8: byte 2 "),
        ((), b"\xff", "standard input is not valid UTF-8: byte 0 "),
        ((os.fsdecode("aü".encode() + b"\xfe"),), b"", "the prompt is not valid UTF-8: byte 3 "),
        (("hello", "--stop", os.fsdecode(b"\xfe")), b"", "a stop string is not valid UTF-8"),
    ],
)
def test_a_prompt_that_is_not_utf8_is_refused_with_the_byte(
    arguments: tuple[str, ...], stdin: bytes, error: str
) -> None:
    ran = mesh("invoke", "a", *arguments, stdin=stdin)
    assert ran.code == 2
    assert ran.error_lines[0].startswith(error)


def test_a_prompt_beyond_any_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.cli.verbs.invoke.PROMPT_BYTES_MAX", 10)
    ran = mesh("invoke", "a", "-", stdin=b"x" * 11)
    assert ran.code == 2
    assert ran.error_lines[0] == "standard input holds more than the 10 bytes of a prompt"


def test_a_fault_of_mesh_is_two_lines_and_has_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(address: str) -> None:
        raise KeyError("oh")

    monkeypatch.setattr("mesh.cli.verbs.showing.MeshClient", broken)
    ran = mesh("status")
    assert ran.code == 1
    assert ran.error_lines[0] == "unexpected KeyError: 'oh'"
    assert "--traceback" in ran.error_lines[1]
    assert "Traceback" in mesh("--traceback", "status").err


@pytest.mark.parametrize(
    ("raised", "code", "lines"),
    [
        (KeyboardInterrupt(), 130, 0),
        (BrokenPipeError(), 141, 0),
        (OSError(28, "No space left on device"), 1, 2),
        (StorageError("full"), 1, 2),
    ],
)
def test_each_way_to_fail_has_its_code(
    raised: BaseException, code: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(address: str) -> None:
        raise raised

    monkeypatch.setattr("mesh.cli.verbs.showing.MeshClient", broken)
    monkeypatch.setattr(cli, "_forget_stdout", lambda: None)
    ran = mesh("status")
    assert ran.code == code
    assert len(ran.err.splitlines()) == lines


def test_a_reader_that_goes_away_is_no_news() -> None:
    """More output than a pipe holds, and nobody who reads it."""
    code = (
        "import sys; from mesh.cli import main, output; from mesh.cli.verbs import version\n"
        "version.__version__ = 'x' * 1_000_000; main.main()"
    )
    with subprocess.Popen(
        [MESH[0], "-c", code, "version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_ctrl_c_is_quiet(tmp_path: Path) -> None:
    """A command that waits for its controller is interrupted."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [*MESH, "status", "--controller", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            connection, _ = silent.accept()
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
            connection.close()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_full_disk_under_the_output_is_told() -> None:
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            [*MESH, "version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[0] == "error: No space left on device"


def test_a_port_in_use_is_two_lines_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = mesh("up", "--listen", address, "--home", str(tmp_path / "home"))
    assert ran.code == 1
    assert ran.error_lines[0] == f"cannot listen on {address}: address already in use"
    assert "--listen" in ran.error_lines[1]
    assert not (tmp_path / "home" / "logs").exists()


def test_a_home_that_cannot_be_written_is_two_lines(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    ran = mesh("up", "--listen", "127.0.0.1:0", "--home", str(tmp_path / "home"))
    assert ran.code == 1
    assert "cannot write" in ran.error_lines[0]
    assert "--home" in ran.error_lines[1]


def test_the_demo_names_the_one_place_that_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    ran = mesh("demo", "--home", str(file))
    assert (ran.code, ran.error_lines[0]) == (1, f"cannot write {file}/store: not a directory")
    assert "--home" in ran.error_lines[1]
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    ran = mesh("demo", "--home", str(tmp_path / "home"))
    assert (ran.code, ran.error_lines[0]) == (1, "cannot make a temporary folder: not a directory")
    assert "TMPDIR" in ran.error_lines[1]


@pytest.mark.parametrize(("file", "place"), [("bench", "bench/fidelity"), ("store", "store")])
def test_bench_fidelity_names_the_one_place_that_it_cannot_write(
    file: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("")
    ran = mesh("bench", "fidelity", "--home", str(tmp_path))
    assert ran.code == 1
    assert ran.error_lines[0].startswith(f"cannot write {tmp_path / place}: ")


def test_a_fleet_without_ray_is_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = mesh("fleet", "status", "--ray", "127.0.0.1:6379")
    assert ran.code == 1
    assert ran.error_lines == (
        "`mesh fleet` needs Ray, which is not installed",
        "pip install 'mesh-serve[ray]'",
    )


def test_the_command_line_begins_without_what_some_verbs_alone_need() -> None:
    """Each of them takes a tenth of a second, or is not there without an extra."""
    heavy = ("asyncio", "grpc", "google.protobuf", "starlette", "pydantic", "asyncpg", "ray")
    code = f"import sys, mesh.cli.main; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_json_of_nothing_is_still_json(tmp_path: Path) -> None:
    assert json.loads(mesh("store", "ls", "--home", str(tmp_path), "-o", "json").out) == []


def test_the_reference_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == page(), "run python scripts/gen_cli.py"


def test_signals_are_counted() -> None:
    with Stopping() as stopping:
        assert not stopping.asked()
        signal.raise_signal(signal.SIGTERM)
        assert (stopping.asked(), stopping.asked_again()) == (True, False)
        signal.raise_signal(signal.SIGINT)
        assert stopping.asked_again()


@pytest.mark.parametrize("after", range(1, 20))
def test_a_signal_never_waits_for_who_waits_for_it(after: int) -> None:
    """Whatever the main thread does when it comes: each line of `wait` in turn, and what it calls.
    The handler would wait for ever for a lock that the thread which it interrupts holds.
    """
    lines = 0

    def line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == after and event == "line":
            sys.settrace(None)
            signal.raise_signal(signal.SIGTERM)
        return line

    with Stopping() as stopping:
        sys.settrace(line)
        try:
            stopping.wait(0.001)
        finally:
            sys.settrace(None)
        assert stopping.asked() or lines < after


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_where_nobody_asks_the_first_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Stopping() as stopping:
        with pytest.raises(KeyboardInterrupt), stopping.interrupting():
            signal.raise_signal(number)
        assert (stopping.asked(), stopping.asked_again()) == (True, False)
        signal.raise_signal(number)
        assert stopping.asked_again()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_was_ignored_at_the_start_stays_so(number: signal.Signals) -> None:
    """By `nohup`, or by a shell that started it in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Stopping() as stopping:
            signal.raise_signal(number)
            with stopping.interrupting():
                signal.raise_signal(number)
            assert not stopping.asked()
            signal.raise_signal(signal.SIGTERM)
            assert stopping.asked()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_exit_codes_and_sigterm_arrive_whatever_the_parent_has_set() -> None:
    program = (
        "import signal, subprocess, sys\n"
        "from mesh.cli.main import main\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "sys.argv = ['mesh', '--version']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(subprocess.run(['false']).returncode, signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "1 set()"


def test_a_signal_that_came_before_interrupts_too() -> None:
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), stopping.interrupting():
            pytest.fail("nobody would see that it had come")
