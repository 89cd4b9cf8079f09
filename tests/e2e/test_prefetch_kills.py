"""Nodes killed amid prefetches: what they leave is whole, and the cell serves on.

Moments are drawn from seeds: a few here, as many as MESH_KILL_SEEDS says.
"""

import os
import random
import time
from functools import partial
from pathlib import Path

from mesh_loader.store import ModelStore
from mesh_loader.upkeep import stored_damages
from tests.e2e.live_cell import LiveCell

SEEDS = int(os.environ.get("MESH_KILL_SEEDS", "4"))
PREFETCH_S = 1.2
"""About as long as an import ahead and the load after it take."""


def test_a_store_is_whole_and_the_cell_serves_whatever_prefetch_is_killed(
    cell: LiveCell, tiny_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "own"
    store = ModelStore(home / "store")
    cell.start_controller("--parked-s", "600")
    node = cell.start_node("n1", "--load-s", "0.2", home=home)
    cell.deploy("chat", tiny_model)
    cell.warm("chat")

    def begun_beyond(before: int) -> bool:
        return cell.client.status().prefetches.begun > before

    for seed in range(SEEDS):
        node.kill()
        cell.wait_for("the node to be gone", lambda: not cell.client.nodes())
        assert list(stored_damages(store)) == [], f"{seed=}"
        for stored in store.models():
            store.remove(stored.info.model_id)
        before = cell.client.status().prefetches.begun
        node = cell.start_node("n1", "--load-s", "0.2", home=home)
        cell.wait_for("a prefetch", partial(begun_beyond, before))
        time.sleep(random.Random(seed).uniform(0.0, PREFETCH_S))
    cell.warm("chat")
    assert list(stored_damages(store)) == []
