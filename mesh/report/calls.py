"""What became of each request, and when: a recorder of a controller's host, live, simulated or read
from a journal.

It owns the stories of open requests and of those that ended within the last minutes, the loads
beside them, and a short line about each request of the last hours. Everything in it is bounded.
Before: the host, which tells each decision. After: the page's view of requests, `chrome_trace`,
`cell_report`.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

from mesh.domain.actions import DeliverTokens, RefuseRequest, SendCommand, TellAccepted, TellWaiting
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.events import CancelRequested, InvokeRequested, NodeConnected, NodeDisconnected
from mesh.domain.events import NodeReported as Reported
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.domain.limits import forget_oldest
from mesh.domain.messages import (
    AbortRequest,
    ContinueRequest,
    InstanceGone,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    RequestReturned,
    SubmitRequest,
    TokensReport,
)
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.revision import public_name
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass

WINDOW_S = 300.0
"""So long a story is kept after its end."""
STORIES_MAX = 2_000
"""At most so many of those that have ended are kept."""
STEPS_MAX, SPANS_MAX, TOKENS_MAX, LATE_MAX = 60, 40, 1_024, 40
"""At most so many of one request are kept; of what comes then only the number is."""
TEXT_CHARS_MAX = 2_000
"""A longer text of a step, a failed load or a line of the log is cut: nodes send them."""
LOADS_MAX = 2_000
ENDS_MAX = 50_000
Look = Callable[[DeploymentName], DeploymentSpec | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """A request that has ended, in a few numbers: times in seconds, as its client saw them."""

    at_s: float
    deployment: str
    tenant: str = ""
    slo_class: str = ""
    end: str
    """A finish reason, or the reason of its refusal."""
    refused: bool
    finished: bool
    met: bool
    """Every token was in time, or late by no more than was told."""
    met_in_the_mean: bool
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None

    @classmethod
    def of(cls, outcome: Outcome) -> "CallEnd":
        return cls(
            at_s=outcome.ended_s,
            deployment=str(outcome.deployment),
            slo_class=outcome.slo.name,
            end=str(outcome.end),
            refused=isinstance(outcome.end, RefusalReason),
            finished=outcome.finished,
            met=outcome.met,
            met_in_the_mean=outcome.met_in_the_mean,
            prompt_tokens=outcome.input_tokens,
            output_tokens=len(outcome.tokens_s),
            ttft_s=outcome.ttft_s,
            tpot_s=outcome.tpot_s,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """A part of a request's time: `wait`, `prefill`, `decode`, `evicted`, while it waits again, or
    `move`, while it is computed ahead elsewhere. `ended_s` is `None` while it lasts.
    """

    kind: str
    begun_s: float
    ended_s: float | None = None
    node_id: NodeId | None = None
    instance_id: InstanceId | None = None
    attempt: int = 0
    """The attempt that a move would go on as."""


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """A load of an instance; without a tier it has failed, or lasts."""

    instance_id: InstanceId
    deployment: DeploymentName
    tenant: str = ""
    node_id: NodeId | None
    begun_s: float
    ended_s: float | None = None
    tier: str = ""
    failed: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """The story of one request. Times are of the host's clock, in seconds."""

    request_id: RequestId
    deployment: DeploymentName
    tenant: str
    slo: Slo
    prompt_tokens: int
    output_tokens_max: int
    arrived_s: float
    number: int = 0
    """Counts ends, so that whoever has seen some can ask for later ones."""
    grace_s: float = 0.0
    phase: str = ""
    steps: list[tuple[float, str]] = field(default_factory=list)
    steps_left_out: int = 0
    spans: list[Span] = field(default_factory=list)
    tokens_after_s: "array[float]" = field(default_factory=lambda: array("f"))
    """When each of the first tokens came, in seconds after the request did."""
    late_s: list[float] = field(default_factory=list)
    """When tokens came that were late, over the grace."""
    output_tokens: int = 0
    late_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    end: str = ""
    ended_s: float | None = None

    def due_s(self, index: int) -> float:
        """When the token of this index is promised."""
        limit_s = self.slo.ttft_limit_s(self.prompt_tokens) + self.grace_s
        return self.arrived_s + limit_s + index * self.slo.tpot_s

    @property
    def place(self) -> Span | None:
        """Where it is computed; `None` while it waits."""
        running = (s for s in reversed(self.spans) if s.ended_s is None and s.kind != "move")
        return next((span for span in running if span.instance_id), None)

    def step(self, at_s: float, text: str) -> None:
        if len(self.steps) < STEPS_MAX:
            self.steps.append((at_s, text[:TEXT_CHARS_MAX]))
        else:
            self.steps_left_out += 1

    def begin(
        self,
        now_s: float,
        kind: str,
        node_id: NodeId | None = None,
        instance_id: InstanceId | None = None,
        attempt: int = 0,
    ) -> None:
        """A part; a move lasts beside the others, which each end the one before."""
        if kind != "move":
            self.close(now_s)
        if len(self.spans) < SPANS_MAX:
            self.spans.append(
                Span(
                    kind=kind,
                    begun_s=now_s,
                    node_id=node_id,
                    instance_id=instance_id,
                    attempt=attempt,
                )
            )

    def give_up_move(
        self, now_s: float, *, attempt: int | None = None, node_id: NodeId | None = None
    ) -> None:
        """A move of that attempt, or to that node, has come to nothing, if there is one."""
        for span in self.spans:
            if span.kind != "move" or span.ended_s is not None:
                continue
            if span.attempt == attempt or (node_id is not None and span.node_id == node_id):
                span.ended_s = now_s
                self.step(now_s, f"its move to {span.instance_id} was given up")

    def close(self, now_s: float) -> None:
        for span in self.spans:
            if span.ended_s is None:
                span.ended_s = now_s

    def delivered(self, now_s: float, tokens: int) -> None:
        self.last_s = now_s
        after_s = now_s - self.arrived_s
        for index in range(self.output_tokens, self.output_tokens + tokens):
            if index < TOKENS_MAX:
                self.tokens_after_s.append(after_s)
            if now_s > self.due_s(index):
                self.late_tokens += 1
                if len(self.late_s) < LATE_MAX:
                    self.late_s.append(now_s)
        self.output_tokens += tokens
        if self.first_s is None:
            self.first_s = now_s
            spare_s = self.due_s(0) - now_s
            early = f"{spare_s:.2f} s early" if spare_s >= 0 else f"{-spare_s:.2f} s late"
            self.step(now_s, f"first token after {after_s:.2f} s, {early}")
        place = self.place
        if place is not None and place.kind == "prefill":
            self.begin(now_s, "decode", place.node_id, place.instance_id)

    def ended(self) -> CallEnd:
        assert self.ended_s is not None
        finished = self.end in (FinishReason.STOP, FinishReason.LENGTH)
        ttft_s = tpot_s = None
        if self.first_s is not None and self.last_s is not None:
            ttft_s = self.first_s - self.arrived_s
            more = self.output_tokens - 1
            tpot_s = (self.last_s - self.first_s) / more if more > 0 else None
        limit_s = self.slo.ttft_limit_s(self.prompt_tokens) + self.grace_s
        in_time = ttft_s is not None and ttft_s <= limit_s and (tpot_s or 0.0) <= self.slo.tpot_s
        return CallEnd(
            at_s=self.ended_s,
            deployment=str(self.deployment),
            tenant=self.tenant,
            slo_class=self.slo.name,
            end=self.end,
            refused=self.end in _REASONS,
            finished=finished,
            met=finished and not self.late_tokens,
            met_in_the_mean=finished and in_time,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )


_REASONS = frozenset(reason.value for reason in RefusalReason)


class CallBook:
    """`look` gives what is deployed under a name, or `None`."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._nodes: dict[int, NodeId] = {}
        """The nodes by their links."""
        self._loading: dict[InstanceId, Load] = {}
        self.number = 0
        """How many requests have ended."""
        self.open: dict[RequestId, Call] = {}
        self.stories: deque[Call] = deque(maxlen=STORIES_MAX)
        """Those that have ended, in that order."""
        self.loads: deque[Load] = deque(maxlen=LOADS_MAX)
        """In the order in which they began."""
        self.ends: deque[CallEnd] = deque(maxlen=ENDS_MAX)

    def find(self, request_id: str) -> Call | None:
        known = self.open.get(RequestId(request_id))
        return known or next((c for c in self.stories if c.request_id == request_id), None)

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        report = event.report if isinstance(event, Reported) else None
        if not isinstance(report, TokensReport):
            self._happened(now_s, event)
        for action in actions:
            match action:
                case DeliverTokens():
                    self._delivered(now_s, action)
                case SendCommand(command=command, link_id=link_id):
                    self._sent(now_s, report, command, self._nodes.get(link_id))
                case TellAccepted() if call := self.open.get(action.request_id):
                    call.grace_s = action.grace_s
                    due_s = call.due_s(0) - now_s
                    late = f", {action.grace_s:.2f} s late for a load" if action.grace_s else ""
                    call.step(
                        now_s, f"accepted: its first token is promised in {due_s:.2f} s{late}"
                    )
                case TellWaiting() if call := self.open.get(action.request_id):
                    if action.phase != call.phase:
                        call.phase = action.phase
                        call.step(now_s, f"waits: {action.phase}")
                case RefuseRequest() if call := self.open.get(action.request_id):
                    call.step(now_s, f"refused ({action.reason}): {action.message}")
                    self._end(now_s, call, action.reason.value)

    def _happened(self, now_s: float, event: object) -> None:
        match event:
            case InvokeRequested(request=request):
                spec = self._look(request.deployment)
                call = Call(
                    request_id=request.request_id,
                    deployment=request.deployment,
                    tenant=spec.tenant if spec else "",
                    slo=event.slo or (spec.slo if spec else Slo()),
                    prompt_tokens=len(request.prompt_tokens),
                    output_tokens_max=request.sampling.max_tokens,
                    arrived_s=now_s,
                )
                self.open[request.request_id] = call
                most = f"up to {call.output_tokens_max} of output"
                call.step(now_s, f"asked: {call.prompt_tokens} prompt tokens, {most}")
                call.begin(now_s, "wait")
            case CancelRequested():
                for request_id in event.request_ids:
                    if call_ := self.open.get(request_id):
                        call_.step(now_s, "cancelled: its client has left, or an operator said so")
                        self._end(now_s, call_, FinishReason.CANCELLED.value)
            case NodeConnected(link_id=link_id, hello=hello):
                self._nodes[link_id] = hello.node_id
            case NodeDisconnected(link_id=link_id):
                node_id = self._nodes.pop(link_id, None)
                for call in self.open.values():
                    call.give_up_move(now_s, node_id=node_id)
                for one in self._on(node_id):
                    one.step(now_s, f"its node {node_id} was lost")
                    one.begin(now_s, "wait")
                for load in [one for one in self._loading.values() if one.node_id == node_id]:
                    self._loaded(now_s, load.instance_id, failed=f"its node {node_id} was lost")
            case Reported(report=InstanceLoaded() as loaded):
                self._loaded(now_s, loaded.instance_id, tier=loaded.tier.value)
            case Reported(report=LoadFailed() | InstanceGone() as gone):
                self._loaded(now_s, gone.instance_id, failed=gone.message or "given up")
            case Reported(report=RequestReturned() as back):
                if returned := self.open.get(back.request_id):
                    returned.step(now_s, f"returned by its node: {back.message}")
                    returned.begin(now_s, "wait")

    def _on(self, node_id: NodeId | None) -> Iterator[Call]:
        for call in self.open.values():
            place = call.place
            if place is not None and place.node_id == node_id:
                yield call

    def _loaded(
        self, now_s: float, instance_id: InstanceId, *, tier: str = "", failed: str = ""
    ) -> None:
        load = self._loading.pop(instance_id, None)
        if load is not None:
            load.ended_s, load.tier, load.failed = now_s, tier, failed[:TEXT_CHARS_MAX]

    def _sent(self, now_s: float, report: object, command: object, node_id: NodeId | None) -> None:
        match command:
            case SubmitRequest(instance_id=instance_id, order=order):
                call = self.open.get(order.request.request_id)
                if call is None:
                    return
                where = f"to {instance_id} on {node_id}"
                if order.paused:
                    call.step(now_s, f"{where}, ahead of its move")
                    call.begin(now_s, "move", node_id, instance_id, order.attempt)
                    return
                more = f", attempt {order.tries}" if order.tries > 1 else ""
                call.step(now_s, f"{where}{more}")
                call.begin(now_s, "prefill", node_id, instance_id)
            case ContinueRequest(paused=False, token_ids=token_ids) if token_ids:
                if call := self.open.get(command.request_id):
                    call.step(now_s, f"goes on at {command.instance_id} on {node_id}")
                    call.begin(now_s, "decode", node_id, command.instance_id)
            case AbortRequest() if isinstance(report, TokensReport) and report.starved:
                if call := self.open.get(command.request_id):
                    from_ = report.instance_id
                    call.step(now_s, f"evicted from {from_}, which had no KV blocks left")
                    call.begin(now_s, "evicted")
            case AbortRequest(request_id=request_id, attempt=attempt):
                if call := self.open.get(request_id):
                    call.give_up_move(now_s, attempt=attempt)
            case LoadInstance():
                name = public_name(command.deployment)
                spec = self._look(name)
                load = Load(
                    instance_id=command.instance_id,
                    deployment=name,
                    tenant=spec.tenant if spec else "",
                    node_id=node_id,
                    begun_s=now_s,
                )
                self._loading[command.instance_id] = load
                self.loads.append(load)
                forget_oldest(self._loading, LOADS_MAX)

    def _delivered(self, now_s: float, action: DeliverTokens) -> None:
        outputs = action.outputs
        call = self.open.get(outputs.request_id)
        if call is None:
            return
        if outputs.token_ids:
            call.delivered(now_s, len(outputs.token_ids))
        if outputs.finish is not None:
            call.step(now_s, f"ended by {outputs.finish}, {call.output_tokens} tokens")
            self._end(now_s, call, outputs.finish.value)

    def _end(self, now_s: float, call: Call, end: str) -> None:
        del self.open[call.request_id]
        call.close(now_s)
        self.number += 1
        call.number, call.end, call.ended_s = self.number, end, now_s
        self.ends.append(call.ended())
        self.stories.append(call)
        while (ended_s := self.stories[0].ended_s) is not None and ended_s < now_s - WINDOW_S:
            self.stories.popleft()
