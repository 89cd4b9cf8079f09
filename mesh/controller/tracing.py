"""Each call as a trace of OpenTelemetry's: gateway, and within it queue, load, prefill and decode.

`Traces` is a recorder of the controller's host, and makes spans of what was decided: neither nodes
nor cores know of it. A call goes on in its client's trace, and one that the sampler leaves out is
forgotten at once. Before: the gateway, which begins and ends a call. After: the exporter's thread.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field

from opentelemetry.propagate import extract, get_global_textmap
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context

from mesh.controller.gateway import Headers
from mesh.domain.actions import DeliverTokens, RefuseRequest, SendCommand, TellAccepted
from mesh.domain.errors import Refused
from mesh.domain.events import InvokeRequested, NodeReported
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.invocation import ChatPrompt, Invocation
from mesh.domain.limits import forget_oldest
from mesh.domain.messages import (
    ContinueRequest,
    InstanceGone,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    SubmitRequest,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request
from mesh.domain.values import dataclass
from mesh.wire.access import caller

ITERATION_EVENTS_MAX = 64
"""At most so many iterations of one decode become events; the span says how many there were."""
LOADS_MAX = 4096
"""At most so many loads are remembered for the requests that wait for them."""
CANCELLED = "cancelled"
_NS = 1_000_000_000
Value = str | bool | int | float | Sequence[str]


@dataclass(slots=True, eq=False, kw_only=True)
class _Load:
    begun_s: float
    ended_s: float | None = None
    elapsed_s: float = 0.0
    """As its node has measured it."""
    tier: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Trace:
    """The spans of one call. `part` is the phase that it is in: queue, prefill or decode."""

    tracer: Tracer
    gateway: Span
    arrived_s: float
    unix_ns: int
    """What the clock's 0 is in Unix time."""
    request_id: RequestId | None = None
    part: Span | None = None
    decoding: bool = False
    iterations: int = 0
    tokens: int = 0
    copy: tuple[int, InstanceId] | None = None
    """The attempt that draws tokens elsewhere, to which it moves, and where."""
    seen: dict[str, Value] = field(default_factory=dict)
    """Attributes of the whole."""

    def ns(self, at_s: float) -> int:
        return self.unix_ns + int(at_s * _NS)

    def begin(self, name: str, now_s: float, **attributes: Value) -> None:
        """A part; whichever there was before is over."""
        self.end(now_s)
        self.part = self.tracer.start_span(
            name,
            context=set_span_in_context(self.gateway),
            attributes=_named(attributes),
            start_time=self.ns(now_s),
        )
        self.decoding = name == "decode"
        self.iterations = self.tokens = 0

    def end(self, now_s: float, **attributes: Value) -> None:
        if self.part is not None:
            if self.decoding:
                self.part.set_attribute("mesh.iterations", self.iterations)
                self.part.set_attribute("mesh.tokens", self.tokens)
            self.part.set_attributes(_named(attributes))
            self.part.end(self.ns(now_s))
            self.part, self.decoding = None, False

    def note(self, name: str, now_s: float, **attributes: Value) -> None:
        self.gateway.add_event(name, _named(attributes), self.ns(now_s))

    def loaded(self, load: _Load, came_s: float) -> None:
        """What it waited for in its queue."""
        if self.part is None or load.ended_s is None or load.ended_s <= came_s:
            return
        span = self.tracer.start_span(
            "load",
            context=set_span_in_context(self.part),
            attributes={"mesh.tier": load.tier, "mesh.load_s": load.elapsed_s},
            start_time=self.ns(max(load.begun_s, came_s)),
        )
        span.end(self.ns(load.ended_s))

    def delivered(self, now_s: float, action: DeliverTokens) -> None:
        outputs = action.outputs
        count = len(outputs.token_ids)
        if count and not self.decoding:
            self.begin("decode", now_s)
        if count:
            self.seen.setdefault("gen_ai.latency.time_to_first_token", now_s - self.arrived_s)
            self.iterations += 1
            self.tokens += count
            if self.part is not None and self.iterations <= ITERATION_EVENTS_MAX:
                self.part.add_event("iteration", {"mesh.tokens": count}, self.ns(now_s))
        if outputs.finish is not None:
            self.end(now_s)
            self.seen["gen_ai.usage.output_tokens"] = outputs.first_index + count
            self.seen["gen_ai.response.finish_reasons"] = (outputs.finish.value,)
            if action.node_id is not None:
                self.seen["mesh.node"] = action.node_id
            if outputs.finish is FinishReason.FAILED:
                self.gateway.set_status(StatusCode.ERROR, "the request failed")


class Traces:
    """`now_s` is the clock of the host that this records."""

    def __init__(self, tracer: Tracer, now_s: Callable[[], float]) -> None:
        self._tracer = tracer
        self._now_s = now_s
        self._calls: dict[RequestId, Trace] = {}
        self._loads: dict[InstanceId, _Load] = {}

    @contextmanager
    def call(
        self, asked: Invocation, headers: Headers, arrived_s: float
    ) -> Iterator[Callable[[Request], None] | None]:
        """Around a call; what is yielded is to be told its request, before that is posted. None: it
        is not traced.
        """
        unix_ns = time.time_ns() - int(self._now_s() * _NS)
        gateway = self._tracer.start_span(
            "gateway",
            context=extract(_carrier(headers)),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(asked),
            start_time=unix_ns + int(arrived_s * _NS),
        )
        if not gateway.is_recording():
            yield None
            return
        trace = Trace(tracer=self._tracer, gateway=gateway, arrived_s=arrived_s, unix_ns=unix_ns)
        try:
            yield lambda request: self._asks(trace, request)
        except BaseException as error:
            _failed(gateway, error)
            raise
        finally:
            if trace.request_id is not None:
                self._calls.pop(trace.request_id, None)
            now_s = self._now_s()
            # What the core has ended has no part any more; it hears of who left after this.
            trace.end(now_s, cancelled=True)
            gateway.set_attributes({**trace.seen, "gen_ai.latency.e2e": now_s - arrived_s})
            gateway.end(trace.ns(now_s))

    def _asks(self, trace: Trace, request: Request) -> None:
        trace.request_id = request.request_id
        self._calls[request.request_id] = trace
        trace.seen |= {
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.max_tokens": request.sampling.max_tokens,
            "gen_ai.usage.input_tokens": len(request.prompt_tokens),
        }

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        match event:
            case InvokeRequested(request=request):
                if trace := self._calls.get(request.request_id):
                    trace.begin("queue", now_s)
            case NodeReported(report=InstanceLoaded() as report):
                self._loaded(now_s, report)
            case NodeReported(report=LoadFailed() | InstanceGone() as report):
                self._loads.pop(report.instance_id, None)
        for action in actions:
            self._decided(now_s, action)

    def _loaded(self, now_s: float, report: InstanceLoaded) -> None:
        load = self._loads.get(report.instance_id)
        if load is not None:
            load.ended_s, load.elapsed_s = now_s, report.elapsed_s
            load.tier = report.tier.value

    def _decided(self, now_s: float, action: object) -> None:
        match action:
            case DeliverTokens():
                if trace := self._calls.get(action.outputs.request_id):
                    if trace.copy is not None and action.outputs.attempt == trace.copy[0]:
                        trace.note("migrated", now_s, instance=trace.copy[1])
                        trace.copy = None
                    trace.delivered(now_s, action)
            case SendCommand(command=SubmitRequest() as command):
                if trace := self._calls.get(command.order.request.request_id):
                    self._submitted(now_s, trace, command)
            case SendCommand(command=ContinueRequest(paused=False) as command) if command.token_ids:
                if trace := self._calls.get(command.request_id):
                    trace.copy = command.attempt, command.instance_id
            case SendCommand(command=LoadInstance() as command):
                self._loads[command.instance_id] = _Load(begun_s=now_s)
                forget_oldest(self._loads, LOADS_MAX)
            case TellAccepted():
                if trace := self._calls.get(action.request_id):
                    trace.note("accepted", now_s, grace_s=action.grace_s)
            case RefuseRequest():
                if trace := self._calls.get(action.request_id):
                    trace.end(now_s, refused=action.reason.value)

    def _submitted(self, now_s: float, trace: Trace, command: SubmitRequest) -> None:
        order = command.order
        if order.paused:
            return
        if "gen_ai.latency.time_in_queue" not in trace.seen:
            trace.seen["gen_ai.latency.time_in_queue"] = now_s - trace.arrived_s
            if load := self._loads.get(command.instance_id):
                trace.loaded(load, now_s - order.age_s)
        else:
            trace.note("resubmitted", now_s, instance=command.instance_id)
        trace.begin("prefill", now_s, instance=command.instance_id, attempt=order.attempt)


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"mesh.{name}": value for name, value in attributes.items()}


def _carrier(headers: Headers) -> dict[str, str]:
    """What traces go on by; everything else that a client sends stays where it is."""
    wanted = get_global_textmap().fields
    found: dict[str, str] = {}
    for key, value in headers():
        name = key.decode("latin-1") if isinstance(key, bytes) else key
        if name in wanted:
            found[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    return found


def _request_attributes(asked: Invocation) -> dict[str, Value]:
    """By OpenTelemetry's conventions for generative AI; nothing of the prompt."""
    given = {
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.top_k": asked.top_k,
        "gen_ai.request.seed": asked.seed,
        "mesh.tenant": caller().tenant or None,
    }
    return {
        "gen_ai.operation.name": (
            "chat" if isinstance(asked.prompt, ChatPrompt) else "text_completion"
        ),
        "gen_ai.provider.name": "mesh",
        "gen_ai.request.model": asked.deployment,
        **{name: value for name, value in given.items() if value is not None},
    }


def _failed(gateway: Span, error: BaseException) -> None:
    """A client that leaves is no error of the cell's. Of others the kind is told: a message may
    quote what was asked.
    """
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        gateway.set_attribute("error.type", CANCELLED)
        return
    kind = error.reason.value if isinstance(error, Refused) else type(error).__name__
    gateway.set_attribute("error.type", kind)
    gateway.set_status(StatusCode.ERROR, kind)
