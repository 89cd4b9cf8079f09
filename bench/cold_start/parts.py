"""Where the seconds of a call went, by the decisions of the node that served it; pure.

The caller's clock and the node's are the machine's, so that its marks lie on the line of the call.
Before: a node's journal. After: `report`.
"""

from collections.abc import Iterable

from bench.cold_start.starts import Called, Part
from mesh.domain.actions import StartStep
from mesh.domain.ids import InstanceId
from mesh.domain.messages import InstanceLoaded, LoadInstance, LoadProgress, SubmitRequest
from mesh.domain.node_events import CommandReceived, StepFinished
from mesh.runtime.journal import Decision

_GRAPH_PHASES = ("import compiled", "compile")
_FIRST_RUN_PHASE = "warm up"


def parts_s(call: Called, decisions: Iterable[Decision]) -> dict[Part, float]:
    """They come to the time from its sending to its first token. `decisions` are in their order."""
    marks: dict[Part, float] = {}
    instance_id: InstanceId | None = None
    submitted = False
    for decision in decisions:
        if not call.sent_s <= decision.now_s <= call.first_s:
            continue
        match decision.event:
            case CommandReceived(command=LoadInstance(deployment=call.deployment) as command):
                instance_id = command.instance_id
                marks[Part.QUEUE] = decision.now_s
            case LoadProgress(instance_id=i, phase=phase) if i == instance_id:
                if phase in (*_GRAPH_PHASES, _FIRST_RUN_PHASE):
                    part = Part.GRAPH if Part.READ in marks else Part.READ
                    marks.setdefault(part, decision.now_s)
            case InstanceLoaded(instance_id=i) if i == instance_id:
                marks[Part.FIRST_RUN] = decision.now_s
            case CommandReceived(command=SubmitRequest() as command):
                if command.order.request.deployment == call.deployment:
                    instance_id, submitted = command.instance_id, True
                    marks.setdefault(Part.QUEUE, decision.now_s)
            case StepFinished(instance_id=i) if i == instance_id and Part.HAND_OVER in marks:
                marks.setdefault(Part.PREFILL, decision.now_s)
            case _:
                pass
        for action in decision.actions:
            if submitted and isinstance(action, StartStep) and action.instance_id == instance_id:
                marks.setdefault(Part.HAND_OVER, decision.now_s)
    marks[Part.WIRE] = call.first_s
    parts, at_s = dict[Part, float](), call.sent_s
    for part in Part:
        if part in marks:
            parts[part], at_s = marks[part] - at_s, marks[part]
    return parts
