"""What `mesh` decides beyond `llm-mesh`: what merges, and who starts first in overload."""

from dataclasses import replace

import pytest

import mesh.policy.mesh
from mesh.core.controller.instances.open_options import OpenOptions
from mesh.core.controller.state.context import EventContext
from mesh.domain.actions import SetTimer
from mesh.domain.deployment import Deployment
from mesh.domain.events import InvokeRequested, LeaseCheckDue
from mesh.domain.ids import DeploymentName, InstanceId, NodeId
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.slo import Slo
from mesh.policy.guarded import Guarded
from mesh.policy.interface import KvDemand
from mesh.policy.mesh import MESH
from mesh.policy.plans import Release
from tests.core.admission import SLOW, instance, node, submitted
from tests.core.cells import MIB, CellUnderTest, commands, deployment, of_kind, only, request
from tests.core.two_nodes import LIMITS

PATIENT = Slo(ttft_s=10.0, tpot_s=10.0)


def anywhere(name: str) -> Deployment:
    made = deployment(name, slo=PATIENT)
    return replace(made, spec=replace(made.spec, devices=tuple(DeviceKind)))


class TwoKinds(CellUnderTest):
    """Two requests run on a GPU, and `r3` on a CPU, on another instance of their deployment."""

    def __init__(self, policy: str) -> None:
        super().__init__(anywhere("a"), limits=LIMITS, rule=policy)
        gpu = replace(node("n1", instance("i1", "a")), device=DeviceKind.GPU, computes_ahead=False)
        self.join(gpu)
        self.ask("r1")
        self.ask("r2")
        self.join(node("n2", instance("i2", "a")))
        self.ask("r3")

    def ask(self, name: str) -> None:
        self.invoke(request(name, of="a", prompt=(1,) * 100, max_tokens=100))

    def state(self, name: str) -> InstanceState:
        return self.core.cell.instances[InstanceId(name)].state


def test_a_smaller_instance_goes_into_a_larger_one_on_a_gpu() -> None:
    cell = TwoKinds("mesh")
    said = cell.tell(LeaseCheckDue())
    command = only(commands(said, SubmitRequest), SubmitRequest)
    assert (command.order.request.request_id, command.instance_id) == ("r3", "i1")
    assert cell.state("i2") is InstanceState.UNLOADING
    timers = [t for t in of_kind(said, SetTimer) if t.timer == LeaseCheckDue()]
    assert only(timers, SetTimer).at_s == cell.now_s + 0.25


def merging(cell: CellUnderTest) -> list[str]:
    """The instances that an upkeep would merge now."""
    ctx = EventContext(
        cell=cell.core.cell,
        epoch=1,
        limits=LIMITS,
        policy=Guarded(MESH, LIMITS),
        now_s=cell.now_s,
        validations_left=0,
    )
    plans = MESH.upkeep(OpenOptions(ctx=ctx, may_move=lambda _: True))
    return [plan.instance.instance_id for plan in plans if isinstance(plan, Release)]


def test_each_upkeep_tries_others_and_none_goes_where_it_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh.policy.mesh, "LOOKS_MAX", 1)
    cell = TwoKinds("mesh")
    cell.join(node("n3", instance("i3", "a")))
    first = merging(cell)
    cell.now_s += MESH.upkeep_s
    assert sorted(first + merging(cell)) == ["i2", "i3"]
    cell.core.cell.turn_node(cell.core.cell.nodes[NodeId("n1")], NodeState.DRAINING)
    assert merging(cell) == []


@pytest.mark.parametrize(
    ("policy", "gpus", "starts"),
    [("mesh", 2, ["cpu"]), ("mesh", 1, []), ("llm-mesh", 2, [])],
)
def test_while_a_gpu_is_not_in_use_a_cpu_starts_an_instance_before_another_one_takes_more(
    policy: str, gpus: int, starts: list[str]
) -> None:
    cell = CellUnderTest(anywhere("a"), limits=LIMITS, rule=policy)
    for gpu in range(gpus):
        used = [instance("i1", "a")] if gpu == 0 else []
        cell.join(replace(node(f"gpu{gpu}", *used), device=DeviceKind.GPU))
    cell.join(node("cpu"))
    cell.invoke(request("r1", of="a", max_tokens=100))
    instances = cell.core.cell.instances.values()
    loading = [i for i in instances if i.state is InstanceState.LOADING]
    assert [i.node.node_id for i in loading] == starts


@pytest.mark.parametrize(
    ("name", "tpot_s", "gpus", "joins"),
    [
        ("tight", 0.2, 1, "gpu"),
        ("loose", 0.5, 1, "cpu"),
        ("", 0.2, 1, "cpu"),
        ("tight", 0.2, 0, "cpu"),
    ],
)
def test_a_class_whose_decodes_take_most_of_a_cpu_goes_to_gpus_first(
    name: str, tpot_s: float, gpus: int, joins: str
) -> None:
    """A decode takes 110 ms on either kind."""
    cell = CellUnderTest(anywhere("a"), limits=LIMITS, profiles=(SLOW,), rule="mesh")
    cell.join(node("cpu", instance("cpu", "a")))
    for _ in range(gpus):
        cell.join(replace(node("gpu", instance("gpu", "a")), device=DeviceKind.GPU))
    slo = Slo(name=name, ttft_s=10.0, tpot_s=tpot_s)
    asked = InvokeRequested(request=request("r1", of="a", max_tokens=100), slo=slo)
    assert submitted(cell.tell(asked)) == [("r1", joins)]


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


@pytest.mark.parametrize(
    ("swaps", "watermark_share", "blocks"),
    [(True, 0.25, 108), (True, 0.05, 105), (False, 0.25, 125)],
)
def test_a_cache_has_little_to_spare_where_weights_are_swapped_and_no_more_than_the_cell_wants(
    swaps: bool, watermark_share: float, blocks: int
) -> None:
    demand = KvDemand(
        required_blocks=100,
        block_tokens=32,
        context_tokens=4096,
        tokens_least=1024,
        watermark_share=watermark_share,
        swaps=swaps,
    )
    assert MESH.kv(demand).wanted_blocks == blocks
