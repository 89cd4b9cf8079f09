"""Which requests can never run on an instance: the checks at submit, the same for all engines here.

Before: the engine's `submit`. After: the instance takes the request, or EngineError says why not.
"""

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId
from mesh.domain.steps import EngineRequest


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
    return ""
