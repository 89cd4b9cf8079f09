"""Requests of several SLO classes of one deployment."""

from dataclasses import replace

from mesh.domain.actions import ControllerAction, RefuseRequest
from mesh.domain.events import InvokeRequested
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import CellLimits
from mesh.domain.messages import AbortRequest, SubmitRequest
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo, best_effort
from tests.core.admission import BusyCell, submitted
from tests.core.cells import CellUnderTest, commands, deployment, hello, of_kind, request

BATCH = best_effort("batch", 600.0)
QUICK = Slo(name="quick", ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=0.15)
PATIENT = Slo(name="patient", ttft_s=8.0, ttft_tokens_per_s=1e9, tpot_s=1.0)


class Cell(BusyCell):
    """Deployments `a` and `b`, each with a loaded instance on one node, and with both classes."""

    def __init__(self) -> None:
        made = [deployment(name, slo=PATIENT) for name in "ab"]
        specs = [
            replace(one.spec, classes=(QUICK, PATIENT), class_default="patient") for one in made
        ]
        deployments = [replace(one, spec=spec) for one, spec in zip(made, specs, strict=True)]
        super().__init__(*deployments)

    def ask_in(self, slo: Slo, name: str, of: str = "a") -> list[ControllerAction]:
        asked = request(name, of=of, prompt=(1,) * 3, max_tokens=256)
        return self.tell(InvokeRequested(request=asked, slo=slo))


def test_a_class_that_finds_no_place_holds_up_no_other() -> None:
    """`b` has all the time of the node that a quick one would need, but not what a patient one
    needs.
    """
    cell = Cell()
    cell.ask_in(QUICK, "r1", of="b")
    cell.tokens(cell.link, "r1", [7])
    for number in range(5):
        assert submitted(cell.ask_in(QUICK, f"q{number}")) == []
    assert submitted(cell.ask_in(PATIENT, "p1")) == [("p1", "a")]


def test_each_class_has_a_bound_of_its_own_for_those_who_wait() -> None:
    made = deployment(slo=PATIENT)
    spec = replace(made.spec, classes=(QUICK, PATIENT), class_default="patient")
    cell = CellUnderTest(replace(made, spec=spec), limits=CellLimits(queue_requests_max=1))
    cell.join(hello())

    def refused(slo: Slo, name: str) -> list[RefusalReason]:
        said = cell.tell(InvokeRequested(request=request(name), slo=slo))
        return [refusal.reason for refusal in of_kind(said, RefuseRequest)]

    assert refused(QUICK, "q1") == [], "it waits for a load"
    assert refused(PATIENT, "p1") == []
    assert refused(QUICK, "q2") == [RefusalReason.QUEUE_FULL]


def test_lengths_and_ends_are_counted_by_class() -> None:
    cell = Cell()
    cell.ask_in(PATIENT, "r1")
    cell.tokens(cell.link, "r1", [7] * 9, finish=FinishReason.STOP)
    entry = cell.core.cell.deployments[DeploymentName("a")]
    assert entry.by_class["patient"].met == 1
    cell.ask_in(QUICK, "r2")
    cell.tokens(cell.link, "r2", [7], finish=FinishReason.STOP)
    assert entry.history.mean_of("quick") < entry.history.mean_of("patient")
    assert (entry.by_class["quick"].served, entry.served) == (1, 2)


def test_best_effort_takes_no_time_from_a_class_and_waits_behind_all_of_them() -> None:
    cell = Cell()
    for number in range(30):
        assert submitted(cell.ask_in(BATCH, f"b{number}")) == [(f"b{number}", "a")]
    assert submitted(cell.ask_in(QUICK, "q1", of="b")) == [("q1", "b")]
    cell.tokens(cell.link, "q1", [7])
    assert submitted(cell.ask_in(QUICK, "q2")) == [], "the class itself has no time for two"


def test_best_effort_gives_its_place_up_to_a_class_and_goes_on_later() -> None:
    """An instance takes 32 requests at a time."""
    cell = Cell()
    for number in range(32):
        cell.ask_in(BATCH, f"b{number}")
    cell.tokens(cell.link, "b31", [7, 8])
    said = cell.ask_in(PATIENT, "p1")
    assert [abort.request_id for abort in commands(said, AbortRequest)] == ["b31"]
    assert submitted(said) == [("p1", "a")]
    said = cell.tokens(cell.link, "p1", [7], finish=FinishReason.STOP)
    (again,) = commands(said, SubmitRequest)
    assert again.order.request.request_id == "b31"
    assert again.order.output_tokens == (7, 8), "no token is lost, and none comes twice"
