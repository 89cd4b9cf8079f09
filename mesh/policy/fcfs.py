"""`fcfs`: first come, first served, and nobody is turned away for an SLO. A baseline that places as
`llm-mesh` does, but computes in the order of arrival.
"""

from mesh.policy.composed import Composed
from mesh.policy.rules.first_come import FIRST_COME

FCFS = Composed(
    name="fcfs",
    rule=FIRST_COME,
    promises=False,
    refuses_late=False,
    preempts=False,
)
