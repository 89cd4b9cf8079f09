"""Killed loads, and killed removals beside an instance that runs: the store is whole after each, is
cleared, loads what was killed, and nothing that is in use is taken.

A load is killed once one of the things that it makes is seen, a removal before one of its changes.
Which, seeds say: a few here, as many as MESH_KILL_SEEDS says.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path

import pytest

from mesh.domain.ids import InstanceId
from mesh.domain.model import ModelInfo
from mesh.domain.request import SamplingParams
from mesh_loader import locks
from mesh_loader.store import ModelStore, StoredModel
from mesh_loader.upkeep import collect, stored_damages
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.openvino.tiny import write_tiny
from tests.nodes.engines.serving import INSTANCE, load, request
from tests.support.killed import begin
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import until

SEEDS = int(os.environ.get("MESH_KILL_SEEDS", "3"))
LOAD = """
from mesh_nodes.engines.openvino import blob_maker
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.serving import load
blob_maker.NICE = blob_maker.WAITED_NICE = 0  # as `blobs_soon`
engine = OpenVinoEngine(threads=1, blobs_path=store.root / "compiled")
stored = store.get(sys.argv[4])
engine.prepare(stored.info, stored.path, lambda *_: None)
load(engine, stored.info, stored.path)
engine.blobs_made(60.0)
"""
"""All that a first load makes: prepared weights, the compiled graph, the shape's blob."""
MADE = (
    *("models/{}/prepared/.*", "models/{}/prepared/.*/*", "models/{}/prepared/[!.]*"),
    *("compiled/.making-*", "compiled/.making-*/*/*", "compiled/*.blob"),
)
"""One after the other, under the store's root."""
LATER_S_MAX = 0.05
"""After it was seen."""
END_S_MAX = 60.0
COLLECT = """
from mesh_loader.upkeep import collect
list(collect(store, originals=True))
"""
REMOVE = """
from mesh.domain.errors import Unavailable
for stored in store.models():
    try:
        store.remove(stored.info.model_id)
    except Unavailable:
        pass
"""
CHANGES = {COLLECT: 7, REMOVE: 20}
"""That they make at least."""
OTHER = InstanceId("other")


class _Store:
    """With a model that an instance here runs, as a node's would, and one that is loaded, prepared
    and removed by processes that are killed.
    """

    def __init__(self, folder: Path) -> None:
        tokenizer = write_tiny_llama(folder / "tokens") / "tokenizer.json"
        self._sources = []
        for seed, kind in enumerate(("llama", "qwen2")):
            source = write_tiny(folder / kind, seed=seed, kind=kind).path
            shutil.copy(tokenizer, source)
            self._sources.append(f"file://{source}")
        self.store = ModelStore(folder / "store")
        self.blobs = self.store.root / "compiled"
        self.used, self.other = (self.store.import_model(source).info for source in self._sources)
        self.engine = OpenVinoEngine(threads=1, blobs_path=self.blobs)
        self._in_use = locks.share(locks.model_lock(self.store.root, self.used.model_id))
        self._bring(self.used, INSTANCE)
        assert self.engine.blobs_made(60.0)
        self.expected = self.tokens(INSTANCE)
        self.expected_other = self.load_other()

    def close(self) -> None:
        self.engine.close()
        os.close(self._in_use)

    def got(self, info: ModelInfo) -> StoredModel:
        stored = self.store.get(info.model_id)
        assert stored is not None
        return stored

    def tokens(self, name: InstanceId) -> list[int]:
        asked = request("r", (5, 6, 7, 8), SamplingParams(max_tokens=8, temperature=0.0))
        self.engine.submit(name, asked)
        found: list[int] = []
        while len(found) < 8:
            for output in self.engine.step(name, 64).outputs:
                found += output.token_ids
        return found

    def load_other(self) -> list[int]:
        self._bring(self.other, OTHER)
        found = self.tokens(OTHER)
        self.engine.unload(OTHER)
        return found

    def _bring(self, info: ModelInfo, name: InstanceId) -> None:
        stored = self.got(info)
        self.engine.prepare(info, stored.path, lambda *_: None)
        load(self.engine, info, stored.path, instance_id=name)

    def ready(self, what: str) -> None:
        """The other model is stored, and of it derived what is then to be removed."""
        assert self.engine.blobs_made(60.0)
        if self.store.get(self.other.model_id) is not None:
            self.store.remove(self.other.model_id)
        self.store.import_model(self._sources[1])
        shutil.rmtree(self.blobs, ignore_errors=True)
        if what is not LOAD:
            self.engine.prepare(self.other, self.got(self.other).path, lambda *_: None)

    def left(self) -> list[Path]:
        """What no removal of leftovers takes yet."""
        for path in self._scratch():
            with suppress(FileNotFoundError):
                os.utime(path, (0, 0))  # else it may be too young to be known as abandoned
        list(collect(self.store, originals=False))
        return self._scratch()

    def _scratch(self) -> list[Path]:
        prepared = self.store.root.glob("models/*/prepared/.*")
        return [*self.blobs.glob(".making-*"), *prepared]

    def kill(self, what: str, rng: random.Random) -> None:
        """A process amid this, or a load right at its end."""
        root, model_id = self.store.root, self.other.model_id
        change = 0 if what is LOAD else rng.randint(1, CHANGES[what])
        with begin(what, root, model_id, change=change) as victim:
            if what is LOAD:
                made = [each.format(model_id) for each in MADE[rng.randrange(len(MADE)) :]]
                until(
                    lambda: (
                        any(glob(each, root_dir=root) for each in made) or victim.poll() is not None
                    ),
                    END_S_MAX,
                )
                time.sleep(rng.uniform(0.0, LATER_S_MAX))
                victim.kill()
            ended = victim.wait(END_S_MAX)
        assert ended == -signal.SIGKILL or (what is LOAD and ended == 0)


@pytest.fixture
def kept(tmp_path: Path, blobs_soon: None) -> Iterator[_Store]:
    found = _Store(tmp_path)
    yield found
    found.close()


def test_a_store_is_whole_and_what_runs_goes_on_whatever_is_killed(kept: _Store) -> None:
    weights = sorted(path.name for path in kept.got(kept.used).path.glob("*.safetensors"))
    for seed in range(SEEDS):
        rng = random.Random(seed)
        what = (LOAD, COLLECT, REMOVE)[seed % 3]
        kept.ready(what)
        kept.kill(what, rng)
        assert list(stored_damages(kept.store)) == [], f"{seed=}"
        used = kept.got(kept.used).path
        assert sorted(path.name for path in used.glob("*.safetensors")) == weights, f"{seed=}"
        assert list(used.glob("prepared/*/weights.bin")), f"{seed=}"
        assert kept.tokens(INSTANCE) == kept.expected, f"{seed=}"
        # Children of the victim's are killed by the system, a moment later.
        until(lambda: not kept.left())
        if kept.store.get(kept.other.model_id) is not None:
            assert kept.load_other() == kept.expected_other, f"{seed=}"
    assert len(weights) == 1
