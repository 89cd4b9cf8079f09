"""Links that break while memory moves: what the engine holds stays within what is tracked of it."""

import pytest

from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import InstanceState
from mesh.domain.slo import Slo
from mesh.runtime.node_actions import Lane
from tests.core.cells import MIB, deployment
from tests.core.world.cell import LIMITS, World
from tests.core.world.node import WorldNode

A, B = DeploymentName("a"), DeploymentName("b")


def loaded(kv_blocks: int) -> tuple[World, WorldNode]:
    """`a` is loaded and idle, on a node with so many KV blocks beside the weights of two."""
    patient = Slo(ttft_s=60.0, tpot_s=10.0)
    deployments = (deployment(A, slo=patient), deployment(B, slo=patient))
    world = World(deployments, ((200 + kv_blocks) * MIB,), rule="fcfs")
    (node,) = world.nodes
    node.connect()
    world.invoke(A, (1,) * 8, 1)
    node.run_all()
    return world, node


def reconnect(node: WorldNode) -> None:
    node.break_link()
    node.connect()


def deliver(node: WorldNode) -> None:
    while node.deliver_down():
        pass


def compute(world: World, node: WorldNode) -> None:
    """All that the engine has been asked for; the books are looked at before and after each answer
    comes.
    """
    while node.lanes.run_one(Lane.COMPUTE):
        world.check_engines()
        while node.deliver_up():
            world.check_engines()


@pytest.mark.parametrize("links", [1, 2], ids=["one", "two"])
def test_a_resize_of_an_earlier_link_does_not_end_one_of_this_link(links: int) -> None:
    """The first, a shrink, is still to be carried out when a growth is asked for."""
    world, node = loaded(25)
    world.clock.advance(1.0)
    deliver(node)
    for n in range(links):
        reconnect(node)
        world.invoke(A, (n + 1,) * 300, 40)
        deliver(node)
    compute(world, node)
    world.settle(5.0)
    assert not world.callers.open_ids()


def test_the_end_of_an_earlier_links_resize_corrects_the_books() -> None:
    """Whether it comes while nobody listens or later."""
    for before_welcome in (True, False):
        world, node = loaded(25)
        world.clock.advance(1.0)
        deliver(node)
        node.break_link()
        node.dial()
        if before_welcome:
            node.lanes.run_one(Lane.COMPUTE)
        node.welcome()
        (instance,) = world.core.cell.instances.values()
        assert instance.promised_blocks == 3
        node.run_all()
        assert (instance.promised_blocks, instance.kv_blocks) == (1, 1)


def test_a_cache_does_not_grow_into_the_memory_of_a_load_that_nobody_knows_of() -> None:
    """The link broke while `b` was loaded beside `a`; it is unloaded as soon as it is there."""
    world, node = loaded(80)
    wanted = world.invoke(B, (1,) * 8, 1)
    deliver(node)
    node.break_link()
    world.cancel(wanted)
    node.connect()
    for n in range(4):
        world.invoke(A, (n + 1,) * 450, 40)
    deliver(node)
    (instance,) = world.core.cell.instances.values()
    assert instance.promised_blocks == 75
    compute(world, node)
    assert node.load()
    assert node.load()
    assert len(node.engine.memory()) == 2
    world.settle(5.0)
    assert not world.callers.open_ids()


def test_an_instance_that_becomes_idle_twice_at_one_moment_is_parked_all_the_same() -> None:
    """Its node came back, and its request ended, before the clock moved."""
    world, node = loaded(25)
    reconnect(node)
    world.invoke(A, (1,) * 8, 1)
    node.run_all()
    world.settle(2.0)
    (instance,) = world.core.cell.instances.values()
    assert instance.state is InstanceState.PARKED
    world.settle(LIMITS.parked_s_max)
    assert not world.core.cell.instances
