"""The page at `/`: its files, read once from the package and served from memory.

A browser gets the page and anybody else what `/` says of itself, by the header Accept. The policy
lets the page load nothing from elsewhere and run no inline script. A file is asked for again each
time, and its ETag spares sending it. Before: the routes.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mesh.domain.values import dataclass

INDEX = "index.html"
MAIN = "main.js"
SOON = (
    "<page/early.js>; rel=preload; as=script",
    "<api/v1/session>; rel=preload; as=fetch; crossorigin",
)
"""The cell's state waits for both, who views and what asks for the state: they come first, and side
by side.
"""
_IMPORTED = re.compile(rb'^import .* from "\./(.+)";$', re.MULTILINE)
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The suffixes that are served; licences and the list of what is vendored are not."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    etag: str
    whole: Response
    same: Response
    """For a browser that has it already."""


class Page:
    """`about` is what `/` says to clients that ask for no page, as JSON; `shown` is whether there
    is a page at all; `opened` is told of browsers that get it.
    """

    def __init__(
        self, about: bytes, *, shown: bool, opened: Callable[[Request], None] = lambda _: None
    ) -> None:
        self._opened = opened
        self._about = Response(about, headers={"vary": "accept"}, media_type="application/json")
        self._files: Mapping[str, _File] = _read(files("mesh") / "page") if shown else {}
        modules = (f"<page/{name}>; rel=modulepreload" for name in _first(self._files))
        links = ", ".join((*SOON, *(f"{one}; fetchpriority=low" for one in modules)))
        index = self._files.get(INDEX)
        told = {"content-type": _KINDS[".html"], "link": links, "vary": "accept"}
        self._index = None if index is None else _file(index.body, told)
        self._turn = asyncio.Lock()

    async def root(self, request: Request) -> Response:
        if self._index is None or "text/html" not in request.headers.get("accept", ""):
            return self._about
        self._opened(request)
        return _answer(request, self._index)

    async def file(self, request: Request) -> Response:
        """Whole ones are sent one in a turn of the loop: a browser asks for six at a time. Raises
        HTTPException. A name is looked up as it is: none leads out of the folder.
        """
        found = self._files.get(request.path_params["file"])
        if found is None:
            raise HTTPException(404)
        answer = _answer(request, found)
        if answer is found.whole:
            async with self._turn:
                await asyncio.sleep(0)
        return answer


def _answer(request: Request, found: _File) -> Response:
    known = request.headers.get("if-none-match", "")
    has_it = found.etag in (one.strip().removeprefix("W/") for one in known.split(","))
    return found.same if has_it else found.whole


def _file(body: bytes, told: Mapping[str, str]) -> _File:
    """With its answers, which are made once; `told` are headers of both."""
    etag = f'"{sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag, **told}
    same = Response(status_code=304, headers=headers)
    return _File(body, etag, Response(body, headers=headers), same)


def _first(files: Mapping[str, _File]) -> list[str]:
    """The modules without which nothing is drawn: they are named with the index, so that a browser
    asks for all at once, not for those that a module imports once it has that module.
    """
    found = [MAIN] if MAIN in files else []
    for name in found:
        imported = (one.decode() for one in _IMPORTED.findall(files[name].body))
        found += [one for one in dict.fromkeys(imported) if one not in found]
    return found


def _read(folder: Traversable, inside: str = "") -> dict[str, _File]:
    found: dict[str, _File] = {}
    for one in folder.iterdir():
        path = f"{inside}{one.name}"
        kind = _KINDS.get(PurePosixPath(path).suffix)
        if one.is_dir():
            found |= _read(one, f"{path}/")
        elif kind is not None:
            found[path] = _file(one.read_bytes(), {"content-type": kind})
    return found
