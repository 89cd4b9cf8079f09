"""`mesh`: LLM-Mesh's headroom and placement, and weights that are swapped token by token (Aegaeon).

On nodes whose engine swaps, memory for weights is no limit any more: an instance has its KV cache
there, and its weights come when a token is due. What limits such a node is its time: at the pace of
the SLOs, before each deadline, and on the link that the weights come by. Other nodes are used as by
`llm-mesh`.

While a GPU is not in use, CPUs start instances before another GPU takes more requests. A request of
an SLO class whose decodes alone take most of a CPU's time goes to GPUs first. While nobody waits,
small instances merge into larger ones of their deployment on GPUs. While somebody does, a new
instance goes to the deployment that is called most. docs/policy-mesh.md says what each rule is
worth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.domain.reasons import DeviceKind, Verdict
from mesh.domain.slo import Pace, Slo
from mesh.policy.interface import KvDemand, KvSize, Tests
from mesh.policy.llm_mesh import LlmMesh
from mesh.policy.plans import Join, Move, Plan, Release, Shortage, Start
from mesh.policy.room import by_demand, roomy_first
from mesh.policy.rules.swapping import SWAPPING
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, DeploymentView, InstanceView, NodeView, Outlook, RequestView

TARGETS_MAX = 2
"""Instances that one look tries to merge another one into."""
LOOKS_MAX = 8
"""Instances that one upkeep tries to merge. Where there are more, each upkeep begins behind those
of the one before it.
"""


@dataclass(frozen=True, kw_only=True)
class Mesh(LlmMesh):
    name: str = "mesh"
    rule: TurnRule = SWAPPING
    start_share: float = 0.5
    """A new instance starts on a node that swaps as long as no more of its time is in use at the
    pace of the SLOs: the rest is for prompts, and for requests that join.
    """
    join_share: float = 0.8
    """The same for a request that joins: it makes a decode of its instance hardly longer."""
    upkeep_s: float = 0.25
    merges: bool = True
    """Whether small instances go into larger ones of their deployment on GPUs."""
    ranks: bool = True
    """Whether who is called most starts first where several wait without an instance."""
    served_share_least: float = 0.4
    """A deployment of which a smaller share is served starts before all others that have more."""
    kv_watermark_share: float = 0.08
    """A KV cache of a node that swaps has so much more than its requests need, if the cell's
    watermark is not lower.
    """
    slack_share: float = 0.2
    """The share of a deployment's mean answer that one is expected to have at least."""

    # Shadow validation rolls swaps forward as far as all weights could come once more. That nobody
    # falls behind later, and that prompts to come find time, is up to the share.

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        node = _node_of(plan)
        if node is None or not node.swaps:
            return super().passes(plan, tests)
        most = self.start_share if isinstance(plan, Start) else self.join_share
        if tests.utilisation(plan) > most:
            return Verdict.TPOT_EXCEEDED
        return tests.shadow(plan)

    # KV caches have little to spare on a node that swaps, where they grow without a copy: what they
    # leave of it holds weights, which need not come when a request does.

    def kv(self, demand: KvDemand) -> KvSize:
        if not demand.swaps:
            return super().kv(demand)
        share = min(self.kv_watermark_share, demand.watermark_share)
        return by_demand(demand, watermark_share=share)

    # After an early first token a request may be behind its pace by what the rest of its answer
    # makes up for. Many answers are a fifth as long as the mean.

    def pace(self, slo: Slo) -> Pace:
        return Pace(slack_share=self.slack_share)

    # Whoever waits for copies or turns of others is not taken late: that takes time which others
    # were promised. Only a load that is too long with its own copy makes a request late.

    def may_be_late(self, request: RequestView, outlook: Outlook) -> bool:
        late = super().may_be_late(request, outlook)
        return late and not outlook.may_load_by(outlook.latest_start_s)

    # While a GPU is not in use, an instance starts on a CPU before a request joins a GPU: when
    # requests joined whatever was there, GPUs stayed in use and CPUs rested. A request that would
    # take most of a CPU takes less of a GPU, and the CPU has time for several of looser classes.
    # Where several deployments wait without an instance, deployments of which less than 40 % is
    # served start first, and then those that are called most: an instance serves more of their
    # requests in the same memory.

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        left, last = set(DeviceKind), list[Plan]()
        if request is not None:
            gpus_first = self._fills_cpu(request, cell)
            for instance in cell.candidates():
                join = Join(request=request, instance=instance)
                on_gpu = instance.device is DeviceKind.GPU
                if gpus_first and not on_gpu:
                    last.append(join)
                    continue
                spares = on_gpu and not gpus_first and DeviceKind.CPU in left
                if spares and _spares_gpus(instance, request, cell):
                    left.remove(DeviceKind.CPU)
                    yield from self._starts(request, cell, {DeviceKind.CPU})
                yield join
            if gpus_first:
                left.remove(DeviceKind.GPU)
                yield from self._starts(request, cell, {DeviceKind.GPU})
        yield from last
        yield from self._starts(request, cell, left)

    def _fills_cpu(self, request: RequestView, cell: CellView) -> bool:
        """Whether the decodes of one request that names a class with limits would take more of a
        CPU's time than a start may, and there are GPUs. The first CPU node stands for all.
        """
        if not request.slo.name or request.slo.best_effort:
            return False
        cpu = next((node for node in cell.nodes() if node.device is DeviceKind.CPU), None)
        if cpu is None or not any(node.device is DeviceKind.GPU for node in cell.nodes()):
            return False
        decode_s = cell.times_on(cpu).decode_s(1, request.tokens)
        return decode_s > self.start_share * request.slo.tpot_s

    def _starts(
        self, request: RequestView | None, cell: CellView, on: set[DeviceKind]
    ) -> Iterator[Plan]:
        if not self._gives_way(request, cell):
            for node in roomy_first(cell):
                if node.device in on:
                    yield Start(request=request, node=node)

    def _gives_way(self, request: RequestView | None, cell: CellView) -> bool:
        """Whether another deployment that waits, and has no instance, starts before its own."""
        made = None if request is None else cell.deployment(request.deployment)
        if made is None or not self.ranks:
            return False
        claim = self._claim(made)
        return any(
            other.queued and not other.instances and self._claim(other) > claim
            for other in cell.deployments()
        )

    def _claim(self, made: DeploymentView) -> tuple[bool, float]:
        return made.served_share < self.served_share_least, made.calls_log

    # A small instance goes once all of its requests have places, in time, on a larger instance of
    # its deployment on a GPU, which computes their tokens again quickly: its node swaps less, or a
    # CPU has time for another deployment. Nothing moves to a CPU, whose prompts take seconds, nor
    # while a request waits, which needs the time more.

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        if self.merges and not any(made.queued for made in cell.deployments()):
            serving = [i for node in cell.nodes() for i in cell.neighbours(node)]
            ordered = sorted(serving, key=_size)
            found = [(small, larger) for small in ordered if (larger := _targets(small, cell))]
            groups = range(0, len(found), LOOKS_MAX)
            first = groups[int(cell.now_s / self.upkeep_s) % len(groups)] if found else 0
            for small, targets in found[first : first + LOOKS_MAX]:
                for to in targets[:TARGETS_MAX]:
                    if small in cell.neighbours(small.node):
                        yield Release(instance=small, to=to)


def _spares_gpus(instance: InstanceView, request: RequestView, cell: CellView) -> bool:
    """Whether the request may keep away from GPUs: this one has computed nothing of it, and another
    one is not in use, so that they are not short of time.
    """
    in_use = {of.node.node_id for of in cell.instances()}
    unused = any(
        node.device is DeviceKind.GPU and node.node_id not in in_use for node in cell.nodes()
    )
    return unused and not cell.cached_tokens(instance, request)


def _node_of(plan: Plan) -> NodeView | None:
    match plan:
        case Start():
            return plan.node
        case Join():
            return plan.instance.node
        case Move():
            return plan.to.node
        case _:
            return None


def _targets(small: InstanceView, cell: CellView) -> list[InstanceView]:
    """The instances on other GPUs that a smaller one of the deployment may go into, the largest
    first.
    """
    made = cell.deployment(small.deployment)
    others = [] if made is None else made.instances.values()
    larger = [i for i in others if i.device is DeviceKind.GPU and _size(i) > _size(small)]
    found = [i for i in larger if i.takes_now and i.batch + small.batch <= i.batch_max]
    away = [i for i in found if i.node is not small.node]
    return sorted(away, key=_size, reverse=True)


def _size(instance: InstanceView) -> tuple[int, int, str]:
    return instance.batch, instance.tokens, instance.instance_id


MESH = Mesh()
MESH_ABLATIONS = (
    Mesh(name="mesh-no-merging", merges=False),
    Mesh(name="mesh-no-ranking", ranks=False),
)
