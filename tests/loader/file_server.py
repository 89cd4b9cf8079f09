"""A web server on this machine that serves one file, and can be as bad as real ones are."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """What is served now, and what has been asked."""

    content: bytes
    breaks_after: list[int] = field(default_factory=list)
    """Bytes after which the next answers break off, one after the other."""
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """What the next answers refuse with."""
    ranges: bool = True
    if_range: bool = True
    """False: a range is served of whatever there is now."""
    tags: bool = True
    changed: str = ""
    """The date of change that is told, if any."""
    length: bool = True
    """False: in chunks, and nobody knows how many."""
    pause_s: float = 0.0
    """After every 64 KiB."""
    asked: list[str] = field(default_factory=list)
    """The Range of each request, or an empty text."""
    logins: list[str] = field(default_factory=list)
    """The Authorization of each request, or an empty text."""
    sent_bytes: int = 0

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'


@contextmanager
def serving(served: Served) -> Iterator[str]:
    """Yields the address, without a path: every path is the file."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            asked = self.headers.get("Range", "")
            served.asked.append(asked)
            served.logins.append(self.headers.get("Authorization", ""))
            if served.statuses:
                self._refuse(*served.statuses.pop(0))
                return
            content, begin = served.content, 0
            told = (served.tag, served.changed)
            same = not served.if_range or self.headers.get("If-Range") in told
            if asked and served.ranges and same:
                begin = int(asked.removeprefix("bytes=").removesuffix("-"))
                if begin >= len(content):
                    self._refuse(416, {"Content-Range": f"bytes */{len(content)}"})
                    return
            self.send_response(206 if begin else 200)
            if begin:
                last = len(content) - 1
                self.send_header("Content-Range", f"bytes {begin}-{last}/{len(content)}")
            if served.tags:
                self.send_header("ETag", served.tag)
            if served.changed:
                self.send_header("Last-Modified", served.changed)
            if served.length:
                self.send_header("Content-Length", str(len(content) - begin))
            else:
                self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Connection", "close")
            self.end_headers()
            self._send(content[begin:])
            self.close_connection = True

        def _send(self, content: bytes) -> None:
            limit = served.breaks_after.pop(0) if served.breaks_after else len(content)
            try:
                for begin in range(0, min(limit, len(content)), 64 << 10):
                    piece = content[begin : min(limit, begin + (64 << 10))]
                    size_line = b"" if served.length else b"%x\r\n" % len(piece)
                    self.wfile.write(size_line + piece + (b"\r\n" if size_line else b""))
                    served.sent_bytes += len(piece)
                    time.sleep(served.pause_s)
                if not served.length and limit >= len(content):
                    self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:
                pass  # the other side was killed

        def _refuse(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
