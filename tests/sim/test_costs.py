"""What things cost in the simulator: tables that ship with mesh, costs added, and loads."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean, median

import pytest

from mesh.compute.times import Times
from mesh.domain.errors import NotFound
from mesh.domain.events import NodeReported
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, RequestId
from mesh.domain.messages import InstanceLoaded
from mesh.domain.model import Footprint
from mesh.domain.profile import IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest, LoadOrder
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart
from mesh.sim.cell_costs import JITTER
from mesh.sim.checking import FaultyRun
from mesh.sim.cluster import VirtualCell
from mesh.sim.costs import Jitter, ModelCosts, NodeCosts, Pace
from mesh.sim.engine import CostEngine
from mesh.sim.scenario import arrivals, plan
from mesh.sim.testbed import known_model, known_models
from tests.cli.views import MODEL
from tests.sim.scenarios import scenario
from tests.support.profiles import profile

DECODE = IterationShape(decode_batch=1, decode_context_tokens=32)
PREFILL = IterationShape(prefill_tokens=8)


class Timed:
    """An engine with one instance, its time, and what its calls have spent."""

    def __init__(self, costs: NodeCosts) -> None:
        self.now_s = self.spent_s = 0.0
        footprint = Footprint(weights_bytes=1 << 20, kv_block_bytes=1 << 14, block_tokens=32)
        known = ModelCosts(profile=profile(model_id=MODEL.model_id), footprint=footprint)
        models = {ModelId(MODEL.model_id): known}
        self.engine = CostEngine(
            models=models,
            costs=costs,
            memory_bytes=1 << 30,
            spend=self.spend,
            now_s=lambda: self.now_s,
        )
        self.load("i-1")

    def spend(self, seconds: float) -> None:
        self.spent_s += seconds

    def load(self, name: str) -> None:
        order = LoadOrder(
            instance_id=InstanceId(name),
            deployment=DeploymentName("chat"),
            model=MODEL,
            model_path=Path(),
            kv_blocks=64,
            context_tokens_max=1024,
            batch_max=8,
        )
        self.engine.load(order, lambda phase, share: None)

    def took_s(self, shape: IterationShape, at_s: float) -> float:
        self.now_s, self.spent_s = at_s, 0.0
        self.engine.measure(InstanceId("i-1"), shape)
        return self.spent_s

    def ends(self, began_s: float, at_s: float, computes_s: float) -> float:
        """Compute until then, for so long since the load began; how much longer the load takes."""
        while self.now_s < min(at_s, began_s + computes_s):
            self.now_s += self.took_s(DECODE, self.now_s)
        self.now_s = at_s
        return self.engine.more_load_s()


def test_a_pace_repeats_and_is_even_without_factors() -> None:
    pace = Pace(window_s=0.5, factors=(1.0, 3.0))
    assert [pace.at(at_s) for at_s in (0.0, 0.49, 0.5, 0.99, 1.0, 1.5)] == [1, 1, 3, 3, 1, 3]
    assert Pace().at(7.0) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Pace(window_s=0.0, factors=(1.0,)),
        lambda: Pace(factors=(1.0, 0.0)),
        lambda: NodeCosts(load_slowdown=0.0),
        lambda: NodeCosts(overhead_s=-0.1),
    ],
)
def test_costs_that_cannot_be_meant_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=r"must be|needs"):
        wrong()


def test_every_cost_is_added_where_it_belongs() -> None:
    plain_s = {shape: Timed(NodeCosts()).took_s(shape, 100.0) for shape in (DECODE, PREFILL)}
    costs = NodeCosts(
        factor=2.0,
        prefill_factor=1.5,
        overhead_s=0.25,
        priming_s=1.0,
        load_s=5.0,
        load_slowdown=3.0,
        pace=Pace(window_s=10.0, factors=(1.0, 2.0)),
    )
    timed = Timed(costs)
    assert timed.took_s(DECODE, 25.0) == pytest.approx(2 * plain_s[DECODE] + 1.25)
    assert timed.took_s(PREFILL, 25.0) == pytest.approx(3 * plain_s[PREFILL] + 1.25)
    assert timed.took_s(DECODE, 15.0) == pytest.approx(4 * plain_s[DECODE] + 1.5)
    timed.now_s = 20.0
    timed.load("i-2")
    assert timed.took_s(DECODE, 24.9) == pytest.approx(6 * plain_s[DECODE] + 1.75)
    assert timed.took_s(DECODE, 25.1) == pytest.approx(2 * plain_s[DECODE] + 1.25)


def test_parts_take_as_long_as_the_whole_but_for_what_each_part_takes() -> None:
    costs = NodeCosts(swap_s=0.08, swap_part_s=0.001, load_bytes_per_s=100 * 2**20)

    def spent_s(*shares: float) -> float:
        timed = Timed(costs)
        timed.spent_s = 0.0
        for share in shares:
            timed.engine.swap(InstanceId("i-1"), share)
        return timed.spent_s

    assert spent_s(0.0) == pytest.approx(0.081)
    assert spent_s(0.75, 0.5, 0.25, 0.0) == pytest.approx(0.084)
    assert spent_s(0.0, 0.5, 1.0) == pytest.approx(0.081 + 1.002), "100 MiB come in 1 s"


def test_jitter_is_drawn_alike_for_the_same_seed_and_never_takes_more_than_half() -> None:
    plain_s = Timed(NodeCosts()).took_s(DECODE, 0.0)

    def drawn(seed: int) -> list[float]:
        jitter = Jitter(decode_s=(0.0, 0.5, -1e9), seed=seed)
        timed = Timed(NodeCosts(jitter=jitter))
        return [timed.took_s(DECODE, 0.0) for _ in range(60)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert sorted(set(drawn(1))) == pytest.approx([plain_s / 2, plain_s, plain_s + 0.5])
    assert Timed(NodeCosts(jitter=Jitter(decode_s=(9.0,)))).took_s(PREFILL, 0.0) < 9.0


def test_jitter_may_be_a_share_of_what_the_engine_takes() -> None:
    plain_s = {shape: Timed(NodeCosts()).took_s(shape, 0.0) for shape in (DECODE, PREFILL)}
    timed = Timed(NodeCosts(jitter=Jitter(decode_shares=(0.25,), prefill_shares=(-0.1,))))
    assert timed.took_s(DECODE, 0.0) == pytest.approx(1.25 * plain_s[DECODE])
    assert timed.took_s(PREFILL, 0.0) == pytest.approx(0.9 * plain_s[PREFILL])


def test_measured_jitter_lengthens_nothing_in_the_mean() -> None:
    for shares in (JITTER.decode_shares, JITTER.prefill_shares):
        assert abs(sum(shares)) / len(shares) < 1e-9


def test_a_load_is_longer_by_the_share_of_its_time_in_which_the_node_computes() -> None:
    """All along, for 1.5 s of it, and not at all, but for a turn that was over by then."""
    for computes_s, seconds in ((9.0, 4.0), (1.5, 3.0), (0.0, 2.0)):
        timed = Timed(
            NodeCosts(overhead_s=0.01, load_s=2.0, load_bytes_per_s=1e18, load_stretch=2.0)
        )
        timed.now_s = 100.0
        timed.took_s(DECODE, 100.0)
        timed.now_s += timed.spent_s
        timed.spent_s = 0.0
        timed.load("i-2")
        began_s, ends_s = timed.now_s, timed.now_s + timed.spent_s
        while more_s := timed.ends(began_s, ends_s, computes_s):
            ends_s += more_s
        assert ends_s - began_s == pytest.approx(seconds, rel=0.02)


def test_a_turn_of_several_decodes_lasts_until_the_last_of_them() -> None:
    timed = Timed(NodeCosts(overhead_s=0.5))
    timed.now_s = 100.0
    request = EngineRequest(
        request_id=RequestId("r-1"),
        prompt_tokens=(1, 2, 3),
        sampling=SamplingParams(max_tokens=4, ignore_eos=True),
    )
    timed.engine.submit(InstanceId("i-1"), request)
    timed.engine.step(InstanceId("i-1"), 64)
    timed.spent_s = 0.0
    assert timed.engine.step(InstanceId("i-1"), 0, 3).iterations == 3
    assert timed.spent_s > 1.5
    assert timed.engine.working_until_s == pytest.approx(100.0 + timed.spent_s)


RAW = json.loads(resources.files("mesh.sim").joinpath("llm_mesh_testbed.json").read_text())
TABLES = [(name, key) for name in RAW["models"] for key in RAW["models"][name]["hardware"]]


@pytest.mark.parametrize(("name", "key"), TABLES)
def test_every_measured_point_is_predicted_as_measured(name: str, key: str) -> None:
    table = RAW["models"][name]["hardware"][key]
    times = Times(known_model(name).costs[key].profile)
    prefill = table["prefill"]
    for tokens, seconds in zip(prefill["tokens"], prefill["seconds"], strict=True):
        assert times.prefill_s(tokens, 0) == pytest.approx(seconds)
    for row in table["decode"]:
        for batch, seconds in zip(row["batch"], row["seconds"], strict=True):
            assert times.decode_s(batch, row["context_tokens"]) == pytest.approx(seconds)


@pytest.mark.parametrize(("name", "key"), TABLES)
def test_the_chunks_of_a_prompt_take_about_as_long_as_the_whole(name: str, key: str) -> None:
    times = Times(known_model(name).costs[key].profile)
    for tokens in (1024, 4096):
        whole_s = times.prefill_s(tokens, 0)
        chunks_s = sum(times.prefill_s(512, past) for past in range(0, tokens, 512))
        assert whole_s * 0.99 <= chunks_s <= whole_s * 2.1


def test_kv_bytes_follow_from_the_shape() -> None:
    """512 KiB a token for a 7B model with all of its heads, 112 KiB for the 3B one."""
    kib = {name: known.info.kv_bytes_per_token() / 1024 for name, known in known_models().items()}
    assert kib == {"llama-3.2-3b": 112, "llama-2-7b": 512, "llama-3.1-8b": 128, "llama-2-13b": 800}


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(NotFound, match="gpt-9"):
        known_model("gpt-9")


STRETCH = 2.4
CONTENDED = f"""
seed = 1

[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 60
costs = {{ factor = 0.12, load_s = 0.26, load_bytes_per_s = inf, load_stretch = {STRETCH} }}

[[deployments]]
name = "m"
count = 20
model = "llama-3.2-3b"
context_tokens_max = 1024
slo = {{ ttft_s = 4.0, tpot_s = 0.3 }}

[workload]
duration_s = 100
requests_per_s = 2
input_tokens = [20, 34]
output_tokens = [16, 96]
"""


def test_loads_of_20_models_under_contention_are_expected_to_a_tenth(tmp_path: Path) -> None:
    """Memory for 8 of them; loads of 0.26 to 0.62 s. First loads count, and so does who comes
    amid a load, which nobody knows when it begins.
    """
    loads: list[tuple[float, float, float]] = []

    class Loads:
        def record(self, now_s: float, event: object, actions: object) -> None:
            if isinstance(event, NodeReported) and isinstance(event.report, InstanceLoaded):
                instance = cell.core.cell.instances[event.report.instance_id]
                took_s = now_s - instance.load_started_s
                loads.append((took_s, instance.load_expected_s, instance.load_s))

    made = scenario(tmp_path, CONTENDED)
    cell = VirtualCell(plan(made), recorders=(Loads(),))
    cell.run(tuple(arrivals(made)))
    took_s = [took_s for took_s, _, _ in loads]
    assert len(loads) >= 100
    assert max(took_s) > 2.2 * min(took_s)
    assert fmean(abs(expected_s - s) / s for s, expected_s, _ in loads) < 0.1
    assert fmean(abs(median(took_s) - s) / s for s in took_s) > 0.1
    (node,) = cell.core.cell.nodes.values()
    assert cell.core.cell.expectations.slowdown(node.hello) == pytest.approx(STRETCH - 1, rel=0.15)


CELL = """
seed = 1

[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 14
shares_weights = true

[[deployments]]
name = "chat"
count = 4
model = "llama-3.2-3b"
context_tokens_max = 4096
slo = { ttft_s = 8.0, ttft_tokens_per_s = 256, tpot_s = 0.5 }
scaling = { keep_alive_s = 30.0 }

[workload]
duration_s = 60
requests_per_s = 0.5
input_tokens = [16, 200]
output_tokens = [1, 40]
"""
"""Weights of 6 GiB, and 1.5 GiB of each instance's own."""


class AtOnce:
    """Counts the instances that are loaded."""

    def __init__(self) -> None:
        self.most = 0
        self.run: FaultyRun | None = None

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if self.run is not None:
            instances = self.run.cell.core.cell.instances.values()
            self.most = max(self.most, sum(instance.is_loaded for instance in instances))


@pytest.mark.parametrize(("shares", "at_once"), [(True, 4), (False, 1)])
def test_a_node_holds_all_that_share_a_model(tmp_path: Path, shares: bool, at_once: int) -> None:
    text = CELL if shares else CELL.replace("shares_weights = true", "")
    cell, counted = scenario(tmp_path, text), AtOnce()

    def started(start: ControllerStart) -> tuple[Recorder, ...]:
        return (counted,)

    counted.run = FaultyRun(plan(cell), check=True, started=started)
    outcomes = counted.run.run(arrivals(cell))
    assert all(isinstance(outcome.end, FinishReason) for outcome in outcomes)
    (node,) = counted.run.cell.nodes
    assert counted.most == at_once
    assert (node.engine.loads == 4) is shares, "else they take each other's place"
