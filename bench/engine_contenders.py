"""What every engine is asked to do: prompts and outputs of one length, several at once."""

import importlib.util
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from bench.driving import GREEDY as PLAIN_SAMPLING
from bench.driving import LoadedModel
from bench.engine_models import I4, I8, Models
from bench.peer import llama_server
from mesh.domain.limits import NodeLimits
from mesh.domain.model import WeightPrecision
from mesh.domain.request import SamplingParams

CONCURRENCIES = (1, 8, 16)
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 2048
OUTPUT_TOKENS = 64
"""The output of every request: nobody stops at an end-of-sequence token."""
CONTEXT_TOKENS = LONG_PROMPT_TOKENS + OUTPUT_TOKENS
KV_TOKENS = max(CONCURRENCIES) * 256
"""Enough for all at once, and for a long prompt."""
THREADS = 2
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40)

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """So many requests at once."""

    name: str
    count: int
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    sampled: bool = False

    @property
    def counted_tokens(self) -> int:
        """The tokens whose rate is told: output tokens, or those of the prompts where there is only
        a prefill.
        """
        each = self.prompt_tokens if self.output_tokens == 1 else self.output_tokens
        return self.count * each

    def prompts(self, vocabulary_tokens: int, seed: int) -> Prompts:
        """Random token ids, so that no engine can share a prefix; special tokens come first in the
        vocabulary and are left out.
        """
        draw = random.Random(seed)
        least = vocabulary_tokens // 100
        return [
            [draw.randrange(least, vocabulary_tokens) for _ in range(self.prompt_tokens)]
            for _ in range(self.count)
        ]


GREEDY = {count: Work(name=f"greedy {count}", count=count) for count in CONCURRENCIES}
SAMPLING = Work(name="sampled 8", count=8, sampled=True)
FIRST = Work(name="first token", count=1, output_tokens=1)
"""What of `GREEDY[1]` is no decode."""
PREFILL = Work(name="prefill 2048", count=1, prompt_tokens=LONG_PROMPT_TOKENS, output_tokens=1)
WORKS = (*GREEDY.values(), SAMPLING, FIRST, PREFILL)


def shortened(work: Work, output_tokens: int) -> Work:
    """With answers of so many tokens at most."""
    return replace(work, output_tokens=min(work.output_tokens, output_tokens))


BATCH_MAX = max(CONCURRENCIES)
GENAI_CACHE_GB = 1


class Contender(Protocol):
    def generate(self, prompts: Prompts, work: Work) -> int:
        """Answers to the prompts, all at once; returns the output tokens made."""
        ...


class Mesh:
    """mesh's engine as a node runs it, with text, stepped in a plain loop."""

    def __init__(self, models: Models) -> None:
        from mesh_nodes.engines.openvino.engine import OpenVinoEngine
        from mesh_nodes.text_engine import TextEngine

        self._model = LoadedModel(
            TextEngine(
                OpenVinoEngine(
                    threads=THREADS,
                    precision=models.precisions.compute,
                    kv=models.precisions.kv,
                    weights=models.weights,
                )
            ),
            models.stored,
            kv_tokens=KV_TOKENS,
            context_tokens_max=CONTEXT_TOKENS,
            batch_max=BATCH_MAX,
        )

    def generate(self, prompts: Prompts, work: Work) -> int:
        sampling = SAMPLED if work.sampled else PLAIN_SAMPLING
        for prompt in prompts:
            self._model.submit(prompt, work.output_tokens, sampling)
        made, running = 0, len(prompts)
        budget = NodeLimits().prefill_tokens_max
        while running:
            outputs = self._model.step(budget).outputs
            made += len(outputs)
            running -= sum(output.finish is not None for output in outputs)
        return made


class GenAi:
    """OpenVINO GenAI's continuous batching, stepped to the end."""

    def __init__(self, models: Models) -> None:
        import openvino
        import openvino_genai

        self._tensor = openvino.Tensor
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = GENAI_CACHE_GB
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(models.genai_ir), scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS}
        )
        self._config = openvino_genai.GenerationConfig
        self._added = 0

    def generate(self, prompts: Prompts, work: Work) -> int:
        import numpy as np

        generation, handles = self._config(), []
        generation.max_new_tokens = work.output_tokens
        generation.ignore_eos = True
        generation.do_sample = work.sampled
        if work.sampled:
            generation.temperature, generation.top_p = SAMPLED.temperature, SAMPLED.top_p
            generation.top_k = SAMPLED.top_k
        for prompt in prompts:
            self._added += 1
            ids = self._tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._added, ids, generation))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return sum(len(output.generated_ids) for h in handles for output in h.read_all())


class LlamaCpp:
    """llama.cpp's server without its HTTP: slots that batch continuously."""

    def __init__(self, models: Models) -> None:
        self._server = llama_server(
            models.gguf, slots=BATCH_MAX, context_tokens=CONTEXT_TOKENS, threads=THREADS
        )
        self._threads = ThreadPoolExecutor(BATCH_MAX)

    def generate(self, prompts: Prompts, work: Work) -> int:
        asked: dict[str, object]
        asked = {"n_predict": work.output_tokens, "ignore_eos": True, "cache_prompt": False}
        asked |= {"temperature": SAMPLED.temperature if work.sampled else 0}
        asked |= {"top_p": SAMPLED.top_p, "top_k": SAMPLED.top_k, "min_p": 0}
        complete = partial(self._complete, asked)
        return sum(self._threads.map(complete, prompts))

    def _complete(self, asked: Mapping[str, object], prompt: list[int]) -> int:
        answer: Any = self._server.handle_completions({**asked, "prompt": prompt})
        return int(answer["usage"]["completion_tokens"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender before it is built. `package` is what it needs installed."""

    name: str
    runs: Mapping[WeightPrecision, str]
    """Which weights and which KV cache, for the table, by their width."""
    package: str
    build: Callable[[Models], Contender]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


ENTRIES = (
    Entry(
        name="mesh",
        runs={I8: "i8, as chosen", I4: "i4-g128, as chosen"},
        package="openvino",
        build=Mesh,
    ),
    Entry(
        name="openvino-genai",
        runs={I8: "i8, KV u8", I4: "u4 in groups of 128, KV u8"},
        package="openvino_genai",
        build=GenAi,
    ),
    Entry(
        name="llama.cpp",
        runs={I8: "Q8_0, KV f16", I4: "Q4_0, KV f16"},
        package="xllamacpp",
        build=LlamaCpp,
    ),
)


def timed(name: str, models: Models) -> Callable[[tuple[Prompts, Work]], float]:
    """A contender of that name, as a `Peer` has it: the seconds from the first submission to the
    last token of all.
    """
    (contender,) = (entry.build(models) for entry in ENTRIES if entry.name == name)

    def generate(asked: tuple[Prompts, Work]) -> float:
        prompts, work = asked
        start_s = time.perf_counter()
        made = contender.generate(prompts, work)
        taken_s = time.perf_counter() - start_s
        if made != len(prompts) * work.output_tokens:
            raise RuntimeError(f"made {made} tokens of {len(prompts) * work.output_tokens}")
        return taken_s

    return generate
