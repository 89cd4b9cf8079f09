"""Child processes: none is left running, however they and their parent end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh.cli import children
from mesh.cli.children import Child
from tests.support.waiting import alive, until


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def started(modules: Path) -> Iterator[Callable[[str], Child]]:
    """Starts a child that runs this text, and waits until it has said `up`."""
    begun: list[Child] = []

    def start(code: str) -> Child:
        name = f"child{len(begun)}"
        (modules / f"{name}.py").write_text(f"import sys, time\n{code}\n")
        begun.append(children.start(name, name, ["x"], modules / "logs" / f"{name}.log"))
        until(lambda: "up" in begun[-1].log_tail() or not begun[-1].running)
        return begun[-1]

    yield start
    children.stop(begun, hurry=lambda: True)


SLEEP = "print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))\n"
    "print('up', flush=True)\nwhile True: time.sleep(1)"
)


def with_one_below(modules: Path) -> str:
    """What starts a process of its own, whose id it leaves in the folder."""
    return (
        "import subprocess\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(modules / 'pid')!r}, 'w').write(str(below.pid))\n{SLEEP}"
    )


def test_a_child_has_its_arguments_and_its_log(started: Callable[[str], Child]) -> None:
    child = started("print(__name__, sys.argv[1:], 'up', sep='\\n', flush=True); time.sleep(600)")
    assert child.log_tail() == ["__main__", "['x']", "up"]
    assert child.running


def test_a_child_leads_its_own_process_group(started: Callable[[str], Child]) -> None:
    child = started(SLEEP)
    assert os.getpgid(child.process.pid) == child.process.pid


def test_its_fate_and_last_lines_can_be_told(started: Callable[[str], Child]) -> None:
    child = started("[print('line', n) for n in range(100)]; sys.exit(3)")
    until(lambda: not child.running)
    assert child.fate() == "exited with code 3"
    assert child.log_tail()[-1] == "line 99"
    assert len(child.log_tail()) == children.LOG_TAIL_LINES


def test_a_runs_log_goes_on_after_a_restart_and_the_one_before_is_kept_once(modules: Path) -> None:
    (modules / "speaker.py").write_text("import sys; print(sys.argv[1])")
    log = modules / "logs" / "speaker.log"

    def ran(word: str, *, again: bool) -> Child:
        child = children.start("speaker", "speaker", [word], log, again=again)
        child.process.wait()
        return child

    assert ran("first", again=False).log_tail() == ["first"]
    assert ran("second", again=True).log_tail() == ["second"], "of its own part"
    assert log.read_text() == "first\nsecond\n"
    assert ran("third", again=False).log_tail() == ["third"]
    assert log.read_text() == "third\n"
    assert log.with_suffix(".previous.log").read_text() == "first\nsecond\n"


def test_what_a_child_that_ended_left_behind_is_cleared(
    started: Callable[[str], Child], modules: Path
) -> None:
    child = started(with_one_below(modules))
    child.process.kill()
    child.process.wait()
    pid = int((modules / "pid").read_text())
    assert alive(pid)
    children.clear(child)
    until(lambda: not alive(pid))


def test_stopping_ends_even_one_that_will_not(
    started: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "STOP_GRACE_S", 0.3)
    begun = [started(SLEEP), started(STUBBORN)]
    children.stop(begun)
    assert [child.fate() for child in begun] == ["was ended by SIGTERM", "was ended by SIGKILL"]
    assert "no" in begun[1].log_tail()


def test_stopping_ends_what_a_child_began(started: Callable[[str], Child], modules: Path) -> None:
    child = started(with_one_below(modules))
    pid = int((modules / "pid").read_text())
    children.stop([child])
    until(lambda: not alive(pid))


def test_children_end_with_a_parent_that_is_killed(modules: Path) -> None:
    """SIGKILL leaves the parent no time to stop anybody: the kernel must."""
    (modules / "sleeper.py").write_text(f"import time\n{SLEEP}\n")
    code = (
        "import sys, time; from pathlib import Path; from mesh.cli import children\n"
        "child = children.start('s', 'sleeper', [], Path(sys.argv[1]) / 's.log')\n"
        "print(child.process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(modules)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent, parent.stdout as told:
        pid = int(told.readline())
        log = modules / "s.log"
        until(lambda: log.exists() and "up" in log.read_text())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not alive(pid))
