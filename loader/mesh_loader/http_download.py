"""Opens a file of the web at an offset, through requests.

Proxies, certificates and logins are configured as requests has them: HTTPS_PROXY,
REQUESTS_CA_BUNDLE, ~/.netrc. `download` comes before it and does the retries.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import requests

from mesh.domain.errors import MeshError, NotFound, Unavailable
from mesh.runtime.engine import Progress
from mesh_loader.download import PIECE_BYTES, Changed, Interrupted, Opened, Version, download
from mesh_loader.download_rate import DownloadRate
from mesh_loader.source_http import TAR_SUFFIXES, WebFile
from mesh_loader.tar_folder import unpacked

CONNECT_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 60.0
"""Without a single byte."""
_TRANSIENT = (408, 409, 423, 425, 429, 500, 502, 503, 504)


def fetch_web_file(source: WebFile, folder: Path, rate: DownloadRate, progress: Progress) -> Path:
    """The file, or what an archive holds, under `folder`; see `download` for what it raises."""
    target = folder / source.name
    download(_HttpFile(source), target, rate, progress)
    if target.name.lower().endswith(TAR_SUFFIXES):
        return unpacked(target, folder / "unpacked", progress)
    return target


class _HttpFile:
    def __init__(self, source: WebFile) -> None:
        self._url = source.url
        self.name = source.name

    @contextmanager
    def open(self, begin_bytes: int, part_of: Version | None) -> Iterator[Opened]:
        headers = {"Accept-Encoding": "identity"}
        if part_of is not None:
            headers |= {"Range": f"bytes={begin_bytes}-", "If-Range": part_of.tag}
        try:
            with requests.get(
                self._url,
                headers=headers,
                stream=True,
                timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
            ) as answer:
                yield self._opened(answer, begin_bytes, part_of)
        except requests.exceptions.SSLError as error:
            raise Unavailable(
                f"{self.name}: the server's certificate is not accepted",
                hint="set REQUESTS_CA_BUNDLE where it is signed by an authority of your own",
            ) from error
        except (requests.ConnectionError, requests.Timeout) as error:
            # Its own text holds the URL it was sent on to, which may be a signed one.
            raise Interrupted(f"no answer ({type(error).__name__})") from None
        except requests.RequestException as error:
            raise Unavailable(
                f"{self.name} cannot be fetched: {type(error).__name__}",
                hint="check the URL in a browser or with curl -L",
            ) from None

    def _opened(
        self, answer: requests.Response, begin_bytes: int, part_of: Version | None
    ) -> Opened:
        if part_of is not None and answer.status_code in (206, 416):
            if answer.status_code == 416 or not _continues(answer, begin_bytes, part_of):
                raise Changed("the server has another version of it")
            return Opened(version=part_of, begin_bytes=begin_bytes, pieces=_pieces(answer))
        if answer.status_code != 200:
            raise self._refusal(answer)
        length = answer.headers.get("Content-Length", "")
        coded = answer.headers.get("Content-Encoding", "identity") != "identity"
        size_bytes = int(length) if length.isdecimal() and not coded else None
        # Of a compressed answer, offsets are not those of the file.
        version = Version(size_bytes=size_bytes, tag="" if coded else _tag(answer))
        return Opened(version=version, begin_bytes=0, pieces=_pieces(answer))

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
                hint="put a login for its host into ~/.netrc on the node, or fetch the file "
                "yourself and name it as file:///path",
            )
        return Unavailable(
            f"{self.name} cannot be fetched: the server answered {status}",
            hint="check the URL in a browser or with curl -L",
        )


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
    """What If-Range takes. A weak ETag says nothing of bytes (RFC 9110 §13.1.5)."""
    etag = answer.headers.get("ETag", "")
    if etag and not etag.startswith("W/"):
        return etag
    return answer.headers.get("Last-Modified", "")


def _pieces(answer: requests.Response) -> Iterator[bytes]:
    pieces: Iterator[bytes] = answer.iter_content(PIECE_BYTES)
    try:
        yield from pieces
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
        raise Interrupted("the connection broke off") from None
