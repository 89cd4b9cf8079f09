"""Prepared weights that stay in the page cache: which ones, when they are read, and when not."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.errors import TornModel
from mesh.domain.steps import LoadTier, StepResult
from mesh_loader.page_cache import cached_share
from mesh_nodes.engines.openvino import engine as engine_module
from mesh_nodes.engines.openvino import page_keeper
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.instance import Instance
from mesh_nodes.engines.openvino.page_keeper import PageKeeper
from tests.nodes.engines.openvino.tiny import TinyModel, write_tiny
from tests.nodes.engines.serving import INSTANCE, load, request, run
from tests.support.page_cache import forget
from tests.support.waiting import until

FOLDER_BYTES = 1 << 20


class Kept:
    """A keeper of folders that are checked by their first byte."""

    def __init__(self, budget_folders: int) -> None:
        self.checked: list[str] = []
        self.resting = True
        self.loaded: set[Path] = set()
        self.asked = self.looks = 0
        self.keeper = PageKeeper(
            budget_folders * FOLDER_BYTES,
            check=self._check,
            rests=self._rests,
            loaded=self._loaded,
        )

    def _rests(self) -> bool:
        self.asked += 1
        return self.resting

    def _loaded(self) -> set[Path]:
        self.looks += 1
        return self.loaded

    def _check(self, folder: Path, between: Callable[[], None]) -> None:
        between()
        self.checked.append(folder.name)
        if (folder / "weights").read_bytes()[:1] != b"\0":
            raise TornModel(f"{folder} is damaged")

    def forget(self, folder: Path) -> None:
        """Not while it reads: of what is read amid that, some would stay and some would not."""
        self.resting = False
        forget(folder / "weights")
        self.resting = True

    def has(self, folders: list[Path]) -> list[str]:
        return [folder.name for folder in folders if self.keeper.has(folder)]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of four models, none of which is in the page cache."""
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
    kept.forget(folders[0])
    until(lambda: cached_share(folders[0] / "weights") == 1.0)


def test_nothing_is_read_while_the_engine_works(folders: list[Path], kept: Kept) -> None:
    kept.resting = False
    kept.keeper.offer(folders)
    until(lambda: kept.asked > 2)
    assert not kept.checked
    kept.resting = True
    until(lambda: kept.has(folders) == ["a", "b"])


def test_what_is_damaged_is_not_kept_until_it_is_another(
    folders: list[Path], kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, other, fresh = folders[:3]
    (damaged / "weights").write_bytes(b"\1" * FOLDER_BYTES)
    kept.keeper.offer([damaged, other])
    until(lambda: kept.has(folders) == ["b"])
    looks = kept.looks
    until(lambda: kept.looks > looks + 2)
    assert kept.checked.count("a") == 1
    assert f"{damaged} is not kept in memory" in caplog.text
    damaged.rename(damaged.with_name("old"))
    until(lambda: kept.has(folders) == ["b"])
    fresh.rename(damaged)
    until(lambda: kept.has(folders) == ["a", "b"])


def test_what_is_loaded_gives_way_to_what_is_not(folders: list[Path], kept: Kept) -> None:
    kept.loaded = {folders[0]}
    kept.keeper.use(folders[0])
    kept.keeper.offer(folders)
    until(lambda: kept.has(folders) == ["b", "c"])


def test_what_was_read_again_is_paid_for_by_a_pause(
    folders: list[Path], kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what had been in the cache before is paid for, not what had not."""
    kept.keeper.offer(folders[:1])
    until(lambda: kept.has(folders) == ["a"])
    monkeypatch.setattr(page_keeper, "REST_SHARE", 1e9)
    kept.forget(folders[0])
    until(lambda: kept.has(folders) == ["a"])
    kept.forget(folders[0])
    kept.keeper.offer(folders[:2])
    until(lambda: kept.has(folders) == ["b"])
    assert kept.checked == ["a", "a", "b"]


def test_a_keeper_closes_amid_a_wait_and_without_a_budget_never_begins(folders: list[Path]) -> None:
    waiting = Kept(2)
    waiting.resting = False
    waiting.keeper.offer(folders)
    until(lambda: waiting.asked > 0)
    waiting.keeper.close()
    assert not waiting.checked
    before = threading.active_count()
    Kept(0).keeper.offer(folders)
    assert threading.active_count() == before


def test_the_engine_rests_between_its_calls_and_a_while_after_them(
    engine: OpenVinoEngine, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "REST_S", 0.0)
    assert engine.rests()
    amid: list[bool] = []

    def note(phase: str, share: float) -> None:
        amid.append(phase != "loaded" and engine.rests())

    load(engine, tiny.info, tiny.path, progress=note)
    step = Instance.step

    def watched(instance: Instance, *turn: Any) -> StepResult:
        amid.append(engine.rests())
        return step(instance, *turn)

    monkeypatch.setattr(Instance, "step", watched)
    run(engine, request("r", range(10, 20)))
    assert amid
    assert not any(amid)
    assert engine.rests()
    monkeypatch.setattr(engine_module, "REST_S", 1e9)
    assert not engine.rests()


@pytest.mark.usefixtures("blobs_soon")
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

    try:
        assert told() == {LoadTier.PREPARED}
        until(lambda: told() == {LoadTier.CACHED})
        assert load(engine, model.info, model.path).tier is LoadTier.CACHED
    finally:
        engine.close()
