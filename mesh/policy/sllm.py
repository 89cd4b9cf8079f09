"""`sllm` and what becomes of it with CPU nodes, and two instances to a node: ServerlessLLM, which
loads quickly and serves as many requests as a partition holds (LLM-Mesh §8.1). Baselines.
"""

from dataclasses import replace

from mesh.domain.reasons import DeviceKind
from mesh.policy.composed import Composed
from mesh.policy.rules.alternate import ALTERNATE

SLLM = Composed(
    name="sllm",
    rule=ALTERNATE,
    devices=(DeviceKind.GPU,),
    partitions=1,
    promises=False,
    reclaims=(DeviceKind.CPU,),
    preempts=False,
)
SLLM_CPU = replace(SLLM, name="sllm+cpu", devices=(DeviceKind.CPU, DeviceKind.GPU))
SLLM_CPU_SHARE = replace(SLLM_CPU, name="sllm+cpu+share", partitions=2)
