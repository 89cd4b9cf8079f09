"""What is said of refusals is what the nodes say, one by one, and looking changes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.outcome import Outcome
from mesh.domain.reasons import RefusalReason
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.refusals import RefusalChecks, RefusalCounts
from mesh.sim.scenario import plan
from tests.sim.scenarios import SMALL, scenario

FLOOD = [Arrival(n * 0.01, f"chat-{n % 3 + 1}", 500, 60) for n in range(90)]


@pytest.fixture
def made(tmp_path: Path) -> CellPlan:
    return plan(replace(scenario(tmp_path), ideal=True))


def looked_at(
    made: CellPlan, work: list[Arrival], drawn_max: int = 1000
) -> tuple[tuple[Outcome, ...], RefusalCounts]:
    looks = RefusalChecks(drawn_max=drawn_max)
    cell = VirtualCell(made, recorders=(looks,))
    looks.attach(cell)
    outcomes = cell.run(work)
    return outcomes, looks.counts(outcomes)


def test_looking_changes_nothing_and_every_refusal_is_looked_at(made: CellPlan) -> None:
    outcomes, found = looked_at(made, FLOOD)
    assert outcomes == VirtualCell(made).run(FLOOD)
    refused = sum(isinstance(o.end, RefusalReason) for o in outcomes)
    assert found.reasons_drawn == refused > 20
    assert looked_at(made, FLOOD, drawn_max=7)[1].reasons_drawn == 7


def test_nothing_was_refused(made: CellPlan) -> None:
    _, found = looked_at(made, FLOOD[:1])
    assert (found.refused_beside_free_link, found.refusal_reasons_agree) == (0, None)


def test_without_memory_anywhere_memory_full_is_the_true_reason(tmp_path: Path) -> None:
    """The nodes hold one instance each; the other models find them taken, and no other reason."""
    text = SMALL.replace("= 64", "= 17").replace("= 40\n", "= 17\n")
    made = plan(replace(scenario(tmp_path, text), ideal=True, policy="sllm+cpu"))
    long = [Arrival(0.0, f"chat-{n}", 100, 900) for n in (1, 2, 3)]
    outcomes, found = looked_at(made, [*long, Arrival(8.0, "small", 100, 10)])
    (refused,) = (o for o in outcomes if not o.finished)
    assert (refused.deployment, refused.end) == ("small", RefusalReason.MEMORY_FULL)
    assert found == RefusalCounts(refused_beside_free_link=0, reasons_drawn=1, reasons_agreeing=1)


def test_requests_refused_beside_idle_gpus_are_counted_and_told_why(tmp_path: Path) -> None:
    """No node is as quick as they want their tokens."""
    text = SMALL.replace("= 4096\n", "= 4096\nslo = { ttft_s = 2.0, tpot_s = 0.001 }\n")
    made = plan(replace(scenario(tmp_path, text), ideal=True))
    outcomes, found = looked_at(made, [Arrival(n * 1.0, "small", 100, 10) for n in range(3)])
    assert [o.end for o in outcomes] == [RefusalReason.TPOT_EXCEEDED] * 3
    assert found == RefusalCounts(refused_beside_free_link=3, reasons_drawn=3, reasons_agreeing=3)


def test_a_request_that_is_late_for_its_own_load_alone_is_not_counted(tmp_path: Path) -> None:
    text = SMALL.replace("= 40\n", "= 40\ncosts = { load_s = 4.0 }\n", 1)
    text = text.replace('model = "llama-2-7b"', 'model = "llama-2-7b"\ndevices = ["gpu"]')
    made = plan(replace(scenario(tmp_path, text), ideal=True))
    (outcome,), found = looked_at(made, [Arrival(0.0, "chat-1", 100, 10)])
    assert outcome.ttft_s is not None
    assert outcome.ttft_s > 4.0
    assert found.refused_beside_free_link == 0


SHARING = """
seed = 1

[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 15.5
shares_weights = true
costs = { load_s = 0.1, load_bytes_per_s = 2e9 }

[[deployments]]
name = "chat"
count = 2
model = "llama-3.2-3b"
context_tokens_max = 4096
slo = { ttft_s = 4.5, tpot_s = 0.5, cold_start = "refuse" }

[[deployments]]
name = "other"
model = "llama-3.2-3b"
context_tokens_max = 2048

[workload]
duration_s = 10
requests_per_s = 2.0
input_tokens = [16, 600]
output_tokens = [1, 40]
"""
"""Weights of 6 GiB, which are loaded in 3.3 s, and 1.5 GiB of each instance's own."""


def test_weights_that_go_for_a_load_are_of_no_use_to_it(tmp_path: Path) -> None:
    """The load of `chat-2` comes behind that of `other`; it would be in time with the weights of
    `chat-1`, which has to go for it.
    """
    made = plan(scenario(tmp_path, SHARING))
    came = (0.0, "chat-1"), (10.0, "other"), (11.0, "chat-2")
    outcomes, found = looked_at(made, [Arrival(at_s, name, 100, 10) for at_s, name in came])
    assert [o.end for o in outcomes if not o.finished] == [RefusalReason.FIRST_TOKEN_LATE]
    assert (found.reasons_drawn, found.reasons_agreeing) == (1, 1)


CLASSES = """
seed = 1
slo_mix = "1.0:0.6,0.001:0.2,best:0.2"

[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 40

[[deployments]]
name = "chat"
model = "llama-3.2-3b"
context_tokens_max = 4096

[workload]
duration_s = 10
requests_per_s = 2.0
input_tokens = [16, 600]
output_tokens = [1, 40]
"""


def test_a_refusal_is_held_against_the_limits_of_its_class(tmp_path: Path) -> None:
    """No node is as quick as the second class wants its tokens. The others find a place: best
    effort has all of them, and gives one up.
    """
    made = plan(replace(scenario(tmp_path, CLASSES), ideal=True))
    made = replace(made, limits=replace(made.limits, batch_max=4))
    loose, tight, best = made.deployments[0].spec.classes
    work = [Arrival(0.0, "chat", 100, 900, best) for _ in range(8)]
    work += [Arrival(20.0 + n, "chat", 100, 10, (loose, tight)[n % 2]) for n in range(6)]
    outcomes, found = looked_at(made, work)
    refused = [o for o in outcomes if not o.finished]
    assert [(o.slo.name, o.end) for o in refused] == [(tight.name, RefusalReason.TPOT_EXCEEDED)] * 3
    assert (found.reasons_drawn, found.reasons_agreeing) == (3, 3)


def test_best_effort_that_waits_for_too_long_was_in_the_way_of_nobody(tmp_path: Path) -> None:
    made = plan(replace(scenario(tmp_path, CLASSES), ideal=True))
    made = replace(made, limits=replace(made.limits, batch_max=4))
    best = replace(made.deployments[0].spec.classes[2], ttft_s=5.0)
    outcomes, found = looked_at(made, [Arrival(0.0, "chat", 100, 900, best) for _ in range(8)])
    refused = [o.end for o in outcomes if not o.finished]
    assert refused == [RefusalReason.QUEUE_TIMEOUT] * 4
    assert found == RefusalCounts(refused_beside_free_link=0, reasons_drawn=4, reasons_agreeing=4)
