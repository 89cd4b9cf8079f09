"""Who sleeps and who goes, decided without any process: remotes are made up."""

import threading
from typing import cast

import pytest

from mesh.domain.ids import InstanceId
from mesh_nodes.engines.vllm.messages import ProcessOptions, Verb
from mesh_nodes.engines.vllm.remote import Remote
from mesh_nodes.engines.vllm.sleeping import Bed, Sleepers, kind_of
from tests.contract.engine_contract import StoredModel
from tests.nodes.engines.vllm.test_ends import WAIT_S_MAX, outcome_of

OPTIONS = ProcessOptions(dtype="float32", block_tokens=32, elastic=True, movable=True)
BYTES = 100


class MadeUp:
    """A process that does at once what it is told, unless `held` keeps it."""

    def __init__(self) -> None:
        self.instance_id = InstanceId("i")
        self.pid = 0
        self.alive = True
        self.told: list[Verb] = []
        self.began, self.held = threading.Event(), threading.Event()
        self.held.set()

    def call(self, verb: Verb, *arguments: object, timeout_s: float) -> None:
        self.told.append(verb)
        self.began.set()
        assert self.held.wait(WAIT_S_MAX)

    def end(self) -> None:
        self.alive = False


class Host:
    """What it has left, and what sleeps there."""

    def __init__(self, model: StoredModel, *, count_max: int = 3, has_bytes: int = 10**9) -> None:
        self._model, self._has_bytes = model, has_bytes
        self._beds: list[tuple[Bed, MadeUp]] = []
        self.sleepers = Sleepers(
            count_max=count_max, bytes_max=10**9, host_available_bytes=self._left_bytes
        )

    def bed(self, batch_max: int = 1, host_bytes: int = BYTES) -> tuple[Bed, MadeUp]:
        """Of a kind of its own for each `batch_max`."""
        made_up = MadeUp()
        kind = kind_of(self._model.order(InstanceId("i"), batch_max=batch_max), OPTIONS)
        bed = Bed(kind=kind, host_bytes=host_bytes, remote=cast(Remote, made_up))
        self._beds.append((bed, made_up))
        return bed, made_up

    def wake(self, batch_max: int) -> Bed | None:
        order = self._model.order(InstanceId("woken"), batch_max=batch_max)
        return self.sleepers.wake(order, kind_of(order, OPTIONS))

    def _left_bytes(self) -> int:
        slept = [bed for bed, one in self._beds if one.alive and Verb.SLEEP in one.told]
        return self._has_bytes - sum(bed.host_bytes for bed in slept)


def test_those_that_died_in_their_sleep_take_nobodys_place(model: StoredModel) -> None:
    host = Host(model, count_max=2)
    (older, first), (newer, second), (last, _) = (host.bed(n) for n in (1, 2, 3))
    assert host.sleepers.sleep(older)
    assert host.sleepers.sleep(newer)
    second.alive = False
    assert host.sleepers.sleep(last)
    assert first.alive
    assert len(host.sleepers.listed()) == 2


@pytest.mark.parametrize(("has_bytes", "sleeps"), [(5 * BYTES, True), (5 * BYTES - 1, False)])
def test_nobody_goes_for_one_that_would_not_fit_in_the_place_of_all(
    model: StoredModel, has_bytes: int, sleeps: bool
) -> None:
    host = Host(model, has_bytes=has_bytes)
    (one, first), (two, second) = host.bed(1), host.bed(2)
    large, _ = host.bed(3, host_bytes=5 * BYTES)
    assert host.sleepers.sleep(one)
    assert host.sleepers.sleep(two)
    assert host.sleepers.sleep(large) is sleeps
    assert first.alive is second.alive is not sleeps


def test_a_load_waits_for_a_sleep_of_its_own_kind_alone(model: StoredModel) -> None:
    host = Host(model)
    bed, made_up = host.bed(1)
    made_up.held.clear()
    sleeper, slept = outcome_of(lambda: host.sleepers.sleep(bed))
    assert made_up.began.wait(WAIT_S_MAX)
    other, found = outcome_of(lambda: host.wake(2))
    other.join(WAIT_S_MAX / 10)
    assert found == [None], "it loads from disk beside the sleep"
    waker, woken = outcome_of(lambda: host.wake(1))
    waker.join(0.1)
    assert waker.is_alive()
    made_up.held.set()
    for thread in (sleeper, waker):
        thread.join(WAIT_S_MAX)
    assert (slept, woken) == ([True], [bed])
