"""Shadow validation by numbers: each of the three cases of LLM-Mesh §5.3, and its bounds.

Where nothing else is said, here and in every `test_shadow_…` beside it, a decode takes 0.1 s and
every prompt token 1 ms more, and all is at time 0. Each refusal stands beside what differs in one
number and passes.
"""

from copy import deepcopy

import pytest

from mesh.domain.reasons import Verdict
from mesh.policy.rules import turns
from mesh.policy.rules.run_queues import RunQueue
from mesh.request import shadow
from tests.request.schedules import TIMES, Instance, Node, Request, a_prompt, instance, times


class TestTheThreeCases:
    @pytest.mark.parametrize(
        ("due_s", "verdict"), [(0.19, Verdict.FIRST_TOKEN_LATE), (0.21, Verdict.PASSES)]
    )
    def test_1_its_first_token_is_late(self, due_s: float, verdict: Verdict) -> None:
        # 200 tokens take 0.2 s.
        node = Node(instances=[instance("a", times=TIMES)], newcomer=a_prompt(200, due_s))
        assert node.verdict() is verdict

    @pytest.mark.parametrize(
        ("due_s", "verdict"), [(0.165, Verdict.DELAYS_RUNNING), (0.175, Verdict.PASSES)]
    )
    def test_2_a_running_request_is_late(self, due_s: float, verdict: Verdict) -> None:
        # Its first decode carries the newcomer's 60 tokens: 0.1 + 0.06, in time at 0.16. Then b,
        # due at 0.3, until 0.22. Its second is of two requests and takes 0.2 s: until 0.42, due
        # 0.25 after the first, at 0.415 or 0.425. Without the newcomer it would be done at 0.26.
        growing = times(decode_s=0.1, decode_more_s=0.1)
        a = instance("a", due_s, times=growing, tpot_s=0.25)
        b = instance("b", 0.3, times=times(decode_s=0.06), tpot_s=0.5)
        assert Node(instances=[a, b], newcomer=a_prompt(60, 0.5), target=0).verdict() is verdict

    @pytest.mark.parametrize(
        ("due_s", "verdict"), [(0.35, Verdict.DELAYS_RUNNING), (0.45, Verdict.PASSES)]
    )
    def test_2_a_waiting_request_is_late(self, due_s: float, verdict: Verdict) -> None:
        # The newcomer is due first, at 0.3, and done at 0.2; the other one then at 0.4.
        a = instance("a", times=TIMES, prompts=[(200, due_s)])
        b = instance("b", times=TIMES)
        assert Node(instances=[a, b], newcomer=a_prompt(200, 0.3)).verdict() is verdict

    @pytest.mark.parametrize(
        ("tpot_s", "verdict"), [(0.25, Verdict.TPOT_EXCEEDED), (0.35, Verdict.PASSES)]
    )
    def test_3_a_decode_of_everybody_takes_too_long(self, tpot_s: float, verdict: Verdict) -> None:
        # Three decodes take 0.3 s. All have headroom for a good while.
        running = [instance(name, 5.0, times=TIMES, tpot_s=tpot_s) for name in ("a", "b")]
        target = instance("c", times=TIMES, tpot_s=tpot_s)
        node = Node(instances=[*running, target], newcomer=a_prompt(10, 5.0))
        assert node.verdict() is verdict

    @pytest.mark.parametrize(
        ("decode_s", "verdict"), [(0.06, Verdict.TPOT_EXCEEDED), (0.04, Verdict.PASSES)]
    )
    def test_3_with_different_slos(self, decode_s: float, verdict: Verdict) -> None:
        # Half of the time is a's: 0.1 s of every 0.2; b takes 0.6 or 0.4, as 0.06 or 0.04 of 0.1.
        a = instance("a", 5.0, times=TIMES, tpot_s=0.2)
        b = instance("b", times=times(decode_s=decode_s), tpot_s=0.1)
        assert Node(instances=[a, b], newcomer=a_prompt(10, 5.0)).verdict() is verdict


@pytest.mark.parametrize(
    ("r1_due_s", "r3_tpot_s", "r5_due_s", "verdict"),
    [
        (0.45, 1.0, 0.5, Verdict.PASSES),
        (0.45, 1.0, 0.15, Verdict.FIRST_TOKEN_LATE),
        (0.418, 1.0, 0.5, Verdict.DELAYS_RUNNING),
        (0.45, 0.05, 0.5, Verdict.TPOT_EXCEEDED),
    ],
)
def test_figure_6(r1_due_s: float, r3_tpot_s: float, r5_due_s: float, verdict: Verdict) -> None:
    """R5 tries to join instance 3, where R4 runs; R1 and R2 run on instance 1, R3 on instance 2.

    R4's decode with R5's prompt of 60 tokens takes 0.1 + 0.06 s. R4 and R5 then decode in 0.2 s
    until 0.36, due 0.165 + 0.25. R1 and R2, due next, decode in 0.06 s until 0.42. (1) R5 due at
    0.15 is late; (2) R1 due at 0.418 is late; (3) instance 2 decodes in 0.01 s, a hundredth of its
    TPOT SLO or a fifth; instance 1 needs 0.12 and instance 3 0.8 of the time.
    """
    first = instance("1", r1_due_s, 0.9, times=times(decode_s=0.06), tpot_s=0.5)
    second = instance("2", 0.9, times=times(decode_s=0.01), tpot_s=r3_tpot_s)
    growing = times(decode_s=0.1, decode_more_s=0.1)
    third = instance("3", 0.165, times=growing, tpot_s=0.25)
    node = Node(instances=[first, second, third], newcomer=a_prompt(60, r5_due_s))
    assert node.verdict() is verdict


class TestBounds:
    def test_what_is_not_settled_in_time_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # a never has more headroom than before, so that the newcomer's prompt never fits.
        asked: list[float] = []

        def counted(
            rule: turns.TurnRule,
            queues: list[RunQueue],
            now_s: float,
            *,
            prefill_tokens_max: int,
            turn_s_max: float,
        ) -> turns.Grant | None:
            asked.append(now_s)
            return turns.next_turn(
                rule, queues, now_s, prefill_tokens_max=prefill_tokens_max, turn_s_max=turn_s_max
            )

        monkeypatch.setattr(shadow, "next_turn", counted)
        monkeypatch.setattr(shadow, "STEPS_MAX", 5)
        a = instance("a", 0.3, times=times(decode_s=0.24), tpot_s=0.25)
        b = instance("b", times=times(decode_s=0.001), tpot_s=1.0)
        node = Node(instances=[a, b], newcomer=a_prompt(1000, 99.0), started_s=-0.1)
        assert node.verdict() is Verdict.TPOT_EXCEEDED
        assert len(asked) == 1 + 5

    def test_it_changes_nothing_but_its_schedule(self) -> None:
        a = instance("a", 0.3, 0.2, -0.1, times=TIMES, prompts=[(300, 2.0)], passed=2)
        node = Node(instances=[a, instance("b", times=TIMES)], newcomer=a_prompt(300, 5.0))
        node.joining = [(0, a_prompt(20, 3.0))]
        before = deepcopy(node)
        first = node.verdict()
        assert first is Verdict.PASSES
        assert node.verdict() is first
        assert as_values(node) == as_values(before)
        assert TIMES.factor == 1.0


def as_values(node: Node) -> list[object]:
    def of(request: Request) -> tuple[float, int, int]:
        return request.due_s, request.left, request.past

    def requests(instance: Instance) -> list[object]:
        return [instance.passed, *(of(request) for request in instance.requests)]

    joining = [(index, of(request)) for index, request in node.joining]
    return [*(requests(each) for each in node.instances), of(node.newcomer), joining]
