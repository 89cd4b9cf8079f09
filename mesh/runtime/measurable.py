"""Which iterations an engine can measure: the checks before `Engine.measure`, the same for all.

A measured iteration must be one that requests could bring about: within the instance's context and
batch, and with KV blocks of its own for every token that it attends to. Before: the node core asks
for a shape. After: the engine makes sequences of that shape, of the tokens that are given here, and
computes them once.
"""

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId
from mesh.domain.profile import IterationShape


def check_measurable(
    instance_id: InstanceId,
    shape: IterationShape,
    *,
    context_tokens_max: int,
    batch_max: int,
    block_tokens: int,
    blocks_free: int,
) -> None:
    """Raises EngineError when no iteration of the instance can have the shape, OutOfMemory when
    too few blocks are free for it now.
    """
    reason = _refusal(shape, context_tokens_max, batch_max)
    if reason:
        raise EngineError(f"instance {instance_id} cannot be measured: {reason}")
    wanted = _blocks(shape, block_tokens)
    if wanted > blocks_free:
        raise OutOfMemory(
            f"instance {instance_id} cannot be measured: the iteration takes {wanted} KV blocks, "
            f"{blocks_free} are free",
            hint="wait for requests to end, or measure a smaller batch or context",
        )


def no_counters(engine: str) -> EngineError:
    """Why `Engine.count_operators` counts nothing."""
    return EngineError(
        f"{engine} has no counters of operators",
        hint="profile on a CPU node, or without --operators",
    )


def made_up_tokens(number: int, length: int, left: int, vocabulary_tokens: int) -> tuple[int, ...]:
    """A prompt of which the last `left` tokens are computed, after `number` others of the same
    iteration: unlike all of them, since of a mixture like tokens would take the same experts. They
    are neighbours, so that a measurement brings no more of an embedding into memory than it must.
    """
    computed = range(number + 1, number + left + 1)
    return (0,) * (length - left) + tuple(token_id % vocabulary_tokens for token_id in computed)


def _refusal(shape: IterationShape, context_tokens_max: int, batch_max: int) -> str:
    """Why no iteration has this shape, or nothing."""
    sizes = (
        shape.prefill_tokens,
        shape.prefill_past_tokens,
        shape.decode_batch,
        shape.decode_context_tokens,
    )
    if min(sizes) < 0:
        return f"the shape has a size of {min(sizes)}"
    if not shape.prefill_tokens and not shape.decode_batch:
        return "the shape is empty"
    if shape.decode_batch and not shape.decode_context_tokens:
        return "a decode attends to at least the token that it computes, not to 0"
    requests = shape.decode_batch + (shape.prefill_tokens > 0)
    if requests > batch_max:
        return f"{requests} requests are more than the {batch_max} that an iteration may carry"
    context_tokens = max(
        shape.prefill_tokens + shape.prefill_past_tokens if shape.prefill_tokens else 0,
        shape.decode_context_tokens if shape.decode_batch else 0,
    )
    if context_tokens > context_tokens_max:
        return f"{context_tokens} tokens are more than the {context_tokens_max} of a context"
    return ""


def _blocks(shape: IterationShape, block_tokens: int) -> int:
    """KV blocks of the shape: no two requests share one."""
    prefill = shape.prefill_past_tokens + shape.prefill_tokens if shape.prefill_tokens else 0
    decode = shape.decode_batch * -(-shape.decode_context_tokens // block_tokens)
    return decode + -(-prefill // block_tokens)
