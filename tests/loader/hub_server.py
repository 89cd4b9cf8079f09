"""A Hugging Face hub on this machine: the few endpoints that huggingface_hub asks for a snapshot.

Serves folders as repositories over HTTP, so that the whole way of a download is taken without a
network: listing, metadata, content, and the hub's answers to unknown, gated and private names.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "org/gated"


@contextmanager
def hub(repositories: dict[str, Path], files_at: str = "") -> Iterator[str]:
    """Serves the repositories (name to folder), all at revision main; yields the endpoint. Their
    files are redirected to `files_at` where that is given, as a hub does to its network.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def _answer(self) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._api("/".join(parts[2:4]), parts[4:])
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self._send(404, b"", {})

        def _refused(self, name: str, revision: str) -> bool:
            if name == GATED:
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif name not in repositories:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                return False
            return True

        def _api(self, name: str, rest: list[str]) -> None:
            revision = rest[1] if len(rest) > 1 else "main"
            if self._refused(name, revision):
                return
            files = sorted(path for path in repositories[name].iterdir() if path.is_file())
            value: object
            if rest[:1] == ["tree"]:
                value = [
                    {
                        "type": "file",
                        "path": path.name,
                        "size": path.stat().st_size,
                        "oid": _etag(path),
                    }
                    for path in files
                ]
            else:
                siblings = [{"rfilename": p.name, "size": p.stat().st_size} for p in files]
                value = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
            headers = {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}
            self._send(200, json.dumps(value).encode(), headers)

        def _file(self, name: str, revision: str, file: str) -> None:
            if self._refused(name, revision):
                return
            path = repositories[name] / file
            if not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}
            if files_at:
                told = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(path.stat().st_size)}
                self._send(302, b"", {**headers, **told, "Location": f"{files_at}{self.path}"})
                return
            self._send(200, path.read_bytes(), headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
