"""What a policy decides, and what it sees for it.

A policy ranks candidates by keys; whether a candidate can take the request is not its matter but
that of admission (`mesh.request`). It sees read-only views of live state, never a copy of the
cluster, and candidates are kept in order incrementally: a key may only depend on what the view
says, and the core ranks an instance anew whenever its batch changes.
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
    def validates(self) -> bool:
        """Whether a request is only placed where shadow validation finds that every SLO is kept."""
        ...

    def instance_rank(self, instance: InstanceView) -> Rank:
        """Existing instances are tried in this order."""
        ...

    def node_rank(self, node: NodeView) -> Rank:
        """Nodes are tried in this order for a new instance."""
        ...
