"""Who sleeps and who goes, decided without any process: remotes are made up."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from mesh.domain.ids import InstanceId
from mesh.domain.steps import LoadOrder
from mesh_nodes.engines.vllm.host_pool import CHUNK_BYTES, HostPool
from mesh_nodes.engines.vllm.messages import WHOLE, Layout, Loaded, ProcessOptions, Range, Verb
from mesh_nodes.engines.vllm.remote import Remote
from mesh_nodes.engines.vllm.sleeping import SleepingProcesses, SleepSlot, WakeKey, wake_key
from tests.contract.engine_contract import StoredModel
from tests.nodes.engines.vllm.test_ends import WAIT_S_MAX, outcome_of
from tests.nodes.engines.vllm.test_host_pool import mark_whole

OPTIONS = ProcessOptions(dtype="float32", block_tokens=32, elastic=True, movable=True)


class MadeUp:
    """A process that does at once what it is told, unless `held` keeps it."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.instance_id = InstanceId("i")
        self.pid = 0
        self.alive = True
        self.told: list[Verb] = []
        self.placed: list[Range | None] = []
        self.began, self.held = threading.Event(), threading.Event()
        self.held.set()

    def call(self, verb: Verb, *arguments: object, timeout_s: float = 0.0) -> None:
        self.told.append(verb)
        if verb in (Verb.SLEEP, Verb.FILL):
            (where,) = cast(tuple[Range | None], arguments)
            self.placed.append(where)
        self.began.set()
        assert self.held.wait(WAIT_S_MAX)
        for where in self.placed if verb is Verb.SLEEP else ():
            if where is not None:
                mark_whole(self._pool, where)

    @property
    def gone(self) -> bool:
        return not self.alive

    def end(self) -> None:
        self.alive = False


def test_parts_of_weights_are_those_of_the_tensors_beside_what_stays() -> None:
    """A tenth of the footprint stays: an eighth of it leaves room for little more."""
    layout = Layout(tensors=(), sizes_bytes=(800, 80), beside=())
    loaded = Loaded(layout=layout, beside_bytes=20)
    slot = SleepSlot(key=cast(WakeKey, None), loaded=loaded, remote=cast(Remote, None))
    for share, there_bytes in ((0.0, 100), (0.05, 100), (0.125, 125), (0.5, 500), (1.0, 1000)):
        assert 100 + slot.moved(1000, share) * 900 == pytest.approx(there_bytes)
    assert slot.moved(450, 0.5) == 0.5, "fewer are stated than move"


class Host:
    """Its pool, in chunks, and what sleeps there."""

    def __init__(self, model: StoredModel, *, count_max: int = 3, chunks: int = 100) -> None:
        self._model = model
        self.pool = HostPool(bytes_max=chunks * CHUNK_BYTES, available_bytes=lambda: 1 << 50)
        self.sleeping = SleepingProcesses(count_max=count_max, pool=self.pool)

    def slot(self, name: str, chunks: int = 1, batch_max: int = 1) -> tuple[SleepSlot, MadeUp]:
        """A slot of a model of this name."""
        made_up = MadeUp(self.pool)
        order = self._order(name, batch_max)
        layout = Layout(tensors=(), sizes_bytes=(chunks * CHUNK_BYTES - len(WHOLE),), beside=())
        loaded = Loaded(layout=layout, beside_bytes=0)
        remote = cast(Remote, made_up)
        return SleepSlot(key=wake_key(order, OPTIONS), loaded=loaded, remote=remote), made_up

    def _order(self, name: str, batch_max: int) -> LoadOrder:
        order = self._model.order(InstanceId("i"), batch_max=batch_max)
        return replace(order, model_path=Path(name))

    def wake(self, name: str, batch_max: int = 1) -> SleepSlot | None:
        order = self._order(name, batch_max)
        return self.sleeping.wake(order, wake_key(order, OPTIONS))

    def pooled(self) -> str:
        return "".join(str(key.model_path) for key in self.pool.listed())


def test_those_that_died_in_their_sleep_take_nobodys_place(model: StoredModel) -> None:
    host = Host(model, count_max=2)
    (older, first), (newer, second), (last, _) = (host.slot(name) for name in "abc")
    assert host.sleeping.sleep(older)
    assert host.sleeping.sleep(newer)
    second.alive = False
    assert host.sleeping.sleep(last)
    assert first.alive
    assert len(host.sleeping.listed()) == 2


@pytest.mark.parametrize(("chunks", "sleeps"), [(5, True), (4, False)])
def test_nobody_goes_for_one_that_would_not_fit_in_the_place_of_all(
    model: StoredModel, chunks: int, sleeps: bool
) -> None:
    host = Host(model, chunks=chunks)
    (one, first), (two, second) = host.slot("a"), host.slot("b")
    large, _ = host.slot("c", chunks=5)
    assert host.sleeping.sleep(one)
    assert host.sleeping.sleep(two)
    assert host.sleeping.sleep(large) is sleeps
    assert first.alive is second.alive is not sleeps


def test_weights_that_nobody_maps_go_before_anybody_who_sleeps(model: StoredModel) -> None:
    host = Host(model, chunks=3)
    (one, first), (two, second), (three, _) = (host.slot(name) for name in "abc")
    for slot in (one, two):
        assert host.sleeping.sleep(slot)
    first.end()
    assert host.pooled() == "ab"
    assert host.sleeping.sleep(three)
    assert host.pooled() == "abc"
    four, _ = host.slot("d")
    assert host.sleeping.sleep(four)
    assert host.pooled() == "bcd"
    assert second.alive


def test_the_place_of_one_asleep_too_long_is_taken_and_its_weights_stay(model: StoredModel) -> None:
    host = Host(model, count_max=1)
    (one, first), (two, second) = host.slot("a"), host.slot("b")
    assert host.sleeping.sleep(one)
    assert host.sleeping.sleep(two)
    assert (first.alive, second.alive) == (False, True)
    assert host.pooled() == "ab"


def test_instances_of_one_model_share_what_they_have_there(model: StoredModel) -> None:
    host = Host(model, chunks=3)
    (one, first), (two, second) = (host.slot("a", 2, batch_max) for batch_max in (1, 2))
    assert host.sleeping.sleep(one)
    assert host.sleeping.sleep(two)
    (filled,), (found,) = first.placed, second.placed
    assert filled is not None
    assert found == replace(filled, whole=True)
    assert host.pool.used_bytes == 2 * CHUNK_BYTES
    assert host.wake("a", 2) is two
    assert host.sleeping.sleep(two)
    assert second.placed[-1] is None, "it has it"


def test_another_that_is_being_filled_is_not_waited_for_and_costs_nobody_anything(
    model: StoredModel,
) -> None:
    host = Host(model)
    (other, asleep), (one, first), (two, _) = host.slot("b"), host.slot("a"), host.slot("a")
    assert host.sleeping.sleep(other)
    host.sleeping.reserve(one)
    assert first.told == [Verb.FILL]
    assert not host.sleeping.sleep(two)
    assert asleep.alive
    (where,) = first.placed
    assert where is not None
    mark_whole(host.pool, where)
    assert host.sleeping.sleep(two)


def test_half_of_it_is_filled_ahead(model: StoredModel) -> None:
    """By what is awake: what sleeps is not in the way."""
    host = Host(model, chunks=6)
    (one, first), (two, second), (three, third) = (host.slot(name, 2) for name in "abc")
    assert host.sleeping.sleep(one)
    host.sleeping.reserve(two)
    host.sleeping.reserve(three)
    assert (second.told, third.told) == ([Verb.FILL], [])
    assert first.alive
    assert host.sleeping.sleep(three)
    assert first.alive


def test_a_load_waits_for_a_sleep_of_its_own_kind_alone(model: StoredModel) -> None:
    host = Host(model)
    slot, made_up = host.slot("a")
    made_up.held.clear()
    sleeper, slept = outcome_of(lambda: host.sleeping.sleep(slot))
    assert made_up.began.wait(WAIT_S_MAX)
    other, found = outcome_of(lambda: host.wake("a", 2))
    other.join(WAIT_S_MAX / 10)
    assert found == [None], "it loads beside the sleep"
    waker, woken = outcome_of(lambda: host.wake("a"))
    waker.join(0.1)
    assert waker.is_alive()
    made_up.held.set()
    for thread in (sleeper, waker):
        thread.join(WAIT_S_MAX)
    assert (slept, woken) == ([True], [slot])
