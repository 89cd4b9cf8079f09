"""`aegaeon`: token-level auto-scaling with separate nodes for prompts and for decodes.

A page beside the paper (Aegaeon, SOSP '25): §4.1 divides the nodes, §4.2 groups prompts, §4.3 has
decodes go round with quotas (the turn rule ROUNDS), and §5 swaps weights between turns. Nothing is
promised and nobody is refused: a token that is late is late. docs/policy-aegaeon-prism.md says what
differs from the paper.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Pace, Slo
from mesh.policy.default_answers import DefaultAnswers, releases
from mesh.policy.plans import Join, Move, Plan, Release, Releases, Start
from mesh.policy.rules.rounds import ROUNDS
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, DeploymentView, InstanceView, NodeView, Place, RequestView


@dataclass(frozen=True, kw_only=True)
class Aegaeon(DefaultAnswers):
    name: str = "aegaeon"
    rule: TurnRule = ROUNDS
    devices: tuple[DeviceKind, ...] = (DeviceKind.GPU,)
    prefill_share: float = 0.375
    """The share of the nodes that compute prompts: 6 of 16 in the paper's testbed (§7.2)."""
    group_max: int = ROUNDS.group_max
    promises: bool = False
    refuses_late: bool = False
    prefetches: bool = False
    upkeep_s: float = 0.1

    # §2.1: a token is due by the arrival, the TTFT and the TBT alone, so that one which comes early
    # leaves its time to those after it.

    def pace(self, slo: Slo) -> Pace:
        return Pace(slack_share=1e6)

    # §4.1: some nodes compute prompts, and the others go on with the decodes. Only nodes that move
    # KV blocks are divided: requests stay on the others from their first token to their last.

    def divided(self, cell: CellView) -> tuple[list[NodeView], list[NodeView]]:
        """The nodes for prompts, and those for decodes."""
        nodes = sorted((n for n in cell.nodes() if n.device in self.devices), key=_by_id)
        moving = [node for node in nodes if node.moves_kv]
        if len(moving) < 2:
            return nodes, []
        count = min(max(round(len(moving) * self.prefill_share), 1), len(moving) - 1)
        return [node for node in nodes if node not in moving[count:]], moving[count:]

    # §4.2, algorithm 1: a prompt goes into a group of its model that is not full, else to the node
    # with the least to do.

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        prefill, _ = self.divided(cell)
        there: dict[str, InstanceView] = {}
        if request is not None:
            there = {i.node.node_id: i for i in cell.candidates() if i.node in prefill}
            for instance in there.values():
                if 0 < self._group(instance, cell) < self.group_max:
                    yield Join(request=request, instance=instance)
        starts = cell.starts()
        for node in sorted(prefill, key=lambda node: (cell.prompts_s(node), node.node_id)):
            if request is not None and node.node_id in there:
                yield Join(request=request, instance=there[node.node_id])
            elif node in starts:
                yield Start(request=request, node=node)

    def _group(self, instance: InstanceView, cell: CellView) -> int:
        """Prompts that an instance has still to compute."""
        return sum(request.prefill_left > 0 for request in cell.requests(instance))

    # Idle instances give way. What one frees of a pool of weights depends on who stays, so that one
    # which is enough by itself may not be the one that is idle longest.

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        idle = cell.idle(place)
        for alone in idle:
            yield (Release(instance=alone),)
        yield releases(idle)

    # §4.3, algorithm 2: with its first token a request goes into a batch of its model that has
    # room, which a move that begins shows, else to the node that has the fewest batches.

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        prefill, decode = self.divided(cell)
        if not decode:
            return
        for node in prefill:
            for instance in cell.instances(node):
                made = cell.deployment(instance.deployment)
                if made is not None and instance.batch and instance.takes_now:
                    yield from self._hand_over(instance, made, decode, cell)

    def _hand_over(
        self,
        instance: InstanceView,
        made: DeploymentView,
        decode: Sequence[NodeView],
        cell: CellView,
    ) -> Iterator[Plan]:
        batches = [i for i in made.instances.values() if i.node in decode]
        running = [
            request
            for request in cell.requests(instance)
            if not request.prefill_left and not request.moves_now
        ]
        for batch in batches:
            moved = running[: batch.batch_max - batch.batch] if batch.takes_now else []
            if moved:
                yield Move(requests=tuple(moved), to=batch, at_once=True)
                if any(request.moves_now for request in moved):
                    return
        if not batches or (running and all(batch.takes_now for batch in batches)):
            there = [batch.node for batch in batches]
            others = [node for node in decode if node not in there]
            for node in sorted(others, key=lambda node: (_batches(node, cell), node.node_id))[:1]:
                yield Start(node=node, deployment=made.name, label="decode")


AEGAEON = Aegaeon()


def _by_id(node: NodeView) -> str:
    return node.node_id


def _batches(node: NodeView, cell: CellView) -> int:
    """Batches of a node, those included that are on their way."""
    return sum(1 for instance in cell.instances(node) if instance.batch or not instance.is_parked)
