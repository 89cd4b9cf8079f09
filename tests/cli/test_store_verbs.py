"""Models in the store by the command line: pulled, listed, checked, and kept while deployed."""

import json
from pathlib import Path

from mesh_loader.store import ModelStore
from tests.cli.conftest import RunningCell
from tests.cli.running import mesh
from tests.support.tiny_model import write_tiny_llama


def test_pull_imports_once_and_says_where(cell: RunningCell, chat: str) -> None:
    ran = cell.mesh("pull", f"file://{cell.model}", "-o", "json")
    assert ran.code == 0
    pulled = json.loads(ran.out)
    assert (Path(pulled["path"]) / "model.json").is_file()
    assert f"path               {pulled['path']}" in cell.mesh("pull", f"file://{cell.model}").out


def test_store_checks_and_clears_but_removes_nothing_that_is_deployed(
    cell: RunningCell, chat: str
) -> None:
    (stored,) = json.loads(cell.mesh("store", "ls", "-o", "json").out)
    verified = cell.mesh("store", "verify", "-o", "json")
    assert (verified.code, json.loads(verified.out)) == (0, [])
    assert json.loads(cell.mesh("store", "gc", "-o", "json").out) == []
    kept = cell.mesh("store", "rm", stored["model_id"])
    assert kept.code == 1
    assert kept.error_lines == (
        f"{stored['model_id']} is deployed as chat",
        "mesh delete chat",
    )
    assert len(json.loads(cell.mesh("store", "ls", "-o", "json").out)) == 1


def test_store_ls_lists_the_others_and_names_the_damaged_one(tmp_path: Path) -> None:
    models = ModelStore(tmp_path / "store")
    for seed in (1, 2):
        models.import_model(f"file://{write_tiny_llama(tmp_path / str(seed), seed=seed)}")
    bad, good = models.folders()
    (bad / "model.json").write_text("{")
    ran = mesh("store", "ls", "--home", str(tmp_path), "-o", "json")
    assert ran.code == 1
    assert [found["model_id"] for found in json.loads(ran.out)] == [good.name]
    assert f"{bad.name} is damaged" in ran.err


def test_store_verify_fails_where_it_names_damage(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "models" / "sha256-0123456789abcdef"
    folder.mkdir(parents=True)
    ran = mesh("store", "verify", "--home", str(tmp_path), "-o", "json")
    assert ran.code == 1
    assert [Path(found["path"]).name for found in json.loads(ran.out)] == [
        "model.json",
        "digests.json",
    ]
    assert "2 damaged in" in ran.err
