"""What a node core keeps from turn to turn, worked out anew and held against it."""

from mesh.core.node import NodeCore
from mesh.core.node_state import LocalInstance, LocalState


def check_kept(core: NodeCore) -> None:
    node = core._node  # the state as it is kept
    loads = (LocalState.LOADING, LocalState.ABANDONED)
    assert node.loads == sum(instance.state in loads for instance in node.instances.values())
    for instance in node.instances.values():
        for held in instance.requests.values():
            assert held.tokens == len(held.order.request.prompt_tokens) + held.output_tokens
        if instance.kept_lane is not None:
            _check_lane(instance)


def _check_lane(instance: LocalInstance) -> None:
    """It holds the requests that the instance has now, for the profile that it has now."""
    kept = instance.kept_lane
    assert kept is not None
    lane = instance._filled_lane(0.0, 0.0, kept.times.factor)
    assert (kept.batch, kept.context_tokens) == (lane.batch, lane.context_tokens)
    assert kept.oldest_s == lane.oldest_s
    assert kept.decode_s == lane.decode_s
    assert [(p.left, p.past) for p in kept.prompts] == [(p.left, p.past) for p in lane.prompts]
    margins_s = {round(due - at, 6) for due, at in zip(lane.dues_s, kept.dues_s, strict=True)}
    assert len(margins_s) <= 1
    assert all(0.0 <= margin_s <= lane.tpot_s / 4 for margin_s in margins_s)
