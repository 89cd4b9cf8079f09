"""Both cores with an engine that takes exactly as long as its profile says, under a clock that
jumps: one node, a link without delay, loads of a second.
"""

from dataclasses import dataclass, field, replace

from mesh.compute.times import Times
from mesh.core.controller.core import ControllerCore
from mesh.core.node.core import NodeCore
from mesh.domain.actions import (
    ControllerAction,
    DeliverTokens,
    NodeAction,
    RefuseRequest,
    SendCommand,
    SendReport,
    SetTimer,
    StartLoad,
    StartResize,
    StartStep,
    StartUnload,
    SubmitToEngine,
)
from mesh.domain.deployment import Deployment
from mesh.domain.events import ControllerEvent, InvokeRequested, NodeConnected, NodeReported
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import SubmitRequest
from mesh.domain.node_events import (
    CommandReceived,
    LinkOpened,
    LoadFinished,
    NodeEvent,
    ResizeFinished,
    StepFinished,
    UnloadFinished,
)
from mesh.domain.profile import IterationShape, Profile
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import RequestTokens
from mesh.domain.slo import Slo
from mesh.domain.steps import EngineRequest, LoadedInstance, StepResult
from mesh.policy.registry import policy
from tests.core.cells import FOOTPRINT, hello, request
from tests.core.world.clock import HeapClock

LOAD_S = 1.0
LINK = 1


@dataclass(slots=True)
class Caller:
    """Someone who waits for tokens, and looks at the clock for each."""

    slo: Slo
    prompt: int
    arrival_s: float
    seen_s: list[float] = field(default_factory=list)
    grace_s: float = 0.0
    ended: RefusalReason | FinishReason | None = None

    def late_s(self) -> float:
        """By how much its latest token was late; negative if all were in time."""
        due_s = self.arrival_s + self.slo.ttft_limit_s(self.prompt) + self.grace_s
        late = [seen - due_s - self.slo.tpot_s * n for n, seen in enumerate(self.seen_s)]
        return max(late, default=0.0)


@dataclass(slots=True)
class Running:
    request: EngineRequest
    left: int
    """Prompt tokens to compute."""
    tokens: int = 0
    """Generated."""

    @property
    def context(self) -> int:
        return len(self.request.prompt_tokens) - self.left + self.tokens


class SimulatedCell:
    def __init__(
        self,
        deployments: tuple[Deployment, ...],
        profile: Profile,
        limits: CellLimits | None = None,
        rule: str = "llm-mesh",
    ) -> None:
        self.core = ControllerCore(
            epoch=1,
            deployments=deployments,
            limits=limits or CellLimits(),
            policy=policy(rule),
            profiles=(profile,),
        )
        self.slos = {made.spec.name: made.spec.slo for made in deployments}
        self.times = Times(profile)
        self.clock = HeapClock()
        self.callers: dict[RequestId, Caller] = {}
        self.placed: list[RequestId] = []
        self.loaded: dict[InstanceId, dict[RequestId, Running]] = {}
        self._asked = 0
        self._node = NodeCore(limits=NodeLimits(primed_tokens_max=0))
        self._tell_node(LinkOpened())
        self.tell(NodeConnected(link_id=LINK, hello=replace(hello(), memory_bytes=8 << 30)))

    def invoke_at(self, at_s: float, of: str, prompt: int, max_tokens: int) -> RequestId:
        """Ask for so many tokens, at that time."""
        self._asked += 1
        made = request(f"r{self._asked}", of=of, prompt=(1,) * prompt, max_tokens=max_tokens)
        caller = Caller(self.slos[DeploymentName(of)], prompt, at_s)

        def arrive() -> None:
            self.callers[made.request_id] = caller
            self.tell(InvokeRequested(request=made))

        self.clock.call_at(at_s, arrive)
        return made.request_id

    def tell(self, event: ControllerEvent) -> None:
        for action in self.core.handle(event, self.clock.now_s()):
            self._perform(action)

    def _perform(self, action: ControllerAction) -> None:
        match action:
            case SendCommand(command=command):
                if isinstance(command, SubmitRequest):
                    self.placed.append(command.order.request.request_id)
                self._soon(0.0, CommandReceived(command=command))
            case SetTimer(timer=timer):
                self.clock.call_at(action.at_s, lambda: self.tell(timer))
            case DeliverTokens(outputs=outputs):
                caller = self.callers[outputs.request_id]
                caller.seen_s += [self.clock.now_s()] * len(outputs.token_ids)
                caller.ended, caller.grace_s = outputs.finish, action.grace_s
            case RefuseRequest():
                self.callers[action.request_id].ended = action.reason
            case _:
                pass

    def _tell_node(self, event: NodeEvent) -> None:
        for action in self._node.handle(event, self.clock.now_s()):
            self._perform_on_node(action)

    def _perform_on_node(self, action: NodeAction) -> None:
        match action:
            case SendReport(report=report):
                told = NodeReported(link_id=LINK, report=report)
                self.clock.call_at(self.clock.now_s(), lambda: self.tell(told))
            case StartLoad():
                loaded = LoadedInstance(
                    footprint=FOOTPRINT, kv_blocks=action.kv_blocks, elapsed_s=LOAD_S
                )
                self.loaded[action.instance_id] = {}
                self._soon(LOAD_S, LoadFinished(instance_id=action.instance_id, loaded=loaded))
            case StartUnload():
                del self.loaded[action.instance_id]
                self._soon(0.0, UnloadFinished(instance_id=action.instance_id))
            case SubmitToEngine(request=asked):
                running = Running(asked, len(asked.prompt_tokens))
                self.loaded[action.instance_id][asked.request_id] = running
            case StartResize():
                resized = ResizeFinished(
                    instance_id=action.instance_id, kv_blocks=action.kv_blocks, elapsed_s=0.0
                )
                self._soon(0.0, resized)
            case StartStep():
                self._step(action)
            case _:
                raise AssertionError(f"nothing here leads to {action}")

    def _soon(self, seconds: float, event: NodeEvent) -> None:
        self.clock.call_at(self.clock.now_s() + seconds, lambda: self._tell_node(event))

    def _step(self, step: StartStep) -> None:
        """One iteration. Who is submitted meanwhile takes part from the next one on."""
        running = self.loaded[step.instance_id]
        decoding = [held for held in running.values() if not held.left]
        budget, computed, past, done = step.prefill_tokens_max, 0, 0, list(decoding)
        for held in running.values():
            part = min(budget, held.left)
            if part:
                past += held.context * part
                held.left -= part
                budget, computed = budget - part, computed + part
                done += [] if held.left else [held]
        context = sum(held.context for held in decoding)
        shape = IterationShape(
            prefill_tokens=computed,
            prefill_past_tokens=past // computed if computed else 0,
            decode_batch=len(decoding),
            decode_context_tokens=context // len(decoding) if decoding else 0,
        )
        seconds = self.times.iteration_s(shape)
        assert seconds > 0.0, "an iteration of nothing"
        result = StepResult(
            outputs=tuple(self._token(running, held) for held in done),
            prefill_tokens=shape.prefill_tokens,
            prefill_past_tokens=shape.prefill_past_tokens,
            decode_batch=shape.decode_batch,
            context_tokens=context,
            prefill_left=tuple((r, held.left) for r, held in running.items() if held.left),
            starved=(),
            kv_blocks_used=0,
            elapsed_s=seconds,
        )
        self._soon(seconds, StepFinished(instance_id=step.instance_id, result=result))

    def _token(self, running: dict[RequestId, Running], held: Running) -> RequestTokens:
        request_id = held.request.request_id
        held.tokens += 1
        last = held.tokens == held.request.sampling.max_tokens
        if last:
            del running[request_id]
        return RequestTokens(
            request_id=request_id,
            attempt=held.request.attempt,
            first_index=held.tokens - 1,
            token_ids=(7,),
            finish=FinishReason.LENGTH if last else None,
        )
