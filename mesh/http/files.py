"""`/v1/files`: OpenAI's files, for batches alone: sent as a form, listed, read and deleted.

A file goes to its place on the disk as it comes. Before: the routes. After: `kept_files`.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from secrets import token_hex
from typing import BinaryIO, Literal, TypeVar

from pydantic import BaseModel
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from mesh.domain.errors import DeadlineExceeded, InvalidInput, NotFound, StorageError
from mesh.http.exchange import Bodies, Endpoint, Exchange
from mesh.http.kept_files import (
    FILE_BYTES_MAX,
    KEPT_S,
    UPLOAD_S_MAX,
    Kept,
    KeptBatch,
    KeptFile,
    KeptFiles,
    Page,
)
from mesh.http.refusals import encoded, json_response
from mesh.http.sessions import check_origin
from mesh.wire.access import caller

T = TypeVar("T")
FORM_BYTES_MAX = 64 << 10
"""Beside the file."""
UPLOADS_MAX = 8
"""At a time; a tenant may have two."""
FILENAME_CHARS_MAX = 255
_NAME = re.compile(r"[/\\]")
"""Before the name of a file there may be those of its folders."""
LISTED_MAX = 10_000
PAGE_MAX = 500
"""However long a list may be: it is made in the loop, and the rest is on the next page."""
BATCHES_LISTED = 20
"""Unless a list of batches is asked for with a limit."""


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class Collection(Endpoint):
    """POST makes one, GET lists those that there are."""

    def __init__(
        self,
        make: Callable[[Exchange], Awaitable[BaseModel]],
        page: Callable[[Request], BaseModel],
    ) -> None:
        self._make = make
        self._page = page

    async def answer(self, exchange: Exchange, request: Request) -> None:
        if request.method == "POST":
            check_origin(request)
            told = await self._make(exchange)
        else:
            told = self._page(request)
        await exchange.json(encoded(told.model_dump()))


class _Form(MultiPartParser):
    """A form whose file goes to `file`, in place of a temporary one."""

    def __init__(
        self, headers: Headers, parts: AsyncGenerator[bytes, None], file: BinaryIO
    ) -> None:
        super().__init__(headers, parts, max_files=1, max_fields=2)
        self._file = file

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        upload = self._current_part.file
        if upload is not None:
            upload.file.close()
            upload.file = self._file


def found(store: T | None) -> T:
    """Raises NotFound at a front, which has neither files nor batches."""
    if store is None:
        raise NotFound("a front keeps no files and batches", hint="ask the controller of a cell")
    return store


async def _kept(store: KeptFiles, exchange: Exchange) -> KeptFile:
    """The file of a call's form. Raises InvalidInput, DeadlineExceeded or Refused."""
    headers = Headers(raw=list(exchange.headers()))
    store.check_room(int(headers.get("content-length", 0)))
    path = store.path(f"file-{token_hex(12)}")
    parts = exchange.parts(FILE_BYTES_MAX + FORM_BYTES_MAX)
    try:
        async with asyncio.timeout(UPLOAD_S_MAX):
            with path.open("wb") as file:
                upload = _upload(await _Form(headers, parts, file).parse())
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
        size_bytes = path.stat().st_size
        store.check_room(size_bytes)
        now_unix_s = store.now_unix_s
        kept = KeptFile(
            id=path.name,
            bytes=size_bytes,
            created_at=now_unix_s,
            expires_at=now_unix_s + KEPT_S,
            filename=_NAME.split(upload.filename or "")[-1][-FILENAME_CHARS_MAX:] or "file",
            purpose="batch",
        )
        store.add(kept, caller())
        await store.saved()
    except BaseException as error:
        store.forget(path.name)
        if isinstance(error, MultiPartException):
            raise InvalidInput(f"the form cannot be read: {error.message}") from error
        if isinstance(error, UnicodeError):  # of a charset that nobody has
            raise InvalidInput(f"the form cannot be read: {error}") from error
        if isinstance(error, TimeoutError):
            said = f"the file has not come within {UPLOAD_S_MAX:g} s"
            raise DeadlineExceeded(said) from None
        if isinstance(error, OSError):
            raise StorageError(f"the file cannot be kept: {error}", hint="free space") from error
        raise
    return kept


def _upload(form: FormData) -> UploadFile:
    """The file of a form. Raises InvalidInput."""
    for name in form:
        if name not in ("purpose", "file"):
            raise InvalidInput(
                f"{name[:100]} is not supported here",
                hint="leave it out: files are kept for 30 days",
                field=name[:100],
            )
    purpose = form.get("purpose", "")
    if purpose != "batch":
        said = repr(purpose[:100]) if isinstance(purpose, str) else "a file"
        raise InvalidInput(f"purpose is {said}; it must be 'batch'", field="purpose")
    file = form.get("file")
    if not isinstance(file, UploadFile) or not file.size:
        raise InvalidInput("file is missing or empty", field="file")
    return file


def listed(store: KeptFiles, kind: type[Kept], request: Request) -> Page[Kept]:
    """The page of the caller's that a request asks for. Raises InvalidInput."""
    asked, usual = request.query_params, BATCHES_LISTED if kind is KeptBatch else LISTED_MAX
    limit, after, order = asked.get("limit", str(usual)), asked.get("after"), asked.get("order")
    if re.fullmatch(r"[0-9]{1,5}", limit) is None or not 1 <= int(limit) <= LISTED_MAX:
        said = f"limit is {limit[:40]!r}; it must be 1 to {LISTED_MAX}"
        raise InvalidInput(said, field="limit")
    if order not in (None, "asc", "desc"):
        raise InvalidInput(f"order is {order[:40]!r}; it must be asc or desc", field="order")
    if after and store.get(kind, after) is None:
        raise InvalidInput(f"after: there is no {after[:100]!r}", field="after")
    return store.page(
        kind,
        after=after or "",
        limit=min(int(limit), PAGE_MAX),
        oldest_first=order == "asc",
        purpose=asked.get("purpose", ""),
    )


def file_routes(store: KeptFiles | None) -> list[Route]:
    bodies = Bodies(count_max=UPLOADS_MAX)

    async def make(exchange: Exchange) -> KeptFile:
        with bodies.reading():
            return await _kept(found(store), exchange)

    def asked(request: Request) -> KeptFile:
        file = found(store).get(KeptFile, request.path_params["id"])
        if file is None:
            raise HTTPException(404)
        return file

    async def one(request: Request) -> Response:
        file = asked(request)
        if request.method != "DELETE":
            return json_response(file.model_dump())
        for batch, _ in found(store).open_batches():
            if batch.input_file_id == file.id:
                raise InvalidInput(f"{file.id} is in use by {batch.id}", hint="cancel that first")
        found(store).forget(file.id)
        await found(store).saved()
        return json_response(DeletedFile(id=file.id).model_dump())

    async def content(request: Request) -> Response:
        file = asked(request)
        await found(store).fetched(file.id)
        path = found(store).content(file.id)
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    files = Collection(make, lambda request: listed(found(store), KeptFile, request))
    return [
        Route("/v1/files", files, methods=["GET", "POST"]),
        Route("/v1/files/{id}", one, methods=["GET", "DELETE"]),
        Route("/v1/files/{id}/content", content, methods=["GET"]),
    ]
