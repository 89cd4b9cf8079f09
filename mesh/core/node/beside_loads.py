"""For how long a node computed beside each of its loads: what lengthens loads that share its cores.

Counts the seconds of all turns, those that are under way included; a load begins and ends with what
was counted by then. Before: turns and loads, as they begin and end. After: the load's report, from
which the controller learns.
"""

from dataclasses import dataclass, field

from mesh.domain.ids import InstanceId


@dataclass(slots=True, kw_only=True, eq=False)
class BesideLoads:
    _ended_s: float = 0.0
    """The seconds of all turns that are over."""
    _turn_s: float | None = None
    """When the one under way began."""
    _before_s: dict[InstanceId, float] = field(default_factory=dict)
    """The seconds that were computed before each load that is under way in the engine."""

    def turn_began(self, now_s: float) -> None:
        self._turn_s = now_s

    def turn_ended(self, now_s: float) -> None:
        self._ended_s, self._turn_s = self._computed_s(now_s), None

    def load_began(self, instance_id: InstanceId, now_s: float) -> None:
        self._before_s[instance_id] = self._computed_s(now_s)

    def load_ended(self, instance_id: InstanceId, now_s: float) -> float:
        """Seconds that were computed since it began."""
        return self._computed_s(now_s) - self._before_s.pop(instance_id)

    @property
    def under_way(self) -> int:
        """Loads."""
        return len(self._before_s)

    def _computed_s(self, now_s: float) -> float:
        under_way_s = 0.0 if self._turn_s is None else now_s - self._turn_s
        return self._ended_s + under_way_s
