"""The book of a node's joules: whom its iterations were for, until it tells what they took.

The seconds of iterations are noted as they end. With the node's next heartbeat its busy joules are
divided by them; what nobody asked for (measured iterations, requests that are gone) stays the
node's, as what it takes while it does not compute.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from mesh.domain.energy import Energy, EnergyView

K = TypeVar("K", bound=Hashable)


class EnergyBook(Generic[K]):
    """A node's iterations since its last heartbeat, by whom they were for."""

    def __init__(self) -> None:
        self._open: dict[K, tuple[float, int, int]] = {}

    def note(self, key: K, seconds: float, *, requests: int = 0, output_tokens: int = 0) -> None:
        """An iteration took so long for it, and so many of its requests ended."""
        before_s, ended, tokens = self._open.get(key, (0.0, 0, 0))
        self._open[key] = before_s + seconds, ended + requests, tokens + output_tokens

    def settle(self, energy: Energy) -> dict[K, EnergyView]:
        """What each took; nothing where the node does not know its joules."""
        found, self._open = self._open, {}
        whole_s = max(energy.busy_s, sum(seconds for seconds, _, _ in found.values()))
        if energy.source is None or energy.busy_j is None or whole_s <= 0.0:
            return {}
        return {
            key: EnergyView(
                sources=(energy.source,),
                busy_j=energy.busy_j * seconds / whole_s,
                requests=requests,
                output_tokens=tokens,
            )
            for key, (seconds, requests, tokens) in found.items()
        }
