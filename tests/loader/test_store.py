"""The store: each content once, found again at once, never half there, and clear about its disk."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from mesh.domain.errors import Cancelled, NotFound, StorageError, TornModel, Unavailable
from mesh_loader import locks, model_files
from mesh_loader import store as store_module
from mesh_loader.model_files import check_fetched, files_of
from mesh_loader.source_index import source_key
from mesh_loader.store import ModelStore
from tests.loader.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import write_tiny_llama

UNREACHED = "sha256-0000000000000000"


@pytest.fixture
def root(store: ModelStore) -> Path:
    return store.root


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def phases_of(store: ModelStore, source: str) -> list[str]:
    heard: list[str] = []
    store.import_model(source, lambda phase, share: heard.append(phase))
    return list(dict.fromkeys(heard))


def test_a_second_import_returns_at_once(store: ModelStore, gguf: Path) -> None:
    first = store.import_model(f"file://{gguf}")
    assert phases_of(store, f"file://{gguf}") == []
    assert store.import_model(f"file://{gguf}") == first
    assert store.find(f"file://{gguf}") == first
    assert store.get(first.info.model_id) == first
    assert store.models() == [first]


def test_an_empty_store_is_empty(store: ModelStore, root: Path) -> None:
    assert store.models() == []
    assert store.find("file:///nowhere.gguf") is None
    assert store.get(UNREACHED) is None
    assert store.get("../../etc") is None
    assert not root.exists()


def test_content_of_two_names_is_one_model(store: ModelStore, gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf.read_bytes())
    first = store.import_model(f"file://{gguf}")
    assert "convert weights" not in phases_of(store, f"file://{copy}")
    assert store.import_model(f"file://{copy}") == first
    assert len(store.models()) == 1


def test_a_changed_file_is_imported_beside_the_old_model(store: ModelStore, gguf: Path) -> None:
    first = store.import_model(f"file://{gguf}")
    write_tiny_gguf(gguf, metadata={"general.name": "another"})
    second = store.import_model(f"file://{gguf}")
    assert second.info.model_id != first.info.model_id
    assert [s.path for s in store.models()] == sorted([first.path, second.path])


def test_a_touched_file_is_hashed_again_but_not_converted(store: ModelStore, gguf: Path) -> None:
    store.import_model(f"file://{gguf}")
    os.utime(gguf, ns=(1, 1))
    assert phases_of(store, f"file://{gguf}") == ["hash", "done"]
    assert phases_of(store, f"file://{gguf}") == []


def test_a_new_file_in_a_folder_makes_another_model(store: ModelStore, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    first = store.import_model(f"file://{folder}")
    (folder / "README.md").write_text("not part of the model")
    assert phases_of(store, f"file://{folder}") == []
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    second = store.import_model(f"file://{folder}")
    assert second.info.stop_token_ids == (1, 7)
    assert second.path != first.path


def test_a_model_outlives_its_source(store: ModelStore, gguf: Path) -> None:
    stored = store.import_model(f"file://{gguf}")
    gguf.unlink()
    assert store.import_model(f"file://{gguf}") == stored


def test_a_removed_model_is_gone_and_can_come_back(store: ModelStore, gguf: Path) -> None:
    stored = store.import_model(f"file://{gguf}")
    (stored.path / "prepared").mkdir()
    (stored.path / "prepared" / "weights").write_bytes(b"x")
    store.remove(stored.info.model_id)
    assert store.models() == []
    assert store.find(f"file://{gguf}") is None
    assert not stored.path.exists()
    with pytest.raises(NotFound, match=stored.info.model_id):
        store.remove(stored.info.model_id)
    assert store.import_model(f"file://{gguf}").info == stored.info


def test_a_damaged_index_entry_only_costs_time(store: ModelStore, root: Path, gguf: Path) -> None:
    stored = store.import_model(f"file://{gguf}")
    for damage in (b"", b"{", b"[]", b'{"source": 1}', b"null"):
        (entry,) = (root / "sources").iterdir()
        entry.write_bytes(damage)
        assert store.find(f"file://{gguf}") is None
        assert store.import_model(f"file://{gguf}") == stored


def test_a_damaged_model_is_named(store: ModelStore, gguf: Path) -> None:
    stored = store.import_model(f"file://{gguf}")
    (stored.path / "model.json").write_text("{}")
    with pytest.raises(StorageError, match=stored.info.model_id):
        store.get(stored.info.model_id)
    (error,) = store.damaged()
    assert str(stored.path) in error.hint
    assert store.models() == []


def test_a_file_that_changes_while_it_is_imported_is_torn(store: ModelStore, gguf: Path) -> None:
    def progress(phase: str, share: float) -> None:
        if phase == "build tokenizer":
            os.utime(gguf, ns=(5, 5))

    with pytest.raises(TornModel, match=r"m\.gguf changed while it was imported"):
        store.import_model(f"file://{gguf}", progress)
    assert store.models() == []


def test_what_progress_raises_stops_the_import(store: ModelStore, root: Path, gguf: Path) -> None:
    for stop_at in ("hash", "build tokenizer", "convert weights"):

        def progress(phase: str, share: float, stop_at: str = stop_at) -> None:
            if phase == stop_at:
                raise Cancelled("enough")

        with pytest.raises(Cancelled):
            store.import_model(f"file://{gguf}", progress)
        assert store.models() == []
        assert not list((root / "staging").iterdir())


def test_stale_staging_is_swept_but_no_live_one(store: ModelStore, root: Path, gguf: Path) -> None:
    (root / "locks").mkdir(parents=True)
    for name in ("0123", "removed.sha256-1", "4567"):
        (root / "staging" / name).mkdir(parents=True)
        (root / "staging" / name / "part").write_bytes(b"x")
    with locks.locked(root / "locks" / "4567.lock", wait_s=0, on_wait=lambda: None):
        store.import_model(f"file://{gguf}")
    assert [path.name for path in (root / "staging").iterdir()] == ["4567"]


def test_the_wait_for_another_import_is_bounded(
    store: ModelStore, root: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "IMPORT_WAIT_S", 0.3)
    (root / "locks").mkdir(parents=True)
    key = source_key(f"file://{gguf}")
    heard: list[str] = []
    with (
        locks.locked(root / "locks" / f"{key}.lock", wait_s=0, on_wait=lambda: None),
        pytest.raises(Unavailable, match="another process has held"),
    ):
        store.import_model(f"file://{gguf}", lambda phase, share: heard.append(phase))
    assert set(heard) == {"wait for another import"}


def import_and_report(
    root: Path, source: str, start: Barrier, answers: "multiprocessing.Queue[tuple[str, bool]]"
) -> None:
    heard: list[str] = []
    start.wait()
    stored = ModelStore(root).import_model(source, lambda phase, share: heard.append(phase))
    answers.put((str(stored.path), "convert weights" in heard))


def test_processes_that_import_at_once_convert_once(root: Path, gguf: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    answers: multiprocessing.Queue[tuple[str, bool]] = context.Queue()
    processes = [
        context.Process(target=import_and_report, args=(root, f"file://{gguf}", start, answers))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    said = [answers.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert len({path for path, _ in said}) == 1
    assert sorted(converted for _, converted in said) == [False, False, True]


def test_too_little_space_is_known_before_the_work_and_the_numbers_are_told(
    store: ModelStore, root: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NearlyFull:
        f_bavail, f_frsize = 1000, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: NearlyFull())
    with pytest.raises(StorageError) as caught:
        store.import_model(f"file://{gguf}")
    assert "the disk has 3.9 MiB free (4096000 bytes)" in caught.value.message
    assert "m.gguf needs" in caught.value.message
    assert str(root) in caught.value.hint
    assert store.models() == []


def test_a_disk_that_fills_during_the_import_is_a_storage_error(root: Path, gguf: Path) -> None:
    """A real limit on file sizes stands in for the full disk; nothing is left behind."""

    # Not by a preexec_fn: that forks a process in which other tests may have used gRPC.
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = ["-m", "mesh_loader", "import", f"file://{gguf}", "--store", str(root)]
    child = subprocess.run(
        [sys.executable, "-c", limited, *command], capture_output=True, text=True, check=False
    )
    assert child.returncode == 1
    last = child.stdout.splitlines()[-1]
    assert '"StorageError"' in last
    assert "limit on file sizes is reached" in last
    assert "bytes)" in last
    assert not list((root / "models").iterdir())
    assert not list((root / "staging").iterdir())


def test_a_store_that_is_a_file_says_so(store: ModelStore, root: Path, gguf: Path) -> None:
    root.write_text("in the way")
    with pytest.raises(StorageError, match="the store cannot be written") as caught:
        store.import_model(f"file://{gguf}")
    assert str(root) in caught.value.hint
    with pytest.raises(StorageError):
        store.models()


def test_only_a_folders_model_files_count_and_in_order(tmp_path: Path) -> None:
    for name in ("b.json", "a.safetensors", "README.md", "c.py"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "sub.json").mkdir()
    assert [path.name for path in files_of(tmp_path)] == ["a.safetensors", "b.json"]


def test_holes_that_nobody_has_looked_at_count_as_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "HOLES_MAX", 2)
    with (tmp_path / "m.gguf").open("wb") as file:
        for begin in (8192, 16384, 24576):
            file.seek(begin)
            file.write(b"x" * 4096)
        file.truncate(model_files.SPARSE_BYTES_LEAST)
    with pytest.raises(TornModel, match="were never written"):
        check_fetched(tmp_path / "m.gguf")
