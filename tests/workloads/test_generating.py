"""Generated workloads: in order, the same by seed, with the statistics that they claim."""

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads import generating, scaling
from mesh_workloads.generating import LLM_MESH, Workload, generate
from mesh_workloads.processes import POISSON, Clustered, Diurnal, OnOff
from mesh_workloads.prompts import Prompts, encoded, sentences_shipped
from mesh_workloads.rates import Lognormal, Rates, Zipf
from mesh_workloads.sampling import load_for
from mesh_workloads.scaling import Scale
from mesh_workloads.trace import TOKENS_MAX, Arrival, Trace

LONG = replace(LLM_MESH, duration_s=10_000.0)
"""Long enough for statistics."""


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 20),
    st.floats(0.01, 5),
    st.floats(1, 200),
    st.sampled_from([POISSON, Clustered(dispersion=5.0), OnOff(duty=0.2, on_s=3.0)]),
    st.sampled_from([Diurnal(), Diurnal(swing=0.9, period_s=50.0, phase=0.3)]),
    st.integers(0, 2**64),
)
def test_any_workload_is_in_order_and_the_same_again(
    functions: int,
    rate_per_s: float,
    duration_s: float,
    process: Clustered | OnOff,
    diurnal: Diurnal,
    seed: int,
) -> None:
    workload = Workload(
        name="w",
        functions=functions,
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        rates=Zipf(exponent=1.0),
        process=process,
        diurnal=diurnal,
    )
    trace = generate(workload, seed)
    assert trace == generate(workload, seed)
    times = [a.t_s for a in trace.arrivals]
    assert times == sorted(times)
    assert all(0 <= t <= duration_s for t in times)
    assert all(0 <= a.function < functions for a in trace.arrivals)
    assert all(a.input_tokens >= 1 and a.output_tokens >= 1 for a in trace.arrivals)


PINNED = [(0.107925, 17, 399, 407), (0.359138, 0, 399, 423), (0.513889, 0, 1031, 56)]


def test_the_first_arrivals_are_these_on_every_python() -> None:
    first = generate(replace(LLM_MESH, duration_s=60.0), seed=1).arrivals[:3]
    found = [(a.t_s, a.function, a.input_tokens, a.output_tokens) for a in first]
    assert found == PINNED


def test_another_seed_gives_other_arrivals() -> None:
    short = replace(LLM_MESH, duration_s=60.0)
    assert generate(short, 1).arrivals != generate(short, 2).arrivals


def test_rates_of_functions_are_as_stated() -> None:
    workload = replace(LONG, process=POISSON)
    trace = generate(workload, seed=2)
    assert trace.summary().rate_per_s == pytest.approx(workload.rate_per_s, rel=0.02)
    counts = Counter(a.function for a in trace.arrivals)
    for function, rate_per_s in enumerate(workload.rates_per_s()):
        expected = rate_per_s * workload.duration_s
        assert abs(counts[function] - expected) <= 5 * math.sqrt(expected) + 1


def test_dispersion_is_as_stated() -> None:
    workload = replace(LONG, process=OnOff(duty=0.4, on_s=20.0))
    trace = generate(workload, seed=3)
    for window_s in (1.0, 10.0, 60.0):
        stated = workload.index_of_dispersion(window_s)
        assert trace.dispersion(window_s) == pytest.approx(stated, rel=0.2)


def test_the_stated_dispersion_is_near_that_of_the_load_it_imitates() -> None:
    stated = [LLM_MESH.index_of_dispersion(window_s) for window_s in (1.0, 10.0, 60.0)]
    assert stated == pytest.approx([1.51, 6.17, 32.6], rel=0.16)


def test_lengths_and_shares_are_those_of_the_load_it_imitates() -> None:
    summary = generate(replace(LONG, process=POISSON), seed=4).summary()
    assert 120 <= summary.functions <= 128
    assert summary.busiest_tenth == pytest.approx(0.754, abs=0.06)
    assert summary.input_tokens.p50 == pytest.approx(980, rel=0.1)
    assert summary.output_tokens.p50 == pytest.approx(140, rel=0.15)
    assert summary.output_tokens.p99 == pytest.approx(603, rel=0.05)


def test_the_day_s_swing_is_in_the_arrivals() -> None:
    workload = replace(LONG, process=POISSON, diurnal=Diurnal(swing=0.8, period_s=5_000.0))
    trace = generate(workload, seed=5)
    quarters = Counter(int(a.t_s % 5_000 // 1250) for a in trace.arrivals)
    # The sine's mean over the first and the third quarter is 2 / pi and -2 / pi.
    even = len(trace.arrivals) / 4
    assert quarters[0] == pytest.approx(even * (1 + 0.8 * 2 / math.pi), rel=0.05)
    assert quarters[2] == pytest.approx(even * (1 - 0.8 * 2 / math.pi), rel=0.05)
    assert len(trace.arrivals) == pytest.approx(workload.rate_per_s * 10_000, rel=0.02)


def test_a_function_keeps_its_requests_whatever_the_others() -> None:
    one = Workload(
        name="w", functions=1, rate_per_s=1.0, duration_s=50.0, rates=Lognormal(sigma=0.0)
    )
    two = replace(one, functions=2, rate_per_s=2.0)
    first = [a for a in generate(two, 9).arrivals if a.function == 0]
    assert first == list(generate(one, 9).arrivals)


def test_loads_can_be_cut_from_a_generated_trace() -> None:
    trace = generate(LLM_MESH, seed=1)
    rates = [len(load_for(trace, models).arrivals) for models in (32, 64, 128)]
    assert rates == sorted(rates)
    assert rates[2] == len(trace.arrivals)


@pytest.mark.parametrize(
    ("duration_s", "rate_per_s"), [(0.0, 1.0), (math.nan, 1.0), (1e9, 1.0), (1.0, 1e9)]
)
def test_a_workload_out_of_bounds_is_refused(duration_s: float, rate_per_s: float) -> None:
    with pytest.raises(InvalidInput, match="workload llm-mesh"):
        replace(LLM_MESH, duration_s=duration_s, rate_per_s=rate_per_s)


def test_more_arrivals_than_a_trace_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(LLM_MESH, duration_s=60.0)
    monkeypatch.setattr(generating, "ARRIVALS_MAX", 10)
    with pytest.raises(InvalidInput, match="more than 10 arrivals"):
        generate(short, 1)


LAWS = st.one_of(
    st.builds(Zipf, exponent=st.floats(0, 10)), st.builds(Lognormal, sigma=st.floats(0, 10))
)


@given(LAWS, st.integers(1, 300), st.floats(0.001, 1000))
def test_rates_descend_and_add_up(law: Rates, functions: int, total_per_s: float) -> None:
    rates = law.rates_per_s(functions, total_per_s)
    assert len(rates) == functions
    assert math.fsum(rates) == pytest.approx(total_per_s)
    assert min(rates) > 0
    assert all(a >= b or a == pytest.approx(b) for a, b in pairwise(rates))


def test_zipf_falls_with_the_rank() -> None:
    rates = Zipf(exponent=2.0).rates_per_s(10, 1.0)
    assert rates[0] / rates[4] == pytest.approx(25.0)


def test_the_logarithms_of_lognormal_rates_deviate_by_sigma() -> None:
    logs = [math.log(rate) for rate in Lognormal(sigma=1.5).rates_per_s(5000, 1.0)]
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / len(logs))
    assert deviation == pytest.approx(1.5, rel=0.01)


def test_the_busiest_tenth_has_its_share() -> None:
    """What the LLM-Mesh load's busiest 13 of 128 functions have: 75 %."""
    rates = Lognormal(sigma=1.91).rates_per_s(128, 1.0)
    assert sum(rates[:13]) == pytest.approx(0.754, abs=0.06)


@pytest.mark.parametrize(
    ("law", "functions", "total_per_s"),
    [
        (Zipf(exponent=-1.0), 1, 1.0),
        (Lognormal(sigma=math.nan), 1, 1.0),
        (Zipf(exponent=1.0), 0, 1.0),
        (Zipf(exponent=1.0), 1_000_000, 1.0),
        (Zipf(exponent=1.0), 1, 0.0),
        (Zipf(exponent=1.0), 1, math.inf),
    ],
)
def test_parameters_are_bounded(law: Rates, functions: int, total_per_s: float) -> None:
    with pytest.raises(InvalidInput):
        law.rates_per_s(functions, total_per_s)


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


PROMPTS = Prompts(encoded(by_bytes), seed=1)


@given(number=st.integers(0, 10**6), tokens=st.integers(1, 5000))
def test_a_prompt_has_its_length_and_the_text_s_sentences(number: int, tokens: int) -> None:
    prompt = PROMPTS.prompt(number, tokens)
    assert len(prompt) == tokens
    text = bytes(prompt).decode()
    whole = re.match(f"(?: (?:{'|'.join(map(re.escape, sentences_shipped()))}))*", text)
    assert whole is not None
    rest = text[whole.end() :]
    assert any(f" {sentence}".startswith(rest) for sentence in sentences_shipped())


def test_prompts_differ_and_are_the_same_in_every_run() -> None:
    some = [PROMPTS.prompt(number, 200) for number in range(500)]
    assert len(set(some)) > 480
    assert some == [Prompts(encoded(by_bytes), seed=1).prompt(number, 200) for number in range(500)]
    assert some[0] != Prompts(encoded(by_bytes), seed=2).prompt(0, 200)


def test_the_text_is_many_sentences() -> None:
    sentences = sentences_shipped()
    assert len(set(sentences)) == len(sentences) == 50


def test_a_tokenizer_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no tokens"):
        encoded(lambda text: [])


TRACE = generate(LLM_MESH, seed=3)


def lengths(trace: Trace) -> list[tuple[int, int, int]]:
    return [(a.function, a.input_tokens, a.output_tokens) for a in trace.arrivals]


def test_a_scale_of_one_changes_nothing() -> None:
    assert Scale().of(TRACE) == TRACE


def test_the_time_scale_moves_every_arrival_and_keeps_all() -> None:
    half = Scale(time=0.5).of(TRACE)
    assert half.duration_s == TRACE.duration_s / 2
    assert lengths(half) == lengths(TRACE)
    assert [a.t_s for a in half.arrivals] == [a.t_s * 0.5 for a in TRACE.arrivals]


@given(rate=st.floats(0.05, 0.95), seed=st.integers(0, 99))
def test_thinning_keeps_a_share_of_the_arrivals_in_their_order(rate: float, seed: int) -> None:
    thin = Scale(rate=rate, seed=seed).of(TRACE)
    kept = iter(TRACE.arrivals)
    assert all(arrival in kept for arrival in thin.arrivals)
    expected = rate * len(TRACE.arrivals)
    assert abs(len(thin.arrivals) - expected) < 5 * (expected * (1 - rate)) ** 0.5 + 1
    assert thin == Scale(rate=rate, seed=seed).of(TRACE)


def test_another_seed_leaves_out_others() -> None:
    assert Scale(rate=0.5, seed=1).of(TRACE) != Scale(rate=0.5, seed=2).of(TRACE)


def test_superposition_sends_each_arrival_as_often_and_stays_in_bursts() -> None:
    thrice = Scale(rate=3.0).of(TRACE)
    assert sorted(lengths(thrice)) == sorted(lengths(TRACE) * 3)
    assert thrice.duration_s == TRACE.duration_s
    assert set(TRACE.arrivals) <= set(thrice.arrivals)
    # Laid over itself unturned, its index of dispersion would be three times as high.
    assert thrice.dispersion(10.0) < 2 * TRACE.dispersion(10.0)


def test_a_part_of_a_copy_is_thinned() -> None:
    more = Scale(rate=1.5).of(TRACE)
    assert len(more.arrivals) == pytest.approx(1.5 * len(TRACE.arrivals), rel=0.03)


def test_lengths_are_scaled_and_rounded_to_one_at_least() -> None:
    arrivals = (Arrival(t_s=0.0, function=0, input_tokens=105, output_tokens=3),)
    scaled = Scale(tokens=0.1).of(Trace(name="t", arrivals=arrivals, duration_s=1.0))
    assert lengths(scaled) == [(0, 10, 1)]
    long = Scale(tokens=1000.0).of(
        Trace(
            name="t",
            arrivals=(Arrival(t_s=0.0, function=0, input_tokens=TOKENS_MAX, output_tokens=1),),
            duration_s=1.0,
        )
    )
    assert lengths(long) == [(0, TOKENS_MAX, 1000)]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1001.0])
def test_a_scale_out_of_bounds_is_named(value: float) -> None:
    with pytest.raises(InvalidInput, match="the time scale is"):
        Scale(time=value)
    with pytest.raises(InvalidInput, match="the rate scale is"):
        Scale(rate=value)
    with pytest.raises(InvalidInput, match="the tokens scale is"):
        Scale(tokens=value)


def test_too_many_arrivals_and_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Trace(name="few", arrivals=TRACE.arrivals[:3], duration_s=TRACE.duration_s)
    with pytest.raises(InvalidInput, match="leaves none of the 3 arrivals"):
        Scale(rate=1e-9).of(few)
    with pytest.raises(InvalidInput, match="trace few has no arrivals within 1800 s"):
        Scale().of(replace(few, arrivals=()))
    monkeypatch.setattr(scaling, "ARRIVALS_MAX", 5)
    with pytest.raises(InvalidInput, match="2 times 3 arrivals are more than 5"):
        Scale(rate=2.0).of(few)
