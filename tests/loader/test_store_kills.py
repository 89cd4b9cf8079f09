"""Killed imports, preparations and removals: the store is whole after each, and clears itself.

Each is killed before one of its changes or amid a file that it writes. Where, seeds say: a few
here, as many as MESH_KILL_SEEDS says.
"""

import os
import random
import signal
from pathlib import Path

from mesh.domain.model import WeightPrecision
from mesh_loader.prepared_key import openvino_key
from mesh_loader.store import ModelStore
from mesh_loader.upkeep import collect, stored_damages
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.prepared import write_prepared
from mesh_nodes.engines.openvino.weights import graph_weights
from tests.support.killed import UNBOUNDED, begin
from tests.support.tiny_model import write_tiny_llama

SEEDS = int(os.environ.get("MESH_KILL_SEEDS", "8"))
END_S_MAX = 60.0
IMPORT = "store.import_model(sys.argv[4])"
PREPARE = "from tests.loader.test_store_kills import prepare; prepare(store)"
COLLECT = "from mesh_loader.upkeep import collect; list(collect(store, originals=True))"
REMOVE = "[store.remove(stored.info.model_id) for stored in store.models()]"
CHANGES = {IMPORT: 20, PREPARE: 7, COLLECT: 5, REMOVE: 20}
"""That they make at least."""
WRITTEN_BYTES = {IMPORT: 70_000, PREPARE: 35_000}
"""Each of these writes a file that is at least this large: a lower limit kills it amid that
file.
"""


def prepare(store: ModelStore) -> None:
    precision = WeightPrecision.I8
    for stored in store.models():
        architecture, checkpoint = read_architecture(stored.path), Checkpoint(stored.path)
        weights = graph_weights(architecture, checkpoint, precision)
        write_prepared(stored.path, openvino_key(precision), weights)


def ready(store: ModelStore, source: str, what: str) -> None:
    """For all that this does."""
    for stored in store.models():
        store.remove(stored.info.model_id)
    if what is not IMPORT:
        store.import_model(source)
    if what in (COLLECT, REMOVE):
        prepare(store)


def left_of(store: ModelStore) -> list[Path]:
    """What the removal of leftovers has not taken."""
    scratch = "models/*/prepared/.*"
    for left in store.root.glob(scratch):
        os.utime(left, (0, 0))  # else it may be too young to be known as abandoned
    list(collect(store, originals=False))
    return [*store.root.glob(scratch), *store.root.glob("staging/*")]


def test_a_store_is_whole_whatever_is_killed(tmp_path: Path) -> None:
    source = f"file://{write_tiny_llama(tmp_path / 'model')}"
    store = ModelStore(tmp_path / "store")
    for seed in range(SEEDS):
        rng = random.Random(seed)
        what = tuple(CHANGES)[seed % len(CHANGES)]
        ready(store, source, what)
        change, bytes_max, end = rng.randint(1, CHANGES[what]), UNBOUNDED, signal.SIGKILL
        if what in WRITTEN_BYTES and rng.random() < 0.5:
            change, bytes_max, end = 0, rng.randrange(WRITTEN_BYTES[what]), signal.SIGXFSZ
        with begin(what, store.root, source, change=change, bytes_max=bytes_max) as victim:
            assert victim.wait(END_S_MAX) == -end, f"{seed=}"
        assert list(stored_damages(store)) == [], f"{seed=}"
        assert left_of(store) == [], f"{seed=}"
    store.import_model(source)
    assert len(store.models()) == 1
    assert list(stored_damages(store)) == []
