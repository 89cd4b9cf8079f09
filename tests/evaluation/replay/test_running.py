"""A plan's calls reach the cell as they are planned, and their answers become results."""

from dataclasses import replace

import pytest

from mesh.domain.slo import Slo
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.running import Replaying
from mesh_workloads.prompts import Prompts, encoded
from mesh_workloads.replay_plan import Call, ReplayPlan
from tests.cli.views import CHAT_SMALL
from tests.support.token_server import token_server

PROMPTS = Prompts(encoded(lambda text: list(text.encode())))
VIEW = replace(CHAT_SMALL, spec=replace(CHAT_SMALL.spec, slo=Slo(ttft_s=30.0, tpot_s=5.0)))
PLAN = ReplayPlan(
    name="t",
    calls=tuple(
        Call(
            number=n,
            at_s=0.02 * n,
            deployment="chat-small",
            function="0",
            input_tokens=20 + n,
            output_tokens=1 + n,
        )
        for n in range(8)
    ),
    duration_s=1.0,
    deployments=("chat-small",),
    functions=1,
    forced=True,
    too_long=0,
    clipped=True,
    left_out=0,
)


def test_calls_have_the_plans_lengths_and_results_its_calls() -> None:
    told: list[CallResult] = []
    replaying = Replaying(PLAN, {"chat-small": VIEW}, {"chat-small": PROMPTS}, told.append)
    with token_server() as (address, server):
        replaying.run(address)
    assert sorted((len(r.tokens.ids), r.max_tokens) for r in server.requests) == [
        (call.input_tokens, call.output_tokens) for call in PLAN.calls
    ]
    results = replaying.results
    assert [result.call for result in results] == list(PLAN.calls)
    assert sorted(told, key=lambda r: r.call.number) == results
    assert all(result.finished and result.outcome.met for result in results)
    for result in results:
        assert result.outcome.arrival_s == pytest.approx(result.call.at_s + result.late_s)
        assert len(result.outcome.tokens_s) == result.call.output_tokens
