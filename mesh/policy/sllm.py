"""`sllm` and what becomes of it with CPU nodes, and two instances to a node: ServerlessLLM, which
loads quickly and serves as many requests as a partition holds (LLM-Mesh §8.1). Baselines.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.domain.reasons import DeviceKind
from mesh.policy.default_answers import DefaultAnswers, releases
from mesh.policy.interface import KvDemand, KvSize, Rank
from mesh.policy.partitions import kv_of_part
from mesh.policy.plans import Release, Releases
from mesh.policy.ranks import fullest_instance
from mesh.policy.room import enough
from mesh.policy.rules.alternate import ALTERNATE
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, Place


@dataclass(frozen=True, kw_only=True)
class Sllm(DefaultAnswers):
    name: str = "sllm"
    rule: TurnRule = ALTERNATE
    devices: tuple[DeviceKind, ...] = (DeviceKind.GPU,)
    parts: int = 1
    """Into how many equal parts a node is cut, at most. An instance has one with all of its memory
    from its load to its end.
    """
    promises: bool = False
    prefetches: bool = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance)

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        """On GPU nodes an idle instance keeps its part until its keep-alive is over."""
        if place.device is DeviceKind.CPU:
            yield releases(enough(cell.idle(place), missing_bytes))

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        return Release(instance=instance)

    def kv(self, demand: KvDemand) -> KvSize:
        return kv_of_part(demand, self.parts, counts=True)


SLLM = Sllm()
SLLM_CPU = Sllm(name="sllm+cpu", devices=(DeviceKind.CPU, DeviceKind.GPU))
SLLM_CPU_SHARE = Sllm(name="sllm+cpu+share", devices=SLLM_CPU.devices, parts=2)
