"""Which faults a run has, and when: drawn from the scenario's seed before anything runs.

A scenario says how often each kind of fault comes and when the last of them is over; what comes of
it is a list of occurrences, the same for the same seed. Before: `scenario`. After: `injection`,
which makes them happen.
"""

import random
from collections.abc import Mapping, Sequence
from enum import StrEnum

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import NodeId
from mesh.domain.values import dataclass


class FaultKind(StrEnum):
    """What can go wrong, beyond what the workload does."""

    CRASH = "crash"
    """A node's agent dies, and is started again."""
    VANISH = "vanish"
    """A machine goes without a word, and comes back."""
    BREAK = "break"
    """A link breaks; what was on its way is lost."""
    SILENCE = "silence"
    """Nothing gets through a link any more, in one direction or both, and nobody is told."""
    LATE = "late"
    """All messages of a node are late, each way."""
    STALL = "stall"
    """They are so late that welcomes come after the node has given up, and leases run out."""
    SLOW_LOADS = "slow_loads"
    """A node loads more slowly than ever."""
    FAILING_LOADS = "failing_loads"
    FAILING_STEPS = "failing_steps"
    FAILING_RESIZES = "failing_resizes"
    WRONG_PROFILE = "wrong_profile"
    """A node computes more slowly, or quicker, than its tables say."""
    FREEZE = "freeze"
    """A node stands still for a moment: one iteration takes so much longer."""
    KILL_CONTROLLER = "kill_controller"
    STOP_CONTROLLER = "stop_controller"
    """It ends as asked, and is started again."""
    CANCEL = "cancel"
    """A client goes away."""
    LOSE = "lose"
    """An instance ends by itself, busy or idle: its engine process is killed."""
    TEAR = "tear"
    """The KV blocks that a node sends are lost, or arrive changed."""
    BREAK_STREAM = "break_stream"
    """The stream of a client with a key breaks; it asks the same controller again."""
    DRAIN = "drain"
    """An operator drains a node, and takes that back: requests move while all else goes wrong."""
    STORE_AWAY = "store_away"
    """No controller reaches the database."""
    CUT_STORE = "cut_store"
    """The leader alone does not."""
    CUT_LEADER = "cut_leader"
    """Nobody reaches the leader, nor it anybody: database, nodes and callers."""
    CUT_NODE = "cut_node"
    """A node and one of the controllers do not reach each other."""
    FREEZE_LEADER = "freeze_leader"
    """The leader's process stands still, and goes on where it was."""
    RESET_SESSIONS = "reset_sessions"
    """The leader's sessions in the database end, as if it had died."""
    RESTORE = "restore"
    """Both controllers end, and the database is restored to an earlier time."""


LEASES = (
    *(FaultKind.STORE_AWAY, FaultKind.CUT_STORE, FaultKind.CUT_LEADER, FaultKind.CUT_NODE),
    *(FaultKind.FREEZE_LEADER, FaultKind.RESET_SESSIONS, FaultKind.RESTORE),
)
"""Those of a cell that has a standby."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How faults of a kind turn out: uniform within these bounds."""

    lasts_s: tuple[float, float] = (0.0, 0.0)
    """Until the node or the controller is back, or all is well again."""
    size: tuple[float, float] = (0.0, 0.0)
    """A factor, a number of calls, or seconds: see `checking`."""


UNTIL_S_MAX = 86_400.0
"""A day: every fault is drawn before the first of them happens."""
MIX = (0.0, 0.5, 1.0, 3.0)
"""What the rate of a kind is multiplied by, any alike, where each seed has its own mix."""
SHAPES: Mapping[FaultKind, Shape] = {
    FaultKind.CRASH: Shape(lasts_s=(0.1, 20.0)),
    FaultKind.VANISH: Shape(lasts_s=(0.1, 20.0)),
    FaultKind.BREAK: Shape(size=(0.0, 1.0)),
    FaultKind.SILENCE: Shape(size=(5.0, 15.0)),
    FaultKind.LATE: Shape(lasts_s=(0.5, 10.0), size=(0.01, 3.0)),
    FaultKind.STALL: Shape(lasts_s=(5.0, 40.0), size=(3.0, 14.0)),
    FaultKind.SLOW_LOADS: Shape(lasts_s=(5.0, 30.0), size=(2.0, 20.0)),
    FaultKind.FAILING_LOADS: Shape(lasts_s=(1.0, 20.0), size=(1.0, 4.0)),
    FaultKind.FAILING_STEPS: Shape(lasts_s=(1.0, 20.0), size=(1.0, 3.0)),
    FaultKind.FAILING_RESIZES: Shape(lasts_s=(1.0, 20.0), size=(1.0, 4.0)),
    FaultKind.WRONG_PROFILE: Shape(lasts_s=(5.0, 30.0), size=(0.5, 3.0)),
    FaultKind.FREEZE: Shape(lasts_s=(1.0, 5.0), size=(0.2, 3.0)),
    FaultKind.KILL_CONTROLLER: Shape(lasts_s=(0.1, 8.0)),
    FaultKind.STOP_CONTROLLER: Shape(lasts_s=(0.1, 8.0)),
    FaultKind.CANCEL: Shape(),
    FaultKind.LOSE: Shape(),
    FaultKind.TEAR: Shape(lasts_s=(0.5, 10.0)),
    FaultKind.BREAK_STREAM: Shape(lasts_s=(0.0, 3.0)),
    FaultKind.DRAIN: Shape(lasts_s=(1.0, 20.0)),
    FaultKind.STORE_AWAY: Shape(lasts_s=(0.1, 10.0)),
    FaultKind.CUT_STORE: Shape(lasts_s=(0.1, 10.0)),
    FaultKind.CUT_LEADER: Shape(lasts_s=(0.1, 10.0), size=(5.0, 15.0)),
    FaultKind.CUT_NODE: Shape(lasts_s=(1.0, 15.0), size=(5.0, 15.0)),
    FaultKind.FREEZE_LEADER: Shape(lasts_s=(0.1, 6.0)),
    FaultKind.RESET_SESSIONS: Shape(),
    FaultKind.RESTORE: Shape(lasts_s=(0.1, 3.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong in a cell."""

    until_s: float
    """From the start of the workload; every fault is over by then."""
    per_minute: Mapping[FaultKind, float]
    """In the whole cell."""
    vary: bool = False
    """Each seed has its own mix: it leaves some kinds out, and has others more often. What many
    seeds of a single mix never meet, some mix has all the time.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One occurrence."""

    at_s: float
    """From the start of the workload."""
    kind: FaultKind
    node_id: NodeId
    """The node; it has no meaning for faults of no node."""
    until_s: float
    size: float
    chance: float
    """From 0 to 1, for what else there is to choose when it happens."""


def check_faults(faults: Faults) -> None:
    """Raises InvalidInput for what cannot be meant."""
    if not 0 < faults.until_s <= UNTIL_S_MAX:
        raise InvalidInput(
            f"faults: until_s is {faults.until_s:g}; it must be above 0 and at most {UNTIL_S_MAX:g}"
        )
    for kind, rate in faults.per_minute.items():
        if not 0 <= rate <= 600:
            raise InvalidInput(f"faults: {rate:g} {kind} a minute cannot be meant; 0 to 600 can")


def breaks_streams(faults: Faults) -> bool:
    """Whether a controller ends now and then, or a client's connection to it."""
    kinds = (FaultKind.KILL_CONTROLLER, FaultKind.STOP_CONTROLLER, FaultKind.BREAK_STREAM)
    return _has_any(faults, kinds) or has_standby(faults)


def has_standby(faults: Faults) -> bool:
    """Whether a second controller stands by."""
    return _has_any(faults, LEASES)


def _has_any(faults: Faults, kinds: Sequence[FaultKind]) -> bool:
    return any(faults.per_minute.get(kind, 0.0) > 0.0 for kind in kinds)


def occurrences(faults: Faults, node_ids: Sequence[NodeId], seed: int) -> tuple[Fault, ...]:
    """The occurrences of all faults, ordered by time. Each kind is a Poisson process on its own, so
    that a further kind leaves the others alone.
    """
    found = [
        fault
        for kind in FaultKind
        for fault in _of_kind(kind, faults, node_ids, random.Random(f"{seed} {kind}"))
    ]
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def _of_kind(
    kind: FaultKind, faults: Faults, node_ids: Sequence[NodeId], rng: random.Random
) -> list[Fault]:
    mixed = rng.choice(MIX) if faults.vary else 1.0
    rate = faults.per_minute.get(kind, 0.0) * mixed / 60
    found: list[Fault] = []
    at_s = rng.expovariate(rate) if rate else faults.until_s
    while at_s < faults.until_s:
        shape = SHAPES[kind]
        found.append(
            Fault(
                at_s=at_s,
                kind=kind,
                node_id=rng.choice(node_ids),
                until_s=min(at_s + rng.uniform(*shape.lasts_s), faults.until_s),
                size=rng.uniform(*shape.size),
                chance=rng.random(),
            )
        )
        at_s += rng.expovariate(rate)
    return found
