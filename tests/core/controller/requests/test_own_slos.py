"""Requests with an SLO of their own, beside others of their deployment."""

from math import inf

from mesh.domain.actions import ControllerAction, RefuseRequest
from mesh.domain.events import InvokeRequested
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from tests.core.admission import BusyCell, submitted
from tests.core.cells import commands, deployment, of_kind, only, request

PATIENT = Slo(ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=1.0)
"""The SLO of each deployment. A decode is reckoned with 0.11 s, and planned with 0.95 of the TPOT
SLO.
"""
QUICK = Slo(ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=0.13)
IMPOSSIBLE = Slo(ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=0.05)


class Cell(BusyCell):
    """Deployments `a` and `b`, each with a loaded instance on one node."""

    def __init__(self) -> None:
        super().__init__(*(deployment(name, slo=PATIENT) for name in "ab"))

    def ask_with(self, slo: Slo | None, name: str, of: str = "a") -> list[ControllerAction]:
        asked = request(name, of=of, prompt=(1,) * 3, max_tokens=256)
        return self.tell(InvokeRequested(request=asked, slo=slo))


def test_its_node_is_told_its_own_slo_and_others_theirs() -> None:
    cell = Cell()
    own = only(commands(cell.ask_with(QUICK, "r1"), SubmitRequest), SubmitRequest)
    cell.tokens(cell.link, "r1", [7])
    assert own.order.slo == QUICK
    instance = cell.core.cell.requests[own.order.request.request_id].instance
    assert instance is not None
    assert instance.pace_s == QUICK.tpot_s * 0.95
    assert submitted(cell.ask_with(None, "r2")) == [("r2", "a")]
    assert instance.pace_s == QUICK.tpot_s * 0.95, "each decode gives both a token"
    cell.tokens(cell.link, "r1", [8], first=1, finish=FinishReason.STOP)
    assert instance.pace_s == PATIENT.tpot_s * 0.95


def test_an_answer_of_one_token_does_not_hide_the_pace_of_those_beside_it() -> None:
    cell = Cell()
    first = request("r0", of="a", prompt=(1,) * 3, max_tokens=1)
    assert submitted(cell.tell(InvokeRequested(request=first))) == [("r0", "a")]
    (entry,) = [made for made in cell.core.cell.instances.values() if made.deployment == "a"]
    assert entry.pace_s == inf
    assert submitted(cell.ask_with(None, "r1")) == [("r1", "a")]
    assert entry.pace_s == PATIENT.tpot_s * 0.95


def test_a_quick_one_takes_the_time_that_its_pace_needs() -> None:
    """One decode of `a` each 0.12 s leaves `b` nothing; one each second does."""
    taken = Cell()
    assert submitted(taken.ask_with(QUICK, "r1")) == [("r1", "a")]
    taken.tokens(taken.link, "r1", [7])
    assert submitted(taken.ask_with(None, "r2", of="b")) == []
    free = Cell()
    assert submitted(free.ask_with(None, "r1")) == [("r1", "a")]
    free.tokens(free.link, "r1", [7])
    assert submitted(free.ask_with(None, "r2", of="b")) == [("r2", "b")]


def test_one_that_cannot_be_served_holds_up_nobody_and_says_nothing_of_others() -> None:
    """`b` has the time that `r2` would need; `r3` needs less."""
    cell = Cell()
    cell.ask_with(QUICK, "r1", of="b")
    cell.tokens(cell.link, "r1", [7])
    assert submitted(cell.ask_with(QUICK, "r2")) == []
    loose = Slo(ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=20.0)
    assert submitted(cell.ask_with(loose, "r3")) == [("r3", "a")]


def test_one_without_hope_is_refused_at_once_and_told_to_raise_its_slo() -> None:
    cell = Cell()
    (refusal,) = of_kind(cell.ask_with(IMPOSSIBLE, "r1"), RefuseRequest)
    assert refusal.hint == "no node is quick enough: raise its SLO"
