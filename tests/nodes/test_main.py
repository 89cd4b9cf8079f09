"""The node agent's composition root: exit codes and two-line errors. tests/e2e has whole nodes."""

import mmap
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId
from mesh.domain.messages import InstanceLoaded, NodeHello
from mesh.domain.steps import LoadTier
from mesh_nodes.engines.choosing import BuiltEngine
from mesh_nodes.engines.vllm import installed_release
from mesh_nodes.kept_loads import KeptLoads
from mesh_nodes.main import main
from mesh_nodes.options import NodeOptions
from tests.support.scripted_engine import FOOTPRINT, ScriptedEngine

ENGINE_BYTES = 64 << 20


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What it wrote to stderr; nothing may go to stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_gpu_node_without_a_driver_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("mesh_nodes.gpus.ctypes.CDLL", missing)
    assert main(["--device", "gpu", "--home", str(tmp_path)]) == 1
    error, hint = _lines(capsys)
    assert error.startswith("error: this machine has no NVIDIA driver")
    assert hint.startswith("hint: start the node with --device cpu")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "error: the vLLM engine is not installed"),
        ({"vllm": "0.9.2"}, "error: vllm 0.9.2 is installed; this build of mesh works with"),
        ({"vllm": "0.32.0"}, "error: vllm 0.32.0 is built for GPUs, and this node is a CPU"),
    ],
)
def test_a_vllm_that_does_not_fit_is_refused_before_it_is_imported(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    said: str,
) -> None:
    from mesh_nodes.engines import vllm

    def version_of(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(vllm, "installed_release", lambda: installed_release(version_of))
    assert main(["--engine", "vllm", "--home", str(tmp_path)]) == 1
    error, hint = _lines(capsys)
    assert error.startswith(said)
    assert hint.startswith("hint: ")


def test_a_missing_engine_package_names_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("mesh_nodes.engines.openvino")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(["--home", str(tmp_path)]) == 1
    error, hint = _lines(capsys)
    assert error.startswith("error: the engine of CPU nodes is not installed")
    assert "'openvino'" in error
    assert hint == "hint: pip install 'mesh-serve[cpu]'"


@pytest.mark.parametrize("arguments", [["--nmae", "x"], ["--threads", "many"], ["--memory", "x"]])
def test_wrong_usage_is_two_lines(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    error, hint = _lines(capsys)
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[NodeHello]:
    """The hellos of the agents that are started, none of which does anything."""
    told: list[NodeHello] = []

    class Recorded:
        clean = True

        def __init__(self, *, identity: NodeHello, **rest: object) -> None:
            told.append(identity)

        def stop(self) -> None: ...

        async def run(self) -> None: ...

    monkeypatch.setattr("mesh_nodes.main.Agent", Recorded)
    return told


def test_a_node_tells_its_fingerprint(told: list[NodeHello], tmp_path: Path) -> None:
    """With the threads that it computes with, and the engine that it has."""
    arguments = ["--home", str(tmp_path), "--threads", "3"]
    assert main(arguments, engine_of=lambda options: ScriptedEngine()) == 0
    (hello,) = told
    assert re.fullmatch(r"cpu/[^/ ]+/3-threads/([^/ ]+/)?scripted-1", hello.fingerprint)


def test_a_node_tells_its_limit_and_its_own_part(told: list[NodeHello], tmp_path: Path) -> None:
    """The latter once the engine is there."""
    held: list[mmap.mmap] = []

    def engine_of(options: NodeOptions) -> ScriptedEngine:
        # Pages of its own: the allocator would take what other tests have left it.
        held.append(mmap.mmap(-1, ENGINE_BYTES))
        held[0].write(bytes(range(256)) * (ENGINE_BYTES // 256))
        return ScriptedEngine()

    arguments = ["--home", str(tmp_path), "--memory", "2GiB"]
    assert main(arguments, lambda options: ScriptedEngine()) == 0  # what it imports is there
    before_bytes = psutil.Process().memory_info().rss
    assert main(arguments, engine_of) == 0
    hello = told[-1]
    assert hello.memory_bytes == 2 << 30
    assert ENGINE_BYTES * 0.5 < hello.base_bytes - before_bytes < ENGINE_BYTES * 2


def test_what_other_processes_hold_is_not_for_loads(told: list[NodeHello], tmp_path: Path) -> None:
    for kept_bytes in (0, 1 << 29):
        built = BuiltEngine(ScriptedEngine(), lambda: 1 << 20, kept_bytes=kept_bytes)
        arguments = ["--home", str(tmp_path), "--memory", "2GiB"]
        assert main(arguments, lambda options, built=built: built) == 0  # type: ignore[misc]
        assert told[-1].base_bytes == (1 << 20) + kept_bytes


def test_what_a_load_takes_is_measured_once(told: list[NodeHello], tmp_path: Path) -> None:
    asked: list[float] = []

    def least_load_s() -> float:
        asked.append(0.25)
        return 0.25

    def start() -> KeptLoads:
        engine = BuiltEngine(ScriptedEngine(), lambda: 1 << 20, least_load_s=least_load_s)
        assert main(["--home", str(tmp_path), "--memory", "2GiB"], lambda options: engine) == 0
        return KeptLoads(tmp_path, told[-1].fingerprint)

    ((tier, rate),) = start().rates()
    assert (tier, rate.fixed_s, len(asked)) == (LoadTier.DISK, 0.25, 1)
    loaded = InstanceLoaded(
        instance_id=InstanceId("i"), footprint=FOOTPRINT, kv_blocks=1, elapsed_s=2.0
    )
    start().note(loaded)
    ((_, rate),) = start().rates()
    assert rate.load_s(FOOTPRINT.weights_bytes) == pytest.approx(2.0)
    assert len(asked) == 2, "not at the third start"


def test_a_node_that_cannot_measure_starts(told: list[NodeHello], tmp_path: Path) -> None:
    def least_load_s() -> float:
        raise EngineError("a graph cannot be compiled")

    engine = BuiltEngine(ScriptedEngine(), lambda: 1 << 20, least_load_s=least_load_s)
    assert main(["--home", str(tmp_path), "--memory", "2GiB"], lambda options: engine) == 0
    assert KeptLoads(tmp_path, told[-1].fingerprint).rates() == ()


def test_a_limit_that_leaves_nothing_for_models_is_refused_with_both_figures(
    capsys: pytest.CaptureFixture[str], told: list[NodeHello], tmp_path: Path
) -> None:
    arguments = ["--home", str(tmp_path), "--memory", "3MiB"]
    assert main(arguments, engine_of=lambda options: ScriptedEngine()) == 2
    error, hint = _lines(capsys)
    assert re.fullmatch(
        r"error: the node's process may take 3\.0 MiB \(--memory\), and takes [0-9.]+ [MG]iB "
        r"without any model",
        error,
    )
    assert hint.startswith("hint: give --memory more")
    assert told == [], "no agent was started"


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--join HOST:PORT" in capsys.readouterr().out


def test_a_state_folder_that_cannot_be_made_is_a_storage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["--home", str(tmp_path / "file")]) == 1
    error, hint = _lines(capsys)
    assert (
        error == f"error: the model store {tmp_path}/file/store cannot be written: not a directory"
    )
    assert hint.startswith("hint: choose a state folder")


def test_a_journal_that_cannot_be_written_is_a_storage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    journal = tmp_path / "missing" / "journal.jsonl"
    assert main(["--home", str(tmp_path), "--journal", str(journal)]) == 1
    assert _lines(capsys)[0].startswith(f"error: cannot write the journal {journal}")
