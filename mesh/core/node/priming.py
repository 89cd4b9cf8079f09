"""Priming on a node: a newly loaded instance computes iterations of many sizes once, for nobody.

Engines build and keep kernels for each size when they first meet it (OpenVINO on a CPU: 10 to 20 ms
each), which the first burst on an instance would pay for with its deadlines. So it is done whenever
nothing else is to be computed, from a heartbeat on, the least sizes first; requests wait for one
such iteration at most, and those that follow at once on an answer, a load or a grow for none. A
size that the KV cache does not hold is left until it does.
"""

from collections import deque

from mesh.core.node.context import NodeEventContext
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.state import LocalNode
from mesh.domain.actions import StartMeasure
from mesh.domain.profile import IterationShape

CONTEXT_TOKENS = 32
PREFILL_STEP_TOKENS = 4
"""Engines pad longer chunks to steps of their own, of which none is shorter."""


def to_prime(
    *, batch_max: int, context_tokens_max: int, tokens_max: int, decodes: bool = True
) -> deque[IterationShape]:
    """Every batch of decodes, where there are any, and prefills in steps, both of up to so many
    tokens.
    """
    context = min(CONTEXT_TOKENS, context_tokens_max)
    batches = range(1, min(batch_max, tokens_max) + 1) if decodes else ()
    shapes = [IterationShape(decode_batch=b, decode_context_tokens=context) for b in batches]
    longest = min(tokens_max, context_tokens_max)
    lengths = range(PREFILL_STEP_TOKENS, longest + 1, PREFILL_STEP_TOKENS)
    return deque([*shapes, *(IterationShape(prefill_tokens=tokens) for tokens in lengths)])


def grant(ctx: NodeEventContext, node: LocalNode) -> bool:
    """Compute the next size of an instance that has some left. False where none has."""
    for instance in node.instances.values():
        shape = _next_shape(instance) if _may_compute(node, instance) else None
        if shape is not None:
            instance.note_primed(shape)
            node.begin_measured(instance, ctx.now_s)
            ctx.engine(StartMeasure(instance_id=instance.instance_id, shape=shape))
            return True
    return False


def _may_compute(node: LocalNode, instance: LocalInstance) -> bool:
    return instance.state is LocalState.READY and node.computes(instance)


def _next_shape(instance: LocalInstance) -> IterationShape | None:
    """The first that the KV cache has room for."""
    free = instance.kv_blocks_next - instance.kv_blocks_used
    return next((shape for shape in instance.unprimed if fits(instance, shape, free)), None)


def fits(instance: LocalInstance, shape: IterationShape, free_blocks: int) -> bool:
    """Whether so many KV blocks hold what such an iteration computes with."""
    footprint = instance.footprint
    if footprint is None:
        return False
    decode = shape.decode_batch * footprint.blocks_for(shape.decode_context_tokens)
    prompt = footprint.blocks_for(shape.prefill_past_tokens + shape.prefill_tokens)
    return decode + prompt <= free_blocks
