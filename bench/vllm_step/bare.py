"""vLLM's own loop, in a process of its own: its LLMEngine, its scheduler, its sampler.

It answers with the milliseconds of every step that decoded the whole batch.
"""

import time
import warnings
from collections.abc import Callable
from itertools import count

from bench.vllm_step.workload import (
    BATCH,
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    KV_BLOCKS,
    OUTPUT_TOKENS,
    PREFILL_TOKENS_MAX,
    prompt,
)


def contender(model_path: str) -> Callable[[None], list[float]]:
    """With the same model, precision, KV cache and bounds as mesh's adapter has."""
    # Here, for it reads the peer's environment when it is imported.
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    warnings.simplefilter("ignore")
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=BATCH,
            max_num_batched_tokens=PREFILL_TOKENS_MAX + BATCH,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=KV_BLOCKS + 1,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
        )
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    names = count()

    def steps_ms(_: None) -> list[float]:
        for number in range(BATCH):
            engine.add_request(str(next(names)), {"prompt_token_ids": prompt(number)}, params)
        taken_ms = []
        while engine.has_unfinished_requests():
            start_s = time.perf_counter()
            outputs = engine.step()
            if len(outputs) == BATCH:
                taken_ms.append(1e3 * (time.perf_counter() - start_s))
        return taken_ms

    return steps_ms
