"""Nodes killed amid prefetches: what they leave is whole, and the cell serves on.

Each is killed a drawn moment after its prefetch has come so far, by one of EVENTS after the other:
as many times as MESH_KILL_SEEDS says.
"""

import os
import time
from functools import partial
from glob import glob
from pathlib import Path
from random import Random

from mesh.domain.lifecycle import InstanceState
from mesh_loader.store import ModelStore
from mesh_loader.upkeep import collect, stored_damages
from tests.e2e.live_cell import LiveCell, Process

KILLS = int(os.environ.get("MESH_KILL_SEEDS", "3"))
LATER_S_MAX = 0.02
CALLS = 10
"""With so many the model is expected to be called again, until the last kill."""
BEGUN, LOADS = "begun", "loads"
EVENTS = (BEGUN, "staging/*/model/*", "models/*", LOADS)
"""The steps of a prefetch, one after the other; those between are files under the store's root."""


def has_come(cell: LiveCell, store: ModelStore, event: str, begun_before: int) -> bool:
    if event == BEGUN:
        return cell.client.status().prefetches.begun > begun_before
    if event != LOADS:
        return bool(glob(event, root_dir=store.root))
    found = cell.deployment("chat")
    return found is not None and any(
        instance.phase == "pretend" or instance.state is not InstanceState.LOADING
        for instance in found.instances
    )


def left(store: ModelStore) -> list[str]:
    """What the removal of leftovers has not taken."""
    list(collect(store, originals=False))
    return glob("staging/*", root_dir=store.root)


def test_a_store_is_whole_and_the_cell_serves_whatever_prefetch_is_killed(
    cell: LiveCell, tiny_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "own"
    store = ModelStore(home / "store")

    def start() -> Process:
        return cell.start_node("n1", "--load-s", "0.2", home=home)

    def so_far(events: tuple[str, ...], begun_before: int) -> bool:
        """To the first of them, or a later one where that was soon over."""
        return any(has_come(cell, store, event, begun_before) for event in events)

    cell.start_controller("--parked-s", "600")
    node = start()
    cell.deploy("chat", tiny_model)
    for _ in range(CALLS):
        cell.warm("chat")
    for number in range(KILLS + 1):
        node.kill()
        cell.wait_for("the node to be gone", lambda: not cell.client.nodes())
        # Its import is killed by the system, a moment later.
        cell.wait_for("nothing to be left", lambda: not left(store))
        assert list(stored_damages(store)) == [], f"before {number=}"
        for stored in store.models():
            store.remove(stored.info.model_id)
        begun = cell.client.status().prefetches.begun
        node = start()
        events = EVENTS[number % len(EVENTS) :]
        cell.wait_for(f"a prefetch, {events[0]}", partial(so_far, events, begun))
        time.sleep(Random(number).uniform(0.0, LATER_S_MAX))
    cell.warm("chat")
    assert list(stored_damages(store)) == []
