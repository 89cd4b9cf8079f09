"""What a policy sees: the live entries of the core's books, to read and never to change.

Nothing is copied, so that looking costs nothing; what has to be worked out is asked of the
`CellView`. The cell offers a policy what may be decided at that moment and nothing else: while
queues are tried, loaded instances; once all have been, those that load and nodes for new ones, and
loaded instances again for whom the policy would rather start one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from mesh.compute.times import Times
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier

T = TypeVar("T")


class RequestView(Protocol):
    """A request that waits, or runs."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def deployment(self) -> DeploymentName: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def due_s(self) -> float:
        """When its next token is due."""
        ...

    @property
    def tokens(self) -> int:
        """How many tokens its prompt and its output so far have."""
        ...

    @property
    def output_tokens(self) -> Sequence[int]:
        """Its output so far."""
        ...

    @property
    def accepted(self) -> bool:
        """Whether its client was told that it is served, late or not."""
        ...

    @property
    def prefill_left(self) -> int:
        """Tokens that its node has still to compute before its next one; 0 while it waits."""
        ...

    @property
    def submitted_s(self) -> float:
        """When it was sent to its node last."""
        ...

    @property
    def moves_now(self) -> bool:
        """Whether it is on its way to another instance, or computed ahead there."""
        ...


class NodeView(Protocol):
    """A node, with two books of its memory: what it has, and what is not promised yet."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def device(self) -> DeviceKind: ...
    @property
    def capacity_bytes(self) -> int:
        """For instances."""
        ...

    @property
    def free_bytes(self) -> int:
        """Memory that no instance has reserved."""
        ...

    @property
    def prefetch_bytes(self) -> int:
        """The memory that its operator allows for instances that nobody has called yet."""
        ...

    @property
    def swaps(self) -> bool:
        """Whether it swaps weights by its turn rule: instances take little but their KV caches."""
        ...

    @property
    def moves_kv(self) -> bool:
        """Whether requests that run go on from it to others, and come, with their KV blocks."""
        ...

    @property
    def running(self) -> int:
        """Requests on it."""
        ...

    @property
    def iteration_started_s(self) -> float | None:
        """When the iteration in flight began; `None` when there is none."""
        ...


class InstanceView(Protocol):
    """An instance, loaded or on its way."""

    @property
    def instance_id(self) -> InstanceId: ...
    @property
    def deployment(self) -> DeploymentName: ...
    @property
    def node(self) -> NodeView: ...
    @property
    def device(self) -> DeviceKind: ...
    @property
    def label(self) -> str:
        """What the policy remembers of it; see `mesh.policy.plans.Label`."""
        ...

    @property
    def batch(self) -> int:
        """Requests on it."""
        ...

    @property
    def batch_max(self) -> int: ...
    @property
    def tokens(self) -> int:
        """How many tokens the prompts and the outputs so far of its requests have."""
        ...

    @property
    def weights_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int:
        """The size of its KV cache, once all that was issued for it is done."""
        ...

    @property
    def promised_bytes(self) -> int:
        """The memory that is promised to its weights and its KV cache together."""
        ...

    def freed_bytes(self, after: "Sequence[InstanceView]" = ()) -> int:
        """The bytes that its node has for others once it has gone, after those of `after`:
        `promised_bytes`, without weights that it shares with one that stays.
        """
        ...

    @property
    def takes_now(self) -> bool:
        """Whether a request may be submitted to it, if there is room and time."""
        ...

    @property
    def resident_share(self) -> float:
        """The share of its weights that is on the device: 1 while it is resident."""
        ...

    @property
    def resident(self) -> bool:
        """Whether it is loaded and its weights are on the device, as its node told last."""
        ...

    @property
    def is_parked(self) -> bool:
        """Whether it is loaded and idle, and has no KV cache."""
        ...

    @property
    def prefetched(self) -> bool:
        """Whether it was loaded before anybody called, and still waits for the first call."""
        ...

    @property
    def may_go(self) -> bool:
        """Whether it is idle and nobody needs it to stay: a minimum, a promise, a measurement."""
        ...

    @property
    def idle_since_s(self) -> float: ...
    @property
    def next_due_s(self) -> float:
        """When the first of its next tokens is due; infinite where it has no request."""
        ...


Place = InstanceView | NodeView
"""Where memory is wanted: for an instance that is there, or for one that starts on a node."""


class DeploymentView(Protocol):
    """A deployment."""

    @property
    def name(self) -> DeploymentName: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def queued(self) -> int:
        """Requests that wait."""
        ...

    @property
    def answer_tokens(self) -> float:
        """Mean length of its answers."""
        ...

    def answer_tokens_of(self, slo_class: str) -> float:
        """The same of one SLO class; of all, before an answer of it has ended."""
        ...

    @property
    def instances(self) -> Mapping[InstanceId, InstanceView]:
        """Its instances, those that are being unloaded included."""
        ...

    @property
    def called_s(self) -> float:
        """When it was called last, unless an operator has had it unloaded since."""
        ...

    @property
    def calls_log(self) -> float:
        """The logarithm of how often it is called: whose is higher stays so until the next call."""
        ...

    def call_chance(self, now_s: float, *, rated: bool = True) -> float:
        """The probability of a call within the next minute, by the times between its calls and, if
        `rated`, by how often it is called of late.
        """
        ...

    @property
    def replicas_max(self) -> int:
        """How many instances it may have."""
        ...

    @property
    def served_share(self) -> float:
        """The share of its ended requests that were served; 1 before the first has ended."""
        ...


class CellView(Protocol):
    """The cell, and what of it is open to the request, or to the instance, that is asked about."""

    @property
    def now_s(self) -> float: ...
    @property
    def looks_max(self) -> int:
        """Nodes that are worth yielding: no more are looked at."""
        ...

    def size(self) -> int:
        """Nodes and instances in the cell."""
        ...

    def candidates(self) -> Iterable[InstanceView]:
        """The instances that may take the request, in the order of `Policy.instance_rank`: first
        the one that was promised to it or has its beginning, and from where the last look stopped.
        """
        ...

    def starts(self) -> Sequence[NodeView]:
        """The nodes that may have an instance for it, were all that idles there to go, in the order
        of `Policy.node_rank`.
        """
        ...

    def lacks_bytes(self, node: NodeView) -> int:
        """The bytes that the instance it would start lacks there; 0 or less means that there is
        room.
        """
        ...

    def shares_bytes(self, node: NodeView) -> int:
        """The part of its weights that others on the node hold or are promised, and that it would
        not take.
        """
        ...

    def idle(self, place: Place) -> Sequence[InstanceView]:
        """Others on the node that may be unloaded now, in the order in which they were used."""
        ...

    def neighbours(self, place: Place) -> Sequence[InstanceView]:
        """Others on the node that serve, and whose requests may be moved; none while a place
        without that is looked for.
        """
        ...

    def nodes(self) -> Iterable[NodeView]: ...
    def instances(self, node: NodeView | None = None) -> Iterable[InstanceView]:
        """The instances of a node, or of all nodes."""
        ...

    def requests(self, instance: InstanceView) -> Iterable[RequestView]:
        """The requests that run on the instance."""
        ...

    def of_requests(
        self, instance: InstanceView, work_out: Callable[[Iterable[RequestView]], T]
    ) -> T:
        """What a function makes of the classes, tokens and outputs of the requests on the instance:
        it is called once, until they change. It has to be one of a module: the last few are kept,
        and a lambda is another one at each call.
        """
        ...

    def deployment(self, name: DeploymentName) -> DeploymentView | None: ...
    def deployments(self) -> Iterable[DeploymentView]: ...
    def waiting(self, name: DeploymentName) -> Sequence[RequestView]:
        """The requests of a deployment that wait, the longest first."""
        ...

    def calls_per_s(self, name: DeploymentName) -> float:
        """How often a deployment is called, the last minutes counting most."""
        ...

    def cached_tokens(self, instance: InstanceView, request: RequestView) -> int:
        """How many of the request's tokens the instance need not compute."""
        ...

    def decode_s(self, instance: InstanceView) -> float:
        """One iteration of all that it serves; 0 where that is nobody."""
        ...

    def times(self, instance: InstanceView) -> Times:
        """What predicts its iterations, corrected and overestimated as in a validation."""
        ...

    def times_on(self, node: NodeView) -> Times:
        """What predicts iterations of an instance of the deployment asked about that would start on
        a node; overestimated, without a correction.
        """
        ...

    def carry_s(self, instance: InstanceView, tokens: int) -> float:
        """Seconds in which the KV blocks of so many tokens go from it to another node that is as
        quick, behind no others.
        """
        ...

    def ready_s(self, instance: InstanceView) -> float:
        """When its load is over, those before it included; now, if it is loaded."""
        ...

    def utilisation(self, node: NodeView) -> float:
        """The share of the node's time that its decodes take at the planned pace."""
        ...

    def prompts_s(self, node: NodeView) -> float:
        """Seconds in which a node computes the prompts that it has, and brings the weights of their
        instances that are out.
        """
        ...

    def load_s(self, node: NodeView) -> float:
        """Seconds that a load of the deployment asked about takes there, its link to itself."""
        ...


class AheadView(CellView, Protocol):
    """The cell, as a policy sees it that brings models nearer before they are called."""

    @property
    def parked_s_max(self) -> float:
        """How long an idle instance stays that keeps its weights alone."""
        ...

    @property
    def load_s_max(self) -> float:
        """A load that takes longer is not begun for nobody: who calls another model would wait."""
        ...

    def rests(self, node: NodeView) -> bool:
        """Whether nothing is loaded, imported or moved there, nor about to be, and nothing computed
        that a load would slow.
        """
        ...

    def about(self, name: DeploymentName) -> "AheadView | None":
        """The same, asked about a deployment: `starts` has the nodes that have a budget for it and
        may take it, and it would have the least KV cache. None where it may have no instance more.
        """
        ...

    def growth_bytes(self, node: NodeView) -> int:
        """What has to stay free there for those who run: a load cannot be given up for them."""
        ...

    def tier(self, node: NodeView) -> LoadTier:
        """From where the node would load it."""
        ...


class Outlook(Protocol):
    """What a request that waits may hope for, worked out as it is asked for."""

    @property
    def now_s(self) -> float: ...
    @property
    def latest_start_s(self) -> float:
        """When it has to begin on the quickest node for its first token to be in time: before its
        arrival if it could not have been in time alone.
        """
        ...

    def has_just_come(self) -> bool:
        """Whether it came so lately that its queue need not have been tried again."""
        ...

    def has_node(self) -> bool:
        """Whether any node may hold an instance for it; one that is lost may come back."""
        ...

    def is_loaded(self) -> bool:
        """Whether an instance of its deployment is loaded."""
        ...

    def is_loading(self) -> bool: ...
    def may_change(self) -> bool:
        """Whether a loaded instance may take it soon though no request ends: those that run get
        ahead of their deadlines and leave time for its prompt, or memory comes free.
        """
        ...

    def place_s(self) -> float:
        """When a place on a loaded instance is expected for it, behind those who wait before it:
        requests end, or a KV cache may be tried to grow; infinite if none is.
        """
        ...

    def may_load_by(self, at_s: float) -> bool:
        """Whether one more load could be over by then, and its weights on the device."""
        ...

    def load_s(self) -> float:
        """When that could be at the earliest; infinite if there may be none."""
        ...
