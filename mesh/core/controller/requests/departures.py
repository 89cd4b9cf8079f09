"""When places of a deployment are expected to come free: as those that run on its nodes end.

An answer is expected to become as long as those of its deployment have been, and a token of it to
take as long as one decode of every instance of its node. Before: the instances' books. After:
`deadlines`, which refuses at once whoever would get a place too late, and says when to come again.
"""

from math import inf

from mesh.core.controller.instances.node_schedule import round_s
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry

LEFT_SHARE_LEAST = 0.25
"""Of a mean answer, that one is expected to have left at least: it may be longer than the mean."""
APART_SHARE = 1.25
"""Of the time between two ends, from one who is told to come again to the next."""


class Departures:
    """From a deployment's loaded instances; worked out when it is first asked for."""

    def __init__(self, entry: DeploymentEntry, now_s: float) -> None:
        self._entry = entry
        self._now_s = now_s
        self._ends_s: list[float] | None = None

    def at_s(self, ahead: int) -> float:
        """When one more place has come free than so many who wait will have taken; infinite if
        fewer run.
        """
        ends_s = self._ends()
        return ends_s[ahead] if ahead < len(ends_s) else inf

    @property
    def apart_s(self) -> float:
        """Seconds from one end to the next, over those that run."""
        ends_s = self._ends()
        if not ends_s:
            return 0.0
        return APART_SHARE * max(ends_s[-1] - self._now_s, 0.0) / len(ends_s)

    def _ends(self) -> list[float]:
        if self._ends_s is None:
            loaded = [i for i in self._entry.instances.values() if i.is_loaded]
            self._ends_s = sorted(end_s for i in loaded for end_s in self._ends_on(i))
        return self._ends_s

    def _ends_on(self, instance: InstanceEntry) -> list[float]:
        if not instance.requests:
            return []
        token_s = round_s(instance.node, self._now_s)
        left = (self._left(request) for request in instance.requests.values())
        return [self._now_s + tokens * token_s for tokens in left]

    def _left(self, request: RequestEntry) -> float:
        """Tokens that an answer is expected to get yet."""
        most = request.original.sampling.max_tokens
        mean = min(self._entry.history.mean_tokens or most, most)
        return max(mean - len(request.output_tokens), mean * LEFT_SHARE_LEAST)
