"""`mesh`: LLM-Mesh's headroom and placement, and weights that are swapped token by token (Aegaeon).

On nodes whose engine swaps, memory for weights is no limit any more: an instance has its KV cache
there, and its weights come when a token is due. What limits such a node is its time: at the pace of
the SLOs, before each deadline, and on the link that the weights come by. Other nodes are used as by
`llm-mesh`.
"""

from dataclasses import dataclass

from mesh.domain.reasons import Verdict
from mesh.policy.interface import Tests
from mesh.policy.llm_mesh import LlmMesh
from mesh.policy.plans import Join, Move, Plan, Shortage, Start
from mesh.policy.rules.swapping import SWAPPING
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import NodeView


@dataclass(frozen=True, kw_only=True)
class Mesh(LlmMesh):
    name: str = "mesh"
    rule: TurnRule = SWAPPING
    start_share: float = 0.7
    """A new instance starts on a node that swaps as long as no more of its time is in use at the
    pace of the SLOs: the rest is for prompts, and for requests that join.
    """
    join_share: float = 1.0
    """The same for a request that joins: it makes a decode of its instance hardly longer."""

    # A request is in time there if the node keeps up with the pace of all, if its prompt and those
    # of others are computed before they are due, and if the weights of all that are out come before
    # their next tokens are due. Shadow validation does not model swaps.

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        node = _node_of(plan)
        if node is None or not node.swaps:
            return super().passes(plan, tests)
        most = self.start_share if isinstance(plan, Start) else self.join_share
        if tests.utilisation(plan) > most:
            return Verdict.TPOT_EXCEEDED
        return tests.demand(plan)


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


MESH = Mesh()
