"""Preemption (LLM-Mesh §7.1): a smaller neighbour makes room, if its requests keep their SLOs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    InstanceGone,
    InstanceReport,
    KvResized,
    LoadInstance,
    ResizeKv,
    SubmitRequest,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.profile import Grid
from mesh.domain.reasons import Verdict
from mesh.domain.slo import Slo
from mesh.policy.interface import Policy
from mesh.policy.llm_mesh import LlmMesh
from mesh.policy.plans import Join, Plan, Start
from mesh.policy.views import CellView, RequestView
from tests.core.admission import instance, node, submitted
from tests.core.cells import FOOTPRINT, MIB, CellUnderTest, commands, deployment, only, request
from tests.support.profiles import FINGERPRINT, PREFILL, PROFILE, profile

LIMITS = CellLimits(delivery_s_max=0.02)


@dataclass(frozen=True, kw_only=True)
class LastFirst(LlmMesh):
    """It takes all candidates before it yields one, and yields the last of them first."""

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        assert request is not None
        for there in sorted(cell.candidates(), key=lambda i: i.instance_id, reverse=True):
            yield Join(request=request, instance=there)


@dataclass(frozen=True, kw_only=True)
class Naming(LlmMesh):
    """Each instance that it starts has the name of its node for a label."""

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        for plan in super().places(request, cell):
            yield replace(plan, label=plan.node.node_id) if isinstance(plan, Start) else plan


TOO_SLOW = profile(
    fingerprint="slow", decode=Grid(rows=(1,), columns=(0,), seconds=((0.3,),)), prefill=PREFILL
)


def small(name: str, of: str, kv_blocks: int) -> InstanceReport:
    """An instance with 1 MiB of weights."""
    footprint = replace(FOOTPRINT, weights_bytes=MIB)
    return replace(instance(name, of), footprint=footprint, kv_blocks=kv_blocks)


class FullNode(CellUnderTest):
    """On node n1 `a` runs two requests and `b` one, of 11 KV blocks each (320 tokens and what they
    may write). Of 44 blocks that there is memory for beside the weights, `b` has the 16 of a full
    context and `a` the rest: a third request of `a` finds no room. A small `c` idles, and stays.
    """

    def __init__(
        self, *, rule: str | Policy = "llm-mesh", b_minimum: int = 0, moves_max: int = 2
    ) -> None:
        super().__init__(
            deployment("a"),
            deployment("b", replicas_min=b_minimum),
            deployment("c", replicas_min=1),
            limits=replace(LIMITS, preempted_max=moves_max),
            profiles=(PROFILE, TOO_SLOW),
            rule=rule,
        )
        found = [replace(instance(name, name), kv_blocks=16) for name in "ab"]
        found.append(small("c", "c", 1))
        self.link, _ = self.join(node("n1", *found, memory_bytes=(2 * 100 + 44 + 2) * MIB))
        for name, of in (("a1", "a"), ("b1", "b"), ("a2", "a")):
            assert submitted(self.ask(name, of)) == [(name, of)]
            self.tokens(self.link, name, [7])
        resized = KvResized(instance_id=InstanceId("a"), kv_blocks=28, elapsed_s=0.002)
        self.report(self.link, resized)

    def ask(self, name: str, of: str) -> list[ControllerAction]:
        return self.invoke(request(name, of=of, prompt=(1,) * 320, max_tokens=32))

    def second_node(
        self, *names: str, memory_bytes: int = 1024 * MIB, fingerprint: str = FINGERPRINT
    ) -> None:
        """Node n2 with instances of these deployments."""
        found = [instance(f"{name}2", name) for name in names]
        n2 = node("n2", *found, memory_bytes=memory_bytes)
        self.join(replace(n2, fingerprint=fingerprint))

    def learn_load(self, seconds: float) -> None:
        """The controller learns how long a load on n2 takes."""
        n2 = self.core.cell.nodes[NodeId("n2")].hello
        self.core.cell.expectations.learn_load(n2, FOOTPRINT.weights_bytes, seconds)


def test_a_smaller_neighbour_gives_its_memory_and_its_request_continues_elsewhere() -> None:
    cell = FullNode()
    cell.second_node("b")
    decided = cell.ask("a3", "a")
    assert only(commands(decided, AbortRequest), AbortRequest).request_id == "b1"
    assert only(commands(decided, UnloadInstance), UnloadInstance).instance_id == "b"
    assert submitted(decided) == [("b1", "b2"), ("a3", "a")]
    moved = commands(decided, SubmitRequest)[0].order
    assert (moved.attempt, moved.output_tokens) == (2, (7,))
    assert not commands(decided, ResizeKv), "its memory has to come free first"
    gone = cell.report(cell.link, InstanceGone(instance_id=InstanceId("b")))
    assert only(commands(gone, ResizeKv), ResizeKv).kv_blocks == 42


def test_who_moves_may_go_to_any_instance_that_the_policy_was_offered() -> None:
    cell = FullNode(rule=LastFirst())
    for name in ("b2", "b3", "b4"):
        other = node(f"n{name[1]}", instance(name, "b"), memory_bytes=1024 * MIB)
        cell.join(replace(other, fingerprint="slow" if name != "b3" else FINGERPRINT))
    decided = cell.ask("a3", "a")
    assert submitted(decided) == [("b1", "b3"), ("a3", "a")]


def test_where_no_instance_of_its_deployment_is_a_new_one_is_loaded_for_it() -> None:
    cell = FullNode(rule=Naming())
    cell.second_node()
    cell.learn_load(0.2)
    decided = cell.ask("a3", "a")
    load = only(commands(decided, LoadInstance), LoadInstance)
    assert load.deployment == "b"
    assert cell.core.cell.instances[load.instance_id].label == "n2"
    assert submitted(decided) == [("a3", "a")]
    cell.now_s += 0.2
    assert submitted(cell.loaded(2, load.instance_id)) == [("b1", load.instance_id)]


def nothing_moves(cell: FullNode) -> None:
    decided = cell.ask("a3", "a")
    assert not commands(decided, AbortRequest)
    assert not submitted(decided)
    assert cell.core.cell.instances[InstanceId("b")].state is InstanceState.READY


def test_nothing_moves_where_the_displaced_request_would_be_late() -> None:
    slow, far = FullNode(), FullNode()
    slow.second_node("b", fingerprint="slow")
    nothing_moves(slow)
    far.second_node()
    far.learn_load(5.0)
    nothing_moves(far)


def test_nothing_moves_where_there_is_no_room_for_it() -> None:
    cell = FullNode()
    cell.second_node(memory_bytes=110 * MIB)
    nothing_moves(cell)


def test_a_minimum_and_a_policy_that_does_not_preempt_leave_everything_where_it_is() -> None:
    kept = FullNode(b_minimum=2)
    kept.second_node("b")
    nothing_moves(kept)
    other = FullNode(rule="llm-mesh-no-preemption")
    other.second_node("b")
    nothing_moves(other)


def test_an_instance_that_somebody_was_promised_stays() -> None:
    cell = FullNode()
    cell.second_node()
    cell.learn_load(0.2)
    asked, owner = request("b2", of="b"), cell.core.cell.deployments[DeploymentName("b")]
    promised = RequestEntry(original=asked, slo=Slo(), arrival_s=cell.now_s, accepted=True)
    cell.core.cell.add_request(promised)
    owner.enqueue(promised, cell.now_s)
    cell.core.cell.note_queue(owner)
    cell.core.cell.instances[InstanceId("b")].expect(promised, 1)
    nothing_moves(cell)


def test_a_request_is_moved_only_so_often() -> None:
    cell = FullNode(moves_max=0)
    cell.second_node("b")
    nothing_moves(cell)


def test_a_running_instance_that_starves_preempts_before_it_evicts() -> None:
    cell = FullNode()
    cell.second_node("b")
    instance_a = cell.core.cell.instances[InstanceId("a")]
    longer = cell.core.cell.requests[RequestId("a1")]
    more = 30 - instance_a.required_blocks
    longer.required_blocks += more
    instance_a.required_blocks += more
    said = TokensReport(instance_id=InstanceId("a"), outputs=(), starved=(RequestId("a1"),))
    decided = cell.report(cell.link, said)
    assert only(commands(decided, AbortRequest), AbortRequest).request_id == "b1"
    assert submitted(decided) == [("b1", "b2")]
    assert set(instance_a.requests) == {"a1", "a2"}


def test_nothing_moves_to_a_deployment_that_pauses_after_a_failed_load() -> None:
    cell = FullNode()
    cell.second_node()
    owner = cell.core.cell.deployments[DeploymentName("b")]
    cell.learn_load(0.5)
    owner.paused_until_s = cell.now_s + 1.0
    nothing_moves(cell)


def test_a_request_that_runs_well_does_not_try_out_an_estimate() -> None:
    """A node that nobody has measured, where a load takes 5 s, or where an instance is idle that is
    expected to take 0.3 s for a token, and more.
    """
    far, slow = FullNode(), FullNode()
    far.second_node(fingerprint="unknown")
    far.learn_load(5.0)
    nothing_moves(far)
    slow.second_node("b", fingerprint="unknown")
    target = slow.core.cell.instances[InstanceId("b2")]
    target.profile = replace(TOO_SLOW, scaled_from="elsewhere", measured_s=0.0)
    nothing_moves(slow)


def test_whoever_waits_for_time_there_has_been_overtaken() -> None:
    cell = FullNode()
    cell.second_node("b")
    cell.now_s += 0.1
    early = RequestEntry(
        original=request("early", of="c"),
        slo=Slo(),
        arrival_s=cell.now_s - 0.1,
    )
    early.refusals.note(Verdict.DELAYS_RUNNING)
    cell.core.cell.requests[early.original.request_id] = early
    owner = cell.core.cell.deployments[DeploymentName("c")]
    owner.queue.append(early)
    cell.core.cell.note_queue(owner)
    assert ("a3", "a") in submitted(cell.ask("a3", "a"))
    assert early.overtaken == 1


def test_a_minimum_keeps_the_second_of_two_idle_instances_that_were_both_to_make_room() -> None:
    """On n1 `a` needs 11 blocks more: all of `e` and two of `b`, whose request moves to n2. But
    there it takes the place of the other instance of `e`, of which one has to stay.
    """
    cell = CellUnderTest(
        deployment("a"),
        deployment("b"),
        deployment("e", replicas_min=1),
        limits=replace(LIMITS, kv_tokens_least=32),
    )
    on_n1 = [replace(instance("a", "a"), kv_blocks=22), small("b", "b", 2), small("e", "e", 8)]
    link, _ = cell.join(node("n1", *on_n1, memory_bytes=(122 + 3 + 9) * MIB))
    cell.invoke(request("b1", of="b", prompt=(1,) * 40))
    cell.tokens(link, "b1", [7])
    for name in ("a1", "a2"):
        cell.invoke(request(name, of="a", prompt=(1,) * 320, max_tokens=32))
        cell.tokens(link, name, [7])
    cell.join(node("n2", small("b2", "b", 1), small("e2", "e", 8), memory_bytes=(2 + 9) * MIB))
    decided = cell.invoke(request("a3", of="a", prompt=(1,) * 320, max_tokens=32))
    assert submitted(decided) == [("b1", "b2")]
    gone = [unload.instance_id for unload in commands(decided, UnloadInstance)]
    assert gone == ["e2", "b"]
    (waiting,) = cell.core.cell.deployments[DeploymentName("a")].queue
    assert waiting.original.request_id == "a3"


def test_a_neighbour_makes_room_for_all_answers_of_a_call_where_one_fits_by_itself() -> None:
    cell = FullNode()
    cell.second_node("b")
    asked = replace(request("a3", of="a", prompt=(1,) * 100, max_tokens=32), answers=3)
    decided = cell.invoke(asked)
    assert [abort.request_id for abort in commands(decided, AbortRequest)] == ["b1"]
