"""Which neighbours an instance may preempt for memory (LLM-Mesh §7.1): smaller ones, and few.

An instance that cannot grow takes the memory of instances with a smaller batch on its node, the
smallest first, so that many requests never wait for a few, and two instances never preempt each
other in turn. Whether the displaced requests find a place where they keep their SLOs is validated
after. Before: `mesh.core.controller.requests.preemption`, which found no room. After: the moves.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from mesh.domain.ids import InstanceId


class Neighbour(Protocol):
    @property
    def instance_id(self) -> InstanceId: ...
    @property
    def batch(self) -> int:
        """Requests on it."""
        ...

    @property
    def promised_bytes(self) -> int:
        """What it holds, weights included, once all that was issued for it is done."""
        ...


N = TypeVar("N", bound=Neighbour)


def victims(neighbours: Iterable[N], *, batch: int, missing_bytes: int) -> Sequence[N]:
    """Those that give their memory to an instance of `batch` requests that lacks so many bytes;
    none when all that are smaller do not hold as much.
    """
    smaller = [neighbour for neighbour in neighbours if neighbour.batch < batch]
    smaller.sort(key=lambda neighbour: (neighbour.batch, neighbour.instance_id))
    taken: list[N] = []
    for neighbour in smaller:
        if missing_bytes <= 0:
            break
        taken.append(neighbour)
        missing_bytes -= neighbour.promised_bytes
    if missing_bytes > 0:
        return ()
    # The last one may have made an earlier one needless.
    for neighbour in tuple(taken):
        if missing_bytes + neighbour.promised_bytes <= 0:
            taken.remove(neighbour)
            missing_bytes += neighbour.promised_bytes
    return taken
