"""Bursts: the same for the same seed, as much as was asked for, and with pauses."""

from itertools import pairwise

import pytest

from mesh.compute.times import Times
from mesh.evaluation import bursts as arriving
from mesh.evaluation.bursts import INPUT_TOKENS, OUTPUT_TOKENS, calls_of, request_s
from mesh.evaluation.fidelity.live import BATCH, SLOS, deployments
from mesh.sim.cluster import Arrival
from tests.support.profiles import profile

SECONDS = 200.0


def bursts(*, load: float, seed: int) -> tuple[Arrival, ...]:
    times = Times(profile())
    return arriving.bursts(tuple(SLOS), times, BATCH, seconds=SECONDS, load=load, seed=seed)


def test_the_same_seed_gives_the_same_arrivals_in_order_and_in_bounds() -> None:
    made = bursts(load=1.0, seed=3)
    assert made == bursts(load=1.0, seed=3)
    assert made != bursts(load=1.0, seed=4)
    assert [a.at_s for a in made] == sorted(a.at_s for a in made)
    assert all(0.0 <= a.at_s <= SECONDS for a in made)
    assert all(INPUT_TOKENS[0] <= a.input_tokens <= INPUT_TOKENS[1] for a in made)
    assert all(OUTPUT_TOKENS[0] <= a.output_tokens <= OUTPUT_TOKENS[1] for a in made)
    assert {a.deployment for a in made} == set(SLOS)


@pytest.mark.parametrize("load", [0.5, 2.0])
def test_there_is_as_much_to_compute_as_asked_for(load: float) -> None:
    times = Times(profile())
    made = bursts(load=load, seed=1)
    seconds = sum(request_s(times, a.input_tokens, a.output_tokens, BATCH) for a in made)
    assert seconds == pytest.approx(load * SECONDS, rel=0.05)


def test_each_deployment_pauses_between_its_bursts() -> None:
    made = bursts(load=8.0, seed=1)
    for name in SLOS:
        times = [a.at_s for a in made if a.deployment == name]
        pauses = [b - a for a, b in pairwise(times) if b - a >= 2.5]
        assert 5 <= len(pauses) <= 40


def test_calls_have_prompts_of_their_arrivals_lengths() -> None:
    made = bursts(load=0.5, seed=2)
    calls = calls_of(made, SLOS, seed=2)
    assert calls == calls_of(made, SLOS, seed=2)
    assert [(c.at_s, c.deployment, len(c.prompt_tokens), c.output_tokens) for c in calls] == [
        (a.at_s, a.deployment, a.input_tokens, a.output_tokens) for a in made
    ]
    assert all(call.slo == SLOS[call.deployment] for call in calls)


def test_every_deployment_may_go_to_nothing() -> None:
    specs = deployments("pkg://some/model.gguf")
    assert [spec.name for spec in specs] == list(SLOS)
    assert all(spec.scaling.replicas_min == 0 for spec in specs)
