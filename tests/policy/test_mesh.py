"""What `mesh` decides beyond `llm-mesh`: what merges, and who starts first in overload."""

from dataclasses import replace

import pytest

from mesh.domain.actions import SetTimer
from mesh.domain.deployment import Deployment
from mesh.domain.events import LeaseCheckDue
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.slo import Slo
from tests.core.admission import instance, node
from tests.core.cells import MIB, CellUnderTest, commands, deployment, of_kind, only, request
from tests.core.two_nodes import LIMITS

PATIENT = Slo(ttft_s=10.0, tpot_s=10.0)


def anywhere(name: str) -> Deployment:
    made = deployment(name, slo=PATIENT)
    return replace(made, spec=replace(made.spec, devices=tuple(DeviceKind)))


class TwoKinds(CellUnderTest):
    """`r1` runs on a GPU, `r2` on a CPU, each on an instance of the same deployment."""

    def __init__(self, policy: str) -> None:
        super().__init__(anywhere("a"), limits=LIMITS, rule=policy)
        gpu = replace(node("n1", instance("i1", "a")), device=DeviceKind.GPU, computes_ahead=False)
        self.gpu, _ = self.join(gpu)
        self.invoke(request("r1", of="a", prompt=(1,) * 100, max_tokens=100))
        self.tokens(self.gpu, "r1", (40, 41, 42))
        self.cpu, _ = self.join(node("n2", instance("i2", "a")))
        self.invoke(request("r2", of="a", prompt=(1,) * 100, max_tokens=100))

    def state(self, name: str) -> InstanceState:
        return self.core.cell.instances[InstanceId(name)].state


def test_an_instance_on_a_gpu_goes_into_one_on_a_cpu_while_it_serves() -> None:
    cell = TwoKinds("mesh")
    said = cell.tell(LeaseCheckDue())
    order = only(commands(said, SubmitRequest), SubmitRequest).order
    assert (order.request.request_id, order.held) == ("r1", True)
    assert cell.state("i1") is InstanceState.DRAINING
    timers = [t for t in of_kind(said, SetTimer) if t.timer == LeaseCheckDue()]
    assert only(timers, SetTimer).at_s == cell.now_s + 0.25


def test_without_merging_both_go_on() -> None:
    cell = TwoKinds("mesh-no-merging")
    assert not commands(cell.tell(LeaseCheckDue()), SubmitRequest)
    assert (cell.state("i1"), cell.state("i2")) == (InstanceState.READY, InstanceState.READY)


class Full(CellUnderTest):
    """A node with memory for one instance, which serves `c`; `b` is called often, `a` once."""

    def __init__(self, policy: str) -> None:
        super().__init__(*(anywhere(name) for name in "abc"), limits=LIMITS, rule=policy)
        there = replace(instance("i1", "c"), kv_blocks=16)
        self.link, _ = self.join(node("n1", there, memory_bytes=150 * MIB))
        self.invoke(request("r1", of="c", max_tokens=100))

    def started(self) -> list[str]:
        """What loads once the request of `c` has ended; three of `b` came after one of `a`."""
        self.invoke(request("rare", of="a"))
        for n in range(3):
            self.invoke(request(f"often-{n}", of="b"))
        self.tokens(self.link, "r1", (40,), finish=FinishReason.STOP)
        instances = self.core.cell.instances.values()
        return [i.deployment for i in instances if i.state is InstanceState.LOADING]


@pytest.mark.parametrize(("policy", "starts"), [("mesh", "b"), ("mesh-no-ranking", "a")])
def test_memory_goes_to_who_is_called_most_whoever_came_first(policy: str, starts: str) -> None:
    assert Full(policy).started() == [starts]


def test_who_is_hardly_served_starts_before_who_is_called_more() -> None:
    cell = Full("mesh")
    cell.core.cell.deployments[DeploymentName("a")].note_refused()
    assert cell.started() == ["a"]
