"""`fcfs`: first come, first served, and nobody is turned away for an SLO. A baseline that places as
`llm-mesh` does, but computes in the order of arrival.
"""

from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import TurnRule
from mesh.policy.composed import Composed

FCFS = Composed(
    name="fcfs",
    node_rule=NodeRule(turn=TurnRule.FIRST_COME),
    promises=False,
    refuses_late=False,
    preempts=False,
)
