"""What a compiled model computes for a short prompt and a few tokens after it: its logits.

`blob_maker` compares with it what was compiled with what was imported, `precision_trial` what
precisions make of a model. The request that it makes and its KV cache end with the call.
"""

import numpy as np
import numpy.typing as npt

from mesh.domain.ids import RequestId
from mesh.domain.request import SamplingParams
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh.runtime.engine import EngineRequest
from mesh_nodes.engines.openvino.batch import BatchInputs, plan
from mesh_nodes.engines.openvino.blocks import BlockPlaces
from mesh_nodes.engines.openvino.compilation import CompiledGraph
from mesh_nodes.engines.openvino.kv_cache import KvResize, bind_kv_cache
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.sequence import Sequence

_PROMPT_TOKENS = BLOCK_TOKENS + 1
"""A prefill that fills a block and begins the next."""
_DECODES = 3


def probe_logits(
    graph: CompiledGraph, *, vocabulary_tokens: int, context_tokens_max: int
) -> npt.NDArray[np.float32]:
    """[iterations, vocabulary], greedy. Raises RuntimeError or OutOfMemory."""
    request = graph.model.create_infer_request()
    inputs = BatchInputs(graph.model, request)
    prompt_tokens = min(_PROMPT_TOKENS, context_tokens_max)
    step = max(vocabulary_tokens // prompt_tokens, 1)
    sequence = Sequence(
        EngineRequest(
            request_id=RequestId("probe"),
            prompt_tokens=tuple(n * step % vocabulary_tokens for n in range(prompt_tokens)),
            sampling=SamplingParams(max_tokens=_DECODES + 1),
        ),
        context_tokens_max=context_tokens_max,
        vocabulary_tokens=vocabulary_tokens,
    )
    blocks = -(-(prompt_tokens + _DECODES + 1) // BLOCK_TOKENS)
    how = KvResize.ELASTIC
    cache = bind_kv_cache(how, graph.model, request, blocks=blocks, range_blocks=blocks)
    pool = KvBlocks(blocks, BlockPlaces(cache, blocks=blocks, total=blocks), CacheBudget())
    found, finished = [], False
    try:
        while not finished:
            (work,) = plan([sequence], prompt_tokens, pool).work
            inputs.bind([work])
            request.infer(share_outputs=True)
            logits = request.get_output_tensor(0).data
            found.append(logits.reshape(-1, logits.shape[-1])[0].copy())
            sequence.computed += work.tokens
            sequence.decoding = True
            finished = sequence.append(int(found[-1].argmax()))[1] is not None
        return np.array(found)
    finally:
        cache.close()
