"""Prepared weights that stay in the page cache: which ones, when they are read, and when not."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh.domain.errors import TornModel
from mesh.domain.steps import LoadTier
from mesh_loader.page_cache import cached_share
from mesh_nodes.engines.openvino import OpenVinoEngine, page_keeper
from mesh_nodes.engines.openvino.page_keeper import PageKeeper
from tests.nodes.engines.openvino.tiny import write_tiny
from tests.nodes.engines.serving import INSTANCE, load
from tests.support.page_cache import forget
from tests.support.waiting import until

FOLDER_BYTES = 1 << 20


class Kept:
    """A keeper of folders that are checked by their first byte."""

    def __init__(self, budget_folders: int) -> None:
        self.checked: list[str] = []
        self.resting = True
        self.keeper = PageKeeper(
            budget_folders * FOLDER_BYTES, check=self._check, rests=lambda: self.resting
        )

    def _check(self, folder: Path, between: Callable[[], None]) -> None:
        between()
        self.checked.append(folder.name)
        if (folder / "weights").read_bytes()[:1] != b"\0":
            raise TornModel(f"{folder} is damaged")

    def has(self, folders: list[Path]) -> list[str]:
        return [folder.name for folder in folders if self.keeper.has(folder)]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Of four models, none of which is in the page cache."""
    monkeypatch.setattr(page_keeper, "LOOK_S", 0.01)
    monkeypatch.setattr(page_keeper, "REST_SHARE", 0.0)
    found = [tmp_path / name for name in "abcd"]
    for folder in found:
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(FOLDER_BYTES))
        forget(folder / "weights")
    return found


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept(2)
    yield made
    made.keeper.close()


def test_what_was_used_last_stays_within_the_budget(folders: list[Path], kept: Kept) -> None:
    kept.keeper.offer(folders)
    until(lambda: kept.has(folders) == ["a", "b"])
    assert kept.checked == ["a", "b"]
    assert cached_share(folders[2] / "weights") == 0.0, "there is no room for more"
    kept.keeper.use(folders[3])
    until(lambda: kept.has(folders) == ["a", "d"])
    kept.keeper.offer(folders[1:3])
    until(lambda: kept.has(folders) == ["b", "c"])


def test_what_the_kernel_takes_is_read_again(folders: list[Path], kept: Kept) -> None:
    kept.keeper.offer(folders[:1])
    until(lambda: kept.has(folders) == ["a"])
    forget(folders[0] / "weights")
    until(lambda: cached_share(folders[0] / "weights") == 1.0)


def test_nothing_is_read_while_the_engine_works(folders: list[Path], kept: Kept) -> None:
    kept.resting = False
    kept.keeper.offer(folders)
    until(lambda: any(t.name == "mesh-page-keeper" for t in threading.enumerate()))
    threading.Event().wait(0.1)
    assert not kept.checked
    kept.resting = True
    until(lambda: kept.has(folders) == ["a", "b"])


def test_what_is_damaged_is_not_kept_and_not_asked_again(
    folders: list[Path], kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    (folders[0] / "weights").write_bytes(b"\1" * FOLDER_BYTES)
    kept.keeper.offer(folders[:2])
    until(lambda: kept.has(folders) == ["b"])
    looked = len(kept.checked)
    threading.Event().wait(0.1)
    assert len(kept.checked) == looked
    assert f"{folders[0]} is not kept in memory" in caplog.text
    (folders[0] / "weights").write_bytes(bytes(FOLDER_BYTES))
    kept.keeper.use(folders[0])
    until(lambda: kept.has(folders) == ["a", "b"])


def test_a_keeper_closes_amid_a_wait_and_without_a_budget_does_nothing(
    folders: list[Path],
) -> None:
    waiting = Kept(2)
    waiting.resting = False
    waiting.keeper.offer(folders)
    waiting.keeper.close()
    assert not waiting.checked
    idle = Kept(0)
    idle.keeper.offer(folders)
    idle.keeper.close()
    assert not idle.checked


def test_a_model_whose_weights_are_kept_is_told_of_and_loaded_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_keeper, "LOOK_S", 0.01)
    model = write_tiny(tmp_path / "model")
    engine = OpenVinoEngine(threads=1, blobs_path=tmp_path / "blobs", page_cache_bytes=1 << 30)
    engine.prepare(model.info, model.path, lambda phase, share: None)
    assert load(engine, model.info, model.path).tier is LoadTier.DISK
    assert engine.blobs_made(60.0)
    engine.unload(INSTANCE)

    def told() -> set[LoadTier]:
        return {held.tier for held in engine.prepared([model.path])}

    assert told() == {LoadTier.PREPARED}
    until(lambda: told() == {LoadTier.CACHED})
    assert load(engine, model.info, model.path).tier is LoadTier.CACHED
    engine.close()
