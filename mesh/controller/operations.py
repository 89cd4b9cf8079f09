"""Those who wait for an administrative call: the Operators port of the performer.

An operation's caller is told its latest progress, then how it ended. A caller that goes away before
that becomes OperationCancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from mesh.domain.actions import ReplyDone, ReplyError, ReplyProgress
from mesh.domain.events import ControllerEvent, OperationCancelled
from mesh.domain.ids import OperationId
from mesh.wire.errors import error_named

Reply = ReplyProgress | ReplyDone | ReplyError


class Operations:
    """Operation ids are o<epoch>-<n>. How many may be under way is the core's to limit."""

    def __init__(self, *, post: Callable[[ControllerEvent], None], epoch: int) -> None:
        self._post = post
        self._epoch = epoch
        self._begun = 0
        self._waiting: dict[OperationId, _Caller] = {}

    def reply(self, reply: Reply) -> None:
        caller = self._waiting.get(reply.operation_id)
        if caller is not None:
            caller.tell(reply)

    async def run(
        self, event_of: Callable[[OperationId], ControllerEvent]
    ) -> AsyncGenerator[ReplyProgress | ReplyDone, None]:
        """Post the operation's event and yield what comes of it; ReplyDone is the last. Raises the
        error that it failed with.
        """
        self._begun += 1
        operation_id = OperationId(f"o{self._epoch}-{self._begun}")
        caller = self._waiting[operation_id] = _Caller()
        try:
            self._post(event_of(operation_id))
            while True:
                reply = await caller.next()
                if isinstance(reply, ReplyError):
                    raise error_named(reply.error, reply.message, hint=reply.hint)
                yield reply
                if isinstance(reply, ReplyDone):
                    return
        finally:
            del self._waiting[operation_id]
            if caller.end is None:
                self._post(OperationCancelled(operation_id=operation_id))


class _Caller:
    """Holds one progress, the latest: a slow caller misses some, and nothing queues up."""

    def __init__(self) -> None:
        self.end: ReplyDone | ReplyError | None = None
        self._progress: ReplyProgress | None = None
        self._told = asyncio.Event()

    def tell(self, reply: Reply) -> None:
        if isinstance(reply, ReplyProgress):
            self._progress = reply
        elif self.end is None:
            self.end = reply
        self._told.set()

    async def next(self) -> Reply:
        """The progress that has not been given out yet, then the end."""
        await self._told.wait()
        if self._progress is not None:
            progress, self._progress = self._progress, None
            if self.end is None:
                self._told.clear()
            return progress
        assert self.end is not None
        return self.end
