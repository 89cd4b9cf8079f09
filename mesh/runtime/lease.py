"""Which of the controllers of one cell leads: the decisions, without the database.

A row of the database has the lease: its epoch, who holds it, and until when by the database's
clock. The leader renews it; one that stands by takes it when nobody has renewed it for as long as
it lasts by its own monotonic clock, in which it has looked all the time: after the database was
away, the leader thus has the first say. The simulator's controllers ask the same object. Before:
`postgres_lease`, which asks the database. After: it again, which does what is decided.
"""

from enum import StrEnum

from mesh.domain.values import dataclass

LEASE_S = 1.0
"""How long a lease lasts that is not renewed."""
RENEW_S = 0.25
"""Between two renewals, and between two looks of one that stands by."""
LOOK_S_MAX = 0.6
"""Between two looks that count as looking all the time."""


class Role(StrEnum):
    STANDING_BY = "standing_by"
    TAKING = "taking"
    """It tries to take the lease."""
    LEADING = "leading"
    DEPOSED = "deposed"
    """Another one leads, or it has stepped down; it leads never again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """The lease as the database has it. Each renewal changes `until`."""

    epoch: int
    holder: str
    """Its address and a random id of its start: an epoch comes again where a database is restored.
    """
    until: str
    """By the database's clock; opaque, but for whether it has changed."""
    given_up: bool = False
    """Its holder has stepped down, or nobody has ever held it."""


class Lease:
    """One controller's part in it. Times are monotonic seconds of its own clock."""

    def __init__(self) -> None:
        self.role = Role.STANDING_BY
        self.epoch = 0
        """The highest that it has seen; its own while it leads."""
        self.row: LeaseRow | None = None
        """The row when it was last looked at."""
        self._unchanged_since_s = 0.0
        self._looked_s = 0.0
        self._renewed_s = 0.0

    def seen(self, row: LeaseRow, now_s: float) -> bool:
        """One that does not lead has looked at the row: whether it is to take the lease."""
        if self.role is Role.TAKING and self.row is not None:
            # Its session has ended: it may have renewed the lease after the last look.
            if (row.epoch, row.holder) != (self.row.epoch, self.row.holder):
                self.not_taken(now_s)
            self.row = row
        if self.role is not Role.STANDING_BY:
            return self.role is Role.TAKING
        if row != self.row or now_s - self._looked_s > LOOK_S_MAX:
            self._unchanged_since_s = now_s
        self.row, self._looked_s, self.epoch = row, now_s, max(self.epoch, row.epoch)
        if row.given_up or now_s - self._unchanged_since_s >= LEASE_S:
            self.role = Role.TAKING
        return self.role is Role.TAKING

    def session_ended(self, epoch: int) -> bool:
        """The session of the leader of this epoch has ended, which held its advisory lock: whether
        the lease is to be taken at once.
        """
        if self.role is Role.STANDING_BY and self.row is not None and self.row.epoch == epoch:
            self.role = Role.TAKING
        return self.role is Role.TAKING

    def taken(self, epoch: int, asked_s: float) -> None:
        """It leads, by a transaction that began at `asked_s`."""
        self.role, self.epoch, self._renewed_s = Role.LEADING, epoch, asked_s

    def not_taken(self, now_s: float) -> None:
        """Another one was faster, or the database cannot be reached."""
        if self.role is Role.TAKING:
            self.role, self._unchanged_since_s = Role.STANDING_BY, now_s

    def renewed(self, asked_s: float) -> None:
        self._renewed_s = asked_s

    def shown(self, epoch: int, now_s: float) -> bool:
        """A node of this cell has obeyed a leader of this epoch, as it says: whether this
        controller was the leader until now. It takes that on trust only where it cannot renew its
        lease; else the next renewal tells, within RENEW_S.
        """
        led = self.role is Role.LEADING and epoch > self.epoch and not self.may_write(now_s)
        if led:
            self.role = Role.DEPOSED
        return led

    def step_down(self) -> None:
        self.role = Role.DEPOSED

    def may_write(self, now_s: float) -> bool:
        """Whether its lease lasts, as far as it knows. One that cannot renew serves on."""
        return self.role is Role.LEADING and now_s - self._renewed_s < LEASE_S
