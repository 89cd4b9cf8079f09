"""What a node states of loads before it has had any: of those that it can try."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.compute.load_times import PRIORS
from mesh.domain.messages import InstanceLoaded
from mesh.domain.steps import HeldModel, LoadOrder, LoadTier
from mesh.runtime.engine import Progress
from mesh_loader.store import ModelStore
from mesh_nodes.load_probe import COMPILE_RATIO, tried_rates
from tests.support.scripted_engine import WEIGHTS_BYTES, ScriptedEngine
from tests.support.tiny_model import write_tiny_llama

IMPORT_S, SHARED_S = 0.5, 0.05


class SharingEngine(ScriptedEngine):
    """Imports the first instance, and lets the second share."""

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        shares = bool(self.memory())
        loaded = super().load(order, progress)
        return replace(
            loaded,
            elapsed_s=SHARED_S if shares else IMPORT_S,
            tier=LoadTier.HOST if shares else LoadTier.PREPARED,
        )


def held(store: ModelStore, tmp_path: Path) -> HeldModel:
    stored = store.import_model(f"file://{write_tiny_llama(tmp_path / 'tiny', seed=1)}")
    return HeldModel(model_id=stored.info.model_id, tier=LoadTier.PREPARED, context_tokens_max=64)


def test_a_prepared_model_is_loaded_twice_and_gone_before_the_node_serves(tmp_path: Path) -> None:
    engine, store = SharingEngine(), ModelStore(tmp_path / "store")
    rates = tried_rates(engine, store, [held(store, tmp_path)], 1 << 40)
    taken = {tier: rate.load_s(WEIGHTS_BYTES) for tier, rate in rates.items()}
    assert taken == {
        LoadTier.PREPARED: pytest.approx(IMPORT_S),
        LoadTier.CACHED: pytest.approx(IMPORT_S),
        LoadTier.HOST: pytest.approx(SHARED_S),
        LoadTier.DISK: pytest.approx(IMPORT_S * COMPILE_RATIO),
    }
    assert engine.memory() == ()


def test_what_the_page_cache_kept_meanwhile_stands_for_what_it_did_not(tmp_path: Path) -> None:
    class Kept(SharingEngine):
        def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
            loaded = super().load(order, progress)
            imported = loaded.tier is LoadTier.PREPARED
            return replace(loaded, tier=LoadTier.CACHED) if imported else loaded

    store = ModelStore(tmp_path / "store")
    rates = tried_rates(Kept(), store, [held(store, tmp_path)], 1 << 40)
    assert rates[LoadTier.CACHED] == rates[LoadTier.PREPARED]
    assert rates[LoadTier.DISK].load_s(WEIGHTS_BYTES) == pytest.approx(IMPORT_S * COMPILE_RATIO)


def test_what_the_first_load_of_a_process_pays_extra_is_not_stated(tmp_path: Path) -> None:
    class Warming(SharingEngine):
        warm = False

        def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
            loaded = super().load(order, progress)
            extra_s, self.warm = 0.0 if self.warm else 3.0, True
            return replace(loaded, elapsed_s=loaded.elapsed_s + extra_s)

    store = ModelStore(tmp_path / "store")
    rates = tried_rates(Warming(), store, [held(store, tmp_path)], 1 << 40)
    assert rates[LoadTier.PREPARED].load_s(WEIGHTS_BYTES) == pytest.approx(IMPORT_S)


def test_a_damaged_model_is_not_tried(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    model = held(store, tmp_path)
    (store.root / "models" / model.model_id / "model.json").write_text("{")
    assert tried_rates(SharingEngine(), store, [model], 1 << 40) == {}


def test_nothing_is_tried_without_a_prepared_model_or_without_room_for_two(tmp_path: Path) -> None:
    engine, store = SharingEngine(), ModelStore(tmp_path / "store")
    model = held(store, tmp_path)
    assert tried_rates(engine, store, [], 1 << 40) == {}
    assert tried_rates(engine, store, [model], WEIGHTS_BYTES) == {}
    assert LoadTier.PREPARED in PRIORS, "what is expected then"
