"""`llm-mesh`: headroom and shadow validation; CPU first, large batches first, full nodes first."""

from mesh.domain.reasons import TurnRule
from mesh.policy.interface import InstanceView, NodeView, Rank
from mesh.policy.parts import cpu_first, largest_batch_first, tightest_first


class LlmMesh:
    """The order of candidates of LLM-Mesh §4 and §7.2, with the turns and the validation of §5."""

    name = "llm-mesh"
    turns = TurnRule.HEADROOM
    validates = True

    def instance_rank(self, instance: InstanceView) -> Rank:
        return cpu_first(instance), largest_batch_first(instance), instance.instance_id

    def node_rank(self, node: NodeView) -> Rank:
        return cpu_first(node), tightest_first(node), node.node_id
