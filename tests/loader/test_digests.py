"""Digests name every damage by its file and place, and are checked as often as was asked for."""

import json
import os
import random
from pathlib import Path

import pytest
import xxhash

from mesh.domain.errors import TornModel
from mesh_loader.digests import (
    CHUNK_BYTES,
    INDEX,
    Verifier,
    Verify,
    damages,
    note_removed,
    require_originals,
    write_index,
)

SIZES = {"a.bin": 2 * CHUNK_BYTES + 17, "b.json": 5, "empty": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size_bytes in SIZES.items():
        (tmp_path / name).write_bytes(os.urandom(size_bytes))
    write_index(tmp_path)
    return tmp_path


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_a_whole_folder_has_no_damage(folder: Path) -> None:
    assert list(damages(folder)) == []
    Verifier(Verify.ALWAYS).check(folder)


def test_an_index_says_what_those_of_other_versions_say(folder: Path) -> None:
    content = (folder / "a.bin").read_bytes()
    chunks = [content[n : n + CHUNK_BYTES] for n in range(0, len(content), CHUNK_BYTES)]
    written = json.loads((folder / INDEX).read_bytes())
    assert (written["version"], written["chunk_bytes"]) == (1, 4 << 20)
    assert written["files"]["a.bin"] == {
        "bytes": len(content),
        "chunks": [xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks],
    }


def test_a_flip_is_named_by_its_file_and_place(folder: Path) -> None:
    flip(folder / "a.bin", CHUNK_BYTES + 3)
    (damage,) = damages(folder)
    assert damage.path == folder / "a.bin"
    assert damage.what.startswith(f"bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES} ")
    with pytest.raises(TornModel, match=r"a\.bin is damaged: bytes 4194304 to"):
        Verifier().check(folder)


@pytest.mark.parametrize("size_bytes", [0, CHUNK_BYTES, SIZES["a.bin"] + 1])
def test_another_length_is_named_with_both_numbers(folder: Path, size_bytes: int) -> None:
    os.truncate(folder / "a.bin", size_bytes)
    with pytest.raises(TornModel, match=f"it has {size_bytes} bytes, {SIZES['a.bin']} were"):
        Verifier().check(folder)


def test_a_file_that_vanished_is_named(folder: Path) -> None:
    (folder / "b.json").unlink()
    assert [damage.path.name for damage in damages(folder)] == ["b.json"]
    with pytest.raises(TornModel, match=r"b\.json is damaged: it cannot be read"):
        Verifier().check(folder)


@pytest.mark.parametrize("seed", range(12))
def test_no_flip_of_the_index_itself_goes_unnoticed(folder: Path, seed: int) -> None:
    rng, index = random.Random(seed), folder / INDEX
    flip(index, rng.randrange(index.stat().st_size), rng.randrange(8))
    assert list(damages(folder)), f"{seed=}"
    with pytest.raises(TornModel):
        Verifier().check(folder)


def test_a_file_is_read_once_until_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    path_open = Path.open

    def counted(path: Path, *arguments: object, **named: object) -> object:
        opened.append(path.name)
        return path_open(path, *arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", counted)
    verifier = Verifier(Verify.FIRST)
    verifier.check(folder, without=(".bin",))
    assert "a.bin" not in opened
    verifier.check(folder)
    verifier.check(folder)
    assert opened.count("a.bin") == 1
    flip(folder / "a.bin", 0)
    with pytest.raises(TornModel):
        verifier.check(folder)
    Verifier(Verify.NEVER).check(folder)


def test_a_folder_without_digests_passes_unless_every_load_is_checked(folder: Path) -> None:
    (folder / INDEX).unlink()
    Verifier(Verify.FIRST).check(folder)
    with pytest.raises(TornModel, match="cannot be checked"):
        Verifier(Verify.ALWAYS).check(folder)
    assert [damage.path.name for damage in damages(folder)] == [INDEX]


def test_what_was_removed_on_purpose_is_not_missed(folder: Path) -> None:
    note_removed(folder, ["a.bin"])
    (folder / "a.bin").unlink()
    with pytest.raises(TornModel, match=r"of which a\.bin was removed"):
        require_originals(folder)
    assert list(damages(folder)) == []
    Verifier(Verify.ALWAYS).check(folder)


def test_what_is_made_anew_amid_a_check_is_what_counts(folder: Path) -> None:
    path = folder / "a.bin"
    whole = path.read_bytes()
    flip(path, CHUNK_BYTES + 3)
    reads: list[int] = []

    def derive_anew() -> None:
        reads.append(path.stat().st_ino)
        if len(reads) == 1:
            path.with_suffix(".new").write_bytes(whole)
            os.replace(path.with_suffix(".new"), path)

    Verifier().check(folder, between=derive_anew)
    assert len(reads) > 4, "between any two reads, of the damaged file and of the new one"
    flip(path, 0)
    with pytest.raises(TornModel):
        Verifier().check(folder)
