"""What a deployment would meet with is what admission then finds, and asking changes nothing."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mesh.domain.actions import NotePolicyFault
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.messages import LoadInstance
from mesh.domain.reasons import Verdict
from mesh.domain.slo import Slo
from mesh.domain.views import Fit, NodeProspect
from mesh.policy.llm_mesh import LlmMesh
from mesh.policy.plans import Releases
from tests.core.cells import (
    FOOTPRINT,
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
)

SPEC = deployment().spec


def asked(cell: CellUnderTest, spec: DeploymentSpec = SPEC) -> NodeProspect:
    found = cell.core.prospect(spec, cell.now_s)
    assert found is not None
    (one,) = found.nodes
    return one


def test_a_deployment_that_fits_keeps_its_slo_as_its_first_call_then_shows() -> None:
    cell = CellUnderTest(deployment())
    cell.join()
    before = cell.core.snapshot(cell.now_s)
    told = asked(cell, replace(SPEC, name="chat-too"))  # type: ignore[arg-type]
    assert (told.fit, told.warm, told.keeps_slo) == (Fit.NOW, Verdict.PASSES, True)
    assert told.cold_ttft_s > told.warm_ttft_s > 0
    assert cell.core.snapshot(cell.now_s) == before, "it was a question"
    (load,) = commands(cell.invoke(), LoadInstance)
    needed = FOOTPRINT.instance_bytes(load.kv_blocks)
    assert told.needed_bytes <= needed <= told.free_bytes


@pytest.mark.parametrize(
    ("memory_mib", "fit"), [(1024, Fit.NOW), (150, Fit.ONCE_OTHERS_GO), (90, Fit.NEVER)]
)
def test_memory_decides_what_fits(memory_mib: int, fit: Fit) -> None:
    cell, link = one_node(
        deployment(), deployment("other"), node=hello(memory_bytes=memory_mib * MIB)
    )
    if fit is Fit.ONCE_OTHERS_GO:
        cell.bring_up(link)
    told = asked(cell)
    assert told.fit is fit
    assert (told.needed_bytes <= told.capacity_bytes) is (fit is not Fit.NEVER)


@pytest.mark.parametrize("slo", [Slo(ttft_s=0.001, ttft_tokens_per_s=1e6), Slo(tpot_s=1e-6)])
def test_an_slo_that_no_node_keeps_is_told(slo: Slo) -> None:
    cell = CellUnderTest(deployment())
    cell.join()
    told = asked(cell, replace(SPEC, slo=slo))
    assert not told.keeps_slo
    assert told.warm is not Verdict.PASSES


def test_more_calls_than_a_node_carries_do_not_keep_it() -> None:
    cell = CellUnderTest(deployment())
    cell.join()
    assert asked(cell).batch == 1
    entry = cell.core.cell.deployments[SPEC.name]
    for _ in range(100_000):
        entry.note_call(cell.now_s)
    told = asked(cell)
    assert told.batch > 1
    assert not told.keeps_slo


def test_a_model_that_nothing_is_known_of_is_no_guess() -> None:
    cell = CellUnderTest(deployment())
    cell.join()
    assert cell.core.prospect(replace(SPEC, source="file:///unknown"), cell.now_s) is None


def test_a_policy_that_promises_nothing_has_times_alone() -> None:
    cell = CellUnderTest(deployment(), rule="fcfs")
    cell.join()
    told = asked(cell)
    assert (told.cold, told.warm, told.keeps_slo) == (Verdict.PASSES, Verdict.PASSES, True)
    assert told.cold_ttft_s > told.warm_ttft_s > 0


def test_calls_that_run_already_are_counted_once() -> None:
    cell, link = one_node(deployment())
    before = asked(cell).busy_share
    cell.bring_up(link)
    assert asked(cell).busy_share == pytest.approx(before, rel=0.01)


def test_what_a_policy_does_wrong_when_it_is_asked_is_in_no_journal() -> None:
    class Raising(LlmMesh):
        def relieve(self, *_: object) -> Iterator[Releases]:
            raise RuntimeError("it has no answer")

    cell = CellUnderTest(deployment(), deployment("other"), rule=Raising())
    cell.join(hello(memory_bytes=90 * MIB))
    asked(cell)
    assert not of_kind(cell.retry(), NotePolicyFault)
