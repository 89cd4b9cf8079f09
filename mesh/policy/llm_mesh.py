"""`llm-mesh`: headroom and shadow validation; CPU first, large batches first, full nodes first."""

from mesh.domain.reasons import TurnRule
from mesh.policy.interface import InstanceView, NodeView, Rank
from mesh.policy.parts import fullest_instance, fullest_node


class LlmMesh:
    """The order of candidates of LLM-Mesh §4 and §7.2, with the turns and the validation of §5."""

    name = "llm-mesh"
    turns = TurnRule.HEADROOM
    validates = True

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)
