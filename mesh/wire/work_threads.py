"""Threads for work that takes too long for the loop, in bounded numbers.

Reports, traces, sums of usage and files of manifests are made here for callers of every protocol,
those of operators apart from those of tenants. Before: the handlers of HTTP and gRPC. After:
whatever function is given. `Shares` counts what tenants have of anything that is bounded.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from mesh.domain.access import Role
from mesh.domain.errors import Refused
from mesh.domain.reasons import RefusalReason
from mesh.wire.access import caller

TENANT_SHARE_MAX = 0.25
"""One tenant may have this share of what is bounded, and at least one of it."""
WORKS_MAX = 8
"""Calls that may wait or run at a time, those of operators and those of all tenants each."""
WORK_THREADS = 2
"""Threads for each of both. What computes in a thread takes its time from the loop."""

T = TypeVar("T")


class Shares:
    """How much of a bounded resource is in use, by tenant; `what` names it in refusals."""

    def __init__(self, what: str, most: int, hint: str = "") -> None:
        self._what = what
        self._most = most
        self._hint = hint
        self._in_use: Counter[str] = Counter()
        """By tenant; empty for those who are none."""

    def move(self, more: int, tenant: str) -> None:
        """Takes so much more, or gives it back where `more` is negative. Raises Refused."""
        own_max = max(1, int(self._most * TENANT_SHARE_MAX)) if tenant else self._most
        for have, limit in ((self._in_use.total(), self._most), (self._in_use[tenant], own_max)):
            if more > 0 and have + more > limit:
                raise Refused(
                    f"{have} {self._what}; {limit} is the limit",
                    reason=RefusalReason.QUEUE_FULL,
                    retry_after_s=1.0,
                    hint=self._hint,
                )
        self._in_use[tenant] += more


class _Pool:
    """The threads for one role, and the calls that have a place there."""

    def __init__(self, role: Role) -> None:
        self.places = Shares(
            "reports, traces, sums of usage and files are being made",
            WORKS_MAX,
            hint="ask again later",
        )
        self.threads = ThreadPoolExecutor(WORK_THREADS, f"mesh-work-{role}")
        self.free = asyncio.Semaphore(WORK_THREADS)
        """Work waits for this and not in the executor's queue, which would keep its arguments
        after its caller has left.
        """


class WorkThreads:
    """A call takes a `place`, and has its work `run` within it."""

    def __init__(self) -> None:
        self._of = {role: _Pool(role) for role in (Role.ADMIN, Role.TENANT)}

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for the whole of a call, to be taken before anything is computed for it. Raises
        Refused.
        """
        asks = caller()
        places = self._of[asks.role].places
        places.move(1, asks.tenant)
        try:
            yield
        finally:
            places.move(-1, asks.tenant)

    async def run(self, work: Callable[..., T], *given: object) -> T:
        """What comes of the work, which waits for a thread. Where the task is cancelled, work that
        waits is not begun, and work that runs is waited for: what the task holds for it, such as
        its place and the bytes of its body, stays counted until then.
        """
        pool = self._of[caller().role]
        async with pool.free:
            running = asyncio.get_running_loop().run_in_executor(pool.threads, work, *given)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                while not running.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([running])
                running.exception()  # nobody else asks for it
                raise

    def close(self) -> None:
        """Begin no further work; what runs ends by itself."""
        for pool in self._of.values():
            pool.threads.shutdown(wait=False, cancel_futures=True)
