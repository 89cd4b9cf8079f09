"""Virtual cells behind a front, under one clock: the live front's core and performer.

The front's callers check every token, as a cell's do; what a cell's controller tells goes to the
front, and takes as long as a message between machines. Before: tests. After: `cluster`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from mesh.core.front import FrontCore, look_of
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.errors import EngineError
from mesh.domain.events import CancelRequested, InvokeRequested
from mesh.domain.front import (
    AskCell,
    CellEnded,
    CellSeen,
    CellSilent,
    CellTold,
    DropCall,
    FailRequest,
    FrontAction,
    FrontEvent,
)
from mesh.domain.ids import CellName, DeploymentName, RequestId
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens, Waiting
from mesh.domain.outcome import Outcome
from mesh.domain.request import Request, Resumed, SamplingParams
from mesh.runtime.front_actions import FrontPerformer
from mesh.runtime.host import Host, Recorder
from mesh.sim.callers import Callers
from mesh.sim.clock import HeapClock
from mesh.sim.cluster import DRAIN_S_MAX, TOKEN_ID, Arrival, CellPlan, VirtualCell

LOOK_S = 0.25
LIST_EACH = 2
"""Deployments and nodes are looked at each time that so many looks at who leads have passed."""
DELAY_S = 0.001
"""From a front to a cell, and back."""


class FrontCallers(Callers):
    """Who waits at the front."""

    def fail(self, failure: FailRequest) -> None:
        raise AssertionError(f"{failure.request_id} has failed: {failure.message}")


class _CellCallers(Callers):
    """A cell's callers: the calls of the front, by the attempts that it listens to."""

    def __init__(self, clock: HeapClock, lengths: dict[RequestId, int]) -> None:
        super().__init__(clock)
        self.lengths = lengths
        self.attempts: dict[RequestId, int] = {}
        self.post: Callable[[FrontEvent], None]

    def accepted(self, told: TellAccepted) -> None:
        self._tell(
            told.request_id,
            Accepted(
                request_id=told.request_id,
                prompt_tokens=0,
                ttft_limit_s=0.0,
                tpot_limit_s=0.0,
                grace_s=told.grace_s,
                cached_prompt_tokens=told.cached_tokens,
            ),
        )

    def waiting(self, told: TellWaiting) -> None:
        self._tell(told.request_id, Waiting(phase=told.phase, share=told.share))

    def deliver(self, tokens: DeliverTokens) -> None:
        outputs = tokens.outputs
        if outputs.token_ids:
            self._tell(
                outputs.request_id,
                Tokens(first_index=outputs.first_index, token_ids=outputs.token_ids, text=""),
            )
        if outputs.finish is not None:
            count = outputs.first_index + len(outputs.token_ids)
            self._tell(
                outputs.request_id,
                Finished(
                    reason=outputs.finish,
                    prompt_tokens=0,
                    output_tokens=count,
                    ttft_s=0.0,
                    tpot_s=0.0,
                    node_id=tokens.node_id,
                ),
            )
            self.attempts.pop(outputs.request_id, None)

    def refuse(self, refusal: RefuseRequest) -> None:
        attempt = self.attempts.pop(refusal.request_id, None)
        if attempt is not None:
            self.end(refusal.request_id, attempt, refusal)

    def cut_off(self, request_ids: Iterable[RequestId]) -> None:
        for request_id, attempt in self.attempts.items():
            self.end(request_id, attempt, None)
        self.attempts.clear()

    def unanswered_ids(self) -> tuple[RequestId, ...]:
        return ()

    def end(
        self,
        request_id: RequestId,
        attempt: int,
        refusal: RefuseRequest | None,
        *,
        taken: bool = True,
    ) -> None:
        """A call has ended: refused, or its stream broke."""
        ended = CellEnded(
            request_id=request_id,
            attempt=attempt,
            error="Unavailable" if refusal is None else "Refused",
            message="the cell went away" if refusal is None else refusal.message,
            reason=None if refusal is None else refusal.reason,
            retry_after_s=0.0 if refusal is None else refusal.retry_after_s,
            lost=refusal is None,
            taken=taken,
        )
        self._later(ended)

    def _tell(self, request_id: RequestId, told: InvocationEvent) -> None:
        attempt = self.attempts.get(request_id)
        if attempt is not None:
            self._later(CellTold(request_id=request_id, attempt=attempt, told=told))

    def _later(self, event: FrontEvent) -> None:
        self._clock.call_at(self._clock.now_s() + DELAY_S, lambda: self.post(event))


class VirtualFront:
    """`plans` say what each cell is made of; `recorders` see every decision of the front."""

    def __init__(
        self,
        plans: Mapping[CellName, CellPlan],
        *,
        recorders: Sequence[Recorder] = (),
        ended: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.clock = HeapClock()
        self.callers = FrontCallers(self.clock, ended)
        self.core = FrontCore(tuple(plans))
        self._requests: dict[RequestId, InvokeRequested] = {}
        self._behind: dict[CellName, _CellCallers] = {}
        self.cells: dict[CellName, VirtualCell] = {}
        host: Host[FrontEvent, FrontAction] = Host(
            core=self.core,
            clock=self.clock,
            perform=FrontPerformer(clients=self.callers, calls=self).perform,
            recorders=recorders,
        )
        self.tell = host.post
        for name, plan in plans.items():
            behind = self._behind[name] = _CellCallers(self.clock, self.callers.lengths)
            behind.post = host.post
            self.cells[name] = VirtualCell(plan, clock=self.clock, callers=behind)
        self._deployed = {
            one.spec.name: (plan, one)
            for plan in reversed([*plans.values()])
            for one in plan.deployments
        }
        """Each deployment, with the first cell that has it."""
        for name in plans:
            self._look(name, 0)
        self._arrived = self._to_come = 0

    def kill(self, name: CellName) -> None:
        """The whole cell: its controller, and its nodes with all that they have loaded."""
        self.kill_controller(name)
        for node in self.cells[name].nodes:
            node.crash(silently=True)

    def kill_controller(self, name: CellName) -> None:
        self.cells[name].controller.kill()

    def start(self, name: CellName) -> None:
        """Its next controller leads, and its nodes join that: those that were killed are empty."""
        self.cells[name].controller.start()
        for node in self.cells[name].nodes:
            if node.plan.comes_s is None:  # others come when they are wanted
                node.restart()

    def ask(self, asked: AskCell) -> None:
        """See `mesh.runtime.front_actions.CellCalls`."""
        self.clock.call_at(self.clock.now_s() + DELAY_S, lambda: self._taken(asked))

    def drop(self, dropped: DropCall) -> None:
        for name, behind in self._behind.items():
            if behind.attempts.get(dropped.request_id) == dropped.attempt:
                del behind.attempts[dropped.request_id]
                controller = self.cells[name].controller
                if controller.alive:
                    controller.tell(CancelRequested(request_id=dropped.request_id))

    def run(self, workload: Iterable[Arrival]) -> tuple[Outcome, ...]:
        """All outcomes that are kept, in the order of their ends. Raises EngineError when requests
        hang.
        """
        began_s = last_s = self.clock.now_s()
        for arrival in workload:
            self._to_come += 1
            last_s = began_s + arrival.at_s
            self.clock.call_at(last_s, partial(self._arrive, arrival))
        while self._to_come or len(self.callers):
            self.clock.step()
            if self.clock.now_s() - last_s > DRAIN_S_MAX:
                raise EngineError(f"{len(self.callers)} requests have not ended")
        return tuple(self.callers.outcomes)

    def _arrive(self, arrival: Arrival) -> None:
        self._to_come -= 1
        self._arrived += 1
        name = DeploymentName(arrival.deployment)
        plan, deployment = self._deployed[name]
        request = Request(
            request_id=RequestId(f"r-{self._arrived}"),
            deployment=name,
            prompt_tokens=(TOKEN_ID,) * arrival.input_tokens,
            keyed=True,
            sampling=SamplingParams(
                max_tokens=plan.max_tokens(arrival, deployment),
                ignore_eos=plan.lengths_told,
                temperature=1.0,
                seed=self._arrived,
            ),
        )
        self.callers.call(request, deployment, arrival.output_tokens, arrival.slo)
        asked = InvokeRequested(request=request, slo=arrival.slo)
        self._requests[request.request_id] = asked
        self.tell(asked)

    def _taken(self, asked: AskCell) -> None:
        controller, behind = self.cells[asked.cell].controller, self._behind[asked.cell]
        first = self._requests[asked.request_id]
        if not controller.alive:
            behind.end(asked.request_id, asked.attempt, None, taken=False)
            return
        if asked.request_id in behind.attempts:
            controller.tell(CancelRequested(request_id=asked.request_id))
        behind.attempts[asked.request_id] = asked.attempt
        resumed = Resumed(
            output_tokens=asked.output_tokens, age_s=asked.age_s, accepted=asked.vouched
        )
        controller.tell(
            InvokeRequested(
                request=first.request, slo=first.slo, resumed=resumed if asked.resumes else None
            )
        )

    def _look(self, name: CellName, number: int) -> None:
        cell, now_s = self.cells[name], self.clock.now_s()
        controller = cell.controller
        if controller.alive:
            snapshot = controller.core.snapshot(now_s) if number % LIST_EACH == 0 else None
            look = None if snapshot is None else look_of(snapshot.deployments, snapshot.nodes)
            leader = f"{name}-{controller.epoch}"
            self.tell(CellSeen(cell=name, leader=leader))
            if look is not None:
                self.tell(CellSeen(cell=name, leader=leader, look=look))
        else:
            self.tell(CellSilent(cell=name))
        self.clock.call_at(now_s + LOOK_S, lambda: self._look(name, number + 1))
