"""What a completed load tells of the next one: how long it took from where it came, and that its
deployment can be loaded.

Before: `nodes`, which takes the report. After: `Expectations`, and the node's list of
what sleeps on it, which its heartbeats set right.
"""

from mesh.core.controller.state.cell import InstanceEntry
from mesh.core.controller.state.context import Turn
from mesh.domain.messages import InstanceLoaded
from mesh.domain.steps import LoadTier, SleepingModel


def note_loaded(turn: Turn, instance: InstanceEntry, said: InstanceLoaded) -> None:
    node, model_id = instance.node, instance.model_id
    instance.tier = said.tier
    turn.cell.expectations.learn_load(model_id, node.hello.fingerprint, said.elapsed_s, said.tier)
    owner = turn.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.paused_until_s = 0.0
        owner.avoided.clear()
    if said.tier is LoadTier.HOST:
        woken = SleepingModel(model_id=model_id, context_tokens_max=instance.context_tokens_max)
        left = list(node.asleep)
        if woken in left:
            left.remove(woken)
        node.asleep = tuple(left)
