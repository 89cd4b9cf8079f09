"""What a user would run in place of mesh, CUDA graphs, quantised checkpoints, and joules.

A made-up model of 1B is decoded by mesh's engine with CUDA graphs and without, through resizes,
swaps and a sleep; it is served by a cell and by `vllm serve`, each asked by the same client, with
the cell's joules beside those of the driver; and small models that are quantised here as FP8, AWQ
and GPTQ have it are computed beside themselves without that.

    python -m scripts.gpu.beside_vllm [--dry] [--parts steps,way,cell]
"""

from scripts.gpu.sitting import Sitting, main  # isort: skip  before all of mesh

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mesh.domain.request import SamplingParams
from mesh.domain.values import replace
from mesh.sim.operators.tables import Shape
from mesh_loader.store import ModelStore, StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from scripts.gpu import iteration
from scripts.gpu.iteration import BATCHES, CONTEXT_TOKENS, OUTPUT_TOKENS, PROMPT_TOKENS, Heard
from tests.nodes.engines.serving import INSTANCE, load, request

CALLERS = (1, 4, 16, 32)
ROUNDS = 2
"""Calls that each caller makes, one after the other."""
LLAMA_1B = Shape(
    layers=16, hidden=2048, heads=32, kv_heads=8, head_size=64, inner=8192, vocabulary=128256
)
TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_size=32, inner=128, vocabulary=512)
QUANTISED = replace(LLAMA_1B, layers=4, vocabulary=2048)
GROUP = 128
"""The rows of a matrix that have one scale, with AWQ and GPTQ."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of eight in the order in which AWQ puts them into a word."""
SERVER_S_MAX = 150.0
CALM_S_MAX = 30.0
"""For a node to compute the sizes that it wants to know of a new instance."""
IDLE_S = 3.0
"""So long nobody works, and then a node has told all of its joules."""

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""The tensors of a matrix [out, in] by the ends of their names, and what it is without them."""


def tensors(shape: Shape, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Random weights by the names of a Llama."""
    torch.manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype).mul_(columns**-0.5)

    ones = torch.ones(shape.hidden, device=device, dtype=dtype)
    width, kv_width = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    made = {"model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden)}
    made["model.norm.weight"] = ones
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        made |= {
            f"{prefix}input_layernorm.weight": ones.clone(),
            f"{prefix}post_attention_layernorm.weight": ones.clone(),
            f"{prefix}self_attn.q_proj.weight": matrix(width, shape.hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_width, shape.hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_width, shape.hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(shape.hidden, width),
            f"{prefix}mlp.gate_proj.weight": matrix(shape.inner, shape.hidden),
            f"{prefix}mlp.up_proj.weight": matrix(shape.inner, shape.hidden),
            f"{prefix}mlp.down_proj.weight": matrix(shape.hidden, shape.inner),
        }
    return made


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
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write(folder: Path, shape: Shape, made: Tensors, **more: object) -> Path:
    """A Hugging Face folder; its tokenizer has a token for each byte, and words that none makes."""
    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *letters]
    words += [f"<{n}>" for n in range(len(words), shape.vocabulary)]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    config = config_of(shape) | more
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.cpu().contiguous() for name, tensor in made.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def stored(home: Path, shape: Shape, made: Tensors, **more: object) -> StoredModel:
    folder = write(home / f"made-{len(list(home.glob('made-*')))}", shape, made, **more)
    return ModelStore(home / "store").import_model(f"file://{folder}")


def engine_of(sitting: Sitting, **more: Any) -> VllmEngine:
    engine = VllmEngine(gpu_index=None if sitting.dry else 0, **more)
    engine.await_ready()
    return engine


def loaded(engine: VllmEngine, model: StoredModel, kv_tokens: int = 32 * CONTEXT_TOKENS) -> float:
    blocks = engine.footprint(model.info).blocks_for(kv_tokens)
    context = min(CONTEXT_TOKENS, model.info.context_tokens_max)
    told = load(
        *(engine, model.info, model.path),
        kv_blocks=blocks,
        context_tokens_max=context,
        batch_max=BATCHES[-1],
    )
    return told.elapsed_s


def decoded(
    engine: VllmEngine,
    batch: int,
    length: int,
    between: Callable[[int], object] = lambda step: None,
) -> tuple[list[list[int]], float]:
    """The tokens of each row, and the seconds of an iteration in which all of them decode."""
    wish = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for row in range(batch):
        prompt = [(7 + 13 * row + 5 * place) % 250 + 2 for place in range(length)]
        engine.submit(INSTANCE, request(f"r{row}", prompt, wish))
    tokens: list[list[int]] = [[] for _ in range(batch)]
    taken_s, step = [], 0
    while any(len(row) < OUTPUT_TOKENS for row in tokens):
        start_s = time.perf_counter()
        result = engine.step(INSTANCE, 2048)
        if result.decode_batch == batch and not result.prefill_tokens:
            taken_s.append(time.perf_counter() - start_s)
        for output in result.outputs:
            tokens[int(output.request_id[1:])] += output.token_ids
        between(step)
        step += 1
    return tokens, median(taken_s)


def alike(one: list[list[int]], other: list[list[int]]) -> str:
    """How far greedy tokens are the same: near ties of made-up weights part soon."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, other, strict=True)
    ]
    return f"{sum(s == OUTPUT_TOKENS for s in same)} of {len(same)} rows, the least {min(same)}"


def graphs(sitting: Sitting, model: StoredModel) -> None:
    """`elastic=False`: KV caches that are copied have no CUDA graphs."""
    length, batches = (16, BATCHES[1:2]) if sitting.dry else (PROMPT_TOKENS, BATCHES)
    kept: dict[tuple[str, int], list[list[int]]] = {}
    for way, elastic in (("eager", False), ("graphs", True)):
        with closing(engine_of(sitting, elastic=elastic, asleep_max=2)) as engine:
            before_bytes = sitting.used_bytes()
            sitting.note(f"{way}_load_s", loaded(engine, model), "s, the first one of the process")
            taken = (sitting.used_bytes() - before_bytes) / 2**20
            sitting.note(f"{way}_taken_mib", taken, "MiB of the device by NVML, after the load")
            booked = engine.footprint(model.info)
            blocks = engine.memory()[0].kv_blocks
            sitting.note(f"{way}_booked_mib", booked.instance_bytes(blocks) / 2**20, "MiB")
            for batch in batches:
                decoded(engine, batch, length)
                kept[way, batch], step_s = decoded(engine, batch, length)
                sitting.note(f"{way}_step_{batch}_ms", 1e3 * step_s, f"ms, batch {batch}")
            moves(sitting, engine, model, way, kept[way, 8], length)
    for batch in batches:
        sitting.note(f"tokens_alike_{batch}", alike(kept["eager", batch], kept["graphs", batch]))


def moves(
    sitting: Sitting,
    engine: VllmEngine,
    model: StoredModel,
    way: str,
    tokens: list[list[int]],
    length: int,
) -> None:
    """Tokens through a resize amid them, swaps of all and of halves amid them, and a sleep."""
    blocks = engine.memory()[0].kv_blocks

    def resize(step: int) -> None:
        if step in (20, 40):
            engine.resize_kv(INSTANCE, 2 * blocks if step == 20 else blocks)

    took: dict[str, float] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        call()
        took[name] = time.perf_counter() - start_s

    def swap(step: int) -> None:
        if step == 30:
            timed("out", lambda: engine.swap(INSTANCE, 0.0))
            timed("in", lambda: engine.swap(INSTANCE, 1.0))
        if step == 40:
            for share in (0.5, 0.0, 0.5, 1.0):
                engine.swap(INSTANCE, share)

    sitting.note(f"{way}_resized", alike(tokens, decoded(engine, 8, length, resize)[0]))
    sitting.note(f"{way}_swapped", alike(tokens, decoded(engine, 8, length, swap)[0]))
    used_bytes = sitting.used_bytes()
    engine.unload(INSTANCE)
    freed = (used_bytes - sitting.used_bytes()) / 2**20
    sitting.note(f"{way}_sleep_freed_mib", freed, "MiB by NVML, KV blocks included")
    timed("wake", lambda: loaded(engine, model))
    sitting.note(f"{way}_woken", alike(tokens, decoded(engine, 8, length)[0]))
    for name, seconds in took.items():
        sitting.note(f"{way}_{name}_ms", 1e3 * seconds, "ms")


async def asked(address: str, name: str, callers: int) -> list[Heard]:
    """Every caller makes some calls, one after the other."""
    host, _, port = address.rpartition(":")

    async def call(number: int) -> Heard:
        prompt = "".join(
            chr(97 + (number + place) % 26) for place in range(150 + number * 41 % 301)
        )
        said = {"model": name, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        body = json.dumps(said | {"ignore_eos": True, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        start_s = time.monotonic()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        came_s = []
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode().strip())
        while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                came_s.append(time.monotonic())
        writer.close()
        if not came_s:
            raise RuntimeError(f"no token came: {line.decode()[:200]}")
        return start_s, came_s

    async def caller(first: int) -> list[Heard]:
        return [await call(first * 31 + n) for n in range(ROUNDS)]

    async with asyncio.timeout(60):
        heard = await asyncio.gather(*(caller(n) for n in range(callers)))
    return [each for one in heard for each in one]


def ask(sitting: Sitting, way: str, address: str, name: str) -> None:
    asyncio.run(asked(address, name, 4))
    for callers in CALLERS[:2] if sitting.dry else CALLERS:
        heard = asyncio.run(asked(address, name, callers))
        times = {
            "ttft": [came_s[0] - sent_s for sent_s, came_s in heard],
            "tpot": [(came_s[-1] - came_s[0]) / (OUTPUT_TOKENS - 1) for _, came_s in heard],
        }
        for key, each in times.items():
            told = sorted(each)
            unit = f"ms {key} p50, {callers} at once; the most {1e3 * told[-1]:.1f}"
            sitting.note(f"{way}_{key}_{callers}_ms", 1e3 * median(told), unit)
            sitting.keep(f"{way}_{key}_{callers}_max_ms", 1e3 * told[-1])


@contextmanager
def serving(sitting: Sitting, home: Path, source: str, **plan: Any) -> Iterator[tuple[Any, str]]:
    """A cell of one node with the model deployed and nothing to compute, and its HTTP address."""
    from bench.cells import deployed, local_cell, wait_until
    from mesh.cli.cell_plan import NodePlan
    from mesh.domain.deployment import DeploymentSpec
    from mesh.domain.errors import Unavailable
    from mesh.domain.ids import DeploymentName
    from mesh.domain.reasons import DeviceKind
    from mesh.domain.slo import Slo

    node = NodePlan(name="node", device=DeviceKind.GPU)
    if sitting.dry:
        node = NodePlan(name="node", device=DeviceKind.CPU, engine="vllm", memory_bytes=4 << 30)
        plan["threads"] = 1
    slo = Slo(ttft_s=30.0 if sitting.dry else 3.0, tpot_s=1.0 if sitting.dry else 0.05)
    spec = DeploymentSpec(
        name=DeploymentName("m"), source=source, context_tokens_max=CONTEXT_TOKENS, slo=slo
    )
    start_s = time.perf_counter()
    with local_cell(home=home, nodes=[node], http="127.0.0.1:0", no_page=True, **plan) as run:
        deployed(run.address, [spec])
        sitting.note("cell_start_s", time.perf_counter() - start_s, "s until it was deployed")
        agent = psutil.Process(run.children[1].process.pid)
        processes = [agent, *agent.children(recursive=True)]

        def calm() -> bool:
            begun = [process.cpu_times() for process in processes]
            time.sleep(1.0)
            ended = [process.cpu_times() for process in processes]
            used_s = [
                b.user + b.system - a.user - a.system for a, b in zip(begun, ended, strict=True)
            ]
            return sum(used_s) < 0.1

        try:
            wait_until(calm, "the node is not idle", CALM_S_MAX)
        except Unavailable as error:
            sitting.note("cell_calm", str(error))
        yield run, run.http_address or ""


def cell(sitting: Sitting, home: Path, source: str) -> None:
    with serving(sitting, home, source) as (_, address):
        ask(sitting, "cell", address, "m")
        joules(sitting, address, "m")


def way(sitting: Sitting, home: Path, source: str) -> None:
    """An iteration and a first token of a cell that keeps journals, which cost it something."""
    journals = {"journal": home / "controller.journal", "node_journals": home}
    with serving(sitting, home, source, **journals) as (run, address):
        watched = iteration.Watched(run, home)
        asyncio.run(asked(address, "m", 4))
        for callers in BATCHES:
            watched.ask(callers, lambda: asyncio.run(asked(address, "m", callers)))  # noqa: B023
    watched.tell(sitting)


def joules(sitting: Sitting, address: str, name: str) -> None:
    """What some calls take by the node's books, and by the driver's counter beside them."""

    def booked() -> dict[str, float]:
        with closing(http.client.HTTPConnection(address)) as line:
            line.request("GET", "/metrics")
            page = line.getresponse().read().decode()
        named = r'^mesh_node_energy_joules_total\{.*state="(\w+)".*\} (\S+)$'
        return {state: float(j) for state, j in re.findall(named, page, re.M)}

    time.sleep(IDLE_S)
    before, begun_j, begun_s = booked(), sitting.energy_j(), time.monotonic()
    callers = CALLERS[0 if sitting.dry else -1]
    for _ in range(4):
        asyncio.run(asked(address, name, callers))
    time.sleep(IDLE_S)
    after, ended_j = booked(), sitting.energy_j()
    if not after:
        sitting.skip("joules", "the node tells none")
        return
    spent = {state: after[state] - before.get(state, 0.0) for state in after}
    tokens = 4 * callers * ROUNDS * OUTPUT_TOKENS
    sitting.note("joules_node", sum(spent.values()), f"J by the node's books: {spent}")
    sitting.note("joules_driver", ended_j - begun_j, "J by NVML, asked beside it")
    sitting.note("joules_s", time.monotonic() - begun_s, f"s, {tokens} tokens")
    computing = max(spent.values()) if len(spent) == 1 else spent.get("computing", 0.0)
    sitting.note("joules_per_token", computing / tokens, "J computing, of a token")


def _show(log: Path) -> None:
    """Its end, on stderr."""
    sys.stderr.write(f"{log}:\n{log.read_text(errors='replace')[-3000:]}\n")


def server(sitting: Sitting, folder: Path, way: str, more: tuple[str, ...]) -> None:
    """vLLM's own server, with its defaults but for the share of memory that it takes."""
    port = 18071
    log = folder.parent / f"vllm-{way}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "m", *more]
    command += ["--max-model-len", str(CONTEXT_TOKENS), "--gpu-memory-utilization", "0.5"]
    told = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    start_s = time.perf_counter()
    with log.open("wb") as said:
        process = subprocess.Popen(
            *(command,),
            stdout=said,
            stderr=said,
            env={**os.environ, **told},
            cwd=folder.parent,
            start_new_session=True,
        )
    try:
        while True:
            taken_s = time.perf_counter() - start_s
            late = taken_s > min(SERVER_S_MAX, sitting.left_s)
            if process.poll() is not None or late:
                _show(log)
                words = re.findall(r".*(?:Error|error).*", log.read_text(errors="replace"))
                raise RuntimeError(f"after {taken_s:.0f} s: {(words or ['it did not serve'])[-1]}")
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=2)) as line:
                    line.request("GET", "/health")
                    if line.getresponse().status == http.client.OK:
                        break
            except OSError:
                time.sleep(0.2)
        sitting.note(f"vllm_{way}_start_s", taken_s, "s until it served")
        ask(sitting, f"vllm_{way}", f"127.0.0.1:{port}", "m")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def in_fp8(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (matrix.abs().max() / 448.0).float()
    quantised = (matrix.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": quantised, "weight_scale": scale}, quantised.float() * scale


def _levels(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels of 0 to 15 around 8 [in, out], scales [in / GROUP, out], and what that stands for."""
    turned = matrix.float().t()
    parts = turned.reshape(-1, GROUP, turned.shape[1])
    scales = (parts.abs().amax(1) / 7.0).half()
    levels = (parts / scales[:, None].float()).round().add(8).clamp(0, 15)
    plain = ((levels - 8) * scales[:, None].float()).reshape(turned.shape)
    return levels.reshape(turned.shape).to(torch.int64), scales, plain.t()


def _packed(levels: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Eight neighbours of the last dimension in a word of 32 bits."""
    parts = levels.reshape(*levels.shape[:-1], -1, 8)
    word = sum(parts[..., n] << (4 * place) for place, n in enumerate(order))
    assert isinstance(word, torch.Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def in_awq(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    levels, scales, plain = _levels(matrix)
    zeros = torch.full(scales.shape, 8, device=matrix.device, dtype=torch.int64)
    packed = {"qweight": _packed(levels, AWQ_ORDER), "qzeros": _packed(zeros, AWQ_ORDER)}
    return packed | {"scales": scales}, plain


def in_gptq(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    levels, scales, plain = _levels(matrix)
    rows, straight = levels.shape[0], range(8)
    # As its first format has it: one less than the zero point is kept.
    zeros = torch.full(scales.shape, 7, device=matrix.device, dtype=torch.int64)
    order = torch.arange(rows, device=matrix.device, dtype=torch.int32) // GROUP
    packed = _packed(levels.t(), straight).t()
    return {
        "qweight": packed,
        "qzeros": _packed(zeros, straight),
        "scales": scales,
        "g_idx": order,
    }, plain


METHODS: dict[str, tuple[Quantise, dict[str, object]]] = {
    "fp8": (in_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "awq": (
        in_awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "gptq": (
        in_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
}


def quantised_as(method: str, made: Tensors) -> tuple[Tensors, Tensors]:
    """A checkpoint, and the same in plain."""
    quantise, _ = METHODS[method]
    kept: Tensors = {}
    plain: Tensors = {}
    for name, tensor in made.items():
        if name.endswith("_proj.weight"):
            parts, plain[name] = quantise(tensor)
            plain[name] = plain[name].to(tensor.dtype)
            kept |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
        else:
            kept[name] = plain[name] = tensor
    return kept, plain


def quantised(sitting: Sitting, home: Path, method: str) -> None:
    """The likeliest first token of prompts, and its log-probability, beside the plain model's."""
    made = tensors(QUANTISED, sitting.device, torch.float16)
    checkpoint, plain = quantised_as(method, made)
    wish, heard = SamplingParams(max_tokens=1, logprobs=1, ignore_eos=True), []
    told = {"torch_dtype": "float16"}
    for way, some, more in (
        ("plain", plain, told),
        (method, checkpoint, told | {"quantization_config": METHODS[method][1]}),
    ):
        model = stored(home, QUANTISED, some, **more)
        with closing(engine_of(sitting)) as engine:
            before_bytes = sitting.used_bytes()
            loaded(engine, model, kv_tokens=4096)
            rows: dict[str, tuple[int, float]] = {}
            for row in range(BATCHES[-1]):
                prompt = [(3 + 17 * row + 7 * place) % 2000 + 2 for place in range(24)]
                engine.submit(INSTANCE, request(f"r{row}", prompt, wish))
            while len(rows) < BATCHES[-1]:
                for output in engine.step(INSTANCE, 2048).outputs:
                    rows[output.request_id] = output.token_ids[0], output.logprobs[0].logprob
            heard.append(rows)
            taken = (sitting.used_bytes() - before_bytes) / 2**20
            booked = engine.footprint(model.info).instance_bytes(engine.memory()[0].kv_blocks)
            unit = f"MiB by NVML, {booked / 2**20:.0f} in the books"
            sitting.note(f"{method}_{way}_mib", taken, unit)
    one, other = heard
    same = sum(one[row][0] == other[row][0] for row in one)
    apart = max(abs(one[row][1] - other[row][1]) for row in one)
    sitting.note(f"{method}_alike", f"{same} of {len(one)}", "likeliest tokens")
    sitting.note(f"{method}_apart", apart, "of their log-probabilities at most")


def measure(sitting: Sitting) -> None:
    shape = TINY if sitting.dry else LLAMA_1B
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as named:
        home = Path(named)
        dtype = torch.float32 if sitting.dry else torch.bfloat16
        folder = write(home / "one", shape, tensors(shape, sitting.device, dtype))
        model = ModelStore(home / "store").import_model(f"file://{folder}")
        if not sitting.dry:
            torch.cuda.empty_cache()
        parts: dict[str, Callable[[Sitting], None]] = {
            "graphs": partial(graphs, model=model),
            "steps": partial(iteration.steps, model=model),
            "way": partial(way, home=home, source=f"file://{folder}"),
            "cell": partial(cell, home=home, source=f"file://{folder}"),
        }
        if sitting.dry:
            sitting.skip("vllm", "its server takes minutes to start on a CPU")
        else:
            serve = partial(server, folder=folder)
            only = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
            parts["vllm_default"] = partial(serve, way="default", more=())
            parts["vllm_graphs"] = partial(serve, way="graphs", more=("--compilation-config", only))
            parts |= {way: partial(quantised, home=home, method=way) for way in METHODS}
            parts["vllm_eager"] = partial(serve, way="eager", more=("--enforce-eager",))
        for key, part in parts.items():
            if sitting.wants(key) and sitting.in_time(key):
                sitting.part(key, part)
        for log in sorted((home / "logs").glob("*.log")):
            _show(log)


if __name__ == "__main__":
    main("beside_vllm", measure)
