"""What is known to be in vain, so that nobody tries it again, and why each request waits.

A refusal is remembered with what it depends on, and stops to hold by itself once that changes:

- A node had no room or no time for an instance, which the head of a queue wants (`lifecycle`,
  `placement`): until the node is eased, the head is another or an answer of the deployment ends,
  an instance of it is started, or the nodes change.
- An instance has no time for a request of some length, nor for longer ones (`queueing`): until its
  node is eased.
- An instance has refused one for another reason (`queueing`): until the event is over.
- Where among the candidates validations ran out (`queueing`): the next try goes on there.
- When a request would have to begin (`deadlines`): until nodes change, or what is known of them.
- Why a request waits (`RequestRefusals`; whoever tries it): until it is tried again.

FIRST_TOKEN_LATE is never kept: it says nothing about requests that are due later. Before:
`requests.queueing` and `instances.placement` ask before they validate.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.request.shadow import Verdict

if TYPE_CHECKING:
    from mesh.core.controller.state.instance import InstanceEntry
    from mesh.core.controller.state.node import NodeEntry
    from mesh.core.controller.state.request import RequestEntry


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRefusals:
    verdict: Verdict | None = None
    """Why the last node that was tried could not compute it in time, on an instance or on one to be
    loaded for it. None: none was tried.
    """
    short_of_memory: bool = False
    """Whether an instance that it was last tried on had no room for its KV cache."""
    hope: bool = False
    """Whether its first token could be in time on one of them, if iterations took no longer than
    predicted.
    """

    def try_again(self) -> Verdict | None:
        """It is about to be tried: nothing has refused it yet. Returns what had before."""
        before, self.verdict = self.verdict, None
        self.short_of_memory = self.hope = False
        return before

    def note_no_room(self) -> None:
        """An instance has no memory for it."""
        self.short_of_memory = True

    def note_hope(self) -> None:
        """A node may turn out to compute it in time."""
        self.hope = True

    def note(self, verdict: Verdict) -> None:
        """A node cannot compute it in time."""
        self.verdict = verdict

    def keep(self, before: Verdict | None) -> None:
        """Not everything was tried: what was said before holds, unless something was said now."""
        self.verdict = self.verdict or before


class RefusalMemory:
    """Of a cell."""

    def __init__(self) -> None:
        self._starts: dict[DeploymentName, tuple[RequestId, dict[NodeId, _Refusal]]] = {}
        """For whom an instance was tried last, and the nodes that refused it: the verdict where
        time was lacking, None where it was memory.
        """
        self._no_time: dict[InstanceId, tuple[int, int]] = {}
        """The last TPOT_EXCEEDED: `NodeEntry.eased`, and the tokens of the request."""
        self._in_event: dict[InstanceId, tuple[Verdict, int]] = {}
        """Other verdicts, and the tokens of the request."""
        self._resume_at: dict[DeploymentName, int] = {}
        self._latest_start_s: dict[RequestId, float] = {}

    def event_begins(self) -> None:
        self._in_event.clear()

    def fleet_changed(self) -> None:
        """Nodes came, went or were drained, or something new is known of them."""
        self._starts.clear()
        self._latest_start_s.clear()

    def worth_starting_on(
        self, name: DeploymentName, request: "RequestEntry", nodes: Collection["NodeEntry"]
    ) -> list["NodeEntry"]:
        """Which nodes to try for an instance for this request: those that have not refused it since
        they were last eased. Each is entered as having no room, until `note_start` sets it right.
        """
        head, refused = self._starts.get(name, (None, {}))
        if head != request.original.request_id:
            refused = {}
            self._starts[name] = (request.original.request_id, refused)
        worth = []
        for node in nodes:
            eased, verdict = refused.get(node.node_id, (-1, None))
            if eased != node.eased:
                refused[node.node_id] = (node.eased, None)
                worth.append(node)
            elif verdict is not None:
                request.refusals.note(verdict)
        return worth

    def note_start(
        self, name: DeploymentName, request: "RequestEntry", node: "NodeEntry", verdict: Verdict
    ) -> None:
        """A node had room for an instance for the request, but perhaps no time. TPOT_EXCEEDED
        holds for requests of any length; with another verdict the same request may be in time a
        little later. Nothing is kept of a request that is not the head: preemption would move it.
        """
        head, refused = self._starts.get(name, (None, {}))
        if head != request.original.request_id:
            return
        if verdict is Verdict.TPOT_EXCEEDED:
            refused[node.node_id] = (node.eased, verdict)
        else:
            refused.pop(node.node_id, None)

    def note_not_all_tried(self, name: DeploymentName) -> None:
        """Validations ran out: forget the nodes entered as having no room, some of which were not
        tried. The others will say so again, at no great cost.
        """
        head, refused = self._starts.get(name, (None, {}))
        if head is not None:
            self._starts[name] = (head, {n: of for n, of in refused.items() if of[1] is not None})

    def note_started(self, name: DeploymentName) -> None:
        """An instance of the deployment has been started."""
        if name in self._starts:
            self._starts[name][1].clear()

    def note_served(self, name: DeploymentName) -> None:
        """A request of the deployment has ended well, so that another answer is expected."""
        self._starts.pop(name, None)

    def why_refuses(self, instance: "InstanceEntry", request: "RequestEntry") -> Verdict | None:
        """Why an instance refuses a request, if that is known without a validation."""
        eased, tokens = self._no_time.get(instance.instance_id, (-1, 0))
        if eased == instance.node.eased and request.tokens >= tokens:
            return Verdict.TPOT_EXCEEDED
        verdict, tokens = self._in_event.get(instance.instance_id, (None, 0))
        return verdict if request.tokens >= tokens else None

    def note_refused(
        self, instance: "InstanceEntry", request: "RequestEntry", verdict: Verdict
    ) -> None:
        """A validation has refused to submit the request to the instance."""
        if verdict is Verdict.TPOT_EXCEEDED:
            self._no_time[instance.instance_id] = (instance.node.eased, request.tokens)
        elif verdict is not Verdict.FIRST_TOKEN_LATE:
            self._in_event[instance.instance_id] = (verdict, request.tokens)

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

    def forget_request(self, request_id: RequestId) -> None:
        self._latest_start_s.pop(request_id, None)


_Refusal = tuple[int, Verdict | None]
"""`NodeEntry.eased` at the time, and why."""
