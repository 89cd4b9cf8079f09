"""What the core wants kept is written before the core hears that it was."""

from typing import Any, cast

from mesh.domain.actions import AcceptLink, StoreHistory, StoreProfile
from mesh.domain.errors import StorageError
from mesh.domain.events import ControllerEvent, DeploymentStored, StoreFailed
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.node_rule import NodeRule, RuleName
from mesh.domain.profile import Profile
from mesh.runtime.controller_actions import ControllerPerformer, Done
from tests.support.profiles import PROFILE

OPERATION = OperationId("o1")


class Told:
    """Every port at once: notes in order what was asked of it and what the core heard."""

    def __init__(self, *, full: bool = False) -> None:
        self.log: list[object] = []
        self._full = full

    def store_profile(self, profile: Profile, done: Done | None = None) -> None:
        if not self._full:
            self.log.append(profile)
        if done is not None:
            done(StorageError("no space left") if self._full else None)

    def store_history(self, name: DeploymentName, history: OutputHistory) -> None:
        self.log.append((name, history))

    def accept(self, link_id: int, rule: NodeRule) -> None:
        self.log.append((link_id, rule))

    def post(self, event: ControllerEvent) -> None:
        self.log.append(event)


def performer(told: Told) -> ControllerPerformer:
    port = cast(Any, told)
    performer = ControllerPerformer(
        links=port, clients=port, operators=port, registry=port, clock=port
    )
    performer.post = told.post
    return performer


def test_a_profile_is_stored_and_then_acknowledged() -> None:
    told = Told()
    performer(told).perform(StoreProfile(operation_id=OPERATION, profile=PROFILE))
    assert told.log == [PROFILE, DeploymentStored(operation_id=OPERATION)]


def test_a_profile_that_cannot_be_written_is_told_as_such() -> None:
    told = Told(full=True)
    performer(told).perform(StoreProfile(operation_id=OPERATION, profile=PROFILE))
    assert told.log == [StoreFailed(operation_id=OPERATION, message="no space left")]


def test_a_refined_profile_is_stored_in_silence() -> None:
    told, full = Told(), Told(full=True)
    performer(told).perform(StoreProfile(operation_id=None, profile=PROFILE))
    assert told.log == [PROFILE]
    performer(full).perform(StoreProfile(operation_id=None, profile=PROFILE))
    assert full.log == []


HISTORY = StoreHistory(name=DeploymentName("chat"), history=OutputHistory(mean_tokens=9.0, count=5))


def test_a_history_is_stored_and_nobody_hears_of_it() -> None:
    told = Told()
    performer(told).perform(HISTORY)
    assert told.log == [(HISTORY.name, HISTORY.history)]


def test_a_node_is_welcomed_with_the_rule_that_the_core_chose() -> None:
    told, rule = Told(), NodeRule(turn=RuleName(name="alternate"), turn_s_max=0.25)
    performer(told).perform(AcceptLink(link_id=3, rule=rule))
    assert told.log == [(3, rule)]
