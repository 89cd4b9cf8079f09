"""Killed imports and removals of leftovers: the store is whole after each, and clears itself.

Moments are drawn from seeds: a few here, as many as MESH_KILL_SEEDS says.
"""

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from mesh_loader.store import ModelStore
from mesh_loader.upkeep import collect, stored_damages
from tests.support.tiny_model import LlamaShape, write_llama
from tests.support.waiting import until

SEEDS = int(os.environ.get("MESH_KILL_SEEDS", "6"))
IMPORT = (
    "from mesh_loader.store import ModelStore as S; S(Path(sys.argv[1])).import_model(sys.argv[2])"
)
COLLECT = (
    "from mesh_loader.store import ModelStore as S; from mesh_loader.upkeep import collect; "
    "list(collect(S(Path(sys.argv[1])), originals=True))"
)
REMOVE = (
    "from mesh_loader.store import ModelStore as S; s = S(Path(sys.argv[1])); "
    "[s.remove(m.info.model_id) for m in s.models()]"
)
PREPARE = (
    "from mesh_nodes.engines.openvino.compilation import Compiler; "
    "from mesh_nodes.engines.openvino.weights import WeightPrecision; "
    "from mesh_loader.store import ModelStore as S; "
    "c = Compiler(threads=1, weights=WeightPrecision.I8); "
    "[c.prepare(m.info, m.path, lambda *_: None) for m in S(Path(sys.argv[1])).models()]"
)


def child(what: str, root: Path, source: str) -> "subprocess.Popen[bytes]":
    code = f"import sys; from pathlib import Path; {what}"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root), source], stderr=subprocess.DEVNULL
    )


def left_of(store: ModelStore) -> list[Path]:
    """What no removal of leftovers takes yet."""
    for left in store.root.glob("models/*/prepared/.*"):
        with suppress(FileNotFoundError):
            os.utime(left, (0, 0))  # else it may be too young to be known as abandoned
    list(collect(store, originals=False))
    return list(store.root.glob("models/*/prepared/.*"))


def test_a_store_is_whole_whatever_is_killed(tmp_path: Path) -> None:
    shape = LlamaShape(hidden=256, intermediate=1024, layers=8)
    source = f"file://{write_llama(tmp_path / 'model', shape)}"
    store = ModelStore(tmp_path / "store")
    begun_s = time.monotonic()
    assert child(IMPORT, store.root, source).wait() == 0
    whole_s = time.monotonic() - begun_s
    for seed in range(SEEDS):
        rng = random.Random(seed)
        what = (IMPORT, PREPARE, COLLECT, REMOVE)[seed % 4]
        victim = child(what, store.root, source)
        time.sleep(rng.uniform(0.2, 1.2) * whole_s)
        victim.kill()
        victim.wait()
        assert list(stored_damages(store)) == [], f"{seed=}"
        # A child of the victim's is killed by the system, a moment later.
        until(lambda: not left_of(store))
        assert not list(store.root.glob("staging/*")), f"{seed=}"
    store.import_model(source)
    assert len(store.models()) == 1
    assert list(stored_damages(store)) == []
