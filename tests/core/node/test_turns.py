"""The node core by the clock: how large its chunks are, who goes first, what it learns of itself.

By the profile of these tests a decode of one request takes 1 ms, and 256, 128, 32 and 16 prompt
tokens take 20, 10.5, 3.3 and 2.1 ms.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.compute.correction import TRIAL_ITERATIONS
from mesh.domain.actions import NodeAction, StartStep
from mesh.domain.messages import TokensReport
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo, best_effort
from mesh.policy.rules.alternate import Alternate
from mesh.policy.rules.first_come import FIRST_COME
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds
from tests.core.cells import of_kind, only
from tests.core.nodes import NodeUnderTest, load_command, outputs, reports, token


def granted(actions: list[NodeAction]) -> tuple[str, int]:
    """Which instance has the turn, and with how many prompt tokens."""
    step = only(actions, StartStep)
    assert isinstance(step.prefill, int)
    return step.instance_id, step.prefill


def test_first_come_first_served_computes_whole_prompts_of_the_oldest_request() -> None:
    node = NodeUnderTest("i1", "i2", turns=FIRST_COME)
    node.submit("old", "i1", prompt=300, slo=Slo(ttft_s=100.0))
    node.now_s += 1.0
    node.submit("urgent", "i2", slo=Slo(ttft_s=0.001, tpot_s=0.001))
    assert granted(node.step("i1", prefill_left={"old": 44})) == ("i1", 44)
    assert granted(node.step("i1", token("old", 0))) == ("i1", 0)
    done = node.step("i1", token("old", 1, finish=FinishReason.STOP))
    assert granted(done)[0] == "i2"


def test_several_decodes_are_one_turn_and_are_told_together() -> None:
    """A decode takes 1 ms, reckoned as 1.1."""
    node = NodeUnderTest("i1", turn_s_max=0.0045)
    assert only(node.submit("a"), StartStep).iterations == 1, "its prompt is an iteration"
    assert only(node.step("i1", token("a", 0)), StartStep).iterations == 4
    node.now_s += 0.004
    said = node.step("i1", token("a", 1, count=4), iterations=4)
    assert [(each.first_index, each.token_ids) for each in outputs(said)] == [(1, (41, 42, 43, 44))]
    assert only(reports(said), TokensReport).correction == pytest.approx(1.0, rel=0.01)


def test_slow_iterations_correct_the_profile_and_are_reported() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    corrections = []
    for index in range(1000):
        node.now_s += 0.002
        said = only(reports(node.step("i1", token("a", index))), TokensReport)
        corrections.append(said.correction)
    assert corrections == sorted(corrections)
    assert 1.8 < corrections[-1] < 2.0, "each took 2 ms where the profile says 1"
    assert node.core.instances()[0].correction == pytest.approx(corrections[-1])


def test_an_instance_that_was_found_slow_gets_smaller_chunks() -> None:
    """Nearly twice as slow as its profile: 64 tokens take 10 ms, and 128 would take 19."""
    node = NodeUnderTest("i1", "i2")
    node.submit("slow", "i1")
    for index in range(1000):
        node.now_s += 0.002
        node.step("i1", token("slow", index, finish=FinishReason.STOP if index == 999 else None))
    node.submit("b", "i2", slo=Slo(ttft_s=0.1, tpot_s=0.0135))
    node.step("i2", token("b", 0))
    node.now_s += 1.0
    node.submit("a", "i1", prompt=300, age_s=1.99)
    assert granted(node.step("i2", token("b", 1))) == ("i1", 64)


def test_iterations_beside_a_load_teach_what_a_load_costs_and_nothing_about_the_model() -> None:
    node = NodeUnderTest("i1")
    before = node.heartbeat().load_slowdown
    node.command(load_command("i2"))
    node.submit("a", "i1")
    for index in range(1000):
        node.now_s += 0.003
        node.step("i1", token("a", index))
    said = node.heartbeat()
    assert before < 2.5 < said.load_slowdown < 3.0, "each took 3 ms beside it, and else 1"
    assert [report.correction for report in said.instances] == [1.0]


def test_an_estimate_that_takes_too_long_even_beside_a_load_is_corrected_there() -> None:
    """Decodes of half the estimate; those beside the load tell nothing of what that costs."""
    command = load_command("i1")
    assert command.profile is not None
    estimate = replace(command.profile, scaled_from="another")
    node = NodeUnderTest()
    node.load("i1", command=replace(command, profile=estimate))
    before = node.heartbeat().load_slowdown
    node.command(load_command("i2"))
    node.submit("a", "i1")
    for index in range(TRIAL_ITERATIONS):
        node.now_s += 0.0005
        node.step("i1", token("a", index))
    said = node.heartbeat()
    assert said.load_slowdown == before
    (report,) = said.instances
    assert report.correction == pytest.approx(0.5)
    node.load("i3", command=replace(load_command("i3"), profile=estimate))
    assert [i.correction for i in node.heartbeat().instances] == pytest.approx([0.5, 0.5])


def test_an_iteration_that_yields_nothing_is_reported_with_what_is_left_of_prompts() -> None:
    node = NodeUnderTest("i1")
    node.submit("a", prompt=300)
    actions = node.step("i1", prefill_left={"a": 44})
    said = only(reports(actions), TokensReport)
    assert (said.outputs, said.prefill_left) == ((), (("a", 44),))
    assert of_kind(actions, StartStep)[0].prefill == 44


class ByName(Alternate):
    """A rule of a policy file that decodes the last request alone, and computes the last prompt."""

    name = "by-name"
    digest = "abcd"

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        (queue,) = queues
        prompts = [(prompt.request_id, min(prompt.left, 2)) for prompt in queue.prompts[-1:]]
        decode = tuple(queue.running[-1:])
        return Grant(queue=queue, prefill=tuple(prompts), seconds=0.01, decode=decode)


def test_the_rule_of_its_own_file_says_who_computes() -> None:
    node = NodeUnderTest("i1", turns=ByName())
    first = only(node.submit("a"), StartStep)
    assert (first.prefill, first.decode) == ((("a", 2),), ())
    node.submit("b")
    step = only(node.step("i1", prefill_tokens=2, prefill_left={"a": 1, "b": 3}), StartStep)
    assert (step.prefill, step.decode) == ((("b", 2),), ())
    node.step("i1", prefill_tokens=2, prefill_left={"a": 1, "b": 1})
    step = only(node.step("i1", token("b", 0), prefill_tokens=1, prefill_left={"a": 1}), StartStep)
    assert (step.prefill, step.decode) == ((("a", 1),), ("b",))
    step = only(node.step("i1", token("a", 0), token("b", 1), prefill_tokens=1), StartStep)
    assert (step.prefill, step.decode) == ((), ("b",))
    step = only(node.step("i1", token("b", 2)), StartStep)
    assert step.decode == ("b",), "a waits"


@pytest.mark.parametrize(("ttft_s", "next_one"), [(0.01, "i1"), (1e4, "i2")])
def test_best_effort_has_a_turn_once_the_others_are_far_ahead(ttft_s: float, next_one: str) -> None:
    node = NodeUnderTest("i1", "i2")
    node.submit("r1", "i1", slo=Slo(ttft_s=ttft_s, ttft_tokens_per_s=1e9))
    assert steps_of(node.submit("b1", "i2", slo=best_effort("batch", 600.0))) == []
    assert steps_of(node.step("i1", token("r1", 0))) == [next_one]


def test_best_effort_has_no_turn_while_somebody_waits_for_a_load() -> None:
    node = NodeUnderTest("i1", "i2")
    node.submit("r1", "i1", slo=Slo(ttft_s=1e4))
    node.submit("b1", "i2", slo=best_effort("batch", 600.0))
    node.command(load_command("i3"))
    assert steps_of(node.step("i1", token("r1", 0))) == ["i1"]


def test_prompts_of_best_effort_come_in_short_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.policy.rules.turns.BEST_EFFORT_S", 0.0106)
    node = NodeUnderTest("i1")
    step = only(node.submit("b1", prompt=256, slo=best_effort("batch", 600.0)), StartStep)
    assert isinstance(step.prefill, tuple)
    ((name, tokens),) = step.prefill
    assert (name, 128 < tokens < 160) == ("b1", True), "128 beside a decode take 0.01 s"


def test_best_effort_has_no_turn_before_a_prompt() -> None:
    node = NodeUnderTest("i1", "i2")
    node.submit("r1", "i1", slo=Slo(ttft_s=1e4))
    node.submit("b1", "i2", slo=best_effort("batch", 600.0))
    node.submit("r2", "i1", slo=Slo(ttft_s=1e4))
    assert steps_of(node.step("i1", token("r1", 0))) == ["i1"]


def steps_of(actions: list[NodeAction]) -> list[str]:
    return [str(step.instance_id) for step in of_kind(actions, StartStep)]
