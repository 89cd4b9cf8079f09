"""Metrics count what callers see, of a virtual cell whose outcomes are known."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mesh.controller.metrics import CellMetrics, Meter
from mesh.domain.actions import DeliverTokens, RemoveDeployment, SendCommand, StoreDeployment
from mesh.domain.energy import EnergySource, EnergyView
from mesh.domain.events import DeleteRequested, DeploymentStored, InvokeRequested, NodeReported
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.messages import InstanceLoaded
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request, RequestTokens
from mesh.domain.slo import Slo
from mesh.domain.views import CellSnapshot
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import arrivals, plan
from tests.cli.views import CHAT_SMALL, NODE
from tests.controller.live import FOOTPRINT
from tests.core.cells import deployment, load_instance
from tests.sim.scenarios import SMALL, scenario

EMPTY = CellSnapshot(deployments=(), nodes=(), queued=0, running=0, served=0, refused=())
BUSY = SMALL.replace("requests_per_s = 2.0", "requests_per_s = 40.0")
Sample = tuple[str, tuple[tuple[str, str], ...]]


def scraped(meter: Meter, snapshot: CellSnapshot) -> dict[Sample, float]:
    text = asyncio.run(CellMetrics(meter, lambda: snapshot).exposition()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def total(samples: dict[Sample, float], name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (n, has), value in samples.items() if n == name and wanted <= set(has))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Sample, float], list[Outcome]]:
    read = scenario(tmp_path_factory.mktemp("sim"), BUSY)
    cell: list[VirtualCell] = []
    meter = Meter(lambda name: cell[0].core.deployment(name) is not None if cell else True)
    cell.append(VirtualCell(plan(read), recorders=(meter,)))
    outcomes = cell[0].run(arrivals(read))
    return scraped(meter, cell[0].core.snapshot(cell[0].clock.now_s())), list(outcomes)


def test_requests_are_those_of_the_callers(ran: tuple[dict[Sample, float], list[Outcome]]) -> None:
    samples, outcomes = ran
    finished = [o for o in outcomes if o.finished]
    assert 0 < len(finished) < len(outcomes), "some are refused"
    ends = Counter(str(o.end) for o in outcomes)
    for o in finished:
        assert (
            total(samples, "vllm:request_success_total", finished_reason=str(o.end)) == ends[o.end]
        )
    for reason in {o.end for o in outcomes if not o.finished}:
        assert total(samples, "mesh_requests_refused_total", reason=str(reason)) == ends[reason]
    tokens = sum(len(o.tokens_s) for o in outcomes)
    assert total(samples, "vllm:generation_tokens_total") == tokens
    for name in {o.deployment for o in finished}:
        ttft_s = [o.ttft_s for o in finished if o.deployment == name and o.ttft_s is not None]
        first = "vllm:time_to_first_token_seconds"
        assert total(samples, f"{first}_count", model_name=name) == len(ttft_s)
        assert total(samples, f"{first}_sum", model_name=name) == pytest.approx(sum(ttft_s))


def test_a_request_meets_slos_in_the_mean(ran: tuple[dict[Sample, float], list[Outcome]]) -> None:
    samples, outcomes = ran
    assert total(samples, "mesh_requests_met_slo_total") == sum(o.met_in_the_mean for o in outcomes)


def test_loads_are_counted_with_their_tier(ran: tuple[dict[Sample, float], list[Outcome]]) -> None:
    samples, _ = ran
    loads = total(samples, "mesh_load_seconds_count")
    assert loads == total(samples, "mesh_load_seconds_count", tier="disk") > 0
    assert total(samples, "mesh_load_seconds_count", model_name="") == 0


def called(meter: Meter, name: str, request_id: str) -> None:
    request = Request(
        request_id=RequestId(request_id), deployment=DeploymentName(name), prompt_tokens=(1, 2)
    )
    meter.record(1.0, InvokeRequested(request=request), ())


def ended(meter: Meter, request_id: str) -> None:
    outputs = RequestTokens(
        request_id=RequestId(request_id),
        attempt=1,
        first_index=0,
        token_ids=(7,),
        finish=FinishReason.STOP,
    )
    meter.record(2.0, None, (DeliverTokens(outputs=outputs),))


def test_series_go_with_their_deployment_and_unknown_names_get_none() -> None:
    deployed = {"chat", "other"}
    meter = Meter(lambda name: name in deployed)
    for request_id, name in (("r1", "chat"), ("r2", "other"), ("r3", "chat"), ("r4", "made-up")):
        called(meter, name, request_id)
    for request_id in ("r1", "r2"):
        ended(meter, request_id)
    deployed.remove("chat")
    meter.record(3.0, DeploymentStored(operation_id=OperationId("1")), ())
    meter.record(
        3.0,
        DeleteRequested(operation_id=OperationId("1"), name=DeploymentName("chat")),
        (RemoveDeployment(operation_id=OperationId("1"), name=DeploymentName("chat")),),
    )
    for request_id in ("r3", "r4"):
        ended(meter, request_id)
    names = {dict(labels).get("model_name") for _, labels in scraped(meter, EMPTY)}
    assert names <= {None, "", "other"}


def test_series_go_with_their_class() -> None:
    meter = Meter(lambda name: True)
    chat, old = deployment().spec, Slo(name="old")
    for request_id in ("r1", "r2"):
        request = Request(
            request_id=RequestId(request_id), deployment=chat.name, prompt_tokens=(1, 2)
        )
        meter.record(1.0, InvokeRequested(request=request, slo=old), ())
    ended(meter, "r1")
    assert any(("slo_class", "old") in labels for _, labels in scraped(meter, EMPTY))
    stored = StoreDeployment(operation_id=OperationId("1"), deployment=deployment())
    meter.record(2.0, None, (stored,))
    ended(meter, "r2")
    samples = scraped(meter, EMPTY)
    assert not any(("slo_class", "old") in labels for _, labels in samples)
    assert total(samples, "vllm:request_success_total", model_name="chat") == 1


def test_loads_of_a_revision_are_those_of_its_deployment() -> None:
    meter = Meter(lambda name: name == "chat")
    load = load_instance(
        instance_id=InstanceId("chat@2-1-1"),
        deployment=DeploymentName("chat@2"),
        kv_blocks=4,
        context_tokens_max=512,
    )
    loaded = InstanceLoaded(
        instance_id=load.instance_id, footprint=FOOTPRINT, kv_blocks=4, elapsed_s=0.5
    )
    meter.record(1.0, None, (SendCommand(link_id=1, command=load),))
    meter.record(2.0, NodeReported(link_id=1, report=loaded), ())
    samples = scraped(meter, EMPTY)
    assert total(samples, "mesh_load_seconds_count", model_name="chat") == 1


def test_gauges_are_those_of_the_snapshot() -> None:
    took = EnergyView(sources=(EnergySource.RAPL,), idle_j=3.0, busy_j=7.5)
    unknown = replace(NODE, node_id=NodeId("cpu1"))
    nodes, chat = (replace(NODE, energy=took), unknown), replace(CHAT_SMALL, energy=took)
    cell = replace(EMPTY, deployments=(chat,), nodes=nodes)
    samples = scraped(Meter(lambda name: True), cell)
    assert total(samples, "mesh_energy_joules_total", model_name=chat.spec.name) == 7.5
    joules = [key for key in samples if key[0] == "mesh_node_energy_joules_total"]
    assert {dict(labels)["node"] for _, labels in joules} == {"cpu0"}, "none of an unknown"
    for state, joules_of in ("idle", 3.0), ("computing", 7.5):
        name = "mesh_node_energy_joules_total"
        assert total(samples, name, node="cpu0", state=state, source="rapl") == joules_of
    for one in cell.deployments:
        name = one.spec.name
        assert total(samples, "vllm:num_requests_running", model_name=name) == one.running
        assert total(samples, "vllm:num_requests_waiting", model_name=name) == one.queued
    for node in cell.nodes:
        instances = total(samples, "mesh_instances", node=node.node_id)
        assert instances == len(node.instances)
        rss = total(samples, "mesh_node_memory_bytes", node=node.node_id, of="rss")
        assert rss == node.rss_bytes


def test_prompt_tokens_found_in_caches_are_counted(tmp_path: Path) -> None:
    """A third of each prompt and more is one of three texts; what is shared is counted as looked
    for, and what of it was there.
    """
    read = scenario(tmp_path, "beginnings = 3\n" + BUSY)
    meter = Meter(lambda name: True)
    cell = VirtualCell(plan(read), recorders=(meter,))
    served = [o for o in cell.run(arrivals(read)) if o.tokens_s]
    samples = scraped(meter, cell.core.snapshot(cell.clock.now_s()))
    queried = total(samples, "vllm:prefix_cache_queries_total")
    assert queried == sum(o.input_tokens for o in served)
    assert 0.1 < total(samples, "vllm:prefix_cache_hits_total") / queried < 1.0
