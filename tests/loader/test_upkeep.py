"""What gc takes and what it leaves, what verify names, and that nothing in use is removed."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.domain.errors import Unavailable
from mesh_loader import locks
from mesh_loader.digests import write_index
from mesh_loader.prepared_key import is_current, openvino_key
from mesh_loader.store import ModelStore, StoredModel
from mesh_loader.upkeep import Leftover, collect, stored_damages
from tests.support.tiny_model import write_tiny_llama


@pytest.fixture
def stored(store: ModelStore, tmp_path: Path) -> StoredModel:
    return store.import_model(f"file://{write_tiny_llama(tmp_path / 'model')}")


@pytest.fixture
def used(store: ModelStore, stored: StoredModel) -> Iterator[None]:
    """As a node does it that has the model loaded."""
    descriptor = locks.share(locks.model_lock(store.root, stored.info.model_id))
    yield
    os.close(descriptor)


def prepare(stored: StoredModel, key: str = openvino_key("i8")) -> Path:
    folder = stored.path / "prepared" / key
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"derived")
    write_index(folder)
    return folder


def gc(store: ModelStore, *, originals: bool = False) -> list[str]:
    return [name_of(store, leftover) for leftover in collect(store, originals=originals)]


def name_of(store: ModelStore, leftover: Leftover) -> str:
    assert not leftover.path.exists()
    return str(leftover.path.relative_to(store.root))


def test_a_fresh_store_has_nothing_to_collect(store: ModelStore, stored: StoredModel) -> None:
    prepare(stored)
    assert list(stored_damages(store)) == []
    assert gc(store) == []
    assert gc(ModelStore(store.root / "nowhere"), originals=True) == []


def test_remains_go_and_what_is_written_stays(store: ModelStore, stored: StoredModel) -> None:
    torn = store.root / "staging" / "torn"
    scratch = stored.path / "prepared" / ".engine-dead"
    making = store.root / "compiled" / ".making-alive"
    for folder in (torn, scratch, making):
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
    with locks.locked_if_free(making):
        assert len(gc(store)) == 2
        assert making.exists()
    assert gc(store) == ["compiled/.making-alive"]


def test_an_import_cannot_begin_in_what_is_removed(store: ModelStore, stored: StoredModel) -> None:
    for name in ("0123", "4567"):
        (store.root / "staging" / name).mkdir()
    torn = store.torn()
    for folder in torn:
        with locks.locked_if_free(store.root / "locks" / f"{folder.name}.lock") as free:
            assert not free
    # Begun between the look at the one and the look at the other.
    torn = store.torn()
    assert next(torn).name == "0123"
    with locks.locked_if_free(store.root / "locks" / "4567.lock") as free:
        assert free
        assert list(torn) == []


def test_a_node_waits_no_longer_for_who_takes_a_model_out_than_it_may(store: ModelStore) -> None:
    lock = locks.model_lock(store.root, "sha256-0123456789abcdef")
    with store.unused("sha256-0123456789abcdef") as free:
        assert free
        with pytest.raises(BlockingIOError):
            locks.share(lock)
    os.close(locks.share(lock))


def test_a_file_system_without_locks_of_folders_keeps_what_may_be_written(
    store: ModelStore, stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = stored.path / "prepared" / ".engine-half"
    scratch.mkdir(parents=True)
    os.utime(scratch, (0, 0))

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locks.locked_if_free(scratch) as held:
        assert not held
    assert gc(store) == []
    assert scratch.exists()


def test_a_model_in_use_keeps_its_files(store: ModelStore, stored: StoredModel, used: None) -> None:
    prepare(stored)
    with pytest.raises(Unavailable, match="is in use by a node"):
        store.remove(stored.info.model_id)
    assert gc(store, originals=True) == []
    assert list(stored_damages(store)) == []


def test_what_is_derived_elsewise_is_no_original(store: ModelStore, stored: StoredModel) -> None:
    prepare(stored, "openvino-i8-v0")
    assert gc(store, originals=True) == []


def test_originals_go_where_prepared_are_whole(store: ModelStore, stored: StoredModel) -> None:
    assert gc(store, originals=True) == []
    weights = prepare(stored) / "weights.bin"
    weights.write_bytes(b"damaged")
    assert gc(store, originals=True) == []
    weights.write_bytes(b"derived")
    assert gc(store, originals=True) == [f"models/{stored.info.model_id}/model.safetensors"]
    assert list(stored_damages(store)) == [], "nobody misses them"
    assert store.get(stored.info.model_id) == stored


def test_every_kind_of_file_is_verified(store: ModelStore, stored: StoredModel) -> None:
    weights = prepare(stored) / "weights.bin"
    blob = store.root / "compiled" / "key.blob"
    blob.parent.mkdir()
    blob.write_bytes(b"no blob")
    weights.write_bytes(b"derivex")
    (stored.path / "model.json").write_bytes(b"{")
    damaged = {damage.path for damage in stored_damages(store)}
    assert damaged == {stored.path / "model.json", weights, blob}


def test_what_an_older_engine_derived_is_not_read() -> None:
    assert all(is_current(openvino_key(precision)) for precision in ("i8", "i4", "file"))
    assert not is_current("openvino-i4-v2"), "its offsets were f32"
    assert not is_current("openvino-i8-v1")
    assert not is_current("vllm-i8-v2")
