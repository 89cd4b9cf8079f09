"""Sequences that nobody asked for, so that an iteration of a given shape can be measured.

They look as running requests do amid their lives: blocks of their own, and most of their tokens
computed, by the books. `instance` and `precision_trial` compute them once and release them; no
request sees them.
"""

from mesh.domain.ids import RequestId
from mesh.domain.profile import IterationShape
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import EngineRequest
from mesh.runtime.measurable import made_up_tokens
from mesh_nodes.engines.openvino.sequence import Sequence


def sequences_of(shape: IterationShape, vocabulary_tokens: int) -> list[Sequence]:
    """One for each decode and, after them, one whose prompt ends with the chunk: the last chunk of
    a prompt takes the longest, since a token comes of it. None holds a block yet.
    """
    made = [
        _sequence(number, shape.decode_context_tokens, 1, vocabulary_tokens)
        for number in range(shape.decode_batch)
    ]
    for sequence in made:
        sequence.decoding = True
    if shape.prefill_tokens:
        length = shape.prefill_past_tokens + shape.prefill_tokens
        made.append(_sequence(len(made), length, shape.prefill_tokens, vocabulary_tokens))
    return made


def _sequence(number: int, length: int, left: int, vocabulary_tokens: int) -> Sequence:
    """See `made_up_tokens`. It does not end with its next token."""
    request = EngineRequest(
        request_id=RequestId("measured"),
        prompt_tokens=made_up_tokens(number, length, left, vocabulary_tokens),
        output_tokens=(),
        sampling=SamplingParams(max_tokens=2),
        stop_token_ids=(),
    )
    sequence = Sequence(request, context_tokens_max=length + 2, vocabulary_tokens=vocabulary_tokens)
    sequence.computed = length - left
    return sequence
