"""A plan's calls reach the cell as they are planned, and are simulated beside it."""

from dataclasses import replace

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.slo import Slo
from mesh.domain.views import DeploymentSnapshot, NodeSnapshot, ProfileView
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.running import Replaying
from mesh.evaluation.replay.simulating import ReplayedCell, cell_plan, simulate
from mesh.sim.testbed import known_models
from mesh.v1 import control_pb2
from mesh.wire.codec import to_wire, view_from_wire
from mesh_workloads.prompts import Prompts, encoded
from mesh_workloads.replay_plan import Call, ReplayPlan
from tests.cli.views import CHAT_SMALL, NODE
from tests.support.token_server import token_server

PROMPTS = Prompts(encoded(lambda text: list(text.encode())))
VIEW = replace(CHAT_SMALL, spec=replace(CHAT_SMALL.spec, slo=Slo(ttft_s=30.0, tpot_s=5.0)))
PLAN = ReplayPlan(
    name="t",
    calls=tuple(
        Call(
            number=n,
            at_s=0.02 * n,
            deployment="chat-small",
            function="0",
            input_tokens=20 + n,
            output_tokens=1 + n,
        )
        for n in range(8)
    ),
    duration_s=1.0,
    deployments=("chat-small",),
    functions=1,
    forced=True,
    too_long=0,
    clipped=True,
    left_out=0,
)


def test_calls_have_the_plans_lengths_and_results_its_calls() -> None:
    told: list[CallResult] = []
    replaying = Replaying(PLAN, {"chat-small": VIEW}, {"chat-small": PROMPTS}, told.append)
    with token_server() as (address, server):
        replaying.run(address)
    assert sorted((len(r.tokens.ids), r.max_tokens) for r in server.requests) == [
        (call.input_tokens, call.output_tokens) for call in PLAN.calls
    ]
    results = replaying.results
    assert [result.call for result in results] == list(PLAN.calls)
    assert sorted(told, key=lambda r: r.call.number) == results
    assert all(result.finished and result.outcome.met for result in results)
    for result in results:
        assert result.outcome.arrival_s == pytest.approx(result.call.at_s + result.late_s)
        assert len(result.outcome.tokens_s) == result.call.output_tokens


MODEL = known_models()["llama-3.2-3b"]
COSTS = MODEL.costs["xeon-16"]
LIVE_VIEW = replace(
    CHAT_SMALL,
    spec=replace(CHAT_SMALL.spec, name=DeploymentName("chat"), slo=Slo(ttft_s=10.0, tpot_s=1.0)),
    model=MODEL.info,
    context_tokens_max=4096,
    instances=(),
    footprints=(("openvino", COSTS.footprint),),
)
HOST = replace(
    NODE,
    engine="openvino",
    fingerprint=COSTS.profile.fingerprint,
    memory_bytes=64 << 30,
    base_bytes=0,
    instances=(),
)
LIVE_PLAN = replace(
    PLAN,
    calls=tuple(
        Call(
            number=n,
            at_s=4.0 * n,
            deployment="chat",
            function="0",
            input_tokens=100,
            output_tokens=5 + n,
        )
        for n in range(5)
    ),
    duration_s=20.0,
    deployments=("chat",),
)


def live(
    view: DeploymentSnapshot = LIVE_VIEW, *nodes: NodeSnapshot, known: bool = True
) -> ReplayedCell:
    views = (ProfileView(profile=COSTS.profile, nodes=(HOST.node_id,)),) if known else ()
    return ReplayedCell(nodes=nodes or (HOST,), deployments=(view,), profiles={"chat": views})


def test_the_same_calls_come_with_the_same_lengths() -> None:
    results = simulate(cell_plan(live()), LIVE_PLAN)
    assert [r.call for r in results] == list(LIVE_PLAN.calls)
    assert all(r.finished and r.outcome.met for r in results)
    assert [len(r.outcome.tokens_s) for r in results] == [5, 6, 7, 8, 9]
    assert [r.outcome.arrival_s for r in results] == pytest.approx([0.0, 4.0, 8.0, 12.0, 16.0])


def test_a_node_is_what_the_live_one_is() -> None:
    second = replace(HOST, node_id=NodeId("other"), engine="vllm")
    plan = cell_plan(live(LIVE_VIEW, HOST, second))
    assert [node.hello.node_id for node in plan.nodes] == [HOST.node_id, "other"]
    assert plan.nodes[0].hello.memory_bytes == 64 << 30
    assert [bool(node.models) for node in plan.nodes] == [True, False]
    (made,) = plan.deployments
    assert (made.spec, made.context_tokens_max) == (LIVE_VIEW.spec, 4096)


def test_a_node_of_a_kind_that_only_the_controller_knows_is_refused() -> None:
    message = to_wire(HOST, control_pb2.Node)
    message.device = "npu"
    with pytest.raises(InvalidInput, match="'cpu0' computes on 'npu', and no simulated node"):
        cell_plan(live(LIVE_VIEW, view_from_wire(message, NodeSnapshot)))


@pytest.mark.parametrize("lacking", ["profile", "footprint"])
def test_a_deployment_of_which_too_little_is_known_is_named(lacking: str) -> None:
    cell = live(known=False) if lacking == "profile" else live(replace(LIVE_VIEW, footprints=()))
    with pytest.raises(InvalidInput, match="knows of no node how long 'chat' would take") as caught:
        cell_plan(cell)
    assert caught.value.hint == "measure it: mesh profile chat"
