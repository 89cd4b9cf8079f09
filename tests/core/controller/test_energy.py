"""Joules of nodes on the books: of deployments what they were computed for, the rest of nobody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.controller.state.energy import EnergyBook
from mesh.domain.energy import NO_ENERGY, Energy, EnergySource
from mesh.domain.events import NodeDisconnected
from mesh.domain.ids import RequestId
from mesh.domain.messages import Heartbeat, TokensReport
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens
from mesh.domain.views import CellSnapshot
from tests.core.cells import CHAT, CellUnderTest, deployment, instance_report, one_node

RAPL = EnergySource.RAPL


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.0, 10.0, allow_subnormal=False)), max_size=20
    ),
    st.floats(0.0, 10.0, allow_subnormal=False),
    st.floats(0.0, 1e4, allow_subnormal=False),
)
def test_shares_and_what_is_nobodys_are_all_joules(
    iterations: list[tuple[str, float]], beside_s: float, busy_j: float
) -> None:
    book = EnergyBook[str]()
    for key, seconds in iterations:
        book.note(key, seconds)
    noted_s = sum(seconds for _, seconds in iterations)
    energy = Energy(source=RAPL, idle_j=1.0, busy_j=busy_j, busy_s=noted_s + beside_s)
    took = book.settle(energy)
    shared_j = sum(view.busy_j or 0.0 for view in took.values())
    nobodys_j = busy_j * beside_s / energy.busy_s if energy.busy_s else busy_j
    assert shared_j + nobodys_j == pytest.approx(busy_j)
    assert book.settle(energy) == {}, "once"


def computed(cell: CellUnderTest, link: int, busy_s: float, finish: FinishReason | None) -> None:
    (instance,) = cell.core.cell.instances.values()
    outputs = RequestTokens(
        request_id=RequestId("r1"), attempt=1, first_index=0, token_ids=(7, 8), finish=finish
    )
    said = TokensReport(instance_id=instance.instance_id, outputs=(outputs,), busy_s=(busy_s,))
    cell.report(link, said)


def beat(cell: CellUnderTest, link: int, energy: Energy) -> CellSnapshot:
    loaded = [
        instance_report(instance_id=i.instance_id, kv_blocks=i.kv_blocks)
        for i in cell.core.cell.instances.values()
    ]
    cell.report(link, Heartbeat(rss_bytes=1, instances=tuple(loaded), energy=energy))
    return cell.core.snapshot(cell.now_s)


def test_a_deployment_is_charged_by_its_seconds_and_idle_joules_are_its_nodes() -> None:
    cell, link = one_node(deployment())
    cell.bring_up(link)
    computed(cell, link, 3.0, None)
    computed(cell, link, 1.0, FinishReason.STOP)
    told = Energy(source=RAPL, idle_j=5.0, busy_j=100.0, busy_s=5.0)
    seen = beat(cell, link, told)
    ((charged,), (node,)) = (d.energy for d in seen.deployments), (n.energy for n in seen.nodes)
    assert charged.busy_j == pytest.approx(80.0)
    assert (charged.idle_j, charged.sources) == (None, (RAPL,))
    assert (charged.j_per_request, charged.j_per_output_token) == pytest.approx((80.0, 20.0))
    assert (node.idle_j, node.busy_j) == (5.0, 100.0), "20 J were for nobody"
    assert (seen.energy.idle_j, seen.energy.j_per_output_token) == (5.0, 25.0)
    cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    assert cell.core.snapshot(cell.now_s).energy.busy_j == 100.0, "it was taken"


def test_joules_that_are_not_known_are_none_with_the_reason() -> None:
    cell, link = one_node(deployment())
    cell.bring_up(link)
    assert cell.core.snapshot(cell.now_s).energy == NO_ENERGY
    computed(cell, link, 3.0, None)
    seen = beat(cell, link, Energy(reason="permission denied"))
    (chat,) = seen.deployments
    assert (chat.spec.name, chat.energy.busy_j) == (CHAT, None)
    assert (seen.energy.busy_j, seen.energy.reason) == (None, "permission denied")
    computed(cell, link, 1.0, None)
    seen = beat(cell, link, Energy(source=RAPL, idle_j=0.0, busy_j=8.0, busy_s=1.0))
    assert (seen.energy.reason, seen.energy.output_tokens) == ("", 2), "those before are left out"
