"""Transfers of KV blocks between virtual nodes: each node's end of them is a queue with a rate.

The blocks themselves are exported and imported as on live nodes; how long they take on their way is
their bytes over the slower end's rate, after those that came before at either end. A transfer is
lost with the node that it comes from, and faults tear it. Before: `NodePerformer`. After: the
engine of the target.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from mesh.domain.actions import FetchKv
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.ids import InstanceId, NodeId
from mesh.domain.messages import OfferKv
from mesh.domain.steps import KvChunk
from mesh.runtime.clock import Clock
from mesh.runtime.kv_layout import checked_chunk
from mesh.runtime.node_actions import Fetched, KvFetched
from mesh.sim.virtual_engine import VirtualEngine

ASKS_MAX = 5
ASK_PAUSE_S = 0.05
"""An offer may come to its node after the other node has come for it."""


class Torn(Enum):
    """What becomes of KV blocks on their way from a node that is in trouble."""

    LOST = "lost"
    CHANGED = "changed"


class VirtualKvEnd:
    """A node's end; see `mesh.runtime.node_actions.KvTransfers`."""

    def __init__(
        self, links: "VirtualKvLinks", node_id: NodeId, bytes_per_s: float, engine: VirtualEngine
    ) -> None:
        self.node_id = node_id
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.engine = engine
        self.offers: dict[str, tuple[OfferKv, float]] = {}
        """By ticket, with the time when it expires."""
        self._links = links

    def offer(self, offer: OfferKv) -> None:
        now_s = self._links.clock.now_s()
        self.offers = {t: known for t, known in self.offers.items() if known[1] > now_s}
        self.offers[offer.ticket] = offer, now_s + offer.expires_s

    def fetch(self, action: FetchKv, then: Fetched) -> Callable[[], None]:
        return self._links.fetch(self, action, then)


class VirtualKvLinks:
    """All nodes' ends. A node that starts anew has a new one."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._ends: dict[NodeId, VirtualKvEnd] = {}
        self._torn: dict[NodeId, Torn | None] = {}

    def add(self, node_id: NodeId, bytes_per_s: float, engine: VirtualEngine) -> VirtualKvEnd:
        end = self._ends[node_id] = VirtualKvEnd(self, node_id, bytes_per_s, engine)
        return end

    def remove(self, end: VirtualKvEnd) -> None:
        """Its node has ended: what comes from it is lost."""
        if self._ends.get(end.node_id) is end:
            del self._ends[end.node_id]

    def tear(self, node_id: NodeId, torn: "Torn | None") -> None:
        """What is fetched from a node arrives so from now on; `None`: whole."""
        self._torn[node_id] = torn

    def fetch(self, end: VirtualKvEnd, action: FetchKv, then: Fetched) -> Callable[[], None]:
        """See `KvTransfers.fetch`."""
        began_s = self.clock.now_s()
        over = False

        def finish(result: KvFetched | MeshError) -> None:
            if not over:
                then(result)

        def cancel() -> None:
            nonlocal over
            over = True

        def ask(left: int) -> None:
            source = self._ends.get(action.source.node_id)
            offered = None if source is None else source.offers.get(action.source.ticket)
            if over:
                return
            if source is not None and offered is not None and self._holds(*offered, end):
                del source.offers[action.source.ticket]
                self._send(source, end, action, offered[0].instance_id, began_s, finish)
            elif left:
                self.clock.call_at(self.clock.now_s() + ASK_PAUSE_S, lambda: ask(left - 1))
            else:
                name = action.source.node_id
                finish(Unavailable(f"{name} offers no KV blocks of {action.request.request_id}"))

        # The answer comes in an event of its own, as from a network.
        self.clock.call_at(began_s, lambda: ask(ASKS_MAX))
        return cancel

    def _holds(self, offer: OfferKv, expires_s: float, end: VirtualKvEnd) -> bool:
        return offer.to == end.node_id and self.clock.now_s() < expires_s

    def _send(
        self,
        source: VirtualKvEnd,
        end: VirtualKvEnd,
        action: FetchKv,
        instance_id: InstanceId,
        began_s: float,
        finish: Fetched,
    ) -> None:
        try:
            request_id, blocks = action.request.request_id, action.source.blocks
            header, exported = source.engine.export_kv(instance_id, request_id, 0, blocks)
            chunks = tuple(exported)
        except MeshError as error:
            finish(error)
            return
        moved_bytes = header.blocks * source.engine.kv_block_bytes(instance_id)
        begins_s = max(self.clock.now_s(), source.free_s, end.free_s)
        ends_s = begins_s + moved_bytes / min(source.bytes_per_s, end.bytes_per_s)
        source.free_s = end.free_s = ends_s

        def arrive() -> None:
            torn = self._torn.get(source.node_id)
            if torn is Torn.LOST or self._ends.get(source.node_id) is not source:
                finish(Unavailable(f"the transfer from {source.node_id} was lost"))
                return
            came = tuple(map(_changed, chunks)) if torn is Torn.CHANGED else chunks
            try:
                for position, chunk in enumerate(came):
                    checked_chunk(header, chunk, position)
            except MeshError as error:
                finish(error)
                return
            elapsed_s = ends_s - began_s
            finish(
                KvFetched(header=header, chunks=came, moved_bytes=moved_bytes, elapsed_s=elapsed_s)
            )

        self.clock.call_at(ends_s, arrive)


def _changed(chunk: KvChunk) -> KvChunk:
    return replace(chunk, pages=chunk.pages[:-1] + bytes([chunk.pages[-1] ^ 1]))
