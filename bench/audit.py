"""What a controller's journal says of its books, when a fresh core decides it again."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from mesh.core.controller.core import ControllerCore
from mesh.core.controller.instances.kv_cache import PARKED_BLOCKS
from mesh.domain.actions import ControllerAction, DeliverTokens, RefuseRequest, SendCommand
from mesh.domain.events import (
    CancelRequested,
    ControllerEvent,
    InvokeRequested,
    NodeConnected,
    NodeReported,
)
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import (
    AbortRequest,
    Heartbeat,
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    NodeReport,
    RequestReturned,
    ResizeKv,
    TokensReport,
)
from mesh.runtime.journal import ControllerStart, Decision, read_journal
from mesh.runtime.starting import controller_core


@dataclass(slots=True, kw_only=True)
class Audit:
    """What was counted; sizes in bytes."""

    events: int = 0
    diverged_at: int | None = None
    """The first decision that came out otherwise, from 1 on."""
    over_capacity: int = 0
    """Events after which more was tracked, or promised, than a node has."""
    tracked_share_max: float = 0.0
    waited: int = 0
    """Operations that were issued and could not start at once."""
    counts: Counter[str] = field(default_factory=Counter)
    """Loads, unloads, grows, shrinks (parks among them), parks, resumes, evictions."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed loads and resizes, broken instances and returned requests, by kind and error."""
    resize_s: list[float] = field(default_factory=list)
    unaccounted_bytes: list[int] = field(default_factory=list)
    """At each heartbeat: RSS above what the process takes by itself and the engine's books say."""
    unaccounted_amid_bytes: list[int] = field(default_factory=list)
    """The same while instances load or leave, which the engine's books do not have then."""
    base_bytes: int = 0
    books: list[tuple[int, int]] = field(default_factory=list)
    """At each heartbeat without a load or unload: RSS, and what base, weights and pages of KV
    caches are booked at.
    """
    resident_max: int = 0
    """Instances that were loaded at once."""
    loaded: list[tuple[float, int, int]] = field(default_factory=list)
    """At each change: when, how many instances have memory, and how many of them are not parked."""
    asked: set[RequestId] = field(default_factory=set)
    cancelled: set[RequestId] = field(default_factory=set)
    ends: Counter[RequestId] = field(default_factory=Counter)

    @property
    def decided_alike(self) -> bool:
        return self.diverged_at is None

    @property
    def out_of_memory(self) -> int:
        return sum(n for error, n in self.errors.items() if error.endswith("OutOfMemory"))

    @property
    def booked_over_rss(self) -> float:
        """At the peak of what the process held."""
        rss_bytes, booked_bytes = max(self.books, default=(0, 0))
        return booked_bytes / rss_bytes if rss_bytes else 0.0

    def instance_seconds(self, from_s: float, until_s: float) -> tuple[float, float]:
        """Those of all that have memory, and of those that are not parked."""
        times = [min(max(at_s, from_s), until_s) for at_s, _, _ in self.loaded]
        lasted_s = [b - a for a, b in pairwise([*times, until_s])]
        every = sum(s * count for s, (_, count, _) in zip(lasted_s, self.loaded, strict=True))
        busy = sum(s * count for s, (_, _, count) in zip(lasted_s, self.loaded, strict=True))
        return every, busy

    @property
    def ended_once(self) -> bool:
        """Every request that came got one last message; one whose client left gets none."""
        return all(self.ends[r] == (r not in self.cancelled) for r in self.asked)


_AMID = (InstanceState.LOADING, InstanceState.UNLOADING)


class Replay:
    """One run through a journal with a fresh core."""

    def __init__(self, core: ControllerCore) -> None:
        self.audit = Audit()
        self._core = core
        self._parked: set[InstanceId] = set()
        self._waiting: dict[InstanceId, int] = {}
        """Operations that wait, by instance: their sequence numbers."""

    def run(self, decisions: Iterable[Decision]) -> Audit:
        for number, decision in enumerate(decisions, start=1):
            event = decision.event
            assert isinstance(event, ControllerEvent), f"decision {number} is a node's"
            # Before the core decides: it knows the sizes that a report changes.
            self._happened(event)
            actions = self._core.handle(event, decision.now_s)
            if tuple(actions) != decision.actions and self.audit.diverged_at is None:
                self.audit.diverged_at = number
            for action in actions:
                self._decided(event, action)
            self._look_at_books(event)
            self._count_instances(decision.now_s)
            self.audit.events += 1
        return self.audit

    def _happened(self, event: ControllerEvent) -> None:
        match event:
            case InvokeRequested():
                self.audit.asked.add(event.request.request_id)
            case CancelRequested():
                self.audit.cancelled |= self._core.cell.requests.keys() & event.request_ids
            case NodeConnected():
                self.audit.base_bytes = event.hello.base_bytes
            case NodeReported():
                self._reported(event.report)

    def _reported(self, report: NodeReport) -> None:
        counts, errors = self.audit.counts, self.audit.errors
        match report:
            case InstanceLoaded():
                counts["loads"] += 1
            case InstanceGone():
                counts["unloads"] += 1
                if report.error:
                    errors[f"instance {report.error}"] += 1
            case LoadFailed():
                errors[f"load {report.error}"] += 1
            case RequestReturned():
                errors[f"request {report.error}"] += 1
            case KvResized() if report.error:
                errors[f"resize {report.error}"] += 1
            case KvResized():
                self._resized(report)

    def _resized(self, report: KvResized) -> None:
        self.audit.resize_s.append(report.elapsed_s)
        known = self._core.cell.instances.get(report.instance_id)
        if known is not None and report.kv_blocks != known.kv_blocks:
            self.audit.counts["grows" if report.kv_blocks > known.kv_blocks else "shrinks"] += 1

    def _decided(self, event: ControllerEvent, action: ControllerAction) -> None:
        counts = self.audit.counts
        match action:
            case DeliverTokens() if action.outputs.finish is not None:
                self.audit.ends[action.outputs.request_id] += 1
            case RefuseRequest():
                self.audit.ends[action.request_id] += 1
            case SendCommand(command=ResizeKv() as command):
                if command.kv_blocks == PARKED_BLOCKS:
                    counts["parks"] += 1
                    self._parked.add(command.instance_id)
                elif command.instance_id in self._parked:
                    counts["resumes"] += 1
                    self._parked.discard(command.instance_id)
            case SendCommand(command=AbortRequest()) if _starved(event):
                counts["evictions"] += 1

    def _count_instances(self, now_s: float) -> None:
        states = [instance.state for instance in self._core.cell.instances.values()]
        counts = len(states), len(states) - states.count(InstanceState.PARKED)
        if not self.audit.loaded or self.audit.loaded[-1][1:] != counts:
            self.audit.loaded.append((now_s, *counts))

    def _look_at_books(self, event: ControllerEvent) -> None:
        audit, waiting = self.audit, dict[InstanceId, int]()
        over = False
        for node in self._core.cell.nodes.values():
            station = node.station
            loaded = sum(instance.is_loaded for instance in node.instances.values())
            audit.resident_max = max(audit.resident_max, loaded)
            over |= max(station.tracked_bytes, station.promised_bytes) > station.capacity_bytes
            share = station.tracked_bytes / max(station.capacity_bytes, 1)
            audit.tracked_share_max = max(audit.tracked_share_max, share)
            waiting |= {o.instance_id: o.sequence for o in station.waiting()}
            if isinstance(event, NodeReported) and isinstance(event.report, Heartbeat):
                settled = all(i.state not in _AMID for i in node.instances.values())
                account = audit.unaccounted_bytes if settled else audit.unaccounted_amid_bytes
                own_bytes = node.base_bytes + node.engine_bytes
                account.append(node.rss_bytes - own_bytes)
                if settled:
                    audit.books.append((node.rss_bytes, own_bytes))
        audit.over_capacity += over
        audit.waited += sum(self._waiting.get(i) != number for i, number in waiting.items())
        self._waiting = waiting


def _starved(event: ControllerEvent) -> bool:
    report = event.report if isinstance(event, NodeReported) else None
    return isinstance(report, TokensReport) and bool(report.starved)


def audit(path: Path) -> Audit:
    """Raises InvalidInput when this is no journal of a controller."""
    start, decisions = read_journal(path)
    assert isinstance(start, ControllerStart), f"{path} is a node's journal"
    core = controller_core(start)
    return Replay(core).run(decisions)
