"""What shadow validation counts as late, and by whom; see `test_shadow` for the numbers."""

from mesh.domain.reasons import Verdict
from mesh.request.shadow import LOOKAHEAD_TOKENS
from tests.request.schedules import TIMES, Node, a_prompt, instance, times


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
