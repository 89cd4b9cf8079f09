"""What validation admits, by cases that can be reckoned by hand: the paper's three refusals,
deadlines on the way, new instances, queues, and what is under way.
"""

from collections.abc import Sequence
from copy import deepcopy
from math import inf

import pytest

from mesh.domain.ids import InstanceId
from mesh.domain.reasons import Verdict
from mesh.policy.rules import turns
from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.policy.rules.swapping import BEHIND_S, SWAPPING, WHOLE, Swap
from mesh.request import shadow
from mesh.request.pool import Held, Pool
from mesh.request.shadow import (
    LOOKAHEAD_TOKENS,
    STEPS_MAX,
    Newcomer,
    Schedule,
    in_time_together,
    validate,
)
from tests.request.schedules import (
    TIMES,
    TOKENS_MAX,
    Instance,
    Node,
    Request,
    a_prompt,
    instance,
    prompt_of,
    queue,
    times,
)


class TestAnswersOfOneToken:
    """Their pace is infinite: once their prompts are computed nothing follows."""

    @pytest.mark.parametrize(
        ("due_s", "verdict"), [(0.35, Verdict.FIRST_TOKEN_LATE), (0.45, Verdict.PASSES)]
    )
    def test_they_have_no_decodes(self, due_s: float, verdict: Verdict) -> None:
        # Three that wait take 0.3 s. A decode of 0.1 s would exceed the TPOT of their instance.
        waiting = [Request(due_s=0.31, left=100, past=0, tpot_s=inf) for _ in range(3)]
        a = Instance(name="a", times=TIMES, tpot_s=0.05, requests=waiting)
        newcomer = Request(due_s=due_s, left=100, past=0, tpot_s=inf)
        assert Node(instances=[a], newcomer=newcomer, target=0).verdict() is verdict


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
        assert node.verdict() is Verdict.DELAYS_RUNNING
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


def test_a_long_prompt_passes_in_chunks_that_others_can_wait_for() -> None:
    # At once, 0.24 s would make b late, which is due at 0.25 and needs 0.1 s. Of the 0.15 s
    # that are left, 120 tokens take 0.12; b decodes until 0.22; the rest until 0.34.
    a, b = instance("a", times=TIMES), instance("b", 0.25, times=TIMES)
    node = Node(instances=[a, b], newcomer=a_prompt(240, 0.24), target=0)
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 0.35
    assert node.verdict() is Verdict.PASSES


def test_who_is_late_for_other_reasons_blocks_nobody() -> None:
    late = instance("a", -0.1, times=TIMES, prompts=[(100, -0.1)])
    in_vain = instance("b", 0.05, times=TIMES)
    waits_in_vain = instance("c", times=TIMES, prompts=[(100, 0.05)])
    target = instance("d", times=TIMES)
    node = Node(instances=[late, in_vain, waits_in_vain, target], newcomer=a_prompt(100, 5.0))
    assert node.verdict() is Verdict.PASSES


def test_nor_does_who_is_late_on_the_way_to_its_client() -> None:
    # a could be done at 0.1 and is due at 0.11, b's prompt likewise, and 0.02 s are on the way.
    a = instance("a", 0.11, times=TIMES)
    b = instance("b", times=TIMES, prompts=[(100, 0.11)])
    node = Node(instances=[a, b, instance("c", times=TIMES)], newcomer=a_prompt(100, 5.0))
    node.margin_s = 0.02
    assert node.verdict() is Verdict.PASSES


def test_who_runs_beside_one_that_is_late_counts() -> None:
    # The newcomer was passed over so often that 16 of its 20 tokens are computed in any case,
    # 0.016 s. b needs 0.1 s until 0.115 for one of its batch, which is not late but for that.
    a = instance("a", times=TIMES, passed=8)
    b = instance("b", 0.05, 0.115, times=TIMES)
    node = Node(instances=[a, b], newcomer=a_prompt(20, -1.0), target=0, may_be_late=True)
    assert node.verdict() is Verdict.DELAYS_RUNNING
    b.requests[1].due_s = 0.125
    assert node.verdict() is Verdict.PASSES


def test_one_that_was_admitted_before_may_be_late() -> None:
    node = Node(instances=[instance("a", times=TIMES)], newcomer=a_prompt(200, 0.1))
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.may_be_late = True
    assert node.verdict() is Verdict.PASSES


def test_but_it_may_make_nobody_else_late() -> None:
    a = instance("a", times=TIMES, prompts=[(200, 0.35)])
    b = instance("b", times=TIMES)
    node = Node(instances=[a, b], newcomer=a_prompt(200, 0.1), may_be_late=True)
    assert node.verdict() is Verdict.DELAYS_RUNNING


def test_a_token_has_to_be_with_its_client_by_then() -> None:
    # Its first is done at 0.2, a's running one at 0.1.
    node = Node(instances=[instance("a", times=TIMES)], newcomer=a_prompt(200, 0.21))
    node.margin_s = 0.005
    assert node.verdict() is Verdict.PASSES
    node.margin_s = 0.02
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE


def test_so_have_those_of_others() -> None:
    # As in case 2: its second token is done at 0.42 and due at 0.425.
    a = instance("a", 0.175, times=times(decode_s=0.1, decode_more_s=0.1), tpot_s=0.25)
    b = instance("b", 0.3, times=times(decode_s=0.06), tpot_s=0.5)
    node = Node(instances=[a, b], newcomer=a_prompt(60, 0.5), target=0, margin_s=0.004)
    assert node.verdict() is Verdict.PASSES
    node.margin_s = 0.006
    assert node.verdict() is Verdict.DELAYS_RUNNING


def test_a_tpot_shorter_than_the_margin_can_be_promised() -> None:
    # Its first token is late, as was told; the next ones take 8 ms each and are due every 40.
    quick = instance("a", times=times(decode_s=0.008), tpot_s=0.04)
    node = Node(instances=[quick], newcomer=a_prompt(10, -1.0), margin_s=0.05, may_be_late=True)
    assert node.verdict() is Verdict.PASSES
    # A decode of 31 ms leaves 9 of a margin of 10.
    node.instances[0] = instance("a", times=times(decode_s=0.031), tpot_s=0.04)
    assert node.verdict() is Verdict.DELAYS_RUNNING


def test_contexts_count_as_they_will_be() -> None:
    # 10 tokens each, and a decode of 5 ms and 1 ms for each of them: 15 ms. With 64 more it is
    # 79 ms, for two of the TPOTs 158 of 150 ms or 160.
    growing = times(decode_s=0.005, context_token_s=0.001)
    assert LOOKAHEAD_TOKENS == 64
    for tpot_s, verdict in ((0.15, Verdict.TPOT_EXCEEDED), (0.16, Verdict.PASSES)):
        a = instance("a", 5.0, times=growing, tpot_s=tpot_s)
        b = instance("b", times=growing, tpot_s=tpot_s)
        assert Node(instances=[a, b], newcomer=a_prompt(10, 5.0)).verdict() is verdict


def test_also_on_the_way() -> None:
    # b's decode takes 20 ms now, 84 when its context has grown; the newcomer is behind it.
    growing = times(decode_s=0.01, context_token_s=0.001)
    a, b = instance("a", times=TIMES), instance("b", 0.1, times=growing, tpot_s=9.0)
    node = Node(instances=[a, b], newcomer=a_prompt(50, 0.13), target=0)
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 0.14
    assert node.verdict() is Verdict.PASSES


def test_also_those_of_the_newcomer() -> None:
    # It is first, until 0.01; then, due at 0.22, decodes in 20 ms, or in 84 as above; then b's
    # prompt takes 0.14 s, until 0.234.
    growing = times(decode_s=0.01, context_token_s=0.001)
    a = instance("a", times=growing, tpot_s=0.2)
    b = instance("b", times=TIMES, prompts=[(140, 0.23)])
    node = Node(instances=[a, b], newcomer=a_prompt(10, 0.02), target=0)
    assert node.verdict() is Verdict.DELAYS_RUNNING
    b.requests[0].due_s = 0.24
    assert node.verdict() is Verdict.PASSES


@pytest.mark.parametrize(
    ("due_s", "verdict"), [(3.15, Verdict.FIRST_TOKEN_LATE), (3.25, Verdict.PASSES)]
)
def test_the_newcomer_starts_once_its_instance_is_loaded(due_s: float, verdict: Verdict) -> None:
    # In 3 s, and then its 200 tokens take 0.2 s.
    node = Node(instances=[instance("a", times=TIMES)], newcomer=a_prompt(200, due_s))
    node.joins_s = 3.0
    assert validate(*node.schedule(target_known=False)) is verdict


def test_a_new_queue_is_part_of_the_schedule() -> None:
    a, b = (instance(name, 5.0, times=TIMES, tpot_s=0.25) for name in ("a", "b"))
    new = instance("c", times=TIMES, tpot_s=0.25)
    node = Node(instances=[a, b, new], newcomer=a_prompt(10, 5.0), joins_s=1.0)
    assert validate(*node.schedule(target_known=False)) is Verdict.TPOT_EXCEEDED


@pytest.mark.parametrize(
    ("due_s", "verdict"), [(60.26, Verdict.PASSES), (60.19, Verdict.FIRST_TOKEN_LATE)]
)
def test_a_load_may_take_many_iterations_of_others(due_s: float, verdict: Verdict) -> None:
    # Thirty thousand decodes of 2 ms. They gather headroom, so that the 0.2 s fit, behind one
    # decode at most.
    a = instance("a", 0.25, times=times(decode_s=0.002), tpot_s=0.25)
    node = Node(instances=[a, instance("b", times=TIMES)], newcomer=a_prompt(200, due_s))
    node.joins_s = 60.0
    assert node.verdict() is verdict


def test_an_iteration_may_be_in_flight_when_it_joins() -> None:
    # Of 0.1 s; then its 0.2 s.
    a = instance("a", 0.25, times=TIMES, tpot_s=0.25)
    node = Node(instances=[a, instance("b", times=TIMES)], newcomer=a_prompt(200, 60.25))
    node.joins_s = 60.0
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 60.31
    assert node.verdict() is Verdict.PASSES


def test_another_load_may_take_longer() -> None:
    # It joins after 5 s and takes 0.4 s beside a load that ends after 60.
    a = instance("a", 0.25, times=times(decode_s=0.002), tpot_s=0.25)
    node = Node(instances=[a, instance("b", times=TIMES)], newcomer=a_prompt(200, 5.45))
    node.joins_s, node.slowdown, node.slow_until_s = 5.0, 2.0, 60.0
    assert node.verdict() is Verdict.PASSES
    node.newcomer.due_s = 5.35
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE


def test_a_prompt_that_waits_is_not_forgotten_meanwhile() -> None:
    # It takes a second; a has 1.5 s for it now, and the newcomer is not there for a minute.
    a = instance("a", 1.6, times=times(decode_s=0.002), tpot_s=0.25)
    b = instance("b", times=TIMES, prompts=[(1000, 1.1)])
    node = Node(instances=[a, b, instance("c", times=TIMES)], newcomer=a_prompt(10, 70.0))
    node.joins_s = 60.0
    assert node.verdict() is Verdict.PASSES
    c = instance("c", times=TIMES, prompts=[(200, 1.1)])
    node.instances[2] = c
    assert node.verdict() is Verdict.DELAYS_RUNNING


def test_nor_who_is_late_meanwhile() -> None:
    # Each could be in time if it were first; for the second of them it is 0.2 s.
    a, b = instance("a", 0.15, times=TIMES), instance("b", 0.19, times=TIMES)
    node = Node(instances=[a, b, instance("c", times=TIMES)], newcomer=a_prompt(10, 70.0))
    node.joins_s = 60.0
    assert node.verdict() is Verdict.DELAYS_RUNNING
    b.requests[0].due_s = 0.21
    assert node.verdict() is Verdict.PASSES


def test_headroom_that_is_gathered_meanwhile_counts_and_no_more() -> None:
    # a decodes in 0.09 of every 0.1 s: within 10 s it gathers 1.1 s, for a prompt of 0.8 s, but
    # not for one of 2 s. Beside a load it takes 0.18 of every 0.19 s and gathers half of that.
    def node(left: int, tpot_s: float, slowdown: float) -> Node:
        a = instance("a", 0.1, times=times(decode_s=0.09), tpot_s=tpot_s)
        new = instance("b", times=times(decode_s=0.001), tpot_s=1.0)
        return Node(
            instances=[a, new],
            newcomer=a_prompt(left, 10.0 + left * 0.001 + 0.3),
            joins_s=10.0,
            slowdown=slowdown,
            slow_until_s=10.0,
            tokens_max=4000,
        )

    assert node(800, 0.1, 1.0).verdict() is Verdict.PASSES
    assert node(2000, 0.1, 1.0).verdict() is Verdict.FIRST_TOKEN_LATE
    assert node(200, 0.19, 2.0).verdict() is Verdict.PASSES
    assert node(2000, 0.19, 2.0).verdict() is Verdict.FIRST_TOKEN_LATE


def test_a_load_that_others_are_late_beside_is_refused() -> None:
    # a needs 0.12 s of every 0.1 s while the load lasts, and has 1 s of headroom for it.
    def node(load_s: float) -> Node:
        a = instance("a", 1.0, times=times(decode_s=0.06), tpot_s=0.1)
        new = instance("b", times=times(decode_s=0.001), tpot_s=1.0)
        made = Node(instances=[a, new], newcomer=a_prompt(10, load_s + 5.0), joins_s=load_s)
        made.slowdown, made.slow_until_s = 2.0, load_s
        return made

    assert node(4.0).verdict() is Verdict.PASSES
    assert node(8.0).verdict() is Verdict.DELAYS_RUNNING


def test_so_is_what_joins_while_it_lasts() -> None:
    # As above, with the newcomer there at once, on an instance that needs next to nothing.
    def node(load_s: float) -> Node:
        a = instance("a", 1.0, times=times(decode_s=0.06), tpot_s=0.1)
        b = instance("b", times=times(decode_s=0.0001), tpot_s=1.0)
        made = Node(instances=[a, b], newcomer=a_prompt(10, 5.0))
        made.slowdown, made.slow_until_s = 2.0, load_s
        return made

    assert node(4.0).verdict() is Verdict.PASSES
    assert node(8.0).verdict() is Verdict.DELAYS_RUNNING


def test_who_is_late_stays_so_where_steps_run_out() -> None:
    many = [(TOKENS_MAX, 1e9)] * STEPS_MAX
    assert in_time((100, 0.05), *many) == [False] + [True] * STEPS_MAX


def in_time(
    *waiting: tuple[int, float], into: RunQueue | None = None, beside: Sequence[RunQueue] = ()
) -> list[bool]:
    """Which of the prompts are in time: each has so many tokens and is due at a time; a token takes
    1 ms.
    """
    own = into or RunQueue(instance_id=InstanceId("a"), times=TIMES, tpot_s=1.0)
    schedule = Schedule(queues=[*beside], now_s=0.0, prefill_tokens_max=TOKENS_MAX, margin_s=0.01)
    prompts = [Prompt(left=left, past=0, due_s=due_s) for left, due_s in waiting]
    return in_time_together(schedule, own, prompts)


@pytest.mark.parametrize("calls", [1, 4, 16])
def test_of_a_burst_those_whose_turn_comes_in_time(calls: int) -> None:
    """Iterations of 256 tokens, beside a decode of 0.1 s from the second on: 768 tokens are there
    after 0.968 s, and 10 ms later with their clients. That is three prompts of 200.
    """
    found = in_time(*[(200, 1.0)] * calls)
    assert found == [n < 3 for n in range(calls)]


def test_one_that_is_too_late_takes_no_time_from_those_behind_it() -> None:
    assert in_time((900, 0.005), (200, 0.25)) == [False, True]


def test_prompts_that_were_submitted_before_come_first() -> None:
    taken = queue("a", times=TIMES, prompts=[(200, 0.5)])
    assert in_time((200, 0.35), into=taken) == [False]
    assert in_time((200, 0.35)) == [True]


def test_decodes_of_others_that_are_due_come_first() -> None:
    """Two of them, 0.2 s, are due at once."""
    others = [queue("b", 0.1, times=TIMES), queue("c", 0.21, times=TIMES)]
    assert in_time((200, 0.35), beside=others) == [False]
    assert in_time((200, 0.45), beside=others) == [True]


def test_where_nobody_waits_nobody_is_late() -> None:
    assert in_time() == []


BESIDE_B = (("a", ()), ("b", (9.0,)), ("c", ()))
"""Three instances, of which the second has a request that can wait."""


def test_the_iteration_in_flight_has_to_end_first() -> None:
    # b's decode of 0.1 s began 0.02 s ago: 0.08 + 0.2 s.
    b = instance("b", 9.0, times=TIMES)
    node = Node(instances=[instance("a", times=TIMES), b], newcomer=a_prompt(200, 0.25), target=0)
    assert node.verdict() is Verdict.PASSES
    node.started_s = -0.02
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 0.29
    assert node.verdict() is Verdict.PASSES


def test_one_that_should_have_ended_ends_now() -> None:
    b = instance("b", 9.0, times=TIMES)
    node = Node(instances=[instance("a", times=TIMES), b], newcomer=a_prompt(200, 0.21), target=0)
    node.started_s = -0.5
    assert node.verdict() is Verdict.PASSES


def test_whom_it_makes_late_is_late_anyway() -> None:
    # Of two that began together 0.1 s apart, the second cannot be in time at 0.12.
    a, b = instance("a", 0.05, times=TIMES), instance("b", 0.12, times=TIMES)
    node = Node(instances=[a, b], newcomer=a_prompt(50, 5.0), target=0, started_s=-0.05)
    assert node.verdict() is Verdict.PASSES


def test_it_was_chosen_by_who_was_late_when_it_began() -> None:
    # At -0.15, a could be in time at -0.01 and was first. It has taken too long and ends now; b
    # is next, until 0.2, then the newcomer, until 0.3. As late as a is now, b would have been
    # first, until 0.05, then a, until 0.17, then the newcomer, until 0.27.
    a = instance("a", -0.01, times=times(decode_s=0.12))
    b = instance("b", 0.06, times=times(decode_s=0.2))
    target = instance("c", times=TIMES)
    node = Node(instances=[a, b, target], newcomer=a_prompt(100, 0.28), started_s=-0.15)
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE
    node.newcomer.due_s = 0.31
    assert node.verdict() is Verdict.PASSES


@pytest.mark.parametrize(
    ("left", "verdict"), [(100, Verdict.FIRST_TOKEN_LATE), (40, Verdict.PASSES)]
)
def test_requests_that_came_since_then_count(left: int, verdict: Verdict) -> None:
    # 0.08 s until b has decoded, then theirs, due first, then the newcomer's 0.1 s.
    a, b, c = (instance(name, *due, times=TIMES) for name, due in BESIDE_B)
    node = Node(instances=[a, b, c], newcomer=a_prompt(100, 0.25), started_s=-0.02)
    assert node.verdict() is Verdict.PASSES
    node.joining = [(0, a_prompt(left, 0.2))]
    assert node.verdict() is verdict


def test_they_have_no_part_in_the_iteration_in_flight() -> None:
    # In it they would have been first: 0.1 s from -0.09, and the newcomer done at 0.11.
    a, b, c = (instance(name, *due, times=TIMES) for name, due in BESIDE_B)
    node = Node(instances=[a, b, c], newcomer=a_prompt(100, 0.2), started_s=-0.09)
    node.joining = [(0, a_prompt(100, 0.15))]
    assert node.verdict() is Verdict.FIRST_TOKEN_LATE


def test_they_decode_too() -> None:
    # 0.1 s of each 0.25 s for the newcomer and for each that runs or joins: three are too many.
    names = [instance(name, times=TIMES, tpot_s=0.25) for name in ("a", "b", "c")]
    node = Node(instances=names, newcomer=a_prompt(10, 5.0), joining=[(0, a_prompt(10, 5.0))])
    assert node.verdict() is Verdict.PASSES
    node.joining.append((1, a_prompt(10, 5.0)))
    assert node.verdict() is Verdict.TPOT_EXCEEDED


@pytest.mark.parametrize(
    ("until_s", "verdict"), [(0.1, Verdict.FIRST_TOKEN_LATE), (0.0, Verdict.PASSES)]
)
def test_a_load_slows_down_what_begins_beside_it(until_s: float, verdict: Verdict) -> None:
    # 0.2 s, or 0.4 s if it begins before the load ends.
    node = Node(instances=[instance("a", times=TIMES)], newcomer=a_prompt(200, 0.3))
    node.slowdown, node.slow_until_s = 2.0, until_s
    assert node.verdict() is verdict


@pytest.mark.parametrize(
    ("until_s", "verdict"), [(0.5, Verdict.FIRST_TOKEN_LATE), (-0.05, Verdict.PASSES)]
)
def test_also_the_iteration_in_flight(until_s: float, verdict: Verdict) -> None:
    # b's decode takes 0.2 s beside the load, 0.1 s else; the newcomer 20 ms, or 10.
    b = instance("b", 9.0, times=TIMES)
    node = Node(instances=[instance("a", times=TIMES), b], newcomer=a_prompt(10, 0.16), target=0)
    node.started_s, node.slowdown, node.slow_until_s = -0.04, 2.0, until_s
    assert node.verdict() is verdict


def swapping(*names: str, room: int, due_s: float = 9.0) -> Node:
    """All but `names` are out. A copy takes 1 s; each of `a` and `b` has a request that is due
    then, which decodes in 0.1 s of each 1 s; the newcomer comes to `c`.
    """
    there = [instance("a", due_s, times=TIMES), instance("b", due_s, times=TIMES)]
    node = Node(instances=[*there, instance("c", times=TIMES)], newcomer=a_prompt(200, 0.0))
    node.rule, node.room, node.copy_s = WHOLE, room, 1.0
    for each in node.instances:
        each.share = float(each.name in names)
    return node


@pytest.mark.parametrize(
    ("due_s", "verdict"), [(1.15, Verdict.FIRST_TOKEN_LATE), (1.35, Verdict.PASSES)]
)
def test_weights_that_are_out_come_first(due_s: float, verdict: Verdict) -> None:
    # In 1 s, while the others decode, one decode more; then its 200 tokens take 0.2 s.
    node = swapping("a", "b", room=3)
    node.newcomer.due_s = due_s
    assert node.verdict() is verdict


@pytest.mark.parametrize(
    ("left_s", "verdict"), [(0.5, Verdict.PASSES), (0.7, Verdict.FIRST_TOKEN_LATE)]
)
def test_behind_those_that_are_on_their_way(left_s: float, verdict: Verdict) -> None:
    # In `left_s` a's are there, 1 s later its own.
    node = swapping("b", room=3)
    node.moving, node.moved_s, node.newcomer.due_s = Swap(InstanceId("a"), 1.0), left_s, 1.85
    assert node.verdict() is verdict


@pytest.mark.parametrize(
    ("due_s", "verdict"), [(1.6, Verdict.DELAYS_RUNNING), (3.5, Verdict.PASSES)]
)
def test_copies_of_others_are_late_behind_its_own(due_s: float, verdict: Verdict) -> None:
    # c comes by 1.0, is due first, and then a and b, which are due at `due_s`, one after the other.
    node = swapping(room=3, due_s=due_s)
    node.newcomer.due_s = 1.5
    assert node.verdict() is verdict


def test_copies_by_parts_take_no_more_steps_than_whole_ones() -> None:
    """There is room for one: nobody computes while the next comes."""
    names = [f"{number:02}" for number in range(40)]
    there = [instance(name, 1000.0, times=TIMES, tpot_s=1000.0) for name in names]
    there.append(instance("c", times=TIMES))
    node = Node(instances=there, newcomer=a_prompt(200, 5000.0), target=len(names))
    node.rule, node.room, node.copy_s = SWAPPING, 8, 0.125
    for each in there:
        each.weights, each.share = 8, 0.0
    assert node.verdict() is Verdict.PASSES


@pytest.mark.parametrize(("room", "verdict"), [(2, Verdict.FIRST_TOKEN_LATE), (3, Verdict.PASSES)])
def test_nobody_joins_while_weights_have_to_make_room(room: int, verdict: Verdict) -> None:
    # c's leave in 0.3 s; a decodes with the newcomer's 200 tokens, beside b, in 0.3 s.
    node = swapping("a", "b", "c", room=room)
    node.target, node.away_s, node.newcomer.due_s = 0, 0.3, 0.45
    assert node.verdict() is verdict


@pytest.mark.parametrize(
    ("due_s", "verdict"), [(0.205, Verdict.FIRST_TOKEN_LATE), (0.22, Verdict.PASSES)]
)
def test_an_answer_whose_prompt_another_computes_begins_after_that(
    due_s: float, verdict: Verdict
) -> None:
    """200 tokens take 0.2 s, and the ten that are left of the other 0.01 s then."""
    queue_, prompt = queue("a", times=times(decode_s=0.0)), prompt_of(a_prompt(200, due_s))
    prompt.mates.append(prompt_of(a_prompt(10, due_s)))
    schedule = Schedule(queues=[queue_], now_s=0.0, prefill_tokens_max=TOKENS_MAX)
    assert validate(schedule, Newcomer(queue=queue_, prompt=prompt, joins_s=0.0)) is verdict


@pytest.mark.parametrize("owed_s", [0.15, 0.45])
def test_nobody_is_late_for_best_effort_s_sake(owed_s: float) -> None:
    """An iteration of 0.3 s may have begun before `a` joins, which is due at 0.15 or 0.45."""
    a, b = (queue(name, times=TIMES) for name in "ab")
    waits, comes = prompt_of(a_prompt(100, owed_s)), prompt_of(a_prompt(100, 5.0))
    schedule = Schedule(
        queues=[a, b],
        now_s=0.0,
        prefill_tokens_max=TOKENS_MAX,
        started_s=0.0,
        best_effort_s=0.3,
        joining=[(a, waits)],
    )
    verdict = validate(schedule, Newcomer(queue=b, prompt=comes, joins_s=0.0))
    assert verdict is (Verdict.DELAYS_RUNNING if owed_s < 0.4 else Verdict.PASSES)


@pytest.mark.parametrize(("prompt", "passes"), [(0, False), (1, True)])
def test_best_effort_may_be_in_flight_in_place_of_decodes_alone(prompt: int, passes: bool) -> None:
    """A decode of 0.02 s began, or best effort for 0.3 s, and the newcomer needs 0.1 s of 0.35."""
    a = queue("a", 9.0, times=times(decode_s=0.02), prompts=((1, 9.0),) * prompt)
    b = queue("b", times=times(decode_s=0.02))
    schedule = Schedule(
        queues=[a], now_s=0.0, prefill_tokens_max=TOKENS_MAX, started_s=0.0, best_effort_s=0.3
    )
    newcomer = Newcomer(queue=b, prompt=prompt_of(a_prompt(100, 0.35)), joins_s=0.0)
    assert (validate(schedule, newcomer) is Verdict.PASSES) is passes


def test_weights_of_best_effort_come_where_nobody_else_has_anything_to_compute() -> None:
    of = {"a": Held(weights_bytes=1, copy_s=1.0, due_s=BEHIND_S)}
    of["b"] = Held(weights_bytes=1, copy_s=1.0, share=1.0)
    held = {InstanceId(name): each for name, each in of.items()}
    pool = Pool(rule=WHOLE, held=held, free_bytes=0)
    pool.decide([queue("b", 1.0, times=TIMES)], 0.0)
    assert pool.moving is None
    pool.decide([], 0.0)
    assert pool.moving == ("b", 0.0), "it makes room"


@pytest.mark.parametrize(
    ("due_s", "first_due_s", "verdict"),
    [
        (0.85, 9.0, Verdict.PASSES),
        (0.75, 9.0, Verdict.FIRST_TOKEN_LATE),
        (9.0, 0.45, Verdict.DELAYS_RUNNING),
    ],
)
def test_nothing_computes_while_a_kv_cache_grows(
    due_s: float, first_due_s: float, verdict: Verdict
) -> None:
    # 0.2 s for others, 0.3 s for the newcomer; then a decode with its 200 tokens takes 0.3 s.
    node = Node(instances=[instance("a", first_due_s, times=TIMES)], newcomer=a_prompt(200, due_s))
    node.grows, node.grow_s = ((0.0, 0.2),), 0.3
    assert node.verdict() is verdict


def test_who_is_late_by_the_growth_of_others_blocks_nobody() -> None:
    node = Node(instances=[instance("a", 0.25, times=TIMES)], newcomer=a_prompt(200, 9.0))
    node.grows = ((0.0, 0.2),)
    assert node.verdict() is Verdict.PASSES


@pytest.mark.parametrize(("room", "verdict"), [(2, Verdict.FIRST_TOKEN_LATE), (3, Verdict.PASSES)])
def test_a_kv_cache_does_not_grow_before_weights_have_made_room(
    room: int, verdict: Verdict
) -> None:
    # c's leave in 0.3 s; then 0.2 s of growth, and 0.3 s with the newcomer's 200 tokens.
    node = swapping("a", "b", "c", room=room)
    node.target, node.away_s, node.newcomer.due_s, node.grow_s = 0, 0.3, 0.65, 0.2
    assert node.verdict() is verdict
