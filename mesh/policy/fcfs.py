"""`fcfs`: first come, first served, and nobody is turned away for an SLO. A baseline that places as
`llm-mesh` does, but computes in the order of arrival.
"""

from dataclasses import dataclass

from mesh.policy.default_answers import DefaultAnswers
from mesh.policy.interface import Rank
from mesh.policy.ranks import fullest_instance
from mesh.policy.rules.first_come import FIRST_COME
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import InstanceView


@dataclass(frozen=True, kw_only=True)
class Fcfs(DefaultAnswers):
    name: str = "fcfs"
    rule: TurnRule = FIRST_COME
    promises: bool = False
    refuses_late: bool = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance)


FCFS = Fcfs()
