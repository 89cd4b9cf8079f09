"""The controllers of a virtual cell on one registry: one, or two of which one leads.

A controller that is started again knows what its registry has, and nothing else: links, callers and
timers were those of the one before it. Where there are two they keep a lease in a store, as live
ones do, by the same `Lease`: for a while both may lead, of which one is the earlier. Before:
`cluster`. After: the links and the callers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mesh import __version__
from mesh.core.controller.core import ControllerCore
from mesh.domain.actions import ControllerAction
from mesh.domain.events import ControllerEvent, LeaseCheckDue, ShutdownRequested
from mesh.domain.limits import CellLimits
from mesh.runtime.controller_actions import ControllerPerformer, took_long
from mesh.runtime.host import Host, Recorder
from mesh.runtime.journal import ControllerStart
from mesh.runtime.lease import LEASE_S, RENEW_S, Lease, LeaseRow, Role
from mesh.runtime.link_life import NO_EPOCH, CellEpoch
from mesh.runtime.starting import controller_core
from mesh.sim.callers import Callers, MemoryRegistry, Operators, Streams
from mesh.sim.clock import HeapClock
from mesh.sim.links import VirtualLinks

CELL = "virtual-1"
RESTART_S = 1.0
"""From the end of a controller that another one has followed to its next start."""


class VirtualStore:
    """The database of several controllers, as far as the lease goes: see `mesh.runtime.lease`."""

    def __init__(self) -> None:
        self.row = LeaseRow(epoch=0, holder="", until="", given_up=True)
        self.starts = 0
        """The epoch that was taken last."""
        self.away = 0
        """So many faults keep it from everybody."""
        self.cut_from: Counter[int] = Counter()
        """How many keep it from the controller at an address, where any does."""

    def is_reached_by(self, at: int) -> bool:
        return not self.away and at not in self.cut_from

    def is_held_by(self, epoch: int, holder: str) -> bool:
        return (self.row.epoch, self.row.holder) == (epoch, holder)

    def write(self, epoch: int, holder: str, now_s: float, *, given_up: bool = False) -> None:
        until = f"{now_s + LEASE_S}"
        self.row = LeaseRow(epoch=epoch, holder=holder, until=until, given_up=given_up)

    def restore(self, epoch: int) -> None:
        """What it was at an earlier time."""
        self.starts = epoch
        self.row = replace(self.row, epoch=epoch, holder="of earlier", given_up=False)


class VirtualController:
    """The one at address `at`. `recorders` see every decision of the last that began to lead;
    `started` is told what each leader goes out from, and may add recorders of that one alone.
    `leads` is told that this one has begun to lead. Alone it has no lease.
    """

    def __init__(
        self,
        *,
        at: int,
        store: VirtualStore,
        alone: bool,
        leads: Callable[["VirtualController"], None],
        clock: HeapClock,
        links: VirtualLinks,
        callers: Callers,
        registry: MemoryRegistry,
        policy_name: str,
        limits: CellLimits,
        recorders: Sequence[Recorder],
        started: Callable[[ControllerStart], Sequence[Recorder]] = lambda start: (),
    ) -> None:
        self.at = at
        self._store = store
        self._alone = alone
        self._leads = leads
        self.others: Sequence[VirtualController] = ()
        self._clock = clock
        self._links = links
        self._callers = callers
        self._registry = registry
        self._policy_name = policy_name
        self._limits = limits
        self._recorders = recorders
        self._started = started
        self.epoch = 0
        self.up = False
        """It runs, and leads or stands by."""
        self.alive = False
        """It leads, as far as it knows."""
        self.is_last = False
        """It is the last that began to lead."""
        self.lease = Lease()
        self._runs = 0
        self._held: list[ControllerEvent] | None = None
        """What it has yet to hear, while it is frozen."""
        self._post: Callable[[ControllerEvent], None]
        self.core: ControllerCore

    @property
    def is_frozen(self) -> bool:
        return self._held is not None

    def start(self) -> None:
        """The next controller at this address, unless there is one."""
        if self.up:
            return
        self.up, self.lease = True, Lease()
        self._runs += 1
        if self._alone:
            self._store.starts += 1
            self._lead(self._store.starts)
        else:
            self._beat(self._runs)

    def _beat(self, run: int) -> None:
        if self.up and run == self._runs:
            self._clock.call_at(self._clock.now_s() + RENEW_S, partial(self._beat, run))
            self._keep_lease()

    def _keep_lease(self) -> None:
        """As `PostgresRegistry` does: look at the lease, take it, or renew it."""
        now_s, lease, store = self._clock.now_s(), self.lease, self._store
        if self.is_frozen or lease.role is Role.DEPOSED:
            return
        if not store.is_reached_by(self.at):
            lease.not_taken(now_s)
        elif lease.role is Role.LEADING:
            if not store.is_held_by(self.epoch, self._holder):
                self._end_deposed()
                return
            store.write(self.epoch, self._holder, now_s)
            lease.renewed(now_s)
        elif lease.seen(store.row, now_s):
            store.starts = max(store.starts, lease.epoch, int(now_s)) + 1
            store.write(store.starts, self._holder, now_s)
            lease.taken(store.starts, now_s)
            self._lead(store.starts)

    @property
    def _holder(self) -> str:
        return f"{self.at} {self._runs}"

    def lose_sessions(self) -> None:
        """To those that stand by it looks as if this one had died."""
        for other in self.others:
            told = self._store.is_reached_by(self.at) and self._store.is_reached_by(other.at)
            if told and other.up and other.lease.session_ended(self.epoch):
                other._keep_lease()

    def _end_deposed(self) -> None:
        """Another one leads. Whatever started it starts it again, as systemd does."""
        self.lease.step_down()
        self.kill()
        self._clock.call_at(self._clock.now_s() + RESTART_S, self.start)

    def takes(self, obeyed: CellEpoch) -> bool:
        """Whether it leads a node that has obeyed that one, which it is told."""
        if not self.alive or self.is_frozen:
            return False
        why = self.cell_epoch.why_not_after(obeyed)
        if why and self.lease.shown(obeyed.number, self._clock.now_s()):
            self._end_deposed()
        return not why

    @property
    def cell_epoch(self) -> CellEpoch:
        """As nodes are told."""
        return NO_EPOCH if self._alone else CellEpoch(self.epoch, CELL)

    def _lead(self, epoch: int) -> None:
        self.epoch, self.alive = epoch, True
        start = self._start()
        self.core = controller_core(start)
        self._leads(self)
        performer = ControllerPerformer(
            links=self._links,
            clients=self._callers if self._alone else Streams(self._callers, epoch),
            operators=Operators(),
            registry=self._registry,
            clock=self._clock,
        )
        host: Host[ControllerEvent, ControllerAction] = Host(
            core=self.core,
            clock=self._clock,
            perform=performer.perform,
            recorders=[*self._started(start), _OfLast(self, self._recorders)],
            took_long=took_long,
        )
        self._post = host.post
        self._links.open(self)
        # Timers of a controller that is gone are nobody's.
        performer.post = lambda event: self.tell(event) if self._is(epoch) else None
        self.tell(LeaseCheckDue())

    def tell(self, event: ControllerEvent) -> None:
        """A frozen one hears it later."""
        if self._held is not None:
            self._held.append(event)
        elif self.alive:
            self._post(event)

    def freeze(self, *, renews_first: bool) -> Callable[[], None]:
        """What has it go on, with its lease or with what it has yet to hear first, unless it has
        been started again.
        """
        self._held = []
        return partial(self._thaw, self._runs, renews_first)

    def _thaw(self, run: int, renews_first: bool) -> None:
        if run != self._runs:
            return
        held, self._held = self._held or (), None
        if renews_first and self.up:
            self._keep_lease()
        for event in held:
            self.tell(event)

    def kill(self) -> None:
        """Its callers and nodes see their streams break."""
        led, self.up, self.alive, self._held = self.alive, False, False, None
        if led:
            self._links.hang_up(self, "the controller was killed")
            self._callers.cut_off(self._callers.of_epoch(self.epoch))
            self.lose_sessions()

    def stop(self) -> None:
        """As asked: every request is answered first."""
        if self.alive:
            self.tell(ShutdownRequested())
            self.up = self.alive = False
            self._links.hang_up(self, "the controller is stopping")
            waiting = self._callers.unanswered_ids() if self.is_last else ()
            assert not waiting, "a controller has stopped without an answer for each"
            self._callers.cut_off(self._callers.of_epoch(self.epoch))
            store = self._store
            if store.is_reached_by(self.at) and store.is_held_by(self.epoch, self._holder):
                store.write(self.epoch, self._holder, self._clock.now_s(), given_up=True)
            self.lose_sessions()

    def _is(self, epoch: int) -> bool:
        return self.alive and self.epoch == epoch

    def _start(self) -> ControllerStart:
        registry = self._registry
        return ControllerStart(
            version=__version__,
            epoch=self.epoch,
            policy=self._policy_name,
            limits=self._limits,
            deployments=tuple(registry.deployments.values()),
            profiles=tuple(registry.profiles),
            histories=dict(registry.histories),
            revisions=dict(registry.revisions),
        )


class _OfLast:
    """Records for others what a controller decides for as long as no other one has followed it:
    what is checked of a cell holds of its leader.
    """

    def __init__(self, controller: VirtualController, recorders: Sequence[Recorder]) -> None:
        self._controller = controller
        self._recorders = recorders

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if self._controller.is_last:
            for recorder in self._recorders:
                recorder.record(now_s, event, actions)
