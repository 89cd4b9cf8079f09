"""Opens a file of the web at an offset, through requests.

Every hop is looked at by itself: a redirect leads to http or https, never from https to http, and
to an address that `reach` allows, to which the connection then goes. Proxies and certificates are
configured as requests has them: HTTPS_PROXY, REQUESTS_CA_BUNDLE. ~/.netrc is never read: its logins
are not for whoever may name a URL. `download` comes before it and does the retries.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies, select_proxy
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError
from urllib3.util.connection import create_connection

from mesh.domain.errors import InvalidInput, MeshError, NotFound, Unavailable
from mesh.runtime.engine import Progress
from mesh_loader.download import (
    PIECE_BYTES,
    Changed,
    Interrupted,
    Opened,
    Version,
    download,
    unpacked,
)
from mesh_loader.download_rate import DownloadRate
from mesh_loader.reach import REDIRECTS_MAX, Reach
from mesh_loader.sources import TAR_SUFFIXES, WebFile

CONNECT_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 60.0
"""Without a single byte."""
PIECE_S_MAX = 60.0
"""For a handshake with the head of an answer, and for each piece: who sends a byte now and then
would keep others' imports waiting for hours.
"""
_WATCH_S = 1.0
_LENGTH_DIGITS_MAX = 18
_TRANSIENT = (408, 409, 423, 425, 429, 500, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
Connect = Callable[[HTTPConnection], socket.socket]
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def fetch_web_file(
    source: WebFile, folder: Path, rate: DownloadRate, progress: Progress, reach: Reach
) -> Path:
    """The file, or what an archive holds, under `folder`; see `download` for what it raises, and
    InvalidInput for an address beyond the reach.
    """
    target = folder / source.name
    download(_HttpFile(source, reach), target, rate, progress)
    if target.name.lower().endswith(TAR_SUFFIXES):
        return unpacked(target, folder / "unpacked", progress)
    return target


class _HttpFile:
    def __init__(self, source: WebFile, reach: Reach) -> None:
        self._url = source.url
        self._reach = reach.of(*_host_and_port(source.url))
        self.name = source.name

    @contextmanager
    def open(self, begin_bytes: int, part_of: Version | None) -> Iterator[Opened]:
        headers = {"Accept-Encoding": "identity"}
        if part_of is not None:
            headers |= {"Range": f"bytes={begin_bytes}-", "If-Range": part_of.tag}
        hurry = _Hurry()
        try:
            with hurry, self._session(hurry) as session:
                answer = self._followed(session, headers)
                hurry.rest()
                try:
                    yield self._opened(answer, begin_bytes, part_of, hurry)
                finally:
                    answer.close()
        except requests.exceptions.SSLError as error:
            raise Unavailable(
                f"{self.name}: the server's certificate is not accepted",
                hint="set REQUESTS_CA_BUNDLE where it is signed by an authority of your own",
            ) from error
        except (requests.ConnectionError, requests.Timeout) as error:
            hurry.rest()  # it may have been hung up on
            # Its own text holds the URL it was sent on to, which may be a signed one.
            raise Interrupted(f"no answer ({type(error).__name__})") from None
        except requests.RequestException as error:
            raise Unavailable(
                f"{self.name} cannot be fetched: {type(error).__name__}",
                hint="check the URL in a browser or with curl -L",
            ) from None

    def _session(self, hurry: "_Hurry") -> requests.Session:
        session = _Session()
        session.trust_env = False  # it would read ~/.netrc
        session.verify = next(filter(None, map(os.environ.get, _CERTIFICATES)), True)
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Checked(self._reach, hurry))
        return session

    def _followed(self, session: requests.Session, headers: dict[str, str]) -> requests.Response:
        """The answer that is no redirect."""
        url = self._url
        for _ in range(REDIRECTS_MAX + 1):
            proxies = get_environ_proxies(url)
            if select_proxy(url, proxies):
                self._reach.check(*_host_and_port(url))
            try:
                answer = session.get(
                    url,
                    headers=headers,
                    stream=True,
                    allow_redirects=False,
                    proxies=proxies,
                    timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
                )
                leads_to = session.get_redirect_target(answer)
            except ValueError as error:
                if isinstance(error, requests.RequestException):
                    raise
                raise self._no_url() from None
            if answer.status_code not in _REDIRECTS or not leads_to:
                return answer
            answer.close()
            url = self._next(url, leads_to)
        raise Unavailable(
            f"{self.name} is behind more than {REDIRECTS_MAX} redirects",
            hint="name the URL that they lead to",
        )

    def _next(self, url: str, leads_to: str) -> str:
        """The URL of the next hop. Raises InvalidInput for one that is not to be asked."""
        try:
            target = urljoin(url, leads_to)
            parts = urlsplit(target)
            allowed = bool(parts.hostname) and "@" not in parts.netloc and "\\" not in target
            allowed = allowed and (parts.port is None or parts.port > 0)
        except ValueError:
            allowed = False
        if not allowed or parts.scheme not in ("http", "https"):
            raise self._no_url()
        if parts.scheme == "http" and urlsplit(url).scheme == "https":
            raise InvalidInput(
                f"{self.name}: the server redirects from https to http, which anybody on the way "
                "can read and change",
                hint="name a URL that stays with https",
            )
        return target

    def _no_url(self) -> InvalidInput:
        return InvalidInput(
            f"{self.name}: the server redirects to what is no plain URL of http or https",
            hint="name the URL of the file itself",
        )

    def _opened(
        self, answer: requests.Response, begin_bytes: int, part_of: Version | None, hurry: "_Hurry"
    ) -> Opened:
        if part_of is not None and answer.status_code in (206, 416):
            if answer.status_code == 416 or not _continues(answer, begin_bytes, part_of):
                raise Changed("the server has another version of it")
            return Opened(version=part_of, begin_bytes=begin_bytes, pieces=_pieces(answer, hurry))
        if answer.status_code != 200:
            raise self._refusal(answer)
        length = answer.headers.get("Content-Length", "")
        coded = answer.headers.get("Content-Encoding", "identity") != "identity"
        told = length.isdecimal() and len(length) <= _LENGTH_DIGITS_MAX and not coded
        size_bytes = int(length) if told else None
        # Of a compressed answer, offsets are not those of the file.
        version = Version(size_bytes=size_bytes, tag="" if coded else _tag(answer))
        return Opened(version=version, begin_bytes=0, pieces=_pieces(answer, hurry))

    def _refusal(self, answer: requests.Response) -> MeshError | Interrupted:
        status = answer.status_code
        if status in _TRANSIENT:
            after_s = 0.0
            with suppress(ValueError):  # it may also be a date
                after_s = float(answer.headers.get("Retry-After", "0"))
            return Interrupted(f"the server answered {status}", after_s)
        if status in (404, 410):
            return NotFound(
                f"{self.name} is not at its URL: the server answered {status}",
                hint="check the URL in a browser or with curl -L",
            )
        if status in (401, 403, 407):
            return Unavailable(
                f"{self.name} may not be fetched: the server answered {status}",
                hint="fetch the file yourself and name it as file:///path: http(s) sources are "
                "asked for without a login",
            )
        return Unavailable(
            f"{self.name} cannot be fetched: the server answered {status}",
            hint="check the URL in a browser or with curl -L",
        )


class _Session(requests.Session):
    """It looks at no redirect by itself: for that it would read the whole body of one."""

    def resolve_redirects(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(())


class _Hurry:
    """Hangs up where what is waited for does not come within PIECE_S_MAX, however many bytes of it
    come. A context manager.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._until_s = inf
        self._hung_up = False
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watched, name="mesh-hurry", daemon=True)

    def __enter__(self) -> "_Hurry":
        self._watch.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        self._watch.join()
        if self._socket is not None:
            self._socket.close()

    def of(self, connection: socket.socket) -> None:
        """Wait for what comes by this connection from now on."""
        earlier, self._socket = self._socket, connection.dup()
        if earlier is not None:
            earlier.close()
        self.again()

    def again(self) -> None:
        """Wait for the next piece."""
        self._until_s = time.monotonic() + PIECE_S_MAX

    def rest(self) -> None:
        """It has come. Raises Interrupted where it was hung up, which looks like an end."""
        self._until_s = inf
        if self._hung_up:
            raise Interrupted(f"too little came within {PIECE_S_MAX:g} s")

    def _watched(self) -> None:
        while not self._over.wait(_WATCH_S):
            if time.monotonic() > self._until_s and self._socket is not None:
                self._hung_up = True
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class _Checked(HTTPAdapter):
    """Its connections go to addresses that the reach allows. Those to a proxy are the proxy's."""

    def __init__(self, reach: Reach, hurry: _Hurry) -> None:
        self._reach = reach
        self._hurry = hurry
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools(
            lambda connection, _: _connected(connection, self._reach, self._hurry)
        )

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        def connected(connection: HTTPConnection, connect: Connect) -> socket.socket:
            made = connect(connection)
            self._hurry.of(made)
            return made

        made = super().proxy_manager_for(*args, **kwargs)
        if not made.proxy.scheme.startswith("socks"):  # they have connections of their own
            made.pool_classes_by_scheme = self._pools(connected)
        return made

    def _pools(
        self, connected: Callable[[HTTPConnection, Connect], socket.socket]
    ) -> dict[str, type[HTTPConnectionPool]]:
        class Plain(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                return connected(self, HTTPConnection._new_conn)

        class Secured(HTTPSConnection):
            def _new_conn(self) -> socket.socket:
                return connected(self, HTTPConnection._new_conn)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecuredPool(HTTPSConnectionPool):
            ConnectionCls = Secured

        return {"http": PlainPool, "https": SecuredPool}


def _connected(connection: HTTPConnection, reach: Reach, hurry: _Hurry) -> socket.socket:
    """A connection to one of the host's addresses, each of them checked; Host and SNI name the host
    as ever. Raises what urllib3 does for a host that cannot be reached.
    """
    host, port = connection.host, connection.port
    try:
        addresses = reach.addresses(host, port)
    except socket.gaierror as error:
        raise NameResolutionError(host, connection, error) from error
    failure: Exception = NewConnectionError(connection, f"{host} has no address")
    for address in addresses:
        try:
            made = create_connection(
                (address, port),
                connection.timeout,
                source_address=connection.source_address,
                socket_options=connection.socket_options,
            )
            hurry.of(made)
            return made
        except TimeoutError:
            failure = ConnectTimeoutError(connection, f"{host} does not answer")
        except OSError as error:
            failure = NewConnectionError(connection, f"{host}: {error.strerror}")
    raise failure


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _continues(answer: requests.Response, begin_bytes: int, part_of: Version) -> bool:
    """Whether what comes is the rest of that version, whatever the server made of If-Range."""
    unit, _, sent = answer.headers.get("Content-Range", "").partition(" ")
    where, _, total = sent.partition("/")
    return (
        unit == "bytes"
        and where.startswith(f"{begin_bytes}-")
        and (part_of.size_bytes is None or total in ("*", str(part_of.size_bytes)))
        and _tag(answer) in ("", part_of.tag)
    )


def _tag(answer: requests.Response) -> str:
    """What If-Range takes. A weak ETag says nothing of bytes, and a date of change nothing where
    another change may have come within its second (RFC 9110 §13.1.5, §8.8.2.2)."""
    etag = answer.headers.get("ETag", "")
    if etag and not etag.startswith("W/"):
        return etag
    changed, sent = answer.headers.get("Last-Modified", ""), answer.headers.get("Date", "")
    try:
        later_s = (parsedate_to_datetime(sent) - parsedate_to_datetime(changed)).total_seconds()
    # One is missing, is no date, or says nothing of its zone.
    except (ValueError, TypeError, OverflowError):
        return ""
    return changed if later_s >= 1.0 else ""


def _pieces(answer: requests.Response, hurry: _Hurry) -> Iterator[bytes]:
    pieces: Iterator[bytes] = answer.iter_content(PIECE_BYTES)
    try:
        hurry.again()
        for piece in pieces:
            hurry.rest()
            yield piece
            hurry.again()
        hurry.rest()
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
        raise Interrupted("the connection broke off") from None
