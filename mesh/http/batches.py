"""`/v1/batches`: OpenAI's batches. A file of calls is answered in the time that others leave.

Each line is a call to the same endpoint as one by HTTP, for who asked for the batch, as best
effort. A batch is a task in the controller's loop: it checks its file, makes the calls, and
registers its answers as files. One that had not ended when the controller did goes on with the
next: what is in its files is answered, and a line that was under way is asked again. Before: the
routes. After: the endpoints of calls, `batch_lines` and `kept_files`.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from mesh.domain.access import NOBODY, Caller, TenantName
from mesh.domain.deployment import Deployment
from mesh.domain.errors import InvalidInput, MeshError, NotFound, Refused, StorageError, Unreached
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import BATCH, BatchState, advance
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import dataclass, replace
from mesh.domain.views import OpenBatches
from mesh.http.batch_lines import (
    ERRORS_MAX,
    Answer,
    Answers,
    call_of,
    checked,
    lines_of,
)
from mesh.http.bodies import read
from mesh.http.exchange import ABORT, PLACED, WATCH, Bodies, Exchange
from mesh.http.files import Collection, found, listed
from mesh.http.kept_files import (
    ENDED,
    KEPT_S,
    BatchError,
    BatchErrors,
    Counts,
    KeptBatch,
    KeptFile,
    KeptFiles,
    Page,
)
from mesh.http.refusals import JSON, json_response
from mesh.http.tools import Strict
from mesh.wire.access import act_as, caller

RUNNING_MAX = 4
"""Batches whose calls are made at a time; a tenant has half of them."""
LINES_AT_ONCE_MAX = 128
"""Calls of a batch that are under way."""
LINES_WAITING_MAX = 16
"""Those of them that have no place yet: with all batches that run, a quarter of what may wait for a
deployment."""
OPEN_MAX = 64
"""Batches of a tenant that have not ended."""
NOTED_LINES = 64
"""The index is told of a batch's progress once in so many lines."""
TRIES_MAX = 3
"""Calls for a line that a load or an engine failed."""
PAUSE_S_LEAST, PAUSE_S_MOST = 0.25, 30.0
"""Before a call that was refused is made again, unless the refusal says more."""
END_AGAIN_S = 60.0
"""Before a batch is ended again that could not be, as on a full disk."""
FETCH_AGAIN_S = 1.0
"""Before a content is asked for again whose database was away."""
FORGET_S = 3600.0
WINDOW_S = 24 * 3600
_NOT_MADE = {
    BatchState.EXPIRED: ("batch_expired", "the completion window has ended before this call"),
    BatchState.CANCELLED: ("batch_cancelled", "the batch was cancelled before this call"),
}

logger = logging.getLogger(__name__)


_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
"""Bounds of metadata, as with OpenAI."""


class BatchBody(Strict):
    """Answers the calls of a file, in the time that others leave."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)


@dataclass(slots=True, kw_only=True)
class _Open:
    """How far a batch is that has not ended."""

    tenant: TenantName
    counts: Counts
    """As they were kept last."""
    answers: Answers | None = None
    """What it has so far, once its files have been read."""

    @property
    def now(self) -> Counts:
        if self.answers is None:
            return self.counts
        total = self.counts.total or len(self.answers.ids)
        return Counts(total=total, completed=self.answers.completed, failed=self.answers.failed)


class Batches:
    """`check_key` raises Forbidden where the key of that id opens nothing any more."""

    def __init__(
        self, store: KeptFiles, check_key: Callable[[str], None] = lambda key_id: None
    ) -> None:
        self.store = store
        self._check_key = check_key
        self._calls: Mapping[str, ASGIApp] = {}
        self._deployment: Callable[[DeploymentName], Deployment]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By batch."""
        self._open: dict[str, _Open] = {}
        """By batch, as the tasks."""
        self._checking = asyncio.Lock()
        self._own_checking: defaultdict[TenantName, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Each tenant waits with one file for its turn to be checked."""
        self._places = asyncio.Semaphore(RUNNING_MAX)
        self._own_places: defaultdict[TenantName, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(RUNNING_MAX // 2)
        )
        self._own_places[NOBODY] = asyncio.Semaphore(RUNNING_MAX)
        self._ending = set[str]()
        self._forgetting: asyncio.Task[None] | None = None

    def serve(
        self, calls: Mapping[str, ASGIApp], deployment: Callable[[DeploymentName], Deployment]
    ) -> None:
        """Go on with what has not ended. `calls` are the endpoints by their paths; `deployment`
        raises NotFound.
        """
        self._calls, self._deployment = calls, deployment
        self._forgetting = asyncio.create_task(self._forget_old())
        for batch, owner in self.store.open_batches():
            self._begin(batch, owner)

    def stop(self) -> None:
        """Leave the rest to the next controller."""
        for task in (self._forgetting, *self._tasks.values()):
            if task is not None:
                task.cancel()

    async def create(self, body: BatchBody) -> KeptBatch:
        """Raises InvalidInput, Refused or StorageError."""
        file = self.store.get(KeptFile, body.input_file_id)
        if file is None or file.purpose != "batch":
            raise InvalidInput(
                f"there is no file {body.input_file_id[:100]!r} for a batch",
                hint="send it to /v1/files with purpose batch",
                field="input_file_id",
            )
        tenant = caller().tenant
        count = sum(owner.tenant == tenant for _, owner in self.store.open_batches())
        if count >= OPEN_MAX:
            raise Refused(
                f"{count} batches have not ended, which is the limit",
                reason=RefusalReason.TENANT_LIMIT,
                hint="wait for one of them, or cancel it",
            )
        self.store.check_room(0)
        now_unix_s = self.store.now_unix_s
        batch = KeptBatch(
            id=f"batch_{token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            output_file_id=f"file-{token_hex(12)}",
            error_file_id=f"file-{token_hex(12)}",
            created_at=now_unix_s,
            expires_at=now_unix_s + WINDOW_S,
            metadata=body.metadata,
        )
        self.store.add(batch, caller())
        try:
            await self.store.saved()
        except BaseException:
            self.store.forget(batch.id)
            raise
        self._begin(batch, caller())
        return batch

    async def cancel(self, batch: KeptBatch) -> KeptBatch:
        """Make no further calls. Raises InvalidInput where it has ended, or StorageError."""
        if batch.status is not BatchState.CANCELLING:
            if BatchState.CANCELLING not in BATCH[batch.status] or batch.id in self._ending:
                raise InvalidInput(f"{batch.id} is {batch.status}: there is nothing to cancel")
            batch = self._moved(batch, BatchState.CANCELLING)
            if batch.id in self._tasks:
                self._tasks[batch.id].cancel()
            await self.store.saved()
        return batch

    def shown(self, batch: KeptBatch) -> KeptBatch:
        """As its tenant sees it: with no files of answers before it has ended."""
        told: dict[str, Any] = {"request_counts": self._counts(batch)}
        if batch.status not in ENDED:
            told |= {"output_file_id": None, "error_file_id": None}
        return batch.model_copy(update=told)

    def open(self) -> list[OpenBatches]:
        """Those that have not ended, by tenant."""
        found: defaultdict[TenantName, list[Counts]] = defaultdict(list)
        for one in self._open.values():
            found[one.tenant].append(one.now)
        return [
            OpenBatches(
                tenant=tenant,
                batches=len(counts),
                lines=sum(one.total for one in counts),
                done=sum(one.completed + one.failed for one in counts),
            )
            for tenant, counts in sorted(found.items())
        ]

    def _counts(self, batch: KeptBatch) -> Counts:
        """As they are now."""
        return self._open[batch.id].now if batch.id in self._open else batch.request_counts

    def _note_progress(self, batch: KeptBatch) -> None:
        counts = {"request_counts": self._counts(batch)}
        self.store.update(self._now(batch).model_copy(update=counts))

    def _begin(self, batch: KeptBatch, owner: Caller) -> None:
        self._open[batch.id] = _Open(tenant=owner.tenant, counts=batch.request_counts)
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch, owner))
        task.add_done_callback(lambda _: (self._tasks.pop(batch.id), self._open.pop(batch.id)))

    async def _run(self, batch: KeptBatch, owner: Caller) -> None:
        act_as(replace(owner, best_effort=True))
        end, why = BatchState.COMPLETED, list[BatchError]()
        try:
            async with asyncio.timeout(batch.expires_at - self.store.now_unix_s):
                if batch.status is BatchState.VALIDATING:
                    batch, why = await self._validated(batch, owner)
                if batch.status is BatchState.IN_PROGRESS and not why:
                    await self._answered(batch, owner)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            # Whoever cancels the batch has said so there; else the controller ends.
            if self._now(batch).status is not BatchState.CANCELLING or task.uncancel():
                raise
        except TimeoutError:
            end = BatchState.EXPIRED
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            logger.warning("%s fails", batch.id, exc_info=error)
            message = getattr(error, "message", f"{type(error).__name__}: {error}")
            why = [BatchError(code="failed", message=message)]
        batch = self._now(batch)
        if why:
            end = BatchState.FAILED
        elif batch.status is BatchState.CANCELLING:
            end = BatchState.CANCELLED
        self._ending.add(batch.id)
        try:
            while not await self._end_now(batch, owner, end, why):
                await asyncio.sleep(END_AGAIN_S)
                batch = self._now(batch)
        finally:
            self._ending.discard(batch.id)

    async def _end_now(
        self, batch: KeptBatch, owner: Caller, end: BatchState, why: list[BatchError]
    ) -> bool:
        """Whether the disk takes what its end writes."""
        try:
            await self._end(batch, owner, end, why)
            return True
        except (MeshError, OSError):
            logger.exception("%s does not end: it is tried again", batch.id)
            return False

    def _now(self, batch: KeptBatch) -> KeptBatch:
        """The batch as it is kept."""
        return self.store.get(KeptBatch, batch.id) or batch

    def _moved(self, batch: KeptBatch, to: BatchState, **changes: Any) -> KeptBatch:
        """The batch in another state, as it is kept from now on."""
        status = advance(BATCH, batch.status, to)
        moved = {"status": status, f"{status}_at": self.store.now_unix_s, **changes}
        batch = batch.model_copy(update=moved)
        self.store.update(batch)
        return batch

    async def _validated(
        self, batch: KeptBatch, owner: Caller
    ) -> tuple[KeptBatch, list[BatchError]]:
        await self._fetched(batch.input_file_id)
        async with self._own_checking[owner.tenant], self._checking:
            lines = lines_of(self.store.content(batch.input_file_id))
            found = await asyncio.to_thread(checked, lines, batch.endpoint)
        for model, line in found.models.items():
            if len(found.errors) >= ERRORS_MAX:
                break
            await asyncio.sleep(0)
            try:
                self._deployment(DeploymentName(model))
            except NotFound as error:
                code, param = "model_not_found", "body.model"
                wrong = BatchError(code=code, message=error.message, line=line, param=param)
                found.errors.append(wrong)
            except MeshError:
                pass  # it is being imported, say
        if not found.errors:
            counts = Counts(total=found.lines)
            batch = self._moved(batch, BatchState.IN_PROGRESS, request_counts=counts)
            self._open[batch.id].counts = counts
        return batch, sorted(found.errors, key=lambda one: one.line or 0)

    async def _fetched(self, id_: str) -> Path:
        """The same as the store has it, once its database is there."""
        while True:
            try:
                return await self.store.fetched(id_)
            except Unreached:
                await asyncio.sleep(FETCH_AGAIN_S)

    async def _opened(self, batch: KeptBatch) -> Answers:
        """Its answers so far."""
        one = self._open[batch.id]
        if one.answers is None:
            await self._fetched(batch.input_file_id)
            ids = batch.output_file_id, batch.error_file_id
            paths = [await self._fetched(id_) for id_ in ids if id_]
            one.answers = await asyncio.to_thread(Answers, *paths)
        return one.answers

    async def _answered(self, batch: KeptBatch, owner: Caller) -> None:
        """Make the calls of all lines that have no answer. Raises what ends the batch."""
        answers = await self._opened(batch)
        flying = asyncio.Semaphore(LINES_AT_ONCE_MAX)
        waiting = asyncio.Semaphore(LINES_WAITING_MAX)
        async with self._own_places[owner.tenant], self._places:
            logger.info("%s goes on after %d lines", batch.id, len(answers.ids))
            async with asyncio.TaskGroup() as group:
                for number, raw in lines_of(self.store.content(batch.input_file_id)):
                    custom_id, body = call_of(raw, batch.endpoint)
                    if number % NOTED_LINES == 0:
                        self._note_progress(batch)
                    # Lines that fail at once hold nobody else up.
                    await asyncio.sleep(0)
                    if custom_id in answers.ids:
                        continue
                    await flying.acquire()
                    add = partial(answers.add, custom_id)
                    line = self._line(batch.endpoint, body, waiting, owner.key_id, add)
                    group.create_task(line).add_done_callback(lambda _: flying.release())

    async def _line(
        self,
        path: str,
        body: bytes,
        waiting: asyncio.Semaphore,
        key_id: str,
        add: Callable[[Answer], None],
    ) -> None:
        """Make a call, again where that may help, and `add` its answer. Raises Forbidden."""
        pause_s, tries = PAUSE_S_LEAST, 0
        while True:
            self._check_key(key_id)
            await waiting.acquire()
            placed = _once(waiting.release)
            try:
                answer = await asked(self._calls[path], path, body, placed)
            finally:
                placed()
            tries += 1
            if answer.retry_s is None or (answer.status == 500 and tries == TRIES_MAX):
                add(answer)
                return
            await asyncio.sleep(max(answer.retry_s, pause_s))
            pause_s = min(2 * pause_s, PAUSE_S_MOST)

    async def _end(
        self, batch: KeptBatch, owner: Caller, end: BatchState, why: list[BatchError]
    ) -> None:
        """Register its files, with an error for each line whose call will not be made."""
        if end is BatchState.COMPLETED and batch.status is BatchState.IN_PROGRESS:
            batch = self._moved(batch, BatchState.FINALIZING)
        answers = await self._opened(batch)

        def finish() -> None:
            # A file that was not checked may have any number of lines, or none that is a call.
            if end in _NOT_MADE and batch.in_progress_at is not None:
                with suppress(StorageError):  # without its content nobody knows the others' names
                    for _, raw in lines_of(self.store.content(batch.input_file_id)):
                        custom_id, _ = call_of(raw, batch.endpoint)
                        if custom_id not in answers.ids:
                            answers.add_unanswered(custom_id, *_NOT_MADE[end])
            answers.sync()

        await asyncio.to_thread(finish)
        ids: list[str | None] = []
        for id_, name in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
            path = self.store.path(id_ or "")
            size_bytes = path.stat().st_size
            if id_ is None or not size_bytes:
                path.unlink()
                ids.append(None)
                continue
            now_unix_s = self.store.now_unix_s
            kept = KeptFile(
                id=id_,
                bytes=size_bytes,
                created_at=now_unix_s,
                expires_at=now_unix_s + KEPT_S,
                filename=f"{batch.id}_{name}.jsonl",
                purpose="batch_output",
            )
            self.store.add(kept, owner)
            ids.append(id_)
        self._moved(
            batch,
            end,
            output_file_id=ids[0],
            error_file_id=ids[1],
            request_counts=self._counts(batch),
            errors=BatchErrors(data=why) if why else None,
        )
        logger.info("%s is %s after %d lines", batch.id, end, len(answers.ids))

    async def _forget_old(self) -> None:
        while True:
            try:
                self.store.forget_old()
            except (MeshError, OSError):
                logger.exception("old files are not forgotten")
            await asyncio.sleep(FORGET_S)


async def asked(app: ASGIApp, path: str, body: bytes, placed: Callable[[], None]) -> Answer:
    """What an endpoint answers to a call of best effort; `placed` is called once it has a place."""
    bodies, parts, status, headers = [body], list[bytes](), 500, dict[bytes, bytes]()

    async def receive() -> Message:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message["body"])

    # Nobody leaves: who cancels the batch cancels this task.
    extensions = {WATCH: lambda left: lambda: None, ABORT: lambda: None, PLACED: placed}
    scope = {"type": "http", "path": path, "headers": [JSON], "extensions": extensions}
    await app(scope, receive, send)
    retry_s: float | None = int(headers.get(b"retry-after-ms", 0)) / 1e3
    if status not in (429, 500, 503) or (status == 429 and b"x-should-retry" in headers):
        retry_s = None
    request_id = headers.get(b"x-request-id", b"").decode()
    return Answer(status=status, body=b"".join(parts), request_id=request_id, retry_s=retry_s)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """The same, which does nothing but the first time."""
    left = [call]

    def first() -> None:
        if left:
            left.pop()()

    return first


def batch_routes(batches: Batches | None, bodies: Bodies) -> list[Route]:
    async def make(exchange: Exchange) -> KeptBatch:
        there = found(batches)
        async with exchange.body(bodies) as raw:
            return there.shown(await there.create(read(BatchBody, raw)))

    def page(request: Request) -> Page[KeptBatch]:
        there = found(batches)
        told = listed(there.store, KeptBatch, request)
        return told.model_copy(update={"data": [there.shown(one) for one in told.data]})

    async def one(request: Request) -> Response:
        """GET, or POST to cancel it."""
        there = found(batches)
        batch = there.store.get(KeptBatch, request.path_params["id"])
        if batch is None:
            raise HTTPException(404)
        if request.method == "POST":
            batch = await there.cancel(batch)
        return json_response(there.shown(batch).model_dump())

    return [
        Route("/v1/batches", Collection(make, page), methods=["GET", "POST"]),
        Route("/v1/batches/{id}", one, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", one, methods=["POST"]),
    ]
