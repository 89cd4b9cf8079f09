"""Who answers the turns: a cell of mesh by its client, and two engines bare.

Each peer is built in a process of its own, with its prefix cache on, as its makers recommend.
Before: `__main__`. After: nothing.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.chat.workload import CONTEXT_TOKENS, CONVERSATIONS, OUTPUT_TOKENS, THREADS
from bench.engine.models import Models
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, TokenPrompt, Tokens
from mesh.wire.client import MeshClient

Answer = tuple[float, list[int]]
"""Seconds to the first token, and the ids of all where they are told."""
Turn = Callable[[Sequence[list[int]]], list[Answer]]
"""The next turn of every conversation, at once."""
GENAI_CACHE_GB = 1
CACHE_RAM_MIB = 1024
"""llama.cpp's for prompts of conversations that have no slot."""


def mesh_turn(address: str, name: DeploymentName) -> Turn:
    def answer(prompt: list[int]) -> Answer:
        asked = Invocation(
            deployment=name,
            prompt=TokenPrompt(token_ids=tuple(prompt)),
            temperature=0.0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
        )
        made: list[int] = []
        first_s, start_s = 0.0, time.perf_counter()
        for event in client.invoke(asked):
            if isinstance(event, Tokens):
                first_s = first_s or time.perf_counter() - start_s
                made += event.token_ids
        return first_s, made

    client = MeshClient(address)
    threads = ThreadPoolExecutor(max(CONVERSATIONS))
    return lambda prompts: list(threads.map(answer, prompts))


def genai_turn(models: Models) -> Turn:
    """OpenVINO GenAI's continuous batching."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = GENAI_CACHE_GB
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(models.genai_ir), scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS}
    )
    generation = openvino_genai.GenerationConfig()
    generation.max_new_tokens = OUTPUT_TOKENS
    generation.ignore_eos = True
    generation.do_sample = False
    added = 0

    def turn(prompts: Sequence[list[int]]) -> list[Answer]:
        nonlocal added
        start_s, handles = time.perf_counter(), []
        for prompt in prompts:
            added += 1
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(pipeline.add_request(added, ids, generation))
        first_s, made = [0.0] * len(handles), [list[int]() for _ in handles]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for n, handle in enumerate(handles):
                while handle.can_read():
                    first_s[n] = first_s[n] or time.perf_counter() - start_s
                    for output in handle.read().values():
                        made[n] += output.generated_ids
        return list(zip(first_s, made, strict=True))

    return turn


def llama_turn(models: Models) -> Turn:
    """llama.cpp's server without its HTTP."""
    import xllamacpp

    slots = max(CONVERSATIONS)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(models.gguf)
    parameters.n_parallel = slots
    parameters.n_ctx = slots * CONTEXT_TOKENS
    parameters.cpuparams.n_threads = THREADS
    parameters.cpuparams_batch.n_threads = THREADS
    parameters.cache_ram_mib = CACHE_RAM_MIB
    server: Any = xllamacpp.Server(parameters)
    threads = ThreadPoolExecutor(slots)

    def answer(prompt: list[int]) -> Answer:
        start_s, first_s, made = time.perf_counter(), 0.0, list[int]()

        def came(chunk: dict[str, Any]) -> bool:
            nonlocal first_s
            if chunk.get("timings", {}).get("predicted_n", 0):
                first_s = first_s or time.perf_counter() - start_s
            for choice in chunk.get("choices", ()):
                made.extend(choice.get("tokens", ()))
            made.extend(chunk.get("tokens", ()))
            return False

        asked = {
            "prompt": prompt,
            "n_predict": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
            "timings_per_token": True,
        }
        server.handle_completions(asked, came)
        return first_s, made

    return lambda prompts: list(threads.map(answer, prompts))
