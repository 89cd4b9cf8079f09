"""The answers of Responses that are kept, so that later calls may continue them.

Each is its tenant's alone, and goes an hour after it was last used: asked for, or continued. They
are kept as bytes. Before: `responses` and the routes. After: nobody; a restart forgets them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import from_json

from mesh.domain.access import TenantName
from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass, replace
from mesh.http.exchange import BODY_BYTES_MAX
from mesh.http.refusals import encoded
from mesh.wire.access import caller

KEPT_S_MAX = 3600.0
KEPT_BYTES_MAX = 64 << 20
"""When all answers together take more, the oldest one of the tenant with the most bytes goes."""
CONTINUED_MAX = 1024
"""At most so many answers make a conversation."""
REFERENCES_MAX = 128
"""At most so many items of a call are references to items that are kept."""
_ENTRY_BYTES = 1024
"""An entry takes that beside its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    said: bytes
    """The items of its call, as JSON."""
    answer: bytes
    output: bytes
    """The items of the answer without their log-probabilities, as JSON."""
    previous: str | None
    until_s: float

    @property
    def size_bytes(self) -> int:
        return len(self.said) + len(self.answer) + len(self.output) + _ENTRY_BYTES


class KeptResponses:
    """`now_s` is a monotonic clock in seconds. All of it is for whoever `caller` says."""

    def __init__(self, now_s: Callable[[], float], *, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._now_s = now_s
        self._bytes_max = bytes_max
        self._kept: defaultdict[TenantName, dict[str, _Kept]] = defaultdict(dict)
        """By tenant and id, the longest unused first."""
        self._bytes: defaultdict[TenantName, int] = defaultdict(int)

    def keep(self, answer: Mapping[str, Any], *, said: bytes, previous: str | None) -> None:
        """An answer that has ended."""
        until_s = self._now_s() + KEPT_S_MAX
        kept = _Kept(
            said=said,
            answer=encoded(answer),
            output=encoded([_without_logprobs(item) for item in answer["output"]]),
            previous=previous,
            until_s=until_s,
        )
        tenant = caller().tenant
        self._kept[tenant][answer["id"]] = kept
        self._bytes[tenant] += kept.size_bytes
        while sum(self._bytes.values()) > self._bytes_max:
            most = max(self._bytes, key=lambda one: self._bytes[one])
            self._forget(most, next(iter(self._kept[most])))

    def get(self, id_: str) -> bytes | None:
        """An answer; `None` where it is not, or not any more, kept for the caller."""
        kept = self._used(id_)
        return None if kept is None else kept.answer

    def delete(self, id_: str) -> None:
        """Forget one, if it is there."""
        if id_ in self._kept.get(caller().tenant, {}):
            self._forget(caller().tenant, id_)

    def conversation(self, id_: str) -> list[Any]:
        """The items up to an answer, itself included. Raises InvalidInput where it is not kept, or
        another one that it continues, and where together they exceed what a body may have.
        """
        found = list[_Kept]()
        wanted: str | None = id_
        while wanted is not None:
            kept = self._used(wanted)
            if kept is None or len(found) == CONTINUED_MAX:
                said = "not found" if kept is None else f"the last of {CONTINUED_MAX} that are read"
                raise InvalidInput(
                    f"Previous response with id {wanted[:100]!r} {said}.",
                    hint="they are kept for an hour: send the conversation as input",
                    field="previous_response_id",
                )
            found.append(kept)
            wanted = kept.previous
        size_bytes = sum(len(one.said) + len(one.output) for one in found)
        if size_bytes > BODY_BYTES_MAX:
            raise InvalidInput(
                f"the conversation has {size_bytes} bytes; {BODY_BYTES_MAX} is the limit",
                hint="begin another one",
                field="previous_response_id",
            )
        parts = ((from_json(one.said), from_json(one.output)) for one in reversed(found))
        return [item for said, answered in parts for item in (*said, *answered)]

    def item(self, id_: str) -> Any:
        """One of a kept answer, which its id tells. Raises InvalidInput."""
        kept = self._used("resp_" + id_.partition("_")[2].rpartition("_")[0])
        items = [] if kept is None else from_json(kept.output)
        for item in items:
            if item["id"] == id_:
                return item
        raise InvalidInput(
            f"Item with id {id_[:100]!r} not found.",
            hint="answers are kept for an hour: send the item itself",
            field="input",
        )

    def _used(self, id_: str) -> _Kept | None:
        """One of the caller's; it is kept an hour from now on."""
        tenant, now_s = caller().tenant, self._now_s()
        of_tenant = self._kept.get(tenant, {})
        while of_tenant and (oldest := next(iter(of_tenant.items())))[1].until_s <= now_s:
            self._forget(tenant, oldest[0])
        kept = of_tenant.pop(id_, None)
        if kept is not None:
            of_tenant[id_] = replace(kept, until_s=now_s + KEPT_S_MAX)
        return kept

    def _forget(self, tenant: TenantName, id_: str) -> None:
        kept = self._kept[tenant].pop(id_)
        self._bytes[tenant] -= kept.size_bytes
        if not self._kept[tenant]:
            del self._kept[tenant], self._bytes[tenant]


def _without_logprobs(item: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = item.get("content")
    if not isinstance(parts, list):
        return item
    plain = [{**part, "logprobs": []} if part.get("logprobs") else part for part in parts]
    return {**item, "content": plain}
