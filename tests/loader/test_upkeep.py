"""What gc takes and what it leaves, what verify names, and that nothing in use is removed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.domain.errors import Unavailable
from mesh_loader import locks
from mesh_loader.digests import write_index
from mesh_loader.store import ModelStore, StoredModel
from mesh_loader.upkeep import Leftover, collect, stored_damages
from tests.support.tiny_model import write_tiny_llama


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def stored(store: ModelStore, tmp_path: Path) -> StoredModel:
    return store.import_model(f"file://{write_tiny_llama(tmp_path / 'model')}")


@pytest.fixture
def used(store: ModelStore, stored: StoredModel) -> Iterator[None]:
    """As a node does it that has the model loaded."""
    descriptor = locks.share(locks.model_lock(store.root, stored.info.model_id))
    yield
    os.close(descriptor)


def prepare(stored: StoredModel) -> Path:
    folder = stored.path / "prepared" / "engine"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"derived")
    write_index(folder)
    return folder


def gc(store: ModelStore, *, originals: bool = False) -> list[str]:
    return [name_of(store, leftover) for leftover in collect(store, originals=originals)]


def name_of(store: ModelStore, leftover: Leftover) -> str:
    assert not leftover.path.exists()
    return str(leftover.path.relative_to(store.root))


def test_a_fresh_store_is_whole_and_has_nothing_to_collect(
    store: ModelStore, stored: StoredModel
) -> None:
    prepare(stored)
    assert list(stored_damages(store)) == []
    assert gc(store) == []
    assert gc(ModelStore(store.root / "nowhere"), originals=True) == []


def test_remains_of_the_killed_go_and_what_is_being_written_stays(
    store: ModelStore, stored: StoredModel
) -> None:
    torn = store.root / "staging" / "torn"
    scratch = stored.path / "prepared" / ".engine-dead"
    making = store.root / "compiled" / ".making-alive"
    for folder in (torn, scratch, making):
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
    with locks.held_if_free(making):
        assert len(gc(store)) == 2
        assert making.exists()
    assert gc(store) == ["compiled/.making-alive"]


def test_a_model_in_use_keeps_its_files(store: ModelStore, stored: StoredModel, used: None) -> None:
    prepare(stored)
    with pytest.raises(Unavailable, match="is in use by a node"):
        store.remove(stored.info.model_id)
    assert gc(store, originals=True) == []
    assert list(stored_damages(store)) == []


def test_originals_go_only_where_prepared_weights_are_whole(
    store: ModelStore, stored: StoredModel
) -> None:
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


def test_a_removed_model_can_be_imported_again(
    store: ModelStore, stored: StoredModel, tmp_path: Path
) -> None:
    store.remove(stored.info.model_id)
    assert store.models() == []
    assert store.import_model(f"file://{tmp_path / 'model'}") == stored
