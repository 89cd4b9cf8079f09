"""A plan is the trace's calls, at their times, with their lengths, to known deployments."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput, NotFound
from mesh_workloads import replay_plan
from mesh_workloads.generating import LLM_MESH, generate
from mesh_workloads.mapping import POPULARITY
from mesh_workloads.replay_plan import RUN_S_MAX, Call, Replay, fitted, plan_replay
from mesh_workloads.scaling import Scale
from mesh_workloads.trace import Arrival, Trace

TRACE = Trace(
    name="small",
    arrivals=(
        Arrival(t_s=0.5, function=1, input_tokens=100, output_tokens=50),
        Arrival(t_s=1.5, function=0, input_tokens=3000, output_tokens=200),
        Arrival(t_s=4.0, function=1, input_tokens=7, output_tokens=900),
    ),
    duration_s=5.0,
    labels=("rare", "busy"),
    left_out=2,
)
CONTEXTS = {"chat": 2048, "code": 512}
ASKED = Replay(mapping=POPULARITY)


def test_calls_have_the_trace_s_times_and_lengths() -> None:
    plan = plan_replay(TRACE, ASKED, {"chat": 4096, "code": 4096})
    assert plan.calls == (
        Call(
            number=0,
            at_s=0.5,
            deployment="chat",
            function="busy",
            input_tokens=100,
            output_tokens=50,
        ),
        Call(
            number=1,
            at_s=1.5,
            deployment="code",
            function="rare",
            input_tokens=3000,
            output_tokens=200,
        ),
        Call(
            number=2,
            at_s=4.0,
            deployment="chat",
            function="busy",
            input_tokens=7,
            output_tokens=900,
        ),
    )
    assert (plan.duration_s, plan.functions, plan.left_out, plan.too_long) == (5.0, 2, 2, 0)
    assert plan.deployments == ("chat", "code")


def test_what_no_context_holds_is_cut_or_only_counted() -> None:
    cut = plan_replay(TRACE, ASKED, CONTEXTS)
    assert (cut.too_long, cut.clipped) == (1, True)
    assert (cut.calls[1].input_tokens, cut.calls[1].output_tokens) == (312, 200)
    counted = plan_replay(TRACE, Replay(mapping=POPULARITY, clip=False), CONTEXTS)
    assert (counted.too_long, counted.clipped) == (1, False)
    assert (counted.calls[1].input_tokens, counted.calls[1].output_tokens) == (3000, 200)
    # A prompt that fits keeps its length; its answer ends with the context.
    short = plan_replay(TRACE, Replay(mapping=POPULARITY, clip=False), {"chat": 120, "code": 4096})
    assert (short.calls[0].input_tokens, short.calls[0].output_tokens) == (100, 20)


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(2, 4096))
def test_a_cut_request_fits_and_keeps_a_token_of_each(prompt: int, answer: int, most: int) -> None:
    cut = fitted(prompt, answer, most)
    assert min(cut) >= 1
    assert sum(cut) <= most
    assert cut == (prompt, answer) or sum(cut) == most


def test_answers_are_forced_or_end_by_themselves_below_a_cap() -> None:
    def answers(asked: Replay) -> list[int]:
        return [c.output_tokens for c in plan_replay(TRACE, asked, CONTEXTS).calls]

    assert answers(Replay(mapping=POPULARITY, output_tokens_max=60)) == [50, 60, 60]
    assert answers(Replay(mapping=POPULARITY, forced=False)) == [50, 200, 900]
    capped = Replay(mapping=POPULARITY, forced=False, output_tokens_max=60)
    assert answers(capped) == [60, 60, 60]
    assert not plan_replay(TRACE, capped, CONTEXTS).forced


def test_the_deployments_asked_for_are_the_only_ones_called() -> None:
    plan = plan_replay(TRACE, Replay(deployments=("code",)), CONTEXTS)
    assert {call.deployment for call in plan.calls} == {"code"}
    reverse = Replay(mapping=POPULARITY, deployments=("code", "chat"))
    assert plan_replay(TRACE, reverse, CONTEXTS).calls[0].deployment == "code"


def test_a_table_is_followed() -> None:
    plan = plan_replay(TRACE, Replay(mapping={"rare": "chat", "*": "code"}), CONTEXTS)
    assert [call.deployment for call in plan.calls] == ["code", "chat", "code"]


def test_a_plan_is_scaled_before_popularity_is_counted() -> None:
    trace = generate(LLM_MESH, seed=1)
    asked = Replay(mapping=POPULARITY, scale=Scale(rate=0.01, time=0.1, seed=4))
    plan = plan_replay(trace, asked, CONTEXTS)
    assert plan.duration_s == pytest.approx(180.0)
    assert len(plan.calls) == len(Scale(rate=0.01, seed=4).of(trace).arrivals)
    assert [call.number for call in plan.calls] == list(range(len(plan.calls)))
    assert plan == plan_replay(trace, asked, CONTEXTS)


def test_unknown_deployments_are_named() -> None:
    with pytest.raises(NotFound, match=r"2 of the 3 deployments .*: nil, void") as caught:
        plan_replay(TRACE, Replay(deployments=("nil", "chat", "void")), CONTEXTS)
    assert "chat, code" in caught.value.hint
    with pytest.raises(NotFound, match="no deployments"):
        plan_replay(TRACE, ASKED, {})


def test_parameters_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no mapping 'random'"):
        Replay(mapping="random")
    with pytest.raises(InvalidInput, match="output_tokens_max is 0"):
        Replay(output_tokens_max=0)
    with pytest.raises(InvalidInput, match="asked for twice"):
        plan_replay(TRACE, Replay(deployments=("chat", "chat")), CONTEXTS)


def test_a_replay_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"would last 90000 s; at most 86400"):
        plan_replay(replace(TRACE, duration_s=RUN_S_MAX + 3600), ASKED, CONTEXTS)
    monkeypatch.setattr(replay_plan, "CALLS_MAX", 2)
    with pytest.raises(InvalidInput, match=r"would send 3 calls; at most 2"):
        plan_replay(TRACE, ASKED, CONTEXTS)
