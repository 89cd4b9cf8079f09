"""`http://`: files of a web server on this machine that breaks off, changes, refuses and crawls."""

import gzip
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from threading import Thread

import pytest

from mesh.domain.errors import (
    Cancelled,
    InvalidInput,
    MeshError,
    NotFound,
    StorageError,
    TornModel,
    Unavailable,
    UnsupportedModel,
)
from mesh_loader import download as download_module
from mesh_loader.download_rate import UNBOUND, DownloadRate
from mesh_loader.http_download import fetch_web_file
from mesh_loader.reach import Reach
from mesh_loader.sources import check_source, parse_http
from mesh_loader.store import DOWNLOAD_KEPT_S, ModelStore, silent
from mesh_loader.upkeep import collect
from tests.loader.file_server import Served, serving
from tests.loader.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import write_tiny_llama

HERE = Reach(named=("127.0.0.0/8",))
CONTENT = random.Random(1).randbytes(3 << 20)
OTHER = random.Random(2).randbytes(3 << 20)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "PAUSE_S", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served() -> Served:
    return Served(CONTENT)


@pytest.fixture
def address(served: Served) -> Iterator[str]:
    with serving(served) as address:
        yield address


def fetched(address: str, folder: Path) -> bytes:
    source = parse_http(f"{address}/deep/m.gguf")
    return fetch_web_file(source, folder, UNBOUND, silent, HERE).read_bytes()


def test_a_file_comes_whole_and_alone(served: Served, address: str, tmp_path: Path) -> None:
    assert fetched(address, tmp_path) == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert fetched(address, tmp_path) == CONTENT
    assert served.asked == [""]


def test_a_download_goes_on_where_it_broke(served: Served, address: str, tmp_path: Path) -> None:
    served.breaks_after = [1 << 20, 1 << 20]
    assert fetched(address, tmp_path) == CONTENT
    assert served.asked[0] == ""
    begins = [int(asked.removeprefix("bytes=").removesuffix("-")) for asked in served.asked[1:]]
    assert len(begins) == 2
    assert 0 < begins[0] < begins[1]
    assert served.sent_bytes <= len(CONTENT) + 2 * download_module.PIECE_BYTES


def test_without_ranges_all_is_sent_again(served: Served, address: str, tmp_path: Path) -> None:
    served.ranges, served.breaks_after = False, [2 << 20, 2 << 20]
    assert fetched(address, tmp_path) == CONTENT
    assert len(served.asked) == 3


def test_without_versions_all_is_sent_again(served: Served, address: str, tmp_path: Path) -> None:
    served.tags, served.breaks_after = False, [2 << 20]
    assert fetched(address, tmp_path) == CONTENT
    assert served.asked == ["", ""]


@pytest.mark.parametrize(("age_s", "goes_on"), [(60.0, True), (-60.0, False)])
def test_a_date_of_change_tells_versions_apart_once_its_second_is_over(
    served: Served, address: str, tmp_path: Path, age_s: float, goes_on: bool
) -> None:
    served.tags, served.breaks_after = False, [2 << 20]
    served.changed = formatdate(time.time() - age_s, usegmt=True)
    assert fetched(address, tmp_path) == CONTENT
    assert [bool(asked) for asked in served.asked] == [False, goes_on]


def test_a_file_of_unknown_size_goes_on_and_leaves_the_disk_its_reserve(
    served: Served, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.length, served.breaks_after = False, [1 << 20]
    assert fetched(address, tmp_path) == CONTENT
    assert [bool(asked) for asked in served.asked] == [False, True]
    monkeypatch.setattr(download_module, "FREE_CHECK_BYTES", 1 << 20)
    free = iter([80 << 20, 80 << 20, 64 << 20])
    monkeypatch.setattr("mesh_loader.disk.free_bytes", lambda folder: next(free))
    (tmp_path / "again").mkdir()
    with pytest.raises(StorageError, match=r"m\.gguf needs 1"):
        fetched(address, tmp_path / "again")
    assert (tmp_path / "again" / "m.gguf.part").stat().st_size == 2 << 20


def test_a_whole_part_is_not_fetched_again(served: Served, address: str, tmp_path: Path) -> None:
    """The process was stopped between the last byte and the rename."""
    with pytest.raises(Cancelled):
        _fetch_until(address, tmp_path, len(CONTENT))
    assert (tmp_path / "m.gguf.part").stat().st_size == len(CONTENT)
    assert fetched(address, tmp_path) == CONTENT
    assert served.asked == [""]


@pytest.mark.parametrize("if_range", [True, False])
def test_two_versions_are_never_mixed(
    served: Served, address: str, tmp_path: Path, if_range: bool
) -> None:
    """Also where a server ignores If-Range, and sends the rest of the other version."""
    served.if_range, served.breaks_after, served.statuses = if_range, [2 << 20], []
    changed = Thread(target=_change_after_break, args=(served,))
    changed.start()
    assert fetched(address, tmp_path) == OTHER
    changed.join()


def _change_after_break(served: Served) -> None:
    while served.sent_bytes < 2 << 20:
        time.sleep(0.0005)
    served.content = OTHER


def test_a_version_shorter_than_the_part(served: Served, address: str, tmp_path: Path) -> None:
    served.breaks_after = [2 << 20]
    served.if_range = False
    with pytest.raises(Cancelled):
        _fetch_until(address, tmp_path, 1 << 20)
    served.content = OTHER[: 1 << 19]
    served.breaks_after = []
    assert fetched(address, tmp_path) == served.content


def _fetch_until(address: str, folder: Path, bytes_wanted: int) -> None:
    def progress(phase: str, share: float) -> None:
        if share * len(CONTENT) >= bytes_wanted:
            raise Cancelled("stopped")

    fetch_web_file(parse_http(f"{address}/m.gguf"), folder, UNBOUND, progress, HERE)


def test_a_file_that_keeps_changing_is_left(served: Served, address: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    served.breaks_after = [1 << 20] * 20

    def progress(phase: str, share: float) -> None:
        if share > 0.2:
            served.content = CONTENT[:-8] + rng.randbytes(8)

    with pytest.raises(TornModel, match="changed 4 times"):
        fetch_web_file(parse_http(f"{address}/m.gguf"), tmp_path, UNBOUND, progress, HERE)


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (404, NotFound, "404"),
        (410, NotFound, "410"),
        (401, Unavailable, "may not be fetched"),
        (403, Unavailable, "may not be fetched"),
        (400, Unavailable, "400"),
    ],
)
def test_a_refusal_is_told_at_once(
    served: Served, address: str, tmp_path: Path, status: int, kind: type[MeshError], said: str
) -> None:
    served.statuses = [(status, {})] * 9
    with pytest.raises(kind, match=said) as caught:
        fetched(address, tmp_path)
    assert caught.value.hint
    assert len(served.asked) == 1


def test_a_busy_server_is_asked_so_often(served: Served, address: str, tmp_path: Path) -> None:
    served.statuses = [(503, {}), (429, {"Retry-After": "0.02"}), (500, {})]
    assert fetched(address, tmp_path) == CONTENT
    served.statuses = [(503, {})] * 99
    with pytest.raises(Unavailable, match=f"in {download_module.TRIES_MAX} tries"):
        fetched(address, tmp_path / "again")


def test_no_login_of_netrc_is_sent_to_anybody(
    served: Served, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    served.statuses = [(302, {"Location": "/m.gguf"})]
    assert fetched(address, tmp_path) == CONTENT
    assert served.logins == ["", ""]


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no answer"):
        fetched("http://127.0.0.1:9", tmp_path)


def test_what_cannot_fit_is_refused_before_a_byte_is_written(
    served: Served, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_loader.disk.free_bytes", lambda folder: 66 << 20)
    with pytest.raises(StorageError, match="needs 3"):
        fetched(address, tmp_path)
    assert not list(tmp_path.glob("*.part")) or not (tmp_path / "m.gguf.part").stat().st_size


def test_the_bound_is_for_all_downloads(served: Served, address: str, tmp_path: Path) -> None:
    """Two of 3 MiB at 12 MiB/s take half a second, and not a quarter."""
    rate = DownloadRate(tmp_path / "rate", 12 << 20)
    source = parse_http(f"{address}/m.gguf")
    threads = []
    start_s = time.monotonic()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        arguments = (source, tmp_path / name, rate, silent, HERE)
        threads.append(Thread(target=fetch_web_file, args=arguments))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start_s >= 0.45
    for name in ("a", "b"):
        assert (tmp_path / name / "m.gguf").read_bytes() == CONTENT


def test_a_killed_import_goes_on_where_it_was(served: Served, address: str, tmp_path: Path) -> None:
    """By SIGKILL, in mid-file; the second process fetches the rest alone, and clears up."""
    write_tiny_gguf(tmp_path / "m.gguf")
    served.content = (tmp_path / "m.gguf").read_bytes()
    total_bytes = len(served.content)
    served.pause_s = 0.5
    store = tmp_path / "store"
    argv = [
        *(sys.executable, "-m", "mesh_loader", "import", f"{address}/m.gguf"),
        *("--reach", "127.0.0.0/8"),
        *("--store", str(store), "--download-rate", str(64 << 10)),
    ]
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    part_bytes = 0
    while not part_bytes:
        time.sleep(0.02)
        assert child.poll() is None
        part_bytes = sum(path.stat().st_size for path in store.glob("downloads/*/*.part"))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    served.pause_s = 0.0
    stored = ModelStore(store, reach=HERE).import_model(f"{address}/m.gguf")
    assert stored.info.architecture == "llama"
    assert part_bytes < total_bytes
    assert served.asked[-1].startswith("bytes=")
    assert not list(store.glob("downloads/*"))
    assert not list(store.glob("staging/*"))
    asked = len(served.asked)
    assert ModelStore(store, reach=HERE).import_model(f"{address}/m.gguf") == stored
    assert len(served.asked) == asked


def test_what_makes_no_model_is_fetched_anew(served: Served, address: str, tmp_path: Path) -> None:
    """A file that was torn at its source is not kept until somebody clears the store."""
    write_tiny_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    served.content = whole[: len(whole) // 2]
    store = ModelStore(tmp_path / "store", reach=HERE)
    with pytest.raises(TornModel):
        store.import_model(f"{address}/m.gguf")
    served.content = whole
    assert store.import_model(f"{address}/m.gguf").info.architecture == "llama"


def test_a_download_that_goes_on_is_kept(served: Served, address: str, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", reach=HERE)
    limits = [0.3, 0.6]

    def progress(phase: str, share: float) -> None:
        if phase.startswith("download") and share > limits[0]:
            limits.pop(0)
            raise Cancelled("stopped")

    while limits:
        with pytest.raises(Cancelled):
            store.import_model(f"{address}/m.gguf", progress)
        (begun,) = store.begun_downloads()
        assert not list(store.begun_downloads(older_than_s=DOWNLOAD_KEPT_S))
        os.utime(begun, (0.0, 0.0))
    assert list(store.begun_downloads(older_than_s=DOWNLOAD_KEPT_S)) == [begun]


def test_gc_takes_what_nobody_goes_on_with(served: Served, address: str, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", reach=HERE)

    def progress(phase: str, share: float) -> None:
        if phase.startswith("download") and share > 0.3:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        store.import_model(f"{address}/m.gguf", progress)
    assert len(list(store.root.glob("downloads/*/*.part"))) == 1
    (left,) = collect(store, originals=False)
    assert left.size_bytes > len(CONTENT) // 4
    assert not list(store.root.glob("downloads/*"))


def test_a_folder_comes_as_a_tar_archive(served: Served, address: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny")
    with tarfile.open(tmp_path / "m.tar", "w") as tar:
        tar.add(tmp_path / "tiny", "tiny")
    served.content = (tmp_path / "m.tar").read_bytes()
    stored = ModelStore(tmp_path / "store", reach=HERE).import_model(f"{address}/m.tar")
    assert stored.info.architecture == "llama"
    assert not list((tmp_path / "store" / "downloads").iterdir())


@pytest.mark.parametrize("kind", ["up", "link", "torn"])
def test_an_archive_that_is_none_or_leads_elsewhere_is_refused(
    served: Served, address: str, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 4096)
    (tmp_path / "l").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / ("l" if kind == "link" else "f"), "../f" if kind == "up" else "f")
    served.content = (tmp_path / "m.tar.gz").read_bytes()[: 60 if kind == "torn" else None]
    with pytest.raises(TornModel if kind == "torn" else UnsupportedModel, match=r"m\.tar\.gz"):
        ModelStore(tmp_path / "store", reach=HERE).import_model(f"{address}/m.tar.gz")


def test_a_flipped_bit_in_an_archive_is_found(served: Served, address: str, tmp_path: Path) -> None:
    """In bytes that no compression makes smaller, and so none misses: by the checksum alone."""
    (tmp_path / "model.safetensors").write_bytes(CONTENT)
    with tarfile.open(tmp_path / "m.tgz", "w:gz") as tar:
        tar.add(tmp_path / "model.safetensors", "m/model.safetensors")
    packed = bytearray((tmp_path / "m.tgz").read_bytes())
    packed[len(packed) // 2] ^= 1
    served.content = bytes(packed)
    with pytest.raises(TornModel, match=r"m\.tgz is corrupt: CRC check failed"):
        ModelStore(tmp_path / "store", reach=HERE).import_model(f"{address}/m.tgz")


def test_a_file_with_files_below_is_corrupt(served: Served, address: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "m.tar", "w") as tar:
        for name in ("m", "m/config.json"):
            tar.addfile(tarfile.TarInfo(name))
    served.content = (tmp_path / "m.tar").read_bytes()
    with pytest.raises(TornModel, match=r"m\.tar is corrupt"):
        ModelStore(tmp_path / "store", reach=HERE).import_model(f"{address}/m.tar")


def test_an_archive_that_unfolds_without_end_is_refused_at_its_first_header(
    served: Served, address: str, tmp_path: Path
) -> None:
    huge = tarfile.TarInfo("model.safetensors")
    huge.size = 1 << 55
    served.content = gzip.compress(huge.tobuf() + bytes(1 << 20))
    with pytest.raises(StorageError, match=r"the content of m\.tgz needs"):
        ModelStore(tmp_path / "store", reach=HERE).import_model(f"{address}/m.tgz")


@pytest.mark.parametrize(
    "source",
    [
        "https://me:hunter2@host/m.gguf",
        "https://host/m.gguf?X-Amz-Signature=hunter2",
        "https://host/m.gguf?token=hunter2",
        "s3://me:hunter2@bucket/m.gguf",
    ],
)
def test_a_source_with_credentials_is_refused_and_not_repeated(source: str) -> None:
    with pytest.raises(InvalidInput, match="credentials") as caught:
        check_source(source)
    assert "hunter2" not in str(caught.value) + caught.value.hint
    assert "leave them out" in caught.value.hint


@pytest.mark.parametrize(
    "source", ["https:///m.gguf", "https://host/", "https://host:x/m.gguf", "https://host/m.bin"]
)
def test_a_url_of_no_model_file_is_refused(source: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_source(source)
    assert caught.value.hint
