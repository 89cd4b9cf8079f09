"""Remembers refusals, so that nothing is tried in vain again, and why each request waits.

A refusal is remembered together with its cause, and is forgotten as soon as the cause may be gone:

- A node had no memory or no time for an instance that a waiting request wants (`search`).
  This holds until the version of the node changes (`NodeEntry.version`), an answer of the
  deployment ends, an instance of it is started, or the nodes change. If memory was lacking, the
  node is asked again only if enough is free now.
- An instance has no time for a request of some length, and so for no longer one (`search`). This
  holds until the version of its node changes.
- An instance has refused a request for another reason (`search`). This holds until the event is
  over.
- The validations of an event ran out amid the candidates (`search`). The next try goes on there.
- A request has to begin by some time (`outlook`). This holds until the nodes change, or what is
  known of them.
- A request waits for a reason (`RequestRefusals`). This holds until the request is tried again.

FIRST_TOKEN_LATE is never kept: it says nothing about requests that are due later. Before:
`requests.search` asks before it validates.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.domain.lifecycle import RequestState
from mesh.domain.reasons import Verdict
from mesh.policy.plans import Shortage

if TYPE_CHECKING:
    from mesh.core.controller.state.deployment import DeploymentEntry
    from mesh.core.controller.state.instance import InstanceEntry
    from mesh.core.controller.state.node import NodeEntry
    from mesh.core.controller.state.request import RequestEntry
    from mesh.domain.deployment import Deployment


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRefusals:
    verdict: Verdict | None = None
    """Why the last node that was tried could not compute it in time, on an instance or on one to be
    loaded for it. None: none was tried.
    """
    last: Verdict | None = None
    """The latest `verdict` that there was: it stays when the request is tried again."""
    message: str = ""
    """What the policy said where that is a reason of its own."""
    short_of_memory: bool = False
    """Whether an instance that it was last tried on had no room for its KV cache."""
    in_time_as_predicted: bool = False
    """Whether its first token would be in time on one of them, if iterations took no longer than
    predicted.
    """

    def try_again(self) -> Verdict | None:
        """It is about to be tried: nothing has refused it yet. Returns what had before."""
        before, self.verdict = self.verdict, None
        self.short_of_memory = self.in_time_as_predicted = False
        return before

    def note_no_room(self) -> None:
        """An instance has no memory for it."""
        self.short_of_memory = True

    def note_in_time_as_predicted(self) -> None:
        """A node may turn out to compute it in time."""
        self.in_time_as_predicted = True

    def note(self, said: Verdict | Shortage) -> None:
        """A node cannot compute it in time, or the policy would not have it there."""
        self.verdict = self.last = said if isinstance(said, Verdict) else Verdict.POLICY
        self.message = "" if isinstance(said, Verdict) else said.message

    def keep(self, before: Verdict | None) -> None:
        """Not everything was tried: what was said before holds, unless something was said now."""
        self.verdict = self.verdict or before


class RefusalMemory:
    """What is known of a cell's refusals. For a start, the last few waiting requests of each
    deployment are known: as many as are tried one after the other, and as many again.
    """

    def __init__(self) -> None:
        self._starts: dict[DeploymentName, dict[RequestId, _Starts]] = {}
        self._no_time: dict[InstanceId, dict[str, tuple[int, int]]] = {}
        """The last TPOT_EXCEEDED by SLO class: `NodeEntry.version`, and the tokens of the request.
        """
        self._in_event: dict[tuple[InstanceId, str], tuple[Verdict, int]] = {}
        """Other verdicts, and the tokens that were left to compute."""
        self._resume_at: dict[DeploymentName, int] = {}
        self._latest_start_s: dict[RequestId, float] = {}

    def event_begins(self) -> None:
        self._in_event.clear()

    def fleet_changed(self) -> None:
        """Nodes came, went or were drained, or something new is known of them."""
        self._starts.clear()
        self._latest_start_s.clear()

    def worth_starting_on(
        self,
        entry: "DeploymentEntry",
        request: "RequestEntry",
        nodes: Collection["NodeEntry"],
        obtainable_bytes: Callable[["NodeEntry"], int],
    ) -> list["NodeEntry"]:
        """Which nodes to try for an instance for this request: those that have not refused it in
        their present version, but for those that lacked memory and still do. Each is entered as
        having no room, until `note_start` sets it right.
        """
        return self._starts_for(entry, request).worth(request, nodes, obtainable_bytes)

    def _starts_for(self, entry: "DeploymentEntry", request: "RequestEntry") -> "_Starts":
        known = self._starts.setdefault(entry.spec.name, {})
        starts = known.pop(request.original.request_id, None)
        if starts is None or starts.of is not entry.deployment:
            refused = {} if starts is None else starts.refused
            starts = _Starts(of=entry.deployment, refused=refused)
        known[request.original.request_id] = starts
        if len(known) > STARTS_MAX:
            del known[next(iter(known))]
        return starts

    def starts_of(self, name: DeploymentName, request: "RequestEntry") -> "_Starts | None":
        """What nodes said of an instance for the request; None if that is not known. Nothing is
        kept of one that runs: preemption would move it.
        """
        if request.state is not RequestState.QUEUED:
            return None
        return self._starts.get(name, {}).get(request.original.request_id)

    def note_start(
        self, name: DeploymentName, request: "RequestEntry", node: "NodeEntry", verdict: Verdict
    ) -> None:
        """A node had room for an instance for the request, but perhaps no time. TPOT_EXCEEDED
        holds for requests of any length; with another verdict the same request may be in time a
        little later.
        """
        starts = self.starts_of(name, request)
        if starts is not None:
            starts.note_verdict(node, verdict)

    def note_no_room(
        self, name: DeploymentName, request: "RequestEntry", node: "NodeEntry", needed_bytes: int
    ) -> None:
        """A node lacks memory for an instance for the request."""
        starts = self.starts_of(name, request)
        if starts is not None:
            starts.note_needed(node, needed_bytes)

    def note_not_all_tried(self, name: DeploymentName, request: "RequestEntry") -> None:
        """Validations ran out: forget the nodes entered as having no room, some of which were not
        tried. The others will say so again, at no great cost.
        """
        starts = self.starts_of(name, request)
        if starts is not None:
            starts.forget_memory()

    def note_started(self, name: DeploymentName) -> None:
        """An instance of the deployment has been started."""
        for starts in self._starts.get(name, {}).values():
            starts.forget()

    def note_served(self, name: DeploymentName) -> None:
        """A request of the deployment has ended well, so that another answer is expected."""
        self._starts.pop(name, None)

    def why_refuses(
        self, instance: "InstanceEntry", request: "RequestEntry", left: int
    ) -> Verdict | None:
        """Why an instance refuses a request, if that is known without a validation: it has refused
        one under the same SLO that was no longer. `left` of its tokens are not in the cache there.
        """
        if request.has_own_slo:
            return None
        known = self._no_time.get(instance.instance_id)
        version, tokens = known.get(request.slo.name, (-1, 0)) if known else (-1, 0)
        if version == instance.node.version and request.tokens >= tokens:
            return Verdict.TPOT_EXCEEDED
        place = instance.instance_id, request.slo.name
        verdict, tokens = self._in_event.get(place, (None, 0))
        return verdict if left >= tokens else None

    def note_refused(
        self, instance: "InstanceEntry", request: "RequestEntry", left: int, verdict: Verdict
    ) -> None:
        """A validation has refused to submit the request to the instance, with so many of its
        tokens left to compute.
        """
        if request.has_own_slo:
            return
        if verdict is Verdict.TPOT_EXCEEDED:
            known = self._no_time.setdefault(instance.instance_id, {})
            known[request.slo.name] = (instance.node.version, request.tokens)
        elif verdict is not Verdict.FIRST_TOKEN_LATE:
            self._in_event[instance.instance_id, request.slo.name] = (verdict, left)

    def where_to_resume(self, name: DeploymentName) -> int:
        """The place among the deployment's candidates to begin at, this time."""
        return self._resume_at.pop(name, 0)

    def note_stopped(self, name: DeploymentName, place: int) -> None:
        """Validations ran out there."""
        self._resume_at[name] = place

    def latest_start_s(self, request: "RequestEntry") -> float | None:
        """When the request's first token would be late if it had not begun; None: not known."""
        return self._latest_start_s.get(request.original.request_id)

    def note_latest_start(self, request: "RequestEntry", at_s: float) -> None:
        self._latest_start_s[request.original.request_id] = at_s

    def forget_deployment(self, name: DeploymentName) -> None:
        self._starts.pop(name, None)
        self._resume_at.pop(name, None)

    def forget_instance(self, instance_id: InstanceId) -> None:
        self._no_time.pop(instance_id, None)

    def forget_request(self, request: "RequestEntry") -> None:
        request_id = request.original.request_id
        self._latest_start_s.pop(request_id, None)
        self._starts.get(request.original.deployment, {}).pop(request_id, None)


STARTS_MAX = 8
"""Requests of a deployment of which that is kept."""
_NEVER: tuple[int, Verdict | None] = (-1, None)
"""The entry of a node that has refused nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Starts:
    """What nodes said to an instance for a request."""

    of: "Deployment | None"
    refused: dict[NodeId, tuple[int, Verdict | None]]
    """The node's version; the verdict where time was lacking, `None` where memory was."""
    needed_bytes: dict[NodeId, int] = field(default_factory=dict)
    """Where memory was lacking: that of the least instance for this request."""

    def worth(
        self,
        request: "RequestEntry",
        nodes: Collection["NodeEntry"],
        obtainable_bytes: Callable[["NodeEntry"], int],
    ) -> list["NodeEntry"]:
        """See `RefusalMemory.worth_starting_on`."""
        worth, refused = [], self.refused
        for node in nodes:
            version, verdict = refused.get(node.node_id, _NEVER)
            if version != node.version:
                refused[node.node_id] = (node.version, None)
                needed_bytes = self.needed_bytes.get(node.node_id)
                if needed_bytes is None or needed_bytes <= obtainable_bytes(node):
                    worth.append(node)
            elif verdict is not None:
                request.refusals.note(verdict)
        return worth

    def note_verdict(self, node: "NodeEntry", verdict: Verdict) -> None:
        """See `RefusalMemory.note_start`."""
        if verdict is Verdict.TPOT_EXCEEDED:
            self.refused[node.node_id] = (node.version, verdict)
        else:
            self.refused.pop(node.node_id, None)

    def note_needed(self, node: "NodeEntry", needed_bytes: int) -> None:
        """One that lacks memory even when it is empty is asked each time: if all are such, nobody
        needs to wait.
        """
        if needed_bytes <= node.capacity_bytes:
            self.needed_bytes[node.node_id] = needed_bytes

    def forget_memory(self) -> None:
        """What is entered as having no room may not have been tried."""
        self.refused = {n: of for n, of in self.refused.items() if of[1] is not None}

    def forget(self) -> None:
        """All nodes are to be tried."""
        self.refused.clear()
