"""What a new instance needs of a node, whether the node has it, and why no node takes one.

Before: `requests.search`, which looks for a node. After: `kv_cache`, which knows sizes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from mesh.core.controller.instances.kv_cache import Room, blocks_for_load, start_size
from mesh.core.controller.instances.open_options import relief
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.refusals import RequestRefusals
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import NodeId
from mesh.domain.lifecycle import NodeState
from mesh.domain.model import Footprint
from mesh.memory.demand import kv_blocks_within


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """What the node that comes nearest would have to hold, and its capacity. Both 0: no node."""

    needed_bytes: int = 0
    largest_bytes: int = 0

    @classmethod
    def nearest(cls, needs: Iterable[tuple[int, int]]) -> Self:
        """The node that lacks least. `needs` has what each node would have to hold and its
        capacity.
        """
        needed_bytes, capacity_bytes = min(needs, key=lambda of: of[0] - of[1], default=(0, 0))
        return cls(needed_bytes=needed_bytes, largest_bytes=capacity_bytes)

    @property
    def in_vain(self) -> bool:
        """No node could hold it, were it empty."""
        return not self.largest_bytes or self.needed_bytes > self.largest_bytes


class InstanceNeeds:
    """What an instance for those who wait needs of a node; worked out once a kind of node."""

    def __init__(
        self, ctx: EventContext, entry: DeploymentEntry, waiting: Iterable[RequestEntry]
    ) -> None:
        assert entry.deployment is not None
        self._ctx, self._entry, self.deployment = ctx, entry, entry.deployment
        self._waiting = waiting
        self._known: dict[tuple[str, str, int, int], tuple[int, int]] = {}
        """By engine, device, capacity and weights: nodes' own footprints differ in these."""
        self._least_bytes: dict[NodeId, int] = {}
        """What the instance needs at least, by the nodes that were asked and take one more."""

    def kv_blocks(self, node: NodeEntry, footprint: Footprint) -> tuple[int, int]:
        """At least, and wanted."""
        hello, weights_bytes = node.hello, footprint.weights_bytes
        kind = (hello.engine, hello.fingerprint, node.capacity_bytes, weights_bytes)
        found = self._known.get(kind)
        if found is None:
            found = blocks_for_load(self._ctx, self._entry, self._waiting, footprint, node)
            self._known[kind] = found
        return found

    def with_room(
        self, nodes: Iterable[NodeEntry], memo: RequestRefusals | None
    ) -> list[NodeEntry]:
        """Those of the nodes that take one more instance, and have the memory for it, or could have
        it; of the others that is noted in `memo`.
        """
        ctx, roomy = self._ctx, []
        for node in nodes:
            least_bytes = 0
            if ctx.takes_another(node, self._entry):
                footprint = node.footprint_of(self.deployment)
                least_bytes = footprint.instance_bytes(self.kv_blocks(node, footprint)[0])
                self._least_bytes[node.node_id] = least_bytes
            if least_bytes and least_bytes <= ctx.obtainable_bytes(node, self._entry):
                roomy.append(node)
            elif memo is not None:
                memo.note_no_start(node, least_bytes, ctx.now_s)
        return roomy

    def least_bytes(self, node_id: NodeId) -> int:
        """The bytes of the whole instance there with the least KV cache; 0 where none may be."""
        return self._least_bytes.get(node_id, 0)

    def lack(self) -> NoRoom:
        """What the node that comes nearest would have to hold."""
        nodes, least = self._ctx.cell.nodes, self._least_bytes
        return NoRoom.nearest((most, nodes[name].capacity_bytes) for name, most in least.items())

    def room(self, node: NodeEntry) -> Room | None:
        """Memory that is free, or that idle instances give way for; `None` where neither does."""
        footprint = node.footprint_of(self.deployment)
        least, wanted = self.kv_blocks(node, footprint)
        free_bytes = node.free_bytes_for(self.deployment)
        blocks = kv_blocks_within(footprint, least=least, wanted=wanted, free_bytes=free_bytes)
        if blocks is not None:
            return Room(kv_blocks=blocks, least_blocks=least)
        missing_bytes = footprint.instance_bytes(least) - free_bytes
        reclaim = relief(self._ctx, self._entry, node, missing_bytes)
        return Room(kv_blocks=least, reclaim=reclaim, least_blocks=least) if reclaim else None


def why_no_node(ctx: EventContext, spec: DeploymentSpec, purpose: str = "") -> tuple[str, str]:
    """Where no node takes instances of a deployment: what is missing, and what to do about it."""
    usable = [d for d in spec.devices if d in ctx.policy.devices]
    nodes = [n for n in ctx.cell.nodes.values() if n.device in usable]
    if spec.task is not None and nodes and not any(n.hello.embeds for n in nodes):
        engines = ", ".join(sorted({n.hello.engine for n in nodes}))
        message = f"{spec.name!r} has task {spec.task}; no node that is up computes it ({engines})"
        return message, "start a CPU node, whose engine does, and leave cpu in spec.devices"
    spans = [n.hello.tensor_parallel_max for n in nodes if n.state is NodeState.READY]
    widest = max(spans, default=0)
    if not 0 < widest < spec.tensor_parallel:
        return _why_none_is_ready(nodes, " or ".join(spec.devices), purpose)
    message = (
        f"instances of {spec.name!r} are to span {spec.tensor_parallel} devices "
        f"(tensor_parallel); those of the nodes that are up can span {widest}"
    )
    return message, f"deploy it with tensor_parallel: {widest}, or start a node whose engine can"


def _why_none_is_ready(nodes: list[NodeEntry], devices: str, purpose: str) -> tuple[str, str]:
    """Nodes are counted and not named: tenants are told this, too. The cell forgets a lost node at
    once, so what it has beside those that are ready is draining."""
    if nodes:
        return (
            f"no {devices} node takes new work{purpose}: {len(nodes)} draining",
            "`mesh drain NODE --undo` has a node take work again; `mesh nodes` names them",
        )
    return f"no {devices} node is up{purpose}", "start one with `mesh node --join …`"


def batch_max(ctx: EventContext, entry: DeploymentEntry, node: NodeEntry) -> int:
    """What the node's engine can carry, and the policy has an instance there serve at a time."""
    deployment = entry.deployment
    assert deployment is not None
    most = min(node.hello.batch_max, ctx.limits.batch_max)
    served_max = start_size(ctx, entry, 0, node.footprint_of(deployment), node).batch_max
    return most if served_max is None else min(served_max, most)
