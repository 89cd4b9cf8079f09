"""OpenVINO GenAI and llama.cpp, each in a process of its own: a load, a first token, warm ones.

Both with the settings of `bench.engine`, a context of the same length, and whatever their makers
offer against a slow load: GenAI its model cache (which only its stateful models can use: SDPA), and
llama.cpp a mapped file. Before: `shapes`. After: `__main__`, which asks them in turns.
"""

import gc
import importlib.util
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from bench.cold_start_cell import (
    CONTEXT_TOKENS,
    PROMPT,
    THREADS,
    WARM_CALLS,
    Engine,
    Part,
    Start,
    Tier,
)
from bench.cold_start_shapes import Forms
from bench.harness import timed
from bench.peer import Peer, llama_server

PACKAGES = {Engine.GENAI: "openvino_genai", Engine.LLAMA_CPP: "xllamacpp"}

Call = Callable[[], object]
"""One token for the prompt."""


def installed(engine: Engine) -> bool:
    return importlib.util.find_spec(PACKAGES[engine]) is not None


def started(peer: Peer, engine: Engine, tier: Tier) -> list[Start]:
    """A start, as if from this tier, and a warm call. Raises Unavailable."""
    load_s, first_s, warm_s = peer.ask()
    parts = {Part.GRAPH: load_s, Part.PREFILL: first_s}
    return [
        Start(engine=engine, tier=tier, ttft_s=load_s + first_s, parts_s=parts),
        Start(engine=engine, tier=Tier.WARM, ttft_s=warm_s),
    ]


def starter(engine: Engine, forms: Forms) -> Callable[[Any], tuple[float, float, float]]:
    """As a `Peer` has it: seconds of the load, of the first token from then, of one when warm."""
    load = {Engine.GENAI: _genai, Engine.LLAMA_CPP: _llama_cpp}[engine](forms)

    def start(_: object) -> tuple[float, float, float]:
        gc.collect()
        load_s, call = timed(load)
        first_s, _token = timed(call)
        return load_s, first_s, median(timed(call)[0] for _ in range(WARM_CALLS))

    return start


def _genai(forms: Forms) -> Callable[[], Call]:
    import openvino
    import openvino_genai

    prompt = openvino_genai.TokenizedInputs(
        openvino.Tensor(np.array([PROMPT], np.int64)),
        openvino.Tensor(np.ones((1, len(PROMPT)), np.int64)),
    )
    generation = openvino_genai.GenerationConfig()
    generation.max_new_tokens = 1
    generation.ignore_eos = True
    generation.do_sample = False

    def load() -> Call:
        pipeline = openvino_genai.LLMPipeline(
            str(forms.genai),
            "CPU",
            ATTENTION_BACKEND="SDPA",
            CACHE_DIR=str(forms.genai / "cache"),
            INFERENCE_NUM_THREADS=THREADS,
        )
        return lambda: pipeline.generate(prompt, generation)

    return load


def _llama_cpp(forms: Forms) -> Callable[[], Call]:
    asked = {
        "prompt": list(PROMPT),
        "n_predict": 1,
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": False,
    }

    def load() -> Call:
        server = llama_server(forms.gguf, slots=1, context_tokens=CONTEXT_TOKENS, threads=THREADS)
        return lambda: server.handle_completions(asked)

    return load
