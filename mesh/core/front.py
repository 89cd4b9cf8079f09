"""The core of a front: it picks a cell for each request, and another one where that is lost.

Of the cells that serve its deployment a request gets the first home cell where a loaded instance
has room, else the less busy of two. One that a cell refuses before its first token is asked of the
next; one whose stream breaks goes on under its cell's next leader, and soon in another home cell.
Pure, as the cores of controllers and nodes are: `mesh.runtime.host` calls `handle`, live and
simulated. Before: the gateway, with requests, and looks at the cells. After: calls to the cells.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import field
from hashlib import blake2b
from math import inf
from typing import assert_never

from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted, TellWaiting
from mesh.domain.events import CancelRequested, InvokeRequested, ShutdownRequested
from mesh.domain.front import (
    AskCell,
    CellEnded,
    CellLook,
    CellSeen,
    CellSilent,
    CellTold,
    DeploymentLook,
    DropCall,
    FailRequest,
    FrontAction,
    FrontEvent,
)
from mesh.domain.ids import CellName, DeploymentName, ModelId, NodeId, RequestId
from mesh.domain.invocation import Accepted, Finished, Tokens, Waiting
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.limits import AWAY_S_MAX, BREAKS_MAX, NODES_S_MAX, RESUME_S_MAX
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import Request, RequestTokens
from mesh.domain.values import dataclass
from mesh.domain.views import DeploymentSnapshot, NodeSnapshot

TAKEOVER_S_MAX = 2.0
"""For so long a request that its cell has accepted waits for the cell's next leader, under which it
need not be computed anew, before it goes on in another home cell; and so long a cell may be silent
before its streams are given up. A lease is 1 s.
"""
FULL_RETRY_S = 1.0
AWAY_RETRY_S = 2.0
"""Who is refused because cells are away is told to come again then."""
CELL_CALLS_MAX = 4096
"""Calls of a front that one cell has at one time: half of those that its controller takes
(`GatewayLimits.calls_max`).
"""
UNTAKEN_MAX = 20
"""So often a request is turned away by cells of which one leads, as they say: looks at a cell come
four times a second.
"""

_ELSEWHERE = frozenset(RefusalReason) - {
    RefusalReason.PROMPT_TOO_LONG,
    RefusalReason.QUEUE_TIMEOUT,
    RefusalReason.TENANT_LIMIT,
    RefusalReason.TEXT_ON_HOLD,
}
"""Another cell may serve what one refuses for these reasons. One that has waited in a queue as long
as it may is late in any.
"""
_GONE = ("NotFound", "Unavailable")
"""The errors with which a cell says that it does not serve the deployment now."""


def ranked(name: DeploymentName, cells: Iterable[CellName]) -> list[CellName]:
    """The cells as homes of a deployment, the first one first (rendezvous hashing): where a cell
    comes or goes, no deployment moves between the others.
    """
    return sorted(cells, key=lambda cell: (_digest(f"{name}\0{cell}"), cell), reverse=True)


@dataclass(slots=True)
class _Cell:
    name: CellName
    seen_s: float = -inf
    """When somebody led it last."""
    heard_s: float = -inf
    """When a call under its last leader has told something, or that leader has said that it drains.
    """
    led_since_s: float = -inf
    """Since when its present leader does."""
    led_by: str = ""
    """Who leads it, or did last."""
    led: bool = False
    nodes: int = 0
    requests: int = 0
    deployments: dict[DeploymentName, DeploymentLook] = field(default_factory=dict)
    asked: Counter[DeploymentName] = field(default_factory=Counter)
    """The calls that were made to it since the last look."""
    calls: int = 0
    """Those that it has of this front."""
    given_up: bool = False
    """Its streams were, since it was led last."""
    silent: bool = True
    """Nobody led it at the last look."""

    def note_leader(self, leader: str, now_s: float) -> bool:
        """Whether another one led it before."""
        changed = self.led_by != leader
        if changed or self.silent:
            self.led_since_s = now_s
        self.led, self.led_by, self.seen_s, self.given_up = True, leader, now_s, False
        self.silent = False
        return changed

    def give_up(self, now_s: float) -> bool:
        """Whether its streams are to be given up, which is said once."""
        if self.given_up or now_s - max(self.seen_s, self.heard_s) <= TAKEOVER_S_MAX:
            return False
        self.given_up = True
        return True

    def take(self, look: CellLook) -> None:
        self.nodes, self.requests = look.nodes, look.requests
        self.deployments = {one.name: one for one in look.deployments}
        self.asked.clear()

    def room(self, name: DeploymentName) -> int:
        return self.deployments[name].room - self.asked[name]

    @property
    def load(self) -> float:
        """Its requests for each of its nodes."""
        return (self.requests + self.asked.total()) / self.nodes if self.nodes else inf


@dataclass(slots=True)
class _Call:
    request: Request
    model_id: ModelId
    tokens: list[int]
    """Those that its client has."""
    asked_s: float
    age_s: float
    """Its age when it was asked here."""
    resumes: bool
    """A cell may know it."""
    vouched: bool
    """A cell has accepted it."""
    attempt: int = 0
    cell: _Cell | None = None
    """Where it is; `None` while it waits for a cell."""
    leader: str = ""
    accepted: bool = False
    """Its client was told so here."""
    cached_tokens: int = 0
    breaks: int = 0
    """Streams that broke since its last token."""
    untaken: int = 0
    """How often nobody took it since then."""
    lost: _Cell | None = None
    """The cell that it was lost from, which may have it still."""
    lost_s: float | None = None
    refusals: dict[CellName, CellEnded] = field(default_factory=dict)
    """What the cells have answered that did not serve it, since its last token."""

    @property
    def name(self) -> DeploymentName:
        return self.request.deployment

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    def lost_for_s(self, now_s: float) -> float:
        """Since when a cell has accepted it that answers no more; of one that came so, since it
        came.
        """
        if self.lost_s is not None:
            return now_s - self.lost_s
        return now_s - self.asked_s if self.vouched else inf

    def ask(self, cell: _Cell, attempt: int, now_s: float) -> AskCell:
        self.attempt, self.cell, self.leader = attempt, cell, cell.led_by
        cell.asked[self.name] += 1
        cell.calls += 1
        return AskCell(
            cell=cell.name,
            request_id=self.request_id,
            attempt=self.attempt,
            resumes=self.resumes,
            output_tokens=tuple(self.tokens) if self.resumes else (),
            age_s=self.age_s + now_s - self.asked_s if self.resumes else 0.0,
            vouched=self.vouched,
        )

    def drop(self) -> DropCall:
        return DropCall(request_id=self.request_id, attempt=self.attempt)

    def accept(self, cached_tokens: int) -> bool:
        """Whether its client is to be told."""
        self.vouched = True
        self.lost, self.lost_s = None, None
        if self.accepted:
            return False
        self.accepted, self.cached_tokens = True, cached_tokens
        return True

    def take(self, token_ids: Iterable[int]) -> None:
        self.tokens += token_ids
        self.refusals.clear()
        self.lost, self.lost_s, self.breaks, self.untaken = None, None, 0, 0
        self.resumes = self.vouched = True

    def leave(self) -> _Cell:
        """The cell where it was; it has none from now on."""
        cell, self.cell = self.cell, None
        assert cell is not None
        cell.calls -= 1
        return cell

    def lose(self, cell: _Cell, since_s: float) -> None:
        """The cell may have it, and answers no more."""
        self.lost, self.resumes = cell, True
        self.lost_s = since_s if self.lost_s is None else self.lost_s


class FrontCore:
    """`cells` are all that the front knows of, whether or not they answer."""

    def __init__(self, cells: Sequence[CellName]) -> None:
        self._cells = {name: _Cell(name) for name in cells}
        self._serving: dict[DeploymentName, list[_Cell]] = {}
        """The cells that serve a deployment, or did when they were last looked at, by their ranks.
        """
        self._attempts = 0
        """Counts those of all calls: what comes of an earlier call with the same key is told apart.
        """
        self._calls: dict[RequestId, _Call] = {}
        self._waiting: dict[RequestId, _Call] = {}
        """Those that have no cell now."""
        self._actions: list[FrontAction] = []
        self._now_s = 0.0

    def model(self, name: DeploymentName) -> tuple[CellName, ModelId] | None:
        """The model that prompts of a deployment are to be tokenised for, and a cell that has it:
        the first one that is led, else the first one. `None` where no cell serves it.
        """
        serving = self._serving.get(name, ())
        cell = next((cell for cell in serving if cell.led), serving[0] if serving else None)
        return None if cell is None else (cell.name, cell.deployments[name].model_id)

    def away(self, name: DeploymentName, now_s: float) -> RefuseRequest | None:
        """Why no cell that serves a deployment can be asked, unless one can, or may be soon."""
        serving = self._serving.get(name, [])
        if any(cell.led or now_s - cell.seen_s <= AWAY_S_MAX for cell in serving):
            return None
        return _away(RequestId(""), name, serving, now_s)

    def asked_before(self, request_id: RequestId) -> tuple[Request, Sequence[int]] | None:
        """An open request of this id, with the tokens that it has."""
        call = self._calls.get(request_id)
        return None if call is None else (call.request, call.tokens)

    def load(self) -> tuple[int, int]:
        """The open requests that a cell has accepted, and the others."""
        running = sum(call.accepted for call in self._calls.values())
        return running, len(self._calls) - running

    def handle(self, event: FrontEvent, now_s: float) -> list[FrontAction]:
        self._actions, self._now_s = [], now_s
        match event:
            case CellTold():
                self._told(event)
            case InvokeRequested():
                self._invoke(event)
            case CancelRequested():
                for request_id in event.request_ids:
                    if (call := self._end(request_id)) is not None and call.cell is not None:
                        self._act(call.drop())
            case CellEnded():
                self._ended(event)
            case CellSeen():
                self._seen(event)
            case CellSilent():
                self._silent(event)
            case ShutdownRequested():
                for call in list(self._calls.values()):
                    self._refuse(call, RefusalReason.SHUTTING_DOWN, "the front is stopping", 1.0)
            case _:
                assert_never(event)
        return self._actions

    def _act(self, action: FrontAction) -> None:
        self._actions.append(action)

    def _invoke(self, event: InvokeRequested) -> None:
        request, resumed = event.request, event.resumed
        serving = self.model(request.deployment)
        if serving is None:
            message = f"no cell serves {request.deployment!r}"
            reason = RefusalReason.UNKNOWN_DEPLOYMENT
            self._act(RefuseRequest(request_id=request.request_id, reason=reason, message=message))
            return
        call = _Call(
            request=request,
            model_id=serving[1],
            tokens=[] if resumed is None else list(resumed.output_tokens),
            asked_s=self._now_s,
            age_s=0.0 if resumed is None else resumed.age_s,
            resumes=resumed is not None,
            vouched=resumed is not None and resumed.accepted,
        )
        self._calls[request.request_id] = call
        self._place(call)

    def _place(self, call: _Call, *, after_look: bool = False) -> None:
        """Ask a cell, wait for one, or refuse. `after_look`: something may have changed since cells
        have refused it.
        """
        serving = [
            cell
            for cell in self._serving.get(call.name, ())
            if cell.deployments[call.name].model_id == call.model_id
        ]
        passing = [cell for cell in serving if self._passes(call, cell)]
        if after_look:
            for cell in passing:
                del call.refusals[cell.name]
        left = [cell for cell in serving if cell.name not in call.refusals]
        led = [cell for cell in left if cell.led]
        found = [cell for cell in led if cell.calls < CELL_CALLS_MAX]
        full = bool(led) and not found
        waits = call.lost_for_s(self._now_s) < TAKEOVER_S_MAX
        if call.vouched and call.lost in left and (call.lost in found or waits):
            found = [cell for cell in found if cell is call.lost]
        elif call.request.first is not None:
            # Several answers of one prompt are computed where the first one is.
            first = self._calls.get(call.request.first)
            found = [cell for cell in found if first and cell is first.cell] or found
        elif call.resumes and not call.attempt:
            # Another front has asked for it: rather where the first choice is than where room is.
            found = found[:1]
        if found:
            self._waiting.pop(call.request_id, None)
            self._attempts += 1
            cell = chosen(call.request_id, call.name, found)
            self._act(call.ask(cell, self._attempts, self._now_s))
        elif full and not call.vouched:
            message = f"{led[0].name} has {CELL_CALLS_MAX} calls of this front, its most"
            self._refuse(call, RefusalReason.QUEUE_FULL, message, FULL_RETRY_S)
        elif passing or any(self._may_come(call, cell) for cell in left):
            self._waiting[call.request_id] = call
        elif call.refusals:
            self._give_up(call, min(call.refusals.values(), key=_soonest))
        elif not serving and call.name in self._serving:
            self._end(call.request_id)
            message = f"{call.name!r} has got another model, and no cell has that of this answer"
            failed = FailRequest(
                request_id=call.request_id, error="Unavailable", message=message, hint="ask again"
            )
            self._act(failed)
        else:
            self._end(call.request_id)
            self._act(_away(call.request_id, call.name, serving, self._now_s))

    def _may_come(self, call: _Call, cell: _Cell) -> bool:
        """Whether it is worth waiting for a cell that nobody leads now."""
        if call.vouched and call.lost_for_s(self._now_s) <= RESUME_S_MAX:
            return True
        return self._now_s - cell.seen_s <= AWAY_S_MAX

    def _passes(self, call: _Call, cell: _Cell) -> bool:
        """Whether a cell may soon serve what it has refused: its leader has just begun, and its
        nodes are on their way.
        """
        ended = call.refusals.get(cell.name)
        since_s = min(self._now_s - cell.led_since_s, call.lost_for_s(self._now_s))
        return (
            ended is not None and ended.reason is RefusalReason.NO_NODE and since_s <= NODES_S_MAX
        )

    def _told(self, event: CellTold) -> None:
        call = self._calls.get(event.request_id)
        if call is None or call.attempt != event.attempt or call.cell is None:
            return
        if call.leader == call.cell.led_by:
            call.cell.heard_s = self._now_s
        match event.told:
            case Tokens() as told:
                self._tokens(call, call.cell, told)
            case Accepted() as told:
                if call.accept(told.cached_prompt_tokens):
                    self._act(
                        TellAccepted(
                            request_id=event.request_id,
                            grace_s=told.grace_s,
                            cached_tokens=told.cached_prompt_tokens,
                        )
                    )
            case Waiting(phase=phase, share=share):
                self._act(TellWaiting(request_id=event.request_id, phase=phase, share=share))
            case Finished() as told:
                last = RequestTokens(
                    request_id=event.request_id,
                    attempt=event.attempt,
                    first_index=len(call.tokens),
                    token_ids=(),
                    finish=told.reason,
                )
                node = None if told.node_id is None else NodeId(f"{call.cell.name}/{told.node_id}")
                self._end(event.request_id)
                self._act(DeliverTokens(outputs=last, node_id=node))
            case _:
                assert_never(event.told)

    def _tokens(self, call: _Call, cell: _Cell, told: Tokens) -> None:
        had = len(call.tokens)
        if told.first_index != had:
            # Of another version, say: it does not go on with what the client has.
            message = (
                f"the cell {cell.name} told tokens from {told.first_index} on; {had} are known"
            )
            self._refuse(call, RefusalReason.ENGINE_FAILED, message)
            return
        if told.token_ids:
            call.take(told.token_ids)
        self._act(
            DeliverTokens(
                outputs=RequestTokens(
                    request_id=call.request_id,
                    attempt=call.attempt,
                    first_index=had,
                    token_ids=told.token_ids,
                    text=told.text,
                    logprobs=told.logprobs,
                    cached_tokens=call.cached_tokens,
                    prompt_logprobs=told.prompt_logprobs,
                    embedding=told.embedding,
                )
            )
        )

    def _ended(self, event: CellEnded) -> None:
        call = self._calls.get(event.request_id)
        if call is None or call.attempt != event.attempt or call.cell is None:
            return
        cell = call.leave()
        stops = event.reason is RefusalReason.SHUTTING_DOWN or event.error == "StandsBy"
        call.breaks += event.lost and event.taken
        call.untaken += stops or (event.lost and not event.taken)
        bounded = call.breaks <= BREAKS_MAX and call.untaken <= UNTAKEN_MAX
        if (event.lost or stops) and bounded:
            cell.led = False  # as far as is known: the next look says who leads it
            if event.taken and event.error != "StandsBy":
                call.lose(cell, self._now_s)
            self._place(call)
        elif stops or event.reason in _ELSEWHERE or event.error in _GONE:
            call.refusals[cell.name] = event
            self._place(call)
        else:
            self._give_up(call, event)

    def _give_up(self, call: _Call, ended: CellEnded) -> None:
        if ended.reason is not None:
            self._refuse(call, ended.reason, ended.message, ended.retry_after_s, ended.hint)
            return
        self._end(call.request_id)
        failed = FailRequest(
            request_id=call.request_id, error=ended.error, message=ended.message, hint=ended.hint
        )
        self._act(failed)

    def _refuse(
        self,
        call: _Call,
        reason: RefusalReason,
        message: str,
        retry_after_s: float = 0.0,
        hint: str = "",
    ) -> None:
        if call.cell is not None:
            self._act(call.drop())
        self._end(call.request_id)
        self._act(
            RefuseRequest(
                request_id=call.request_id,
                reason=reason,
                message=message,
                retry_after_s=retry_after_s,
                hint=hint,
            )
        )

    def _end(self, request_id: RequestId) -> _Call | None:
        self._waiting.pop(request_id, None)
        call = self._calls.pop(request_id, None)
        if call is not None and call.cell is not None:
            call.cell.calls -= 1
        return call

    def _seen(self, event: CellSeen) -> None:
        cell = self._cells[event.cell]
        if event.look is not None and cell.led_by not in ("", event.leader):
            return  # it is late: another one leads by now
        changed = cell.note_leader(event.leader, self._now_s)
        if event.look is not None:
            self._look(cell, event.look)
        if changed:
            # What the one before tells of them, if it does, nobody needs.
            calls = [call for call in self._of(cell) if call.leader != event.leader]
            self._lose(cell, calls, self._now_s)
        self._place_waiting(cell)

    def _silent(self, event: CellSilent) -> None:
        cell = self._cells[event.cell]
        cell.led, cell.silent = False, True
        if event.drains:
            cell.heard_s = self._now_s
        if cell.give_up(self._now_s):
            self._lose(cell, self._of(cell), max(cell.seen_s, cell.heard_s))
        self._place_waiting(cell)

    def _of(self, cell: _Cell) -> list[_Call]:
        return [call for call in self._calls.values() if call.cell is cell]

    def _lose(self, cell: _Cell, calls: Iterable[_Call], since_s: float) -> None:
        """Streams of a cell that tell nothing any more, as far as is known."""
        for call in calls:
            self._act(call.drop())
            call.leave()
            call.lose(cell, since_s)
            self._place(call)

    def _place_waiting(self, cell: _Cell) -> None:
        """Those that may wait for a cell, after a look at it."""
        for call in list(self._waiting.values()):
            serving = self._serving.get(call.name)
            if serving is None or cell in serving:
                self._place(call, after_look=True)

    def _look(self, cell: _Cell, look: CellLook) -> None:
        before = cell.deployments
        cell.take(look)
        for name in [name for name in before if name not in cell.deployments]:
            left = [one for one in self._serving[name] if one is not cell]
            if left:
                self._serving[name] = left
            else:
                del self._serving[name]
        for name in [name for name in cell.deployments if name not in before]:
            serving = {one.name: one for one in (*self._serving.get(name, ()), cell)}
            self._serving[name] = [serving[one] for one in ranked(name, serving)]


def look_of(deployments: Iterable[DeploymentSnapshot], nodes: Iterable[NodeSnapshot]) -> CellLook:
    """What a front decides by, of what a cell tells."""
    found = list(deployments)
    return CellLook(
        deployments=tuple(
            DeploymentLook(
                name=one.spec.name,
                model_id=one.model.model_id,
                room=sum(
                    max(instance.batch_max - instance.batch, 0)
                    for instance in one.instances
                    if instance.state is InstanceState.READY
                )
                - one.queued,
            )
            for one in found
            if one.state is DeploymentState.READY and one.model is not None
        ),
        nodes=sum(node.state is NodeState.READY for node in nodes),
        requests=sum(one.queued + one.running for one in found),
    )


def chosen(request_id: RequestId, name: DeploymentName, found: Sequence[_Cell]) -> _Cell:
    """One of these cells, which serve the deployment and are ranked as its homes."""
    if len(found) == 1:
        return found[0]
    warm = next((cell for cell in found if cell.room(name) > 0), None)
    if warm is not None:
        return warm
    pair = found
    if len(found) > 2:
        # Drawn by the request's id: whichever front is asked again looks at the same two.
        drawn = _digest(request_id)
        first, second = drawn % len(found), drawn // len(found) % (len(found) - 1)
        pair = [found[n] for n in sorted((first, second + (second >= first)))]
    return min(pair, key=lambda cell: cell.load)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())


def _soonest(ended: CellEnded) -> tuple[bool, float]:
    """For the least: what says when to come again, the soonest first."""
    return ended.retry_after_s <= 0.0, ended.retry_after_s


def _away(
    request_id: RequestId, name: DeploymentName, serving: Iterable[_Cell], now_s: float
) -> RefuseRequest:
    said = ", ".join(
        cell.name
        + (f" (for {now_s - cell.seen_s:.0f} s)" if cell.seen_s > -inf else " (not seen yet)")
        for cell in serving
        if not cell.led
    )
    return RefuseRequest(
        request_id=request_id,
        reason=RefusalReason.CELL_AWAY,
        message=f"{name!r} is served by cells that are away: {said}",
        retry_after_s=AWAY_RETRY_S,
    )
