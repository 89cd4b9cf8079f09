"""What a method of a node's entries changes together."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.request import LocalRequest
from mesh.core.node.state import LocalNode
from mesh.domain.messages import LoadInstance
from mesh.domain.node_rule import CELL_RULE
from mesh.domain.request import RequestOrder
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.turns import Grant
from tests.core.cells import FOOTPRINT, request
from tests.core.nodes import load_command
from tests.support.profiles import PROFILE


def a_request(name: str = "r1") -> LocalRequest:
    order = RequestOrder(
        request=request(name), attempt=1, output_tokens=(), slo=Slo(), age_s=0.0, due_in_s=1.0
    )
    return LocalRequest(
        order=order, start_s=0.0, output_tokens=0, first_step=1, due_s=1.0, prefill_left=3
    )


def loaded(node: LocalNode, name: str = "i1") -> LocalInstance:
    command: LoadInstance = load_command(name)
    instance = LocalInstance(command=command, profile=command.profile)
    node.add(instance)
    node.begin_load(instance, 0.0)
    node.end_load(instance, LoadTier.DISK, 0.0)
    instance.note_loaded(FOOTPRINT, 16)
    return instance


def changes(instance: LocalInstance, held: LocalRequest) -> dict[str, Callable[[], object]]:
    better = replace(PROFILE, measured_s=PROFILE.measured_s + 1.0)
    return {
        "a request came": lambda: instance.add(a_request("r2")),
        "a request went": lambda: instance.remove(held),
        "an iteration ended": lambda: instance.note_iteration(1),
        "another profile holds": lambda: instance.use_profile(better),
        "it is unloaded": instance.unload,
    }


@pytest.mark.parametrize("change", list(changes(loaded(LocalNode()), a_request())))
def test_the_kept_run_queue_goes_when(change: str) -> None:
    instance, held = loaded(LocalNode()), a_request()
    instance.add(held)
    assert instance.run_queue(0.5, 0.0, 1.0, 1.1) is not None
    assert instance.kept_run_queue is not None
    changes(instance, held)[change]()
    assert instance.kept_run_queue is None


def test_an_instance_has_one_turn_at_a_time() -> None:
    node = LocalNode()
    instance = loaded(node)
    instance.add(a_request())
    run_queue = instance.run_queue(0.5, 0.0, 1.0, 1.1)
    assert run_queue is not None
    node.begin_turn(Grant(queue=run_queue, prefill=3, seconds=0.1), 0.5)
    assert (node.stepping, node.steps_started, node.step_started_s) == ("i1", 1, 0.5)
    assert instance.run_queue(0.5, 0.0, 1.0, 1.1) is None
    node.end_turn(0.0)
    assert node.stepping is None
    instance.encourage()
    assert instance.run_queue(0.5, 0.0, 1.0, 1.1) is not None


def test_a_load_takes_part_of_the_machine_until_it_has_ended() -> None:
    node = LocalNode()
    instance = LocalInstance(command=load_command("i1"), profile=PROFILE)
    node.add(instance)
    assert not node.loading()
    node.begin_load(instance, 0.0)
    assert node.loading()
    node.end_load(instance, LoadTier.DISK, 0.0)
    assert not node.loading()


def test_what_a_closed_link_leaves_in_the_midst_of_something_is_in_nobodys_books() -> None:
    node = LocalNode()
    ready, loading = loaded(node), LocalInstance(command=load_command("i2"), profile=PROFILE)
    waiting = LocalInstance(command=load_command("i3"), profile=PROFILE)
    for instance in (loading, waiting):
        node.add(instance)
    node.begin_load(loading, 0.0)
    ready.begin_resize(8)
    node.link_closed(0.0)
    assert list(node.instances) == ["i1", "i2"]
    node.link_opened(CELL_RULE, HEADROOM)
    assert (ready.unbooked, loading.unbooked, node.has_unbooked()) == (False, True, True)
    assert loading.state is LocalState.ABANDONED
    ready.begin_resize(4)
    assert [ready.end_resize(8), ready.end_resize(4)] == [False, True]
    assert ready.kv_blocks == 4
