"""What an engine refuses at a load and at a submit, and in which words: the same for all here.

Before: the engine's `load` and `submit`. After: it goes on, or an error says why not.
"""

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId
from mesh.domain.steps import EngineRequest, LoadOrder
from mesh.domain.units import format_bytes


def check_bounds(order: LoadOrder) -> None:
    """Raises EngineError for an instance with room for nothing."""
    if min(order.kv_blocks, order.batch_max, order.context_tokens_max) < 1:
        raise EngineError(
            f"instance {order.instance_id} asks for {order.kv_blocks} KV blocks, "
            f"{order.batch_max} requests and {order.context_tokens_max} tokens of context",
            hint="each must be at least 1",
        )


def lacks_memory(instance_id: InstanceId, wanted_bytes: int, available_bytes: int) -> OutOfMemory:
    """For the engine to raise."""
    return OutOfMemory(
        f"instance {instance_id} takes {format_bytes(wanted_bytes)}, "
        f"{format_bytes(available_bytes)} are available",
        hint="lower spec.context_tokens_max, unload another instance, or give the node more memory",
    )


def check_runnable(
    instance_id: InstanceId,
    request: EngineRequest,
    *,
    known: bool,
    context_tokens_max: int,
    vocabulary_tokens: int,
) -> None:
    """Raises EngineError with the reason. `known`: the instance has a request of this id."""
    reason = "it is already there" if known else ""
    reason = reason or _refusal(request, context_tokens_max, vocabulary_tokens)
    if reason:
        raise EngineError(f"request {request.request_id} on {instance_id}: {reason}")


def _refusal(request: EngineRequest, context_tokens_max: int, vocabulary_tokens: int) -> str:
    """Why no instance with these bounds could run it, or nothing."""
    tokens = (*request.prompt_tokens, *request.output_tokens)
    if not request.prompt_tokens:
        return "it has no prompt tokens"
    if len(tokens) >= context_tokens_max:
        return f"{len(tokens)} tokens leave no room in {context_tokens_max} of context"
    if len(request.output_tokens) >= request.sampling.max_tokens:
        return f"it has all of its {request.sampling.max_tokens} tokens already"
    if not 0 <= min(tokens) <= max(tokens) < vocabulary_tokens:
        return f"a token id is outside the vocabulary of {vocabulary_tokens}"
    if request.sampling.prompt_logprobs is not None and request.cache_salt is not None:
        return "it asks about a prompt that it would share, and what is cached has no logits"
    return ""
