"""A cell under the virtual clock: controllers, N nodes, links between them, and its callers.

The cores and their performers are those of a live cell; what differs is the clock, the engine and
the links. `run` offers it a workload, one arrival after the other, and ends with the last request.
A controller that is started again knows what its registry has, and nothing else: links, callers and
timers were those of the one before it. Before: `scenario`, which says what the cell is made of.
After: `mesh.domain.outcome`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import NamedTuple

from mesh import __version__
from mesh.core.controller.core import ControllerCore
from mesh.domain.deployment import Deployment
from mesh.domain.errors import EngineError, InvalidInput
from mesh.domain.events import CancelRequested, InvokeRequested
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.outcome import Outcome
from mesh.domain.profile import Profile
from mesh.domain.request import Request, SamplingParams
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass
from mesh.domain.views import NodesWanted
from mesh.memory.block_keys import digests_of
from mesh.policy.registry import DEFAULT_POLICY
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart
from mesh.runtime.lease import RENEW_S
from mesh.runtime.policies import rule_of_file
from mesh.sim.callers import Callers, MemoryRegistry
from mesh.sim.clock import HeapClock
from mesh.sim.content import Piece, Said, tokens_of
from mesh.sim.controller import VirtualController, VirtualStore
from mesh.sim.kv_links import VirtualKvLinks
from mesh.sim.links import VirtualLinks
from mesh.sim.machines import Machines
from mesh.sim.node import NodePlan, VirtualNode
from mesh_workloads.trace import Turn

SETTLE_S = 1.0
"""Before the first arrival: every node has joined by then."""
DRAIN_S_MAX = 3600.0
"""From the last arrival to the last end; a cell that takes longer has lost a request."""
TOKEN_ID = 1
KEYED_EACH = 2
"""One of so many callers has a key, where any has."""
RESUME_S_MAX = 3.0
"""Callers ask a new controller within so long: before nodes have joined it, and after."""


class Arrival(NamedTuple):
    """One request of a workload. `at_s` counts from its start; arrivals ascend."""

    at_s: float
    deployment: str
    input_tokens: int
    output_tokens: int
    """Exactly so many, unless the context is full before, or its caller takes fewer."""
    slo: Slo | None = None
    """Its own, in place of its deployment's."""
    content: tuple[Piece, ...] = ()
    """What its prompt begins with; the rest is its own. Without any it shares nothing."""
    turn: Turn | None = None
    """In place of `content`, where it is of a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """What a cell is made of."""

    nodes: tuple[NodePlan, ...]
    deployments: tuple[Deployment, ...]
    profiles: tuple[Profile, ...]
    """What the controller knows of iteration times."""
    histories: Mapping[DeploymentName, OutputHistory] = field(default_factory=dict)
    """What it knows of earlier requests."""
    policy: str = DEFAULT_POLICY
    limits: CellLimits = field(default_factory=CellLimits)
    link_delay_s: float = 0.0005
    lengths_told: bool = False
    """Callers ask for exactly as many tokens as their answers have; otherwise for as many as they
    take, and answers end by themselves.
    """
    output_tokens_max: int | None = None
    """The most tokens that callers take; `None` stands for what the context leaves."""
    resumes: bool = False
    """Some callers have keys, and ask again where their controller is gone."""
    controllers: int = 1
    """How many there are: one leads, and the others stand by."""

    def max_tokens(self, arrival: Arrival, deployment: Deployment) -> int:
        """What its caller asks for."""
        if self.lengths_told:
            return arrival.output_tokens
        left = max(deployment.context_tokens_max - arrival.input_tokens, 1)
        return left if self.output_tokens_max is None else min(left, self.output_tokens_max)

    def start(self) -> ControllerStart:
        """For a journal of the controller."""
        return ControllerStart(
            version=__version__,
            epoch=1,
            policy=self.policy,
            limits=self.limits,
            deployments=self.deployments,
            profiles=self.profiles,
            histories=self.histories,
        )


class VirtualCell:
    """`recorders` see every decision of its controllers; `started` is told what each of them goes
    out from, and may add recorders of that one alone. `ended` is told each outcome; where there is
    none, they are kept. Behind a front, `clock` and `callers` are the front's.
    """

    def __init__(
        self,
        plan: CellPlan,
        *,
        recorders: Sequence[Recorder] = (),
        started: Callable[[ControllerStart], Sequence[Recorder]] = lambda start: (),
        ended: Callable[[Outcome], None] | None = None,
        clock: HeapClock | None = None,
        callers: Callers | None = None,
    ) -> None:
        self.plan = plan
        self.clock = HeapClock() if clock is None else clock
        self.callers = Callers(self.clock, ended) if callers is None else callers
        self.links = VirtualLinks(self.clock, plan.link_delay_s, plan.controllers)
        self.kv_links = VirtualKvLinks(self.clock)
        self.store = VirtualStore()
        registry = MemoryRegistry(plan.deployments, plan.profiles)
        registry.histories.update(plan.histories)
        self.controllers = [
            VirtualController(
                at=at,
                store=self.store,
                alone=plan.controllers == 1,
                leads=self._led,
                clock=self.clock,
                links=self.links,
                callers=self.callers,
                registry=registry,
                policy_name=plan.policy,
                limits=plan.limits,
                recorders=recorders,
                started=started,
            )
            for at in range(plan.controllers)
        ]
        for made in self.controllers:
            made.others = [other for other in self.controllers if other is not made]
        self.controller = self.controllers[0]
        """The one that began to lead last."""
        self.cut_off: set[int] = set()
        """The controllers that callers cannot reach."""
        self._deployments = {made.spec.name: made for made in plan.deployments}
        self._functions = {name: number for number, name in enumerate(self._deployments)}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._said = Said()
        for controller in self.controllers:
            controller.start()
        own_rule = rule_of_file(plan.policy)
        self.nodes = [
            VirtualNode(
                made,
                clock=self.clock,
                links=self.links,
                kv_links=self.kv_links,
                lengths=self.callers.lengths,
                own_rule=own_rule,
            )
            for made in plan.nodes
        ]
        for node in self.nodes:
            node.start()
        self.machines = Machines(self.nodes, self.clock, self._wanted)
        self.clock.advance(SETTLE_S)
        self.started_s = self.clock.now_s()
        self._arrived = 0
        self._coming = False
        """More will arrive."""
        self._last_s = self.started_s
        """Time of the last arrival."""

    def _wanted(self) -> tuple[NodesWanted, ...]:
        alive = self.controller.alive
        return self.controller.core.wanted(self.clock.now_s()) if alive else ()

    @property
    def core(self) -> ControllerCore:
        """The core of the controller that runs, or ran last."""
        return self.controller.core

    def cancel(self, request_id: RequestId) -> None:
        """Its caller goes away."""
        answering = self.answering(request_id)
        self.callers.cancel(request_id)
        if answering.alive:
            answering.tell(CancelRequested(request_id=request_id))

    def answering(self, request_id: RequestId) -> VirtualController:
        """The one that its caller listens to, or is to ask again."""
        epoch = self.callers.epoch_of(request_id)
        earlier = (made for made in self.controllers if made.alive and made.epoch == epoch)
        return next(earlier, self.controller)

    def break_stream(self, request_id: RequestId, *, felt: bool) -> Callable[[], None]:
        """Its caller has lost its stream, which the controller has `felt` at once or does when it
        is asked again; what does that.
        """
        self.callers.break_stream(request_id, felt=felt)
        if felt:
            self.controller.tell(CancelRequested(request_id=request_id))
        return partial(self._ask_again, request_id, self.controller.epoch)

    def _led(self, controller: VirtualController) -> None:
        """Callers with keys leave the one that led before, and ask the next one."""
        before, self.controller = self.controller, controller
        before.is_last, controller.is_last = False, True
        if before.alive and before is not controller:
            leaving = self.callers.with_key(before.epoch)
            for request_id in leaving:
                self.callers.break_stream(request_id, felt=True)
            for request_id in leaving if before.at not in self.cut_off else ():
                before.tell(CancelRequested(request_id=request_id))
        self.callers.epoch = controller.epoch
        self._all_ask_again()

    def _all_ask_again(self) -> None:
        """One after the other."""
        epoch, asking = self.controller.epoch, self.callers.asking_again()
        for n, request_id in enumerate(asking):
            after_s = RESUME_S_MAX * (n + 0.5) / len(asking)
            self.clock.call_at(
                self.clock.now_s() + after_s, partial(self._ask_again, request_id, epoch)
            )

    def _ask_again(self, request_id: RequestId, epoch: int) -> None:
        if not self.is_reached or self.controller.epoch != epoch:
            return
        if self.controller.is_frozen:
            # It may still speak to the stream before, which callers do not tell from this one.
            after_s = self.clock.now_s() + RENEW_S
            self.clock.call_at(after_s, partial(self._ask_again, request_id, epoch))
        else:
            for asked in self.callers.again(request_id):
                self.controller.tell(asked)

    @property
    def is_reached(self) -> bool:
        """Whether callers reach the one that leads."""
        return self.controller.alive and self.controller.at not in self.cut_off

    def cut(self, at: int, *, node_s: float) -> None:
        """Nobody reaches a controller any more, nor it anybody, until it is mended."""
        self.store.cut_from[at] += 1
        self.cut_off.add(at)
        for node in self.nodes:
            self.links.cut(node.node_id, at, node_s=node_s)
        for request_id in self.callers.of_epoch(self.controllers[at].epoch):
            self.callers.break_stream(request_id, felt=False)

    def mend(self, at: int) -> None:
        """Its callers find that their streams have broken; those with keys ask again."""
        self.store.cut_from -= Counter([at])
        self.cut_off.discard(at)
        for node in self.nodes:
            self.links.mend(node.node_id, at)
        controller = self.controllers[at]
        for request_id in self.callers.of_epoch(controller.epoch):
            controller.tell(CancelRequested(request_id=request_id))
        self.callers.cut_off(self.callers.of_epoch(controller.epoch))
        self._all_ask_again()

    def run(
        self, workload: Iterable[Arrival], told: Callable[[float], None] = lambda at_s: None
    ) -> tuple[Outcome, ...]:
        """All outcomes that are kept, in the order of their ends. `told` hears the time of each
        arrival.

        Raises InvalidInput for a workload that cannot be meant, EngineError when requests hang.
        """
        coming = iter(workload)
        self._arrive_next(coming, self.clock.now_s(), 0.0, told)
        while self._coming or len(self.callers):
            self.clock.step()
            if not self._coming and self.clock.now_s() - self._last_s > DRAIN_S_MAX:
                raise EngineError(
                    f"{len(self.callers)} requests have not ended {DRAIN_S_MAX:.0f} s after the "
                    "last arrival",
                    hint="this is a fault of mesh: run again with --journal and look at them",
                )
        return tuple(self.callers.outcomes)

    def _arrive_next(
        self,
        coming: Iterator[Arrival],
        start_s: float,
        before_s: float,
        told: Callable[[float], None],
    ) -> None:
        """Only the next arrival is on the clock, so that a long trace is never all in memory."""
        arrival = next(coming, None)
        self._coming = arrival is not None
        self._last_s = self.clock.now_s()
        if arrival is None:
            return
        self._check(arrival, before_s)

        def arrive() -> None:
            told(arrival.at_s)
            self.invoke(arrival)
            self._arrive_next(coming, start_s, arrival.at_s, told)

        self.clock.call_at(start_s + arrival.at_s, arrive)

    def _check(self, arrival: Arrival, before_s: float) -> None:
        if arrival.at_s < before_s:
            raise InvalidInput(f"an arrival at {arrival.at_s} s follows one at {before_s} s")
        if DeploymentName(arrival.deployment) not in self._deployments:
            raise InvalidInput(f"the workload calls {arrival.deployment!r}, which is not deployed")
        if arrival.input_tokens < 1 or arrival.output_tokens < 1:
            raise InvalidInput(
                f"the request at {arrival.at_s} s has {arrival.input_tokens} input and "
                f"{arrival.output_tokens} output tokens; both must be 1 or more"
            )

    def invoke(self, arrival: Arrival) -> None:
        """Now, whatever time it names."""
        self._arrived += 1
        size, content = arrival.input_tokens, arrival.content
        deployment = self._deployments[DeploymentName(arrival.deployment)]
        prompt_tokens, salt = self._prompts.setdefault(size, (TOKEN_ID,) * size), None
        if arrival.turn is not None:
            function = self._functions[deployment.spec.name]
            prompt_tokens = self._said.prompt(arrival.turn, function, size, self._arrived)
        elif content:
            prompt_tokens = tokens_of(content, size, self._arrived)
        if content or arrival.turn is not None:
            salt = "" if deployment.spec.prefix_cache else None
        block_sizes = (footprint.block_tokens for _, footprint in deployment.footprints)
        request = Request(
            request_id=RequestId(f"r-{self._arrived}"),
            deployment=deployment.spec.name,
            prompt_tokens=prompt_tokens,
            cache_salt=salt,
            digests=digests_of(prompt_tokens, block_sizes, salt),
            keyed=self.plan.resumes and self._arrived % KEYED_EACH == 0,
            # A seed of its own gives every request tokens of its own.
            sampling=SamplingParams(
                max_tokens=self.plan.max_tokens(arrival, deployment),
                ignore_eos=self.plan.lengths_told,
                temperature=1.0,
                seed=self._arrived,
            ),
        )
        answer = self.callers.call(request, deployment, arrival.output_tokens, arrival.slo)
        if arrival.turn is not None:
            self._said.answer(arrival.turn, prompt_tokens, answer)
        if self.is_reached:
            self.controller.tell(InvokeRequested(request=request, slo=arrival.slo))
        else:
            self.callers.cut_off((request.request_id,))  # those with a key ask the next one
