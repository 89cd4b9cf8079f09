"""A virtual cell that stands for a live one: its node's journal is kept, its costs are a secret."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction
from mesh.domain.limits import NodeLimits
from mesh.domain.node_events import NodeEvent
from mesh.domain.reasons import DeviceKind
from mesh.evaluation.fidelity.observing import Observer
from mesh.evaluation.fidelity.report import LiveRun
from mesh.runtime.journal import Decision
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.costs import NodeCosts
from mesh.sim.testbed import DEFAULT, known_model

MODEL = "llama-3.2-3b"
SCENARIO = f"""
[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 64

[[deployments]]
name = "chat"
count = 3
model = "{MODEL}"
context_tokens_max = 4096
scaling = {{ keep_alive_s = 1.0 }}

[workload]
duration_s = 1
requests_per_s = 1
input_tokens = [1, 2]
output_tokens = [1, 2]
"""


def arrivals(count: int, every_s: float) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(n * every_s, f"chat-{n % 3 + 1}", 40 + 7 * n, 10 + n % 23) for n in range(count)
    )


@contextmanager
def journal() -> Iterator[list[Decision]]:
    """The journal of the only node."""
    decisions: list[Decision] = []
    handle = NodeCore.handle

    def kept(self: NodeCore, event: NodeEvent, now_s: float) -> list[NodeAction]:
        actions = handle(self, event, now_s)
        decisions.append(Decision(now_s=now_s, event=event, actions=tuple(actions)))
        return actions

    with mock.patch.object(NodeCore, "handle", kept):
        yield decisions


def live(
    plan: CellPlan,
    costs: NodeCosts,
    asked: Sequence[Arrival],
    *,
    calibrated_s: float,
    lead_s: float = 0.0,
) -> LiveRun:
    """What a live run would leave, had its node these costs. It begins `lead_s` after all have
    joined.
    """
    # Its instances are primed, as those of scenarios are not.
    node = replace(plan.nodes[0], costs=costs, limits=NodeLimits())
    with journal() as decisions:
        cell = VirtualCell(replace(plan, nodes=(node,)))
        cell.clock.run_until(cell.started_s + lead_s)
        ended = {int(o.request_id.removeprefix("r-")): o for o in cell.run(asked)}
    start_s = cell.started_s + lead_s
    outcomes = tuple(
        replace(
            ended[n],
            arrival_s=ended[n].arrival_s - start_s,
            tokens_s=tuple(at_s - start_s for at_s in ended[n].tokens_s),
            ended_s=ended[n].ended_s - start_s,
        )
        for n in range(1, len(asked) + 1)
    )
    return LiveRun(
        node=node.hello,
        deployments=plan.deployments,
        profile=known_model(MODEL).costs[DEFAULT[DeviceKind.CPU]].profile,
        arrivals=tuple(asked),
        outcomes=outcomes,
        start_s=start_s,
        calibrated_s=calibrated_s,
        observed=Observer().run(decisions),
        lead_s=lead_s,
    )
