"""What a policy decides, and what it sees for it.

A policy orders candidates; whether a candidate can take the request is not its matter but that of
admission (`mesh.request`). It sees read-only views of live state, never a copy of the cluster.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.reasons import DeviceKind


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

    def has_room_for(self, tokens: int) -> bool:
        """Whether its batch and KV cache can take one more request of so many tokens in all."""
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


Instance = TypeVar("Instance", bound=InstanceView)
Node = TypeVar("Node", bound=NodeView)


class Policy(Protocol):
    """Stateless; every tie is broken by id, so that the same state gives the same choice."""

    @property
    def name(self) -> str: ...

    def order_instances(self, instances: Iterable[Instance]) -> Sequence[Instance]:
        """Existing instances in the order in which a request tries them."""
        ...

    def order_nodes(self, nodes: Iterable[Node]) -> Sequence[Node]:
        """Nodes in the order in which a new instance tries them."""
        ...
