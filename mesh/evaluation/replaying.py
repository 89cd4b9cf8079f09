"""Replays a journal through a fresh core, and says what it holds: a span of time, requests, and the
first decision that comes out otherwise, if there is one.

Any journal will do, a controller's or a node's, of a live cell or of a simulated one; the cores are
the same. Before: `mesh sim --replay`. After: `mesh.runtime.journal`, which reads and compares.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Any

from mesh.core.front import FrontCore
from mesh.core.node.core import NodeCore
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted
from mesh.domain.deployment import Deployment
from mesh.domain.events import CancelRequested, DeployRequested, InvokeRequested
from mesh.domain.ids import RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass
from mesh.evaluation.summary import Summary, summarize
from mesh.runtime.host import Core
from mesh.runtime.journal import (
    ControllerStart,
    Decision,
    Divergence,
    FrontStart,
    JournalHeader,
    NodeStart,
    read_journal,
    replay,
)
from mesh.runtime.policies import rule_of_file
from mesh.runtime.starting import controller_core

DIFFERENCES_MAX = 20
SHOWN_MAX = 6
"""At most so many items of a tuple or a mapping are shown."""
TEXT_MAX = 200
"""At most so many characters of one value are shown."""
NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`where` is a path such as `SendCommand[1].command.kv_blocks`: the second action's."""

    where: str
    recorded: str
    decided: str


def differences(
    recorded: tuple[object, ...], decided: tuple[object, ...]
) -> tuple[Difference, ...]:
    """The first `DIFFERENCES_MAX`, in the order of the actions; none when they are equal."""
    found: list[Difference] = []
    for number in range(max(len(recorded), len(decided))):
        one = recorded[number] if number < len(recorded) else None
        other = decided[number] if number < len(decided) else None
        named = other if one is None else one
        found += _between(f"{type(named).__name__}[{number}]", one, other)
        if len(found) >= DIFFERENCES_MAX:
            break
    return tuple(found[:DIFFERENCES_MAX])


def _between(where: str, one: object, other: object) -> Iterator[Difference]:
    if one == other:
        return
    if is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        for field in fields(one):
            left, right = getattr(one, field.name), getattr(other, field.name)
            yield from _between(f"{where}.{field.name}", left, right)
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _between(f"{where}[{number}]", left, right)
    else:
        yield Difference(where=where, recorded=shown(one), decided=shown(other))


def shown(value: object) -> str:
    """A value in a line, with the ends of what is long left out."""
    text = _shown(value)
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _shown(value: object) -> str:
    if value is None:
        return NOTHING
    if is_dataclass(value) and not isinstance(value, type):
        pairs = (f"{f.name}={_shown(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({', '.join(pairs)})"
    if isinstance(value, tuple):
        more = f", … {len(value)} in all" if len(value) > SHOWN_MAX else ""
        return f"({', '.join(_shown(item) for item in value[:SHOWN_MAX])}{more})"
    if isinstance(value, Mapping):
        first = list(value.items())[:SHOWN_MAX]
        more = f", … {len(value)} in all" if len(value) > SHOWN_MAX else ""
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in first) + more + "}"
    return repr(value) if type(value) is str else str(value)


LINES_BEFORE = 1
"""A journal begins with this many lines that are no decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDecision:
    """The first one that came out otherwise."""

    line: int
    """The line of the journal, counted from 1."""
    now_s: float
    event: str
    differences: tuple[Difference, ...]
    """The fields in which the decisions differ, at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """`requests` and `open_requests` are as the journal has them, and None of a node's."""

    core: str
    """controller, front or node."""
    version: str
    """The version of mesh that wrote the journal."""
    events: int
    span_s: float
    """From the first event to the last."""
    requests: Summary | None
    """The summary of the requests that ended; tokens count from when the controller handed them
    out.
    """
    open_requests: int | None
    other: OtherDecision | None
    """None when everything was decided as recorded."""


def replay_journal(path: Path, told: Callable[[int], None] = lambda events: None) -> ReplayReport:
    """`told` hears how many events have been replayed.

    Raises InvalidInput for what is no journal of this version of mesh.
    """
    start, decisions = read_journal(path)
    seen = _Seen(start, told)
    passing = seen.watch(decisions)
    core: Core[Any, Any]
    match start:
        case ControllerStart():
            kind, core = "controller", controller_core(start)
        case FrontStart():
            kind, core = "front", FrontCore(start.cells)
        case NodeStart():
            kind = "node"
            core = NodeCore(
                limits=start.limits, own_rule=rule_of_file(start.policy), power=start.power
            )
    divergence = replay(core, passing)
    for _ in passing:
        """What follows a difference still says what became of the requests."""
    controllers = isinstance(start, ControllerStart)
    return ReplayReport(
        core=kind,
        version=start.version,
        events=seen.events,
        span_s=seen.last_s - seen.first_s,
        requests=summarize(seen.outcomes, seen.specs.values()) if controllers else None,
        open_requests=len(seen.open) if controllers else None,
        other=None if divergence is None else _other(divergence),
    )


def outcomes_of(path: Path) -> list[Outcome]:
    """What came of the requests whose end a controller's journal tells; a token came when the
    controller handed it out. Raises InvalidInput as `replay_journal` does.
    """
    start, decisions = read_journal(path)
    seen = _Seen(start, lambda events: None)
    for _ in seen.watch(decisions):
        pass  # they are noted as they pass
    return seen.outcomes


def _other(divergence: Divergence) -> OtherDecision:
    decision = divergence.decision
    return OtherDecision(
        line=divergence.number + LINES_BEFORE,
        now_s=decision.now_s,
        event=type(decision.event).__name__,
        differences=differences(decision.actions, divergence.actions),
    )


@dataclass(slots=True)
class _Open:
    request: Request
    slo: Slo
    arrival_s: float
    earlier_tokens: int
    grace_s: float | None = None
    """None until it is accepted."""
    tokens_s: list[float] = field(default_factory=list)


class _Seen:
    """What the recorded decisions say of requests, gathered as they pass."""

    def __init__(self, start: JournalHeader, told: Callable[[int], None]) -> None:
        deployed: tuple[Deployment, ...] = ()
        if isinstance(start, ControllerStart):
            deployed = start.deployments
        self.specs = {of.spec.name: of.spec for of in deployed}
        self._told = told
        self.events = 0
        self.first_s = self.last_s = 0.0
        self.open: dict[RequestId, _Open] = {}
        self.outcomes: list[Outcome] = []

    def watch(self, decisions: Iterator[Decision]) -> Iterator[Decision]:
        for decision in decisions:
            self.first_s = decision.now_s if self.events == 0 else self.first_s
            self.last_s = decision.now_s
            self.events += 1
            self._told(self.events)
            self._look(decision)
            yield decision

    def _look(self, decision: Decision) -> None:
        match decision.event:
            case InvokeRequested(request=request, slo=own, resumed=resumed):
                deployed = self.specs.get(request.deployment)
                slo = own or (deployed.slo if deployed else Slo())
                earlier = 0 if resumed is None else len(resumed.output_tokens)
                self.open[request.request_id] = _Open(request, slo, decision.now_s, earlier)
            case DeployRequested(spec=spec):
                self.specs[spec.name] = spec
            case CancelRequested() as cancelled:
                for request_id in cancelled.request_ids:
                    self._end(request_id, FinishReason.CANCELLED)
            case _:
                pass
        for action in decision.actions:
            if isinstance(action, RefuseRequest):
                self._end(action.request_id, action.reason)
            elif isinstance(action, DeliverTokens):
                self._delivered(action)
            elif isinstance(action, TellAccepted) and action.request_id in self.open:
                self.open[action.request_id].grace_s = action.grace_s

    def _delivered(self, action: DeliverTokens) -> None:
        outputs = action.outputs
        if outputs.request_id in self.open:
            self.open[outputs.request_id].tokens_s += [self.last_s] * len(outputs.token_ids)
        if outputs.finish is not None:
            self._end(outputs.request_id, outputs.finish)

    def _end(self, request_id: RequestId, end: FinishReason | RefusalReason) -> None:
        ended = self.open.pop(request_id, None)
        if ended is None:
            return
        self.outcomes.append(
            Outcome(
                request_id=request_id,
                deployment=ended.request.deployment,
                slo=ended.slo,
                arrival_s=ended.arrival_s,
                input_tokens=len(ended.request.prompt_tokens),
                tokens_s=tuple(ended.tokens_s),
                earlier_tokens=ended.earlier_tokens,
                ended_s=self.last_s,
                accepted=ended.grace_s is not None,
                grace_s=ended.grace_s or 0.0,
                end=end,
            )
        )
