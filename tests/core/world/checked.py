"""What holds of a cell after every call, and what holds once it has come to rest."""

from hypothesis.stateful import RuleBasedStateMachine, invariant

from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.domain.ids import RequestId
from mesh.domain.lifecycle import InstanceState, NodeState, RequestState
from tests.core.cells import FOOTPRINT, MODEL
from tests.core.world.books import check_engine
from tests.core.world.cell import LIMITS, World

LEAST_BYTES = FOOTPRINT.instance_bytes(FOOTPRINT.blocks_for(MODEL.context_tokens_max))
"""Of an instance that any request may be placed on."""


class CheckedCell(RuleBasedStateMachine):
    """The rules come with the tests; `WatchedCore` and `WorldEngine` check as they go."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.room_since_s: dict[RequestId, float] = {}
        self.loadable_since_s: dict[RequestId, float] = {}

    @invariant()
    def books_balance(self) -> None:
        cell = self.world.core.cell
        for node in cell.nodes.values():
            station = node.station
            assert station.promised_bytes == sum(station.size_bytes(i) for i in node.instances)
            assert station.tracked_bytes <= station.capacity_bytes
        for instance in cell.instances.values():
            self._check_instance(instance)
        for name, entry in cell.deployments.items():
            assert all(held.state is RequestState.QUEUED for held in entry.queue)
            assert all(i.deployment == name for i in entry.instances.values())
            assert entry.replicas() <= entry.spec.scaling.replicas_max

    def _check_instance(self, instance: InstanceEntry) -> None:
        assert instance.state is not InstanceState.GONE
        assert instance.node.instances[instance.instance_id] is instance
        assert instance.tokens == sum(held.tokens for held in instance.requests.values())
        assert instance.required_blocks == sum(
            held.required_blocks for held in instance.requests.values()
        )
        assert instance.batch <= instance.batch_max
        assert all(held.instance is instance for held in instance.requests.values())

    @invariant()
    def every_open_request_is_queued_or_running_in_one_place(self) -> None:
        cell = self.world.core.cell
        open_ids = {r for r, c in self.world.clients.items() if not c.ended and not c.gone}
        assert set(cell.requests) == open_ids
        places = [h.original.request_id for d in cell.deployments.values() for h in d.queue]
        places += [r for i in cell.instances.values() for r in i.requests]
        assert sorted(places) == sorted(open_ids)

    @invariant()
    def no_request_waits_long_for_room_that_is_there(self) -> None:
        """The end of a request is looked at on its node; all others are tried when it is time."""
        now_s, before, self.room_since_s = self.world.clock.now_s(), self.room_since_s, {}
        for entry in self.world.core.cell.deployments.values():
            if entry.queue and not entry.queue[0].refusals.verdict:
                head = entry.queue[0].original
                ready = [i for i in entry.instances.values() if i.takes_now and not i.is_full]
                if any(_has_room(i, head.tokens_max) for i in ready):
                    since_s = before.get(head.request_id, now_s)
                    assert now_s <= since_s + LIMITS.place_retry_s
                    self.room_since_s[head.request_id] = since_s

    @invariant()
    def no_request_waits_for_an_instance_that_could_be_loaded(self) -> None:
        """Whoever has become the head by the end of a request on its node, and has found no room
        there, or others have filled it, is seen to when it is time.
        """
        now_s, before, self.loadable_since_s = self.world.clock.now_s(), self.loadable_since_s, {}
        for entry in self.world.core.cell.deployments.values():
            if entry.queue and not entry.queue[0].refusals.verdict and self._could_be_loaded(entry):
                head = entry.queue[0]
                filled = any(instance.is_full for instance in entry.instances.values())
                assert head.refusals.short_of_memory or filled
                since_s = before.get(head.original.request_id, now_s)
                assert now_s <= since_s + LIMITS.place_retry_s
                self.loadable_since_s[head.original.request_id] = since_s

    def _could_be_loaded(self, entry: DeploymentEntry) -> bool:
        coming = any(i.state is InstanceState.LOADING for i in entry.instances.values())
        full = entry.replicas() >= entry.spec.scaling.replicas_max
        if coming or full or self.world.clock.now_s() < entry.paused_until_s:
            return False
        taken = [i.node for i in entry.instances.values()]
        return any(
            node not in taken
            and node.node_id not in entry.avoided
            and node.state is NodeState.READY
            and node.free_bytes >= LEAST_BYTES
            for node in self.world.core.cell.nodes.values()
        )

    @invariant()
    def a_waiting_request_is_tried_again_soon_and_waits_no_longer_than_it_may(self) -> None:
        now_s = self.world.clock.now_s()
        for entry in self.world.core.cell.deployments.values():
            if entry.queue:
                retry_at_s = self.world.core.cell.retry_at_s
                assert retry_at_s is not None
                assert now_s <= retry_at_s <= now_s + LIMITS.place_retry_s
            for held in entry.queue:
                assert now_s - held.queued_at_s <= LIMITS.queue_wait_s_max + LIMITS.place_retry_s

    @invariant()
    def engines_hold_no_more_than_is_tracked_of_them(self) -> None:
        for node in self.world.nodes:
            check_engine(self.world.core.cell, node.link_id, node.engine)

    @invariant()
    def nobody_is_overtaken_too_often(self) -> None:
        for held in self.world.core.cell.requests.values():
            assert held.overtaken <= LIMITS.overtaken_max

    @invariant()
    def an_iteration_is_under_way_only_where_requests_are(self) -> None:
        for node in self.world.core.cell.nodes.values():
            assert (node.iteration_started_s is None) == node.is_idle()
            assert node.running == sum(i.batch for i in node.instances.values())

    @invariant()
    def an_instance_is_kept_for_a_profile_only_while_one_is_asked_for(self) -> None:
        cell = self.world.core.cell
        measured = [operation.instance for operation in cell.operations.values()]
        for instance in cell.instances.values():
            assert instance.profiling == (instance in measured)

    def _check_minimum(self, entry: DeploymentEntry) -> None:
        """It is kept as far as memory goes."""
        assert len(entry.instances) <= entry.spec.scaling.replicas_min
        if len(entry.instances) < entry.spec.scaling.replicas_min:
            taken = [i.node for i in entry.instances.values()]
            for node in self.world.core.cell.nodes.values():
                assert node in taken or node.free_bytes < LEAST_BYTES

    def teardown(self) -> None:
        """Once the faults end, every request ends, and idle cells are empty but for minima."""
        for node in self.world.nodes:
            engine = node.engine
            engine.fail_loads = engine.fail_steps = engine.fail_measures = engine.fail_resizes = 0
        self.world.settle(15.0)
        for node in self.world.nodes:
            self.world.drain(node.core_id(), undo=True)
        self.world.settle(90.0)
        assert all(self.world.operations.values()), "an operation was never answered"
        for client in self.world.clients.values():
            assert client.ended or client.gone, "a request is stuck"
        self.books_balance()
        cell = self.world.core.cell
        assert cell.requests == {}
        assert cell.operations == {}
        assert not any(i.profiling for i in cell.instances.values())
        for entry in cell.deployments.values():
            self._check_minimum(entry)
        assert all(i.kv_blocks_used == 0 for i in cell.instances.values())
        for node_entry in cell.nodes.values():
            station = node_entry.station
            assert not station.waiting()
            assert not station.running_reservations()
            assert station.promised_bytes == station.tracked_bytes
        for instance in cell.instances.values():
            parked = instance.state is InstanceState.PARKED
            assert instance.kv_blocks == instance.promised_blocks >= 1
            assert not parked or instance.kv_blocks == 1 or self.world.seen["short shrinks"]
        for node in self.world.nodes:
            for held in node.engine.memory():
                assert held.kv_blocks == cell.instances[held.instance_id].kv_blocks
            loaded = node.engine.held()
            assert set(loaded) == set(cell.nodes[node.core_id()].instances)
            assert all(count == 0 for count in loaded.values()), "a place was leaked"


def _has_room(instance: InstanceEntry, tokens: int) -> bool:
    """Whether its KV cache would hold so many tokens more, all else being as it is."""
    blocks = instance.required_blocks + instance.footprint.blocks_for(tokens)
    return blocks <= instance.promised_blocks
