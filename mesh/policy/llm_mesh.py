"""`llm-mesh`: headroom and shadow validation; CPU first, large batches first, full nodes first.

The order of candidates of LLM-Mesh §4 and §7.2, with the turns and the validation of §5 and the
defragmentation of §7. Its parts can be left out one by one, as the paper's ablations do (§8.4).
"""

from mesh.domain.reasons import DeviceKind
from mesh.policy.composed import Composed

LLM_MESH = Composed(name="llm-mesh")
ABLATIONS = (
    Composed(name="llm-mesh-no-cpu", devices=(DeviceKind.GPU,)),
    Composed(name="llm-mesh-no-sharing", partitions=1, preempts=False),
    Composed(name="llm-mesh-no-defrag", preempts=False, consolidates=False),
    Composed(name="llm-mesh-no-preemption", preempts=False),
)
