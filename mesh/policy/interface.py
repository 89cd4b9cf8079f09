"""What a policy decides, and what it sees for it.

A policy ranks candidates by keys, and says by a few traits how nodes are shared and what is done
when they are full; whether a candidate can take the request is not its matter but that of admission
(`mesh.request`). It sees read-only views of live state, never a copy of the cluster, and candidates
are kept in order incrementally: a key may only depend on what the view says, and the core ranks an
instance anew whenever its batch changes.
"""

from typing import Protocol

from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.reasons import DeviceKind, TurnRule

Rank = tuple[float | str, ...]
"""Smaller comes first. Ends with the id, so that no two are equal."""


class InstanceView(Protocol):
    """A loaded instance that might take a request."""

    @property
    def instance_id(self) -> InstanceId: ...
    @property
    def device(self) -> DeviceKind: ...
    @property
    def batch(self) -> int:
        """Requests on it."""
        ...


class NodeView(Protocol):
    """A node that might take a new instance."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def device(self) -> DeviceKind: ...
    @property
    def free_bytes(self) -> int:
        """Memory that no instance has reserved."""
        ...


class Policy(Protocol):
    """Stateless; every tie is broken by id, so that the same state gives the same choice."""

    @property
    def name(self) -> str: ...

    @property
    def turns(self) -> TurnRule:
        """Which instance of a node computes next."""
        ...

    @property
    def devices(self) -> tuple[DeviceKind, ...]:
        """Nodes that it uses at all."""
        ...

    @property
    def partitions(self) -> int | None:
        """Into how many equal partitions it cuts a node, at most. An instance has one with all of
        its memory from its load to its end. None: instances share a node token by token, and memory
        moves between them.
        """
        ...

    @property
    def validates(self) -> bool:
        """Whether a request is only placed where shadow validation finds that every SLO is kept. If
        not, an instance takes as many requests as its partition can serve at most.
        """
        ...

    @property
    def refuses_late(self) -> bool:
        """Whether a request is refused once its first token would be late wherever it went."""
        ...

    @property
    def reclaims(self) -> tuple[DeviceKind, ...]:
        """Nodes on which an idle instance goes before its keep-alive is over, when its memory is
        wanted.
        """
        ...

    @property
    def preempts(self) -> bool:
        """Whether requests of small instances move elsewhere for a large one that lacks memory
        (LLM-Mesh §7.1).
        """
        ...

    @property
    def consolidates(self) -> bool:
        """Whether the small ones of several instances drain and go (LLM-Mesh §7.2)."""
        ...

    def instance_rank(self, instance: InstanceView) -> Rank:
        """Existing instances are tried in this order."""
        ...

    def node_rank(self, node: NodeView) -> Rank:
        """Nodes are tried in this order for a new instance."""
        ...
