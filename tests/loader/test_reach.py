"""`reach`: no fetch gets to a private address unless the operator has named its host."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, TornModel, Unavailable
from mesh_loader import http_download
from mesh_loader.download_rate import UNBOUND
from mesh_loader.http_download import fetch_web_file
from mesh_loader.reach import NOWHERE_PRIVATE, REDIRECTS_MAX, Reach, is_public
from mesh_loader.sources import parse_http
from mesh_loader.store import ModelStore, silent
from tests.loader.file_server import Served, serving

HERE = Reach(named=("127.0.0.1",))
SECRET = b"hunter2 is the password of this machine"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def fetched(url: str, folder: Path, reach: Reach = NOWHERE_PRIVATE) -> bytes:
    return fetch_web_file(parse_http(url), folder, UNBOUND, silent, reach).read_bytes()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((public, True) for public in ("8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8")),
        *((private, False) for private in ("10.0.0.1", "172.16.0.1", "192.168.1.1", "fd00::1")),
        *((local, False) for local in ("127.0.0.1", "127.255.0.1", "::1", "0.0.0.0", "::")),
        *((link, False) for link in ("169.254.169.254", "fe80::1", "fec0::1")),
        *((many, False) for many in ("224.0.0.1", "ff02::1", "239.1.2.3", "255.255.255.255")),
        *((kept, False) for kept in ("240.0.0.1", "192.0.0.8", "198.18.0.1", "100.64.0.1")),
        *((shown, False) for shown in ("192.0.2.1", "2001:db8::1", "3fff::1", "192.88.99.1")),
        *((mapped, False) for mapped in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1")),
        *((way, False) for way in ("2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::1", "2001::1")),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001"),
        *("0", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "localhost."),
    ],
)
def test_no_spelling_of_this_machine_is_asked(host: str, tmp_path: Path) -> None:
    served = Served(SECRET)
    with serving(served) as address:
        port = address.rpartition(":")[2]
        with pytest.raises(InvalidInput, match="not public"):
            fetched(f"http://{host}:{port}/m.gguf", tmp_path)
    assert served.asked == []


@pytest.mark.parametrize(
    "url",
    [
        *("http://169.254.169.254/m.gguf", "https://[fe80::1]/m.gguf"),
        *("http://[fe80::1%25lo]/m.gguf", "http://[fe80::1%lo]/m.gguf"),
    ],
)
def test_link_local_addresses_are_not_asked(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not public"):
        fetched(url, tmp_path)


def test_a_name_is_resolved_once_and_the_connection_goes_to_the_checked_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads to a public address first, and to this machine at the next look."""
    served, resolved = Served(SECRET), []
    real, dial = socket.getaddrinfo, socket.socket.connect

    def rebinding(host: str, *args: object, **kwargs: object) -> object:
        if host != "rebinds.example":
            return real(host, *args, **kwargs)  # type: ignore[arg-type]
        resolved.append(host)
        return real("8.8.8.8" if len(resolved) == 1 else "127.0.0.1", *args, **kwargs)  # type: ignore[arg-type]

    dialled = []

    def dialling(self: socket.socket, where: tuple[str, int]) -> None:
        dialled.append(where[0])
        if where[0] == "8.8.8.8":
            raise ConnectionRefusedError(111, "no network in tests")
        dial(self, where)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(socket.socket, "connect", dialling)
    monkeypatch.setattr("mesh_loader.download.PAUSE_S", 0.01)
    with serving(served) as address:
        port = address.rpartition(":")[2]
        with pytest.raises(InvalidInput, match=r"rebinds\.example is at an address that is not"):
            fetched(f"http://rebinds.example:{port}/m.gguf", tmp_path)
    assert dialled == ["8.8.8.8"]
    assert served.asked == []


def test_a_redirect_from_a_host_that_is_named_leads_to_no_other_private_one(tmp_path: Path) -> None:
    inner, outer = Served(SECRET), Served(b"")
    with serving(inner) as hidden, serving(outer) as address:
        port = hidden.rpartition(":")[2]
        outer.statuses = [(302, {"Location": f"http://[::ffff:127.0.0.2]:{port}/m.gguf"})]
        with pytest.raises(InvalidInput, match="not public"):
            fetched(f"{address}/m.gguf", tmp_path, HERE)
    assert inner.asked == []


def test_a_source_that_is_not_named_gets_to_no_named_host_by_a_redirect() -> None:
    named = Reach(named=("models.internal", "10.0.0.0/8"))
    assert named.of("evil.example", 443) == NOWHERE_PRIVATE
    assert named.of("models.internal", 443) == named
    assert named.of("10.1.2.3", 80) == named


@pytest.mark.parametrize(
    "leads_to",
    [
        *("file:///etc/passwd", "ftp://127.0.0.1/m.gguf", "gopher://127.0.0.1/"),
        *("http://me:hunter2@127.0.0.1/m.gguf", "http://127.0.0.1\\@8.8.8.8/m.gguf", "http://[/"),
    ],
)
def test_a_redirect_to_what_is_no_plain_url_is_refused(leads_to: str, tmp_path: Path) -> None:
    served = Served(SECRET, statuses=[(302, {"Location": leads_to})])
    with serving(served) as address, pytest.raises(InvalidInput, match="redirects") as caught:
        fetched(f"{address}/m.gguf", tmp_path, HERE)
    assert "hunter2" not in str(caught.value) + caught.value.hint
    assert served.asked == [""]


def test_redirects_are_bounded(tmp_path: Path) -> None:
    served = Served(SECRET, statuses=[(302, {"Location": "/again/m.gguf"})] * (REDIRECTS_MAX + 1))
    with serving(served) as address, pytest.raises(Unavailable, match="more than 5 redirects"):
        fetched(f"{address}/m.gguf", tmp_path, HERE)
    assert len(served.asked) == REDIRECTS_MAX + 1
    served.statuses = [(307, {"Location": "/again/m.gguf"})] * REDIRECTS_MAX
    with serving(served) as address:
        assert fetched(f"{address}/m.gguf", tmp_path, HERE) == SECRET


@contextmanager
def sending(pieces: Callable[[], Iterable[bytes]]) -> Iterator[tuple[str, list[int]]]:
    """A server that answers every connection with these pieces; also the lengths of those sent."""
    listening, sent = socket.create_server(("127.0.0.1", 0)), list[int]()

    def serve() -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    for piece in pieces():
                        connection.sendall(piece)
                        sent.append(len(piece))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", sent
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        listening.close()


def test_the_body_of_a_redirect_is_not_read(tmp_path: Path) -> None:
    length = 64 << 20

    def redirect() -> Iterator[bytes]:
        yield b"HTTP/1.1 302 Found\r\nLocation: /m.gguf\r\nContent-Length: %d\r\n\r\n" % length
        for _ in range(64):
            yield bytes(length // 64)

    with sending(redirect) as (address, sent):
        with pytest.raises(Unavailable, match="more than 5 redirects"):
            fetched(f"{address}/m.gguf", tmp_path, HERE)
        assert sum(sent) < length, "of six bodies, what the kernel holds of each"


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_who_sends_a_byte_now_and_then_is_hung_up_on(
    head: bytes, proxied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_download, "PIECE_S_MAX", 0.2)
    monkeypatch.setattr(http_download, "_WATCH_S", 0.02)
    monkeypatch.setattr("mesh_loader.download.TRIES_MAX", 1)

    def drops() -> Iterator[bytes]:
        yield head
        for _ in range(3000):
            yield b"x"
            time.sleep(0.01)

    with sending(drops) as (address, _):
        if proxied:
            monkeypatch.setenv("http_proxy", address)
        url = f"{'http://8.8.8.8' if proxied else address}/m.gguf"
        with pytest.raises(Unavailable, match=r"in 1 tries: too little came within 0\.2 s"):
            fetched(url, tmp_path, HERE)


def test_a_length_of_thousands_of_digits_says_nothing(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nabc"
    with sending(lambda: [answer]) as (address, _):
        assert fetched(f"{address}/m.gguf", tmp_path, HERE) == b"abc"


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
def test_what_can_be_no_name_of_a_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no name of a host"):
        fetched(f"http://{host}/m.gguf", tmp_path)


def test_an_answer_is_not_repeated_in_the_error(tmp_path: Path) -> None:
    with serving(Served(SECRET)) as address, pytest.raises(TornModel) as caught:
        ModelStore(tmp_path, reach=HERE).import_model(f"{address}/m.gguf")
    assert "hunt" not in str(caught.value) + caught.value.hint


def test_a_proxy_of_the_operator_is_asked_and_private_hosts_are_not_asked_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Served(b"by the proxy")
    with serving(proxy) as address:
        monkeypatch.setenv("http_proxy", address)
        assert fetched("http://models.example.invalid/m.gguf", tmp_path) == b"by the proxy"
        with pytest.raises(InvalidInput, match="not public"):
            fetched("http://169.254.169.254/other.gguf", tmp_path)
    assert len(proxy.asked) == 1
