"""What the cores keep from turn to turn, worked out anew and held against it."""

from mesh.core.controller.core import ControllerCore
from mesh.core.controller.instances.placement import find_room
from mesh.core.controller.state.context import EventContext
from mesh.core.node.core import NodeCore
from mesh.core.node.state import LocalInstance, LocalState
from mesh.request.placement import Start


def check_refusals(core: ControllerCore, now_s: float) -> None:
    """A node that had no memory for a new instance, and has not been eased since, has none."""
    ctx = EventContext(
        cell=core.cell,
        epoch=0,
        limits=core._limits,
        policy=core._policy,
        now_s=now_s,
        validations_left=0,
    )
    for entry in core.cell.deployments.values():
        assert not entry.queue or entry.spec.name in core.cell.waiting
        if not entry.queue or entry.replicas() >= entry.spec.scaling.replicas_max:
            continue
        tried_for, refused = core.cell.refusals._starts.get(entry.spec.name, (None, {}))
        if tried_for != entry.queue[0].original.request_id:
            continue
        nodes = core.cell.nodes.values()
        full = [n for n in nodes if refused.get(n.node_id) == (n.eased, None)]
        found = find_room(ctx, entry, full, waiting=entry.queue, wanted_by=None)
        if isinstance(found, Start):
            raise AssertionError(f"{found.node.node_id} could hold {entry.spec.name} by now")


def check_kept(core: NodeCore) -> None:
    node = core._node  # the state as it is kept
    loads = (LocalState.LOADING, LocalState.ABANDONED)
    assert node.loads == sum(instance.state in loads for instance in node.instances.values())
    for instance in node.instances.values():
        for held in instance.requests.values():
            assert held.tokens == len(held.order.request.prompt_tokens) + held.output_tokens
        if instance.kept_run_queue is not None:
            _check_lane(instance)


def _check_lane(instance: LocalInstance) -> None:
    """It holds the requests that the instance has now, for the profile that it has now."""
    kept = instance.kept_run_queue
    assert kept is not None
    run_queue = instance._filled_run_queue(0.0, 0.0, kept.times.factor)
    assert (kept.batch, kept.context_tokens) == (run_queue.batch, run_queue.context_tokens)
    assert kept.oldest_s == run_queue.oldest_s
    assert kept.decode_s == run_queue.decode_s
    assert [(p.left, p.past) for p in kept.prompts] == [(p.left, p.past) for p in run_queue.prompts]
    margins_s = {round(due - at, 6) for due, at in zip(run_queue.dues_s, kept.dues_s, strict=True)}
    assert len(margins_s) <= 1
    assert all(0.0 <= margin_s <= run_queue.tpot_s / 4 for margin_s in margins_s)
