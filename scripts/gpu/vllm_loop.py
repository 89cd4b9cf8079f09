"""vLLM's own decode loop over a made-up model, in a process of `vllm_steps`': prints one JSON line.

The model is a folder with a configuration alone; vLLM makes the weights up.
"""

import json
import tempfile
import time
from pathlib import Path

from scripts.gpu.stack import SHAPES, TINY, Shape

BATCH, CONTEXT_TOKENS, STEPS = 8, 512, 64


def run(name: str, eager: bool) -> None:
    (shape,) = (shape for shape in (*SHAPES, TINY) if shape.name == name)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(shape)))
        start_s = time.perf_counter()
        from vllm import LLM, SamplingParams, TokensPrompt

        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=eager,
            max_model_len=2 * CONTEXT_TOKENS,
            max_num_seqs=BATCH,
            kv_cache_memory_bytes=4 * BATCH * CONTEXT_TOKENS * shape.kv_elements_per_token * 4,
            gpu_memory_utilization=0.01,
            enable_prefix_caching=False,
        )
        start_s = time.perf_counter() - start_s
        prompts = [
            TokensPrompt(prompt_token_ids=[1 + i] * (CONTEXT_TOKENS - STEPS)) for i in range(BATCH)
        ]
        taken_s = []
        for tokens in (STEPS, 1, STEPS):
            wish = SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            begin_s = time.perf_counter()
            llm.generate(prompts, wish, use_tqdm=False)
            taken_s.append(time.perf_counter() - begin_s)
    step_ms = 1e3 * (taken_s[2] - taken_s[1]) / (STEPS - 1)
    print(json.dumps({"step_ms": step_ms, "start_s": start_s}))


def config_of(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
