"""The controllers of a virtual cell, one after the other, on one registry.

A controller that is started again knows what its registry has, and nothing else: links, callers and
timers were those of the one before it. Before: `cluster`. After: the links and the callers.
"""

from collections.abc import Callable, Sequence

from mesh import __version__
from mesh.core.controller.core import ControllerCore
from mesh.domain.actions import ControllerAction
from mesh.domain.events import ControllerEvent, LeaseCheckDue, ShutdownRequested
from mesh.domain.limits import CellLimits
from mesh.runtime.controller_actions import ControllerPerformer, took_long
from mesh.runtime.host import Host, Recorder
from mesh.runtime.journal import ControllerStart
from mesh.runtime.starting import controller_core
from mesh.sim.callers import Callers, MemoryRegistry, Operators
from mesh.sim.clock import HeapClock
from mesh.sim.links import VirtualLinks


class VirtualController:
    """`recorders` see every decision; `started` is told what each controller goes out from, and
    may add recorders of that one alone.
    """

    def __init__(
        self,
        *,
        clock: HeapClock,
        links: VirtualLinks,
        callers: Callers,
        registry: MemoryRegistry,
        policy_name: str,
        limits: CellLimits,
        recorders: Sequence[Recorder],
        started: Callable[[ControllerStart], Sequence[Recorder]] = lambda start: (),
    ) -> None:
        self._clock = clock
        self._links = links
        self._callers = callers
        self._registry = registry
        self._policy_name = policy_name
        self._limits = limits
        self._recorders = recorders
        self._started = started
        self.epoch = 0
        self.alive = False
        self.core: ControllerCore
        self.tell: Callable[[ControllerEvent], None]

    def start(self) -> None:
        """The next controller, unless there is one."""
        if self.alive:
            return
        self.epoch += 1
        self.alive = True
        start = self._start()
        self.core = controller_core(start)
        performer = ControllerPerformer(
            links=self._links,
            clients=self._callers,
            operators=Operators(),
            registry=self._registry,
            clock=self._clock,
        )
        host: Host[ControllerEvent, ControllerAction] = Host(
            core=self.core,
            clock=self._clock,
            perform=performer.perform,
            recorders=[*self._started(start), *self._recorders],
            took_long=took_long,
        )
        epoch = self.epoch
        self.tell = self._links.tell = host.post
        # Timers of a controller that is gone are nobody's.
        performer.post = lambda event: host.post(event) if self._is(epoch) else None
        self.tell(LeaseCheckDue())

    def kill(self) -> None:
        """Its callers and nodes see their streams break."""
        if self.alive:
            self.alive = False
            self._links.hang_up("the controller was killed")
            self._callers.cut_off()

    def stop(self) -> None:
        """As asked: every request is answered first."""
        if self.alive:
            self.tell(ShutdownRequested())
            self.alive = False
            self._links.hang_up("the controller is stopping")
            waiting = self._callers.unanswered_ids()
            assert not waiting, "a controller has stopped without an answer for each"

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
