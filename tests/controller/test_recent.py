"""The last minutes in numbers: windows that end, bounds, and a quarter of an hour of samples."""

import pytest

from mesh.controller.recent import CALLS_MAX, SAMPLES_MAX, WINDOW_S, Recent
from mesh.domain.reasons import RefusalReason


def test_a_window_counts_what_ended_within_it_by_deployment_and_together() -> None:
    recent = Recent()
    for n in range(100):
        recent.finished(1.0, "chat", ttft_s=0.01 * (n + 1), tpot_s=0.1, met=n < 75)
    recent.refused(2.0, "code", RefusalReason.MEMORY_FULL)
    chat = recent.calls(WINDOW_S, ("chat",))
    assert (chat.finished, chat.attainment) == (100, 0.75)
    assert chat.ttft_p50_s == pytest.approx(0.51)
    assert chat.ttft_p95_s == pytest.approx(0.96)
    assert recent.calls(WINDOW_S).refused == ((RefusalReason.MEMORY_FULL, 1),)
    both = recent.calls(WINDOW_S, ("chat", "code"))
    assert both == recent.calls(WINDOW_S), "all together"
    later = recent.calls(WINDOW_S + 1.5)
    assert (later.finished, later.attainment, later.tpot_p50_s) == (0, None, None)
    assert later.refused, "the refusal came later"
    assert not recent.calls(WINDOW_S + 3.0).refused


def test_a_flood_and_a_long_life_cost_no_memory() -> None:
    recent = Recent()
    for n in range(CALLS_MAX + 10):
        recent.refused(1.0, "chat", RefusalReason.QUEUE_FULL)
        recent.sample(float(n), float(n), running=1, queued=2)
    assert recent.calls(1.0, ("chat",)).refused == ((RefusalReason.QUEUE_FULL, CALLS_MAX),)
    assert len(recent.samples) == SAMPLES_MAX
    recent.forget("chat")
    assert not recent.calls(1.0, ("chat",)).refused


def test_a_sample_gives_rates_since_the_one_before() -> None:
    recent = Recent()
    recent.sample(10.0, 1000.0, running=0, queued=0)
    recent.tokens(30)
    recent.refused(11.0, "chat", RefusalReason.NO_NODE)
    recent.sample(12.0, 1002.0, running=1, queued=3)
    first, second = recent.samples
    assert (first.tokens_per_s, first.attainment) == (0.0, None)
    assert (second.tokens_per_s, second.refused_per_s) == (15.0, 0.5)
    assert (second.running, second.queued) == (1, 3)
