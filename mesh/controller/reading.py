"""What the page and `/api/v1` read of requests and of usage, each caller what its key may see.

Before: `mesh.http.reading`, which writes it. After: the book of calls, the gateway, which ends
requests, and the usage file.
"""

import time
from collections.abc import Callable, Sequence

from mesh.controller.lookup import no_request
from mesh.domain.access import Caller, Role
from mesh.domain.ids import RequestId
from mesh.domain.usage import Usage, UsageBy, summed
from mesh.report.call_views import Sees, chrome_trace, story, timeline
from mesh.report.calls import CallBook
from mesh.report.plain import Plain, plain
from mesh.runtime.clock import Clock


class Reading:
    """`cancel` ends an open request, and `usage` gives what was used since a time."""

    def __init__(
        self,
        *,
        book: CallBook,
        cancel: Callable[[RequestId], None],
        usage: Callable[[float], Sequence[Usage]],
        clock: Clock,
    ) -> None:
        self._book = book
        self._cancel = cancel
        self._usage = usage
        self._clock = clock

    def requests(self, asks: Caller, after: int) -> dict[str, Plain]:
        """Those that are open, and those that ended after the one of this number."""
        now_s = self._clock.now_s()
        return timeline(self._book, now_s, time.time(), after=after, sees=_sees(asks))

    def request(self, asks: Caller, request_id: str) -> dict[str, Plain]:
        """Raises NotFound for one that is not known any more, or that is another tenant's."""
        found = self._book.find(request_id)
        if found is None or not _sees(asks)(found.tenant):
            raise no_request(RequestId(request_id))
        return story(found, self._clock.now_s(), time.time())

    def end(self, asks: Caller, request_id: str) -> None:
        """Raises NotFound for one that is not open, or that is another tenant's."""
        found = self._book.open.get(RequestId(request_id))
        if found is None or not _sees(asks)(found.tenant):
            raise no_request(RequestId(request_id))
        self._cancel(found.request_id)

    def trace(self, asks: Caller) -> dict[str, Plain]:
        return chrome_trace(self._book, self._clock.now_s(), _sees(asks))

    def usage(self, asks: Caller, since_unix_s: float, by: UsageBy) -> Plain:
        """Raises StorageError."""
        found = self._usage(since_unix_s)
        mine = [one for one in found if asks.role is Role.ADMIN or one.tenant == asks.tenant]
        return plain(summed(mine, by))


def _sees(asks: Caller) -> Sees:
    return lambda tenant: asks.role is Role.ADMIN or tenant == asks.tenant != ""
