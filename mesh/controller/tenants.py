"""Limits of tenants: who calls too often, has too many tokens or calls under way, is refused.

Buckets that fill at the limit's rate, a second's or a minute's worth at most. Tokens are taken out
when a call has ended, and each answer of a call is taken out of the requests, so that a tenant may
overdraw once and then waits. Times are the caller's of the methods. Before: the gateway, with a
call. After: the same call, or Refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mesh.domain.access import NOBODY, TenantLimits, TenantName
from mesh.domain.errors import Refused
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import dataclass, replace
from mesh.runtime.clock import Clock

MINUTE_S = 60.0
SPARED_SHARE = 0.5
"""The share of each limit that best effort leaves to the tenant's other calls."""
RUNNING_RETRY_S = 1.0
"""Who has too many calls under way is told to try again after this time: nobody knows when one
ends.
"""


@dataclass(slots=True)
class _Bucket:
    """`level` may be below 0, after an overdraft."""

    level: float
    at_s: float

    def filled(self, rate_per_s: float, most: float, now_s: float) -> float:
        self.level = min(self.level + (now_s - self.at_s) * rate_per_s, most)
        self.at_s = now_s
        return self.level


@dataclass(slots=True)
class Taken:
    """What a call has used; its holder says when it ends."""

    tokens: int = 0
    answers_to_come: int = 0
    """Further answers that were let in with the call, and have not begun."""


class TenantMeter:
    """`limits` knows those of a tenant, now. Tenants are as many as have keys."""

    def __init__(self, limits: Callable[[TenantName], TenantLimits], clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._requests: dict[TenantName, _Bucket] = {}
        self._tokens: dict[TenantName, _Bucket] = {}
        self._running: dict[TenantName, int] = {}

    @contextmanager
    def call(
        self,
        tenant: TenantName,
        *,
        answers: int = 1,
        first: Taken | None = None,
        takes_over: bool = False,
        counted: bool = False,
        best_effort: bool = False,
    ) -> Iterator[Taken]:
        """A call of a tenant while it is open. Each of its `answers` counts as running, from now
        until it has ended; the later ones are given the `first`. One that `takes_over` has the
        place of a call that runs; one that is `counted` was a request of an earlier controller.
        `best_effort`: of each limit it takes SPARED_SHARE less. Raises Refused.
        """
        taken = Taken(answers_to_come=answers - 1)
        if tenant == NOBODY:
            yield taken
            return
        if first is None:
            limits = self._limits(tenant)
            if takes_over:
                limits = replace(limits, running=None)
            limits = replace(limits, requests_per_s=None) if counted else limits
            self._admit(tenant, limits, answers, SPARED_SHARE if best_effort else 0.0)
        if first is not None and first.answers_to_come:
            first.answers_to_come -= 1
        else:
            self._running[tenant] = self._running.get(tenant, 0) + answers
        try:
            yield taken
        finally:
            self._running[tenant] -= 1 + taken.answers_to_come
            taken.answers_to_come = 0
            if tenant in self._tokens:
                self._tokens[tenant].level -= taken.tokens

    def _admit(self, tenant: TenantName, limits: TenantLimits, answers: int, spared: float) -> None:
        now_s, running = self._clock.now_s(), self._running.get(tenant, 0)
        if limits.running is not None:
            running_max = limits.running - int(limits.running * spared)
            if running + answers > running_max:
                said = f"has {running} calls under way"
                if answers > 1:
                    said += f", and asks for {answers} answers at once"
                again_s = RUNNING_RETRY_S if answers <= running_max else 0.0
                raise _over(tenant, said, running_max, again_s)
        if limits.tokens_per_min is not None:
            rate, most = limits.tokens_per_min / MINUTE_S, limits.tokens_per_min
            bucket = self._tokens.setdefault(tenant, _Bucket(most, now_s))
            level = bucket.filled(rate, most, now_s)
            least = most * spared
            if level <= least:
                again_s = (least + 1.0 - level) / rate if rate else MINUTE_S
                said = f"has used {most - level:.0f} tokens in a minute"
                raise _over(tenant, said, limits.tokens_per_min, again_s)
        if limits.requests_per_s is not None:
            rate, most = limits.requests_per_s, max(limits.requests_per_s, 1.0)
            bucket = self._requests.setdefault(tenant, _Bucket(most, now_s))
            level = bucket.filled(rate, most, now_s)
            least = min(1.0 + most * spared, most)
            if level < least:
                again_s = (least - level) / rate if rate else MINUTE_S
                raise _over(tenant, "calls more often in a second than it may", rate, again_s)
            bucket.level -= answers


def _over(tenant: TenantName, said: str, limit: float, again_s: float) -> Refused:
    return Refused(
        f"the tenant {tenant!r} {said}; its limit is {limit:g}",
        reason=RefusalReason.TENANT_LIMIT,
        retry_after_s=again_s,
    )


def check_deployments(tenant: TenantName, limits: TenantLimits, deployed: int) -> None:
    """Before one more. Raises Refused."""
    if limits.deployments is not None and deployed >= limits.deployments:
        raise Refused(
            f"the tenant {tenant!r} has {deployed} deployments; its limit is {limits.deployments}",
            reason=RefusalReason.TENANT_LIMIT,
        )
