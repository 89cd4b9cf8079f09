"""What `polyserve-co` decides in a small cell: which tier a server is of, and who goes where; what
its rule and its predictions say; and where its baselines send a request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.controller.state.instance import WORKED_OUT_MAX
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import ControllerAction
from mesh.domain.events import InvokeRequested, LeaseCheckDue
from mesh.domain.history import OutputHistory
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import AbortRequest, ContinueRequest, KvArrived, SubmitRequest
from mesh.domain.profile import Grid
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.slo import Slo
from mesh.policy.colocated import LEFT_TOKENS_LEAST, Growth
from mesh.policy.rules.chunked import AHEAD, APART, BUDGET, CHUNKED
from mesh.policy.rules.run_queues import NOBODY
from mesh.policy.rules.turns import next_turn
from mesh.sim.slo_mix import with_classes
from tests.core.admission import instance, node, submitted
from tests.core.cells import CellUnderTest, commands, only, request
from tests.policy.test_mesh import anywhere
from tests.request.schedules import queue, times
from tests.support.profiles import profile

GROWING = profile(
    prefill=Grid(rows=(1, 256), columns=(0,), seconds=((0.0001,), (0.0256,))),
    decode=Grid(rows=(1, 32), columns=(4096,), seconds=((0.01,), (0.32,))),
)
"""A decode takes 10 ms for each of the batch, a prompt 0.1 ms a token."""
LONGER = profile(
    prefill=GROWING.prefill,
    decode=Grid(rows=(1, 32), columns=(1, 512), seconds=((0.01, 0.3), (0.32, 9.6))),
)
"""A decode takes 0.6 ms more for each token of a context: 50 ms for 70 tokens."""


class Servers(CellUnderTest):
    """Three servers of one model. A tier of 50 ms has room for four requests, one of 20 ms for one:
    iterations have to fit into 97 % of it.
    """

    def __init__(self, rule: str = "polyserve-co") -> None:
        super().__init__(
            anywhere("a"),
            limits=CellLimits(delivery_s_max=0.0, kv_watermark_share=0.0),
            profiles=(GROWING,),
            rule=rule,
        )
        self.asked = 0
        self.links = {}
        for name in ("n1", "n2", "n3"):
            gpu = replace(node(name, instance(name, "a")), device=DeviceKind.GPU)
            self.links[name] = self.join(gpu)[0]

    def ask(self, tpot_s: float, *, ttft_s: float = 1.0, prompt: int = 3) -> str:
        """Where a request goes; nowhere if it waits or is refused."""
        self.asked += 1
        slo = Slo(name=f"{tpot_s}", ttft_s=ttft_s, ttft_tokens_per_s=1e9, tpot_s=tpot_s)
        asked = request(f"r{self.asked}", of="a", prompt=(1,) * prompt, max_tokens=100)
        sent = commands(self.tell(InvokeRequested(request=asked, slo=slo)), SubmitRequest)
        return only(sent, SubmitRequest).instance_id if sent else ""

    def ask_all(self, tpot_s: float, count: int) -> list[str]:
        return [self.ask(tpot_s) for _ in range(count)]

    def end(self, *numbers: int) -> None:
        for number in numbers:
            entry = self.core.cell.requests[
                next(r for r in self.core.cell.requests if r == f"r{number}")
            ]
            assert entry.instance is not None
            link = self.links[str(entry.instance.node.node_id)]
            self.tokens(link, f"r{number}", (7,), finish=FinishReason.LENGTH)

    def keep_up(self) -> None:
        self.tell(LeaseCheckDue())

    def labels(self) -> list[str]:
        return [self.core.cell.instances[InstanceId(name)].label for name in self.links]


def test_a_tier_fills_its_servers_one_after_the_other() -> None:
    cell = Servers()
    assert cell.ask_all(0.05, 5) == ["n1"] * 4 + ["n2"]
    assert cell.labels() == ["tier 50 ms", "tier 50 ms", ""]


def test_without_the_gradient_the_least_loaded_server_of_a_tier_comes_first() -> None:
    for rule, went in (("polyserve-co", "n1"), ("polyserve-co-no-gradient", "n2")):
        cell = Servers(rule)
        assert cell.ask_all(0.05, 5) == ["n1"] * 4 + ["n2"]
        cell.end(1)
        assert cell.ask(0.05) == went


def test_without_a_prediction_a_request_joins_where_it_will_not_keep_its_slo() -> None:
    for rule, decode, ttft_s, went in (
        ("polyserve-co", LONGER, 1.0, ""),
        ("polyserve-co-no-peak", LONGER, 1.0, "n1"),
        ("polyserve-co", GROWING, 0.01, ""),
        ("polyserve-co-no-chunks", GROWING, 0.01, "n1"),
    ):
        cell = Servers(rule)
        for entry in cell.core.cell.instances.values():
            entry.profile = decode
        assert cell.ask(0.05, ttft_s=ttft_s, prompt=3 if decode is LONGER else 200) == went


def test_a_looser_request_is_promoted_before_its_tier_gets_another_server() -> None:
    cell = Servers()
    assert cell.ask(0.05) == "n1"
    assert cell.ask_all(0.1, 4) == ["n1"] * 3 + ["n2"]
    assert cell.labels() == ["tier 50 ms", "tier 100 ms", ""]
    cell.end(2)
    assert cell.ask(0.1) == "n2", "its own tier comes first"
    unpromoted = Servers("polyserve-co-no-promotion")
    assert unpromoted.ask_all(0.05, 1) + unpromoted.ask_all(0.1, 2) == ["n1", "n2", "n2"]


def test_a_tighter_request_never_goes_into_a_looser_tier() -> None:
    cell = Servers()
    cell.ask_all(0.1, 1)
    assert cell.ask_all(0.02, 3) == ["n2", "n3", ""]


def test_an_empty_server_goes_back_into_the_pool() -> None:
    cell = Servers()
    cell.ask(0.05)
    cell.end(1)
    cell.keep_up()
    assert cell.labels() == ["", "", ""]


def test_a_server_that_only_looser_requests_are_left_on_pends_and_joins_their_tier() -> None:
    cell = Servers()
    assert cell.ask_all(0.05, 1) + cell.ask_all(0.1, 12) == ["n1"] * 4 + ["n2"] * 9
    cell.end(1)
    cell.keep_up()
    assert cell.labels() == ["pending 100 ms", "tier 100 ms", ""]
    assert cell.ask_all(0.05, 4) == ["n3"] * 4, "who pends takes no request of its former tier"
    assert cell.ask(0.1) == "n1", "its tier is full and wants another server"
    assert cell.labels() == ["tier 100 ms", "tier 100 ms", "tier 50 ms"]


def test_a_request_joins_only_where_its_first_token_is_in_time_in_chunks_that_fit() -> None:
    cell = Servers()
    cell.ask_all(0.05, 4)
    cell.ask_all(0.1, 9)
    # Beside nine decodes 7 ms of 97 are left for prompts: 70 tokens, and two iterations for 100.
    assert cell.ask(0.1, ttft_s=0.2, prompt=100) == "n3"


def test_a_prompt_that_is_late_everywhere_holds_up_no_shorter_one_of_its_class() -> None:
    cell = Servers()
    assert cell.ask_all(0.05, 11) == ["n1"] * 4 + ["n2"] * 4 + ["n3"] * 3
    # After an iteration of 49 ms three decodes leave 18 of each to 450 tokens, which alone take 45.
    assert cell.ask(0.05, ttft_s=0.1, prompt=450) == ""
    assert "r12" in cell.core.cell.requests, "it waits"
    assert cell.ask(0.05, ttft_s=0.1) == "n3"


def test_a_long_prompt_joins_who_is_far_enough_ahead_of_its_deadlines() -> None:
    cell = Servers()
    assert cell.ask(0.05) == "n1"
    cell.tokens(cell.links["n1"], "r1", (7,))
    # Beside a decode, at its pace, 450 tokens take two iterations of 49 ms. At once they take 55,
    # and the next token of the first is due in a second.
    assert cell.ask(0.05, ttft_s=0.07, prompt=450) == "n1"
    assert cell.ask(0.05, ttft_s=0.07, prompt=450) == "n2", "the first token of n1 is due by then"


@pytest.mark.parametrize("policy", ["polyserve-co", "co-random", "co-minimal", "co-chunk"])
def test_the_hopeless_are_refused_unless_nobody_is(policy: str) -> None:
    refusing = Servers(policy)
    assert refusing.ask(0.05, ttft_s=0.01, prompt=300) == ""
    assert not refusing.core.cell.requests
    assert Servers(f"{policy}-no-refusal").ask(0.05, ttft_s=0.05, prompt=300)


def test_baselines_go_to_the_least_busy_or_anywhere() -> None:
    for policy in ("co-minimal", "co-chunk"):
        assert Servers(policy).ask_all(0.05, 4) == ["n1", "n2", "n3", "n1"]
    drawn = Servers("co-random").ask_all(0.05, 12)
    assert set(drawn) == {"n1", "n2", "n3"}
    assert drawn == Servers("co-random").ask_all(0.05, 12)


CLASSES = ("", "quick", "slow")
REQUESTS = st.tuples(st.sampled_from(CLASSES), st.integers(0, 90), st.integers(1, 400))
"""Its SLO class, and the tokens of its output and of its prompt."""
MEANS = st.fixed_dictionaries({name: st.integers(1, 90) for name in CLASSES})


def _rolled(requests: Sequence[RequestEntry], means: Mapping[str, int]) -> float:
    """The most tokens that they hold, token by token."""
    least = int(LEFT_TOKENS_LEAST)
    lefts = [(max(means[of.slo.name] - len(of.output_tokens), least), of) for of in requests]
    steps = range(1, 1 + max((left for left, _ in lefts), default=0))
    held = [sum(of.tokens + step for left, of in lefts if left >= step) for step in steps]
    return max(held, default=0)


@given(st.lists(REQUESTS, max_size=12), REQUESTS, st.lists(MEANS, max_size=4))
def test_the_peak_is_that_of_a_rollout_token_by_token(
    running: Sequence[tuple[str, int, int]],
    coming: tuple[str, int, int],
    forecasts: Sequence[Mapping[str, int]],
) -> None:
    made = []
    for name, output, prompt in (*running, coming):
        asked = request("r", of="a", prompt=(1,) * prompt)
        made.append(RequestEntry(original=asked, slo=Slo(name=name), arrival_s=0.0))
        made[-1].note_tokens((7,) * output, 0.0)
    *there, one = made
    growth = Growth(there)
    for means in forecasts:
        least, most = growth.bounds_with(one, means.__getitem__)
        assert least <= _rolled(made, means) <= most
        assert growth.peak_with(one, means.__getitem__) == _rolled(made, means)
        assert growth.peak(means.__getitem__) == _rolled(there, means)


def test_a_peak_is_worked_out_anew_once_a_request_comes_goes_or_has_a_token() -> None:
    cell = Servers()
    assert cell.ask_all(0.05, 2) == ["n1"] * 2
    known = cell.core.cell.instances[InstanceId("n1")]
    for change in (
        lambda: cell.tokens(cell.links["n1"], "r1", (7,)),
        lambda: cell.ask(0.05),
        lambda: cell.end(2),
    ):
        assert cell.ask(0.05, ttft_s=0.0001) == "", "its first token would be late"
        assert known.worked_out
        change()
        assert not known.worked_out


def test_the_last_few_results_about_the_requests_of_an_instance_are_kept() -> None:
    cell = Servers()
    cell.ask_all(0.05, 2)
    known = cell.core.cell.instances[InstanceId("n1")]
    for place in range(2 * WORKED_OUT_MAX):

        def counted(there: Iterable[object], place: int = place) -> tuple[int, int]:
            return place, len(list(there))

        assert known.of_requests(counted) == (place, 2)
        assert len(known.worked_out) <= WORKED_OUT_MAX


@given(st.integers(1, 60), st.integers(1, 3000))
def test_a_chunk_is_the_largest_that_fits_into_the_quickest_pace(batch: int, left: int) -> None:
    model = times(decode_s=0.01, decode_more_s=0.001, prefill_token_s=0.00005)
    of = queue("a", *[1.0] * batch, times=model, prompts=[(left, 9.0)], tpot_s=0.05)
    grant = next_turn(CHUNKED, [of], 0.0, prefill_tokens_max=2048)
    assert grant is not None
    most = min(left, 2048)
    spare_s = 0.05 - of.decode_s
    expected = [n for n in range(most + 1) if not n or model.chunk_s(n, 0, batch) <= spare_s][-1]
    assert grant.prefill == max(expected, min(16, most))


@given(st.floats(0.0, 0.4), st.integers(1, 3000))
def test_a_chunk_lasts_until_the_first_token_is_due_where_all_are_ahead(
    ahead_s: float, left: int
) -> None:
    model = times(decode_s=0.01, decode_more_s=0.001, prefill_token_s=0.00005)
    of = queue("a", 1.0, 1.0 + ahead_s, times=model, prompts=[(left, 9.0)], tpot_s=0.05)
    grant = next_turn(AHEAD, [of], 1.0 - ahead_s, prefill_tokens_max=2048)
    assert grant is not None
    most = min(left, 2048)
    spare_s = max(0.05, 1.0 - (1.0 - ahead_s)) - of.decode_s
    expected = [n for n in range(most + 1) if not n or model.chunk_s(n, 0, 2) <= spare_s][-1]
    assert grant.prefill == max(expected, min(16, most))


def test_a_fixed_budget_counts_decodes() -> None:
    of = queue("a", *[1.0] * 60, times=times(), prompts=[(500, 9.0)])
    grant = next_turn(BUDGET, [of], 0.0, prefill_tokens_max=256)
    assert grant is not None
    assert grant.prefill == 196


class Divided(CellUnderTest):
    """Three servers that move KV blocks, of a model with SLO classes."""

    def __init__(self, rule: str = "polyserve-pd") -> None:
        super().__init__(
            with_classes(anywhere("a"), "0.02:0.5,0.05:0.5"),
            limits=CellLimits(delivery_s_max=0.0, kv_watermark_share=0.0),
            profiles=(GROWING,),
            rule=rule,
        )
        self.links = {}
        for name in ("n1", "n2", "n3"):
            gpu = replace(node(name, instance(name, "a")), device=DeviceKind.GPU)
            self.links[name] = self.join(replace(gpu, kv_address=name, kv_format="f"))[0]

    def ask(
        self,
        name: str,
        *,
        prompt: int = 100,
        ttft_s: float = 1.0,
        tpot_s: float = 0.05,
        price: float = 1.0,
    ) -> list[ControllerAction]:
        asked = request(name, of="a", prompt=(1,) * prompt, max_tokens=100)
        slo = Slo(
            name=f"{tpot_s}", ttft_s=ttft_s, ttft_tokens_per_s=1e9, tpot_s=tpot_s, price=price
        )
        return self.tell(InvokeRequested(request=asked, slo=slo))

    def labels(self) -> list[str]:
        return [self.core.cell.instances[InstanceId(name)].label for name in self.links]


@pytest.mark.parametrize("rule", ["polyserve-co", "polyserve-pd"])
def test_a_request_is_expected_to_grow_to_the_mean_of_its_class(rule: str) -> None:
    """An answer of 20 tokens keeps 50 ms, one of 128 does not."""
    for of_class, taken in ((20.0, True), (128.0, False)):
        cell = Divided(rule)
        for entry in cell.core.cell.instances.values():
            entry.profile = LONGER
        (made,) = cell.core.cell.deployments.values()
        made.history = OutputHistory(mean_tokens=148.0 - of_class, classes=(("0.05", of_class, 9),))
        assert bool(submitted(cell.ask("r1", prompt=3))) == taken


def test_a_request_goes_to_its_tier_with_its_first_token_and_on_once_its_blocks_are_there() -> None:
    cell = Divided()
    assert submitted(cell.ask("r1")) == [("r1", "n1")]
    copy = only(commands(cell.tokens(cell.links["n1"], "r1", (7,)), SubmitRequest), SubmitRequest)
    assert (copy.instance_id, copy.order.paused) == ("n2", True)
    assert copy.order.kv is not None
    assert cell.labels() == ["prefill", "tier 50 ms", ""]
    moved = RequestId("r1"), copy.order.attempt
    came = KvArrived(request_id=moved[0], attempt=moved[1], tokens=96, moved_bytes=1, elapsed_s=0.1)
    actions = cell.report(cell.links["n2"], came)
    assert not only(commands(actions, ContinueRequest), ContinueRequest).paused
    assert only(commands(actions, AbortRequest), AbortRequest).attempt == 1
    cell.tell(LeaseCheckDue())
    assert cell.labels() == ["", "tier 50 ms", ""]


def test_a_prompt_joins_where_nobodys_first_token_is_late_by_the_order_of_deadlines() -> None:
    cell = Divided()
    assert submitted(cell.ask("r1", prompt=200, ttft_s=0.05)) == [("r1", "n1")]
    assert submitted(cell.ask("r2", prompt=200, ttft_s=0.3)) == [("r2", "n1")]
    # Before the first it would make that late, behind it it would be late itself.
    assert submitted(cell.ask("r3", prompt=300, ttft_s=0.04)) == [("r3", "n2")]


def test_prompts_alone_are_computed_by_deadline_and_nobody_decodes_beside_them() -> None:
    of = queue("a", 1.0, times=times(), prompts=[(3000, 9.0), (1500, 2.0), (3000, 5.0)])
    second, third, first = (
        of.prompts[2].request_id,
        of.prompts[0].request_id,
        of.prompts[1].request_id,
    )
    grant = next_turn(APART, [of], 0.0, prefill_tokens_max=8192)
    assert grant is not None
    assert (grant.prefill, grant.decode) == (((first, 1500), (second, 548)), (NOBODY,))
    of.prompts = [prompt for prompt in of.prompts if prompt.request_id in (second, third)]
    whole = next_turn(APART, [of], 0.0, prefill_tokens_max=8192)
    assert whole is not None
    assert whole.prefill == ((second, 3000),), "less than twice the budget is finished at once"


def test_the_quickest_iteration_counts_prompts_and_of_equal_ones_the_smaller_batch() -> None:
    cell = Servers("co-minimal")
    flat = profile(
        prefill=GROWING.prefill, decode=Grid(rows=(32,), columns=(4096,), seconds=((0.01,),))
    )
    for entry in cell.core.cell.instances.values():
        entry.profile = flat
    assert [cell.ask(0.05, prompt=n) for n in (40, 9, 20, 3)] == ["n1", "n2", "n3", "n2"]
    for number, name in enumerate(("n1", "n2", "n3", "n2"), 1):
        cell.tokens(cell.links[name], f"r{number}", (7,))
    assert cell.ask_all(0.05, 3) == ["n1", "n3", "n2"]


def test_a_tier_of_a_pace_with_more_than_six_digits_takes_its_next_request() -> None:
    cell = Servers()
    assert cell.ask_all(1 / 24, 2) == ["n1", "n1"]
    assert cell.ask_all(1 / 23.99999, 1) == ["n1"]
    assert cell.labels() == ["tier 41.6667 ms", "", ""]


def test_who_is_computed_already_has_its_place_in_a_tier_before_who_comes() -> None:
    cell = Divided()
    # Of the two other servers each has room for four of 50 ms.
    asked = [bool(submitted(cell.ask(f"r{n}", prompt=3, ttft_s=9.0))) for n in range(1, 11)]
    assert asked == [True] * 8 + [False] * 2
    assert cell.labels() == ["prefill", "", ""]


def test_a_first_token_is_early_enough_for_the_second_unless_it_is_alone() -> None:
    cell = Divided()
    # 20 ms of prompts and 72 until its second token, one pace of 50 ms after the first.
    assert submitted(cell.ask("r1", prompt=200, ttft_s=0.03)) == [("r1", "n1")]
    assert submitted(cell.ask("r2", prompt=200, ttft_s=0.1)) == [("r2", "n2")]
    assert submitted(cell.ask("r3", prompt=200, ttft_s=0.15)) == [("r3", "n1")]


def test_a_first_token_comes_with_the_end_of_an_iteration_that_others_fill() -> None:
    cell = Divided()
    assert submitted(cell.ask("r1", prompt=500, ttft_s=0.3)) == [("r1", "n1")]
    cell.now_s += 0.001
    assert submitted(cell.ask("r2", prompt=500, ttft_s=0.2)) == [("r2", "n1")]
    # After the 50 ms of the first it takes 50, and 100 in an iteration with a third.
    assert submitted(cell.ask("r3", prompt=500, ttft_s=0.9)) == [("r3", "n2")]


def test_nobody_delays_a_first_token_that_is_too_late_for_the_second_alone() -> None:
    cell = Divided()
    assert submitted(cell.ask("r1", prompt=500, ttft_s=0.3)) == [("r1", "n1")]
    cell.now_s += 0.001
    assert submitted(cell.ask("r2", prompt=500, ttft_s=0.19)) == [("r2", "n1")]
    cell.now_s += 0.1
    # It comes at 0.15 s now, and would at 0.2.
    assert submitted(cell.ask("r3", prompt=500, ttft_s=0.9)) == [("r3", "n2")]
