"""Measures the texts that mesh, OpenVINO GenAI and llama.cpp embed, in turn: A B C C B A.

All have the demo model's weights in 8 bits and take the last token's hidden state; mesh is a cell
that is asked by HTTP, each peer a process of its own, idle while another is measured. The last line
is one JSON object: `texts_per_s` by contender and by texts at once, `ratio_to_best` (mesh over the
better peer), `slo_met`, the share of mesh's texts that came within their SLO, `cosine`, the least
of mesh's vectors with a peer's, and `met_of_admitted`, of calls for chats that come while the cell
embeds without a pause.
"""

import http.client
import importlib.util
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path
from statistics import median
from threading import Event
from typing import Annotated, Any

import numpy as np

from bench.cells import deployed, local_cell, wait_calm
from bench.demo_model import SOURCE
from bench.engine_contenders import THREADS
from bench.engine_models import I8, IR_FILES, Models, prepared_models
from bench.harness import Report, Table, in_turn, rounded
from bench.judging import Judgement, judge
from bench.peer import Peer, in_own_process, llama_server
from bench.sending import drawn_call
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import EngineError
from mesh.domain.ids import DeploymentName
from mesh.domain.model import Task
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import offer

AT_ONCE = (1, 8, 32)
TEXTS = 64
"""One measurement has so many."""
WORDS = 48
CONTEXT_TOKENS = 512
SLO = Slo(ttft_s=10.0)
"""The texts': 32 at once take half of it on the slowest two cores seen (6.5 texts/s)."""
CHAT_SLO = Slo(ttft_s=3.0, tpot_s=0.25)
CALLS_PER_S = 0.5
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 96), (16, 48)
CALLERS = 4
"""So many have texts embedded beside the chats."""
EMBEDS, CHAT = DeploymentName("embeds"), DeploymentName("chat")

Vectors = list[list[float]]
Embed = Callable[[tuple[Sequence[str], int]], tuple[Vectors, list[float]]]
"""Texts and how many of them at once; the vectors, and when each had come, in seconds."""


def drawn_texts(seed: int) -> list[str]:
    """No two of them begin alike."""
    words = Path(__file__).with_name("text.txt").read_text(encoding="utf-8").split()
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=WORDS)) for _ in range(TEXTS)]


def by_http(address: str) -> Embed:
    """A text a call; one that is refused has no vector, and never comes."""

    def embed(asked: tuple[Sequence[str], int]) -> tuple[Vectors, list[float]]:
        texts, at_once = asked
        with ThreadPoolExecutor(at_once) as pool:
            told = list(pool.map(lambda text: _vector(address, text), texts))
        return [vector for vector, _ in told], [took_s for _, took_s in told]

    return embed


def _vector(address: str, text: str) -> tuple[list[float], float]:
    with closing(http.client.HTTPConnection(address)) as line:
        begun_s = time.perf_counter()
        body = json.dumps({"model": EMBEDS, "input": text})
        line.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        told = json.loads(answer.read())
        if answer.status == http.client.TOO_MANY_REQUESTS:
            return [], float("inf")
        if answer.status != http.client.OK:
            raise EngineError(f"/v1/embeddings answered {answer.status}: {told}")
        return told["data"][0]["embedding"], time.perf_counter() - begun_s


def genai(folder: Path) -> Embed:
    """As many texts as are asked at once are a batch."""
    import openvino_genai

    kind = openvino_genai.TextEmbeddingPipeline
    config = kind.Config()
    config.pooling_type = kind.PoolingType.LAST_TOKEN
    config.normalize, config.padding_side = True, "left"
    pipeline = kind(str(folder), "CPU", config, INFERENCE_NUM_THREADS=THREADS)

    def embed(asked: tuple[Sequence[str], int]) -> tuple[Vectors, list[float]]:
        texts, at_once = asked
        vectors, came_s, begun_s = Vectors(), list[float](), time.perf_counter()
        for number in range(0, len(texts), at_once):
            vectors += pipeline.embed_documents(list(texts[number : number + at_once]))
            came_s += [time.perf_counter() - begun_s] * (len(vectors) - len(came_s))
        return vectors, came_s

    return embed


def llama_cpp(gguf: Path) -> Embed:
    server = llama_server(
        gguf, slots=max(AT_ONCE), context_tokens=CONTEXT_TOKENS, threads=THREADS, embeds=True
    )

    def one(text: str) -> list[float]:
        answer: Any = server.handle_embeddings({"input": text})
        vector: list[float] = answer["data"][0]["embedding"]
        return vector

    def embed(asked: tuple[Sequence[str], int]) -> tuple[Vectors, list[float]]:
        texts, at_once = asked
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, texts)), []

    return embed


def embedder(models: Models) -> Path:
    """The folder of a graph that embeds, made of the one that GenAI generates with."""
    made = models.genai_ir.with_name(f"{models.genai_ir.name}_embeds")
    if not made.exists():
        in_own_process("the making of a graph that embeds", _make_embedder, models.genai_ir, made)
    return made


def _make_embedder(source: Path, made: Path) -> None:
    """Without a state and a head: positions are counted by the mask, and nothing came before."""
    import openvino as ov
    import openvino.opset13 as ops

    model = ov.Core().read_model(source / "openvino_model.xml")
    found = {one.get_any_name(): one for one in model.inputs}
    ids, mask = found["input_ids"], found["attention_mask"]

    def number(value: int) -> Any:
        return ops.constant(value, ov.Type.i64)

    counted = ops.subtract(ops.cum_sum(mask, number(-1)), number(1))
    found["position_ids"].replace(ops.maximum(counted, number(0)).output(0))
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            (reordered,) = _readers(node, "Gather")
            (joined,) = _readers(reordered, "Concat")
            joined.output(0).replace(joined.input_value(1))
            reordered.output(0).replace(node.input_value(0))
    for node in model.get_ordered_ops():
        # With a state the plugin leaves out these repetitions of heads, of a length of 0.
        if node.get_type_name() == "Broadcast" and len(node.output(0).partial_shape) == 5:
            shape = node.input_value(1).get_node()
            shape.input(3).replace_source_output(ops.constant([1], ov.Type.i64).output(0))
    head = model.get_results()[0].input_value(0).get_node()
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
    hidden = ops.convert(head.input_value(0), "f32").output(0)
    hidden.set_names({"last_hidden_state"})
    scratch = made.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    embeds = ov.Model([ops.result(hidden)], [ids.get_node(), mask.get_node()], "embeds")
    ov.save_model(embeds, scratch / "openvino_model.xml", compress_to_fp16=False)
    for file in source.glob(f"{IR_FILES[1]}.*"):
        shutil.copy(file, scratch)
    scratch.rename(made)


def _readers(node: Any, kind: str) -> list[Any]:
    """The nodes of a kind that read the node's output."""
    reading = (one.get_node() for one in node.output(0).get_target_inputs())
    return [one for one in reading if one.get_type_name() == kind]


def least_cosine(some: Vectors, others: Vectors) -> float | None:
    """The least of the cosines of vectors of the same text; a text that was refused has none."""
    pairs = [(one, other) for one, other in zip(some, others, strict=True) if one and other]
    if not pairs:
        return None
    sides = [np.array(side, np.float64) for side in zip(*pairs, strict=True)]
    ours, theirs = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
    return float((ours * theirs).sum(axis=1).min())


def chats_beside(address: str, http_address: str, spec: DeploymentSpec, seconds: int) -> Judgement:
    """What came of calls for chats while callers have texts embedded without a pause."""
    draw, over = random.Random(0), Event()
    times_s = [
        (number + draw.random()) / CALLS_PER_S for number in range(int(seconds * CALLS_PER_S))
    ]
    calls = [drawn_call(draw, at_s, spec, PROMPT_TOKENS, OUTPUT_TOKENS) for at_s in times_s]

    def caller(seed: int) -> None:
        for text in cycle(drawn_texts(seed)):
            _vector(http_address, text)
            if over.is_set():
                return

    with ThreadPoolExecutor(CALLERS) as pool:
        callers = [pool.submit(caller, seed) for seed in range(CALLERS)]
        try:
            answers = offer(address, calls)
        finally:
            over.set()
        for one in callers:
            one.result()
    return judge(calls, answers)


def run(
    *,
    rounds: int = 5,
    seconds: Annotated[int, "for how long chats come beside texts"] = 60,
    quick: bool = False,
) -> Report:
    rounds, seconds = (1, 10) if quick else (rounds, seconds)
    models = prepared_models()
    specs = [
        DeploymentSpec(
            name=EMBEDS,
            source=SOURCE,
            task=Task.EMBED,
            context_tokens_max=CONTEXT_TOKENS,
            weights=I8,
            slo=SLO,
        ),
        DeploymentSpec(name=CHAT, source=SOURCE, context_tokens_max=CONTEXT_TOKENS, slo=CHAT_SLO),
    ]
    builds: dict[str, tuple[Callable[[Path], Embed], Callable[[], Path]]] = {
        "openvino_genai": (genai, lambda: embedder(models)),
        "xllamacpp": (llama_cpp, lambda: models.gguf),
    }
    met: list[bool] = []
    cosines: list[float] = []
    with ExitStack() as opened:
        cell = opened.enter_context(local_cell(threads=THREADS, http="127.0.0.1:0"))
        http_address = cell.http_address
        assert http_address is not None
        deployed(cell.address, specs)
        asks: dict[str, Callable[[Any], Any]] = {"mesh": by_http(http_address)}
        for package, (build, source) in builds.items():
            if importlib.util.find_spec(package) is not None:
                peer = opened.enter_context(Peer(package, build, source()))
                peer.wait_ready()
                asks[package] = peer.ask
        wait_calm(cell)
        rates: dict[str, dict[int, list[float]]]
        rates = {name: {at_once: [] for at_once in AT_ONCE} for name in asks}
        for at_once in AT_ONCE:
            vectors: dict[str, Vectors] = {}
            for number, name, ask in in_turn(asks, rounds, warm_ups=1):
                texts = drawn_texts(number)
                begun_s = time.perf_counter()
                vectors[name], came_s = ask((texts, at_once))
                took_s = time.perf_counter() - begun_s
                if number > 0 and name == "mesh":
                    met += [one_s <= SLO.ttft_s for one_s in came_s]
                if number > 0:
                    embedded = sum(map(bool, vectors[name]))
                    rates[name][at_once].append(embedded / took_s)
                if len(vectors) == len(asks):
                    ours = vectors.pop("mesh")
                    found = (least_cosine(ours, theirs) for theirs in vectors.values())
                    cosines += [cosine for cosine in found if cosine is not None]
                    vectors = {}
        beside = chats_beside(cell.address, http_address, specs[1], seconds)
    told = {name: {str(n): median(of) for n, of in by.items()} for name, by in rates.items()}
    best = {
        n: max((of[n] for name, of in told.items() if name != "mesh"), default=0.0)
        for n in told["mesh"]
    }
    ratios = {n: told["mesh"][n] / best[n] if best[n] else None for n in best}
    return Report(
        figures={
            "texts_per_s": {
                name: {n: round(rate, 2) for n, rate in of.items()} for name, of in told.items()
            },
            "ratio_to_best": {n: rounded(ratio) for n, ratio in ratios.items()},
            "slo_met": round(sum(met) / len(met), 4),
            "cosine": round(min(cosines), 4) if cosines else None,
            "met_of_admitted": round(beside.met_of_admitted, 4),
            "chats_refused": len(beside.refused),
            "chats": beside.requests,
        },
        shown=[
            Table(
                headings=("texts/s at once", *map(str, AT_ONCE)),
                rows=[
                    (name, *(f"{rate:.1f}" for rate in of.values())) for name, of in told.items()
                ],
                title=f"medians over {rounds} rounds of {TEXTS} texts of {WORDS} words",
            )
        ],
        targets={
            "ratio_to_best": ">= 1.0",
            "slo_met": ">= 0.99",
            "cosine": ">= 0.98",
            "met_of_admitted": ">= 0.99",
        },
    )
