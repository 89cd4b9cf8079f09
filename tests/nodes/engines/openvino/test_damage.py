"""Damaged files: each is named by the store and by the load that meets it, and no engine ends.

Flips and truncations are drawn from seeds: a few here, as many as MESH_DAMAGE_SEEDS says.
"""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.domain.errors import ModelError, TornModel
from mesh.domain.model import KvPrecision, ModelInfo
from mesh.domain.request import SamplingParams
from mesh.domain.steps import LoadTier
from mesh_loader.store import ModelStore
from mesh_loader.upkeep import collect, stored_damages
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.openvino.tiny import write_tiny
from tests.nodes.engines.serving import INSTANCE, load, request, run
from tests.support.tiny_model import write_tiny_llama

SEEDS = int(os.environ.get("MESH_DAMAGE_SEEDS", "6"))
PROMPT = (5, 6, 7, 8)
IMPORTED = (LoadTier.PREPARED, LoadTier.CACHED)


class Damaged:
    """A store with a model that is prepared and has its blob, and an engine."""

    def __init__(self, root: Path, info: ModelInfo) -> None:
        self.store = ModelStore(root)
        self.info = info
        self.path = root / "models" / info.model_id
        self.engine = self.another_engine()

    def load(self, engine: OpenVinoEngine | None = None) -> LoadTier | None:
        """As a node does it; from where it came."""
        engine = engine or self.engine
        engine.prepare(self.info, self.path, lambda *_: None)
        return load(engine, self.info, self.path).tier

    def another_engine(self, *, imports: bool = True) -> OpenVinoEngine:
        blobs_path = self.store.root / "compiled" if imports else None
        return OpenVinoEngine(threads=1, kv=KvPrecision.F32, blobs_path=blobs_path)

    def files(self) -> list[Path]:
        places = (self.path, self.path / "prepared", self.store.root / "compiled")
        return sorted(f for place in places for f in place.rglob("*") if f.is_file())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, blobs_soon: None) -> Damaged:
    """For copies."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_tiny(folder / "model").path
    tokenizer = write_tiny_llama(folder / "other") / "tokenizer.json"
    shutil.copy(tokenizer, source)
    info = ModelStore(folder / "store").import_model(f"file://{source}").info
    made = Damaged(folder / "store", info)
    made.load()
    assert made.engine.blobs_made(60.0)
    assert len(list((folder / "store" / "compiled").iterdir())) == 1
    made.engine.close()
    return made


@pytest.fixture
def damaged(whole: Damaged, tmp_path: Path) -> Iterator[Damaged]:
    """With an instance that was imported."""
    shutil.copytree(whole.store.root, tmp_path / "store")
    found = Damaged(tmp_path / "store", whole.info)
    assert found.load() in IMPORTED
    yield found
    found.engine.close()


def tokens(engine: OpenVinoEngine) -> list[int]:
    asked = request("r", PROMPT, SamplingParams(max_tokens=8, temperature=0.0))
    return run(engine, asked).tokens[asked.request_id]


def harm(path: Path, rng: random.Random) -> None:
    """Cut it off or flip a bit: in place, where nobody maps it."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if rng.random() < 0.3:
        content = content[:at]
    else:
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_whatever_is_damaged_is_named_and_never_computed_with(damaged: Damaged) -> None:
    """While two instances run on the very files that are damaged, one compiled and one imported."""
    compiled = damaged.another_engine(imports=False)
    assert damaged.load(compiled) is LoadTier.DISK
    expected = tokens(compiled)
    assert tokens(damaged.engine) == expected
    assert list(stored_damages(damaged.store)) == []
    saved = damaged.store.root.with_name("saved")
    shutil.copytree(damaged.path, saved / "model")
    shutil.copytree(damaged.store.root / "compiled", saved / "compiled")
    for seed in range(SEEDS):
        rng = random.Random(seed)
        victim = rng.choice(damaged.files())
        harm(victim, rng)
        named = [damage.path for damage in stored_damages(damaged.store)]
        assert victim in named, f"{seed=} {victim} is not among {named}"
        fresh = damaged.another_engine()
        said = ""
        try:
            damaged.load(fresh)
        except TornModel as error:
            said = error.message
        else:
            assert tokens(fresh) == expected, f"{seed=} {victim}"
        assert not said or victim.name in said, f"{seed=} {victim}: {said}"
        fresh.close()
        for running in (compiled, damaged.engine):
            assert tokens(running) == expected, f"{seed=} {victim}"
        for name, place in (("model", damaged.path), ("compiled", damaged.store.root / "compiled")):
            shutil.rmtree(place)
            shutil.copytree(saved / name, place)
    compiled.close()


def test_weights_that_somebody_writes_are_refused_by_the_agent(damaged: Damaged) -> None:
    damaged.engine.unload(INSTANCE)
    (weights,) = damaged.path.glob("prepared/*/weights.bin")
    with (
        weights.open("ab"),
        pytest.raises(ModelError, match=r"weights\.bin: it is open for writing"),
    ):
        damaged.load()
    damaged.load()


def test_prepared_weights_that_are_damaged_are_derived_anew(damaged: Damaged) -> None:
    expected = tokens(damaged.engine)
    damaged.engine.unload(INSTANCE)
    (weights,) = damaged.path.glob("prepared/*/weights.bin")
    content = bytearray(weights.read_bytes())
    content[1000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(TornModel, match=r"weights\.bin is damaged: bytes 0 to"):
        damaged.load()
    damaged.load()
    assert tokens(damaged.engine) == expected


def test_a_model_without_its_originals_loads_until_something_needs_them(damaged: Damaged) -> None:
    expected = tokens(damaged.engine)
    gone = [left.path.name for left in collect(damaged.store, originals=True)]
    assert gone == ["model.safetensors"]
    damaged.engine.unload(INSTANCE)
    damaged.load()
    assert tokens(damaged.engine) == expected
    damaged.engine.unload(INSTANCE)
    shutil.rmtree(damaged.path / "prepared")
    with pytest.raises(TornModel, match=r"removed by `mesh store gc --originals`"):
        damaged.load()
