"""Operators of real model shapes, measured one by one, as a table of `mesh.sim.operators` has them.

Weights and caches are read cold, from different places one after the other, and small kernels are
timed as CUDA graphs of many. Beside the table stand its parts' checks: whole iterations of the 8B
stack against the sum of their operators, what a share of the processors makes of both, what copies
beside them cost, and power. torch alone has no kernel for paged caches, so caches are dense here.
After: `mesh.sim.operators.tables`, which reads the key `table` of the JSON object.

    python -m scripts.gpu.operators [--dry]
"""

from scripts.gpu.sitting import ROOT, Sitting, main  # isort: skip  before all of mesh

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from mesh.domain.operators import Role
from mesh.sim.operators.tables import Shape, read_operators
from scripts.gpu.stack import SHAPES, TINY, Stack

A100 = json.loads((ROOT / "mesh/sim/operators/a100.json").read_text("utf-8"))
TOKENS = tuple(A100["tokens"])
NOTED = (1, 64, 2048)
"""The sizes whose times are rows of the table."""
DENSE, MIXTURES = ("llama-3.1-8b", "qwen2-7b"), ("qwen2-57b-a14b", "mixtral-8x7b")
OTHERS = ("qwen2-72b", "qwen2-1.5b", "qwen2-0.5b")
ATTENDING = (*DENSE, "qwen2-72b", "qwen2-0.5b")
POOL_GB, COPIED_GB = 8, 16
PROMPTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (128, 512, 2048, 8192, 32768)
WHOLE_BATCHES, WHOLE_CONTEXT, WHOLE_PROMPT = (1, 16, 64), 512, 2048
SHARE_SIZES = {"prefill": (1, 128, 1024), "decode": (1, 16, 128)}
SUMMED = (Role.NORM, Role.RESIDUAL, Role.QKV, Role.OUTPUT, Role.GATE_UP, Role.DOWN)
GRAPH_S, REPEATS_MAX, REPLAYS = 2e-3, 200, 5
POWER_S, SPARE_S = 2.5, 15.0
POWERED = {"prefill": "prefill", "decode": "decode_16"}
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
GUESSED = {"all_reduce_s": 18e-6, "all_reduce_bytes_per_s": 300e9}
LINK = {"link_bytes_per_s": 900e9, "link_latency_s": 10e-6}
Work = Callable[[], object]
Numbered = Callable[[int], object]


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, value = both.chunk(2, dim=-1)
    return silu(gate) * value


def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries and keys [rows, heads, size], their halves turned by [rows, 1, size / 2]."""
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Bench:
    """What the parts share: memory to read from, and what was measured so far."""

    def __init__(self, sitting: Sitting) -> None:
        self.sitting = sitting
        self.columns: dict[tuple[str, int], dict[Role, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        """Milliseconds of a layer by TOKENS, of models on one of so many devices."""
        self.points: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        """What the fits are made from, by their names; the seconds are the last of each."""
        self.attended: dict[str, Any] = {"prompts": {}, "decodes": {}}
        self.ways = {phase: list(BACKENDS) for phase in ("prefill", "decode")}
        """The kernels of attention, the fastest first."""
        self.gated, self.turned, self.fused = gated, turned, False
        self.errors: list[float] = []
        self.curves: dict[str, Any] = {}
        self.watts: dict[str, float] = {}
        self._graphs: dict[tuple[str, int], Work] = {}

    def shape(self, model: str) -> Shape:
        raw = {key: A100["models"][model].get(key, 0) for key in Shape.__slots__}
        if self.sitting.dry:
            raw |= {key: getattr(TINY, key) for key in Shape.__slots__ if hasattr(TINY, key)}
            raw |= {"heads": 8, "kv_heads": 4, "head_size": 16}
            small = {"experts": 4, "active": 2, "shared_inner": 64}
            raw |= {key: min(raw[key], most) for key, most in small.items()}
        return Shape(**raw)

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=self.sitting.device, dtype=torch.bfloat16)

    @cached_property
    def pool(self) -> torch.Tensor:
        """Random numbers that stand for the weights and caches of all layers."""
        return self.random((POOL_GB * self.sitting.gb) // 2).mul_(0.02)

    def part(self, number: int, *sizes: int) -> torch.Tensor:
        """A tensor of these sizes in the pool, another one for each number while there are some."""
        size = math.prod(sizes)
        start = number % (self.pool.numel() // size) * size
        return self.pool[start : start + size].view(sizes)

    def seconds(self, work: Numbered, about_s: float) -> float:
        """Seconds of one of `work(0)`, `work(1)`, …, replayed as a CUDA graph; the median."""
        if self.sitting.dry:
            return self.sitting.timed_s(partial(work, 0))
        repeats = min(max(math.ceil(GRAPH_S / about_s), 3), REPEATS_MAX)
        return self.replayed_s(self.sitting.captured(partial(several, work, repeats))) / repeats

    def replayed_s(self, replay: Work) -> float:
        """Seconds of it on the device, the host's launch hidden behind a pause; the median."""
        if self.sitting.dry:
            return self.sitting.timed_s(replay)
        taken = []
        replay()
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)
            start.record()
            replay()
            end.record()
            taken.append((start, end))
        self.sitting.wait()
        return float(median(start.elapsed_time(end) for start, end in taken)) / 1e3

    def took(self, model: str, role: Role, rows: int, seconds: float, devices: int = 1) -> None:
        self.columns[model, devices][role].append(1e3 * seconds)
        if rows in NOTED and devices == 1:
            self.sitting.note(f"{model}_{role}_{rows}_ms", 1e3 * seconds, "ms")

    @cached_property
    def stack(self) -> Stack:
        shape, context = (TINY, 8) if self.sitting.dry else (SHAPES[2], WHOLE_CONTEXT)
        tokens = max(WHOLE_PROMPT, max(SHARE_SIZES["decode"]) * context)
        return Stack(shape, tokens, self.sitting.device, torch.bfloat16)

    def step(self, phase: str, size: int) -> Work:
        """An iteration of the stack: a prompt of so many tokens, or a token of each sequence."""
        if phase == "prefill":
            return partial(self.stack.iterate, self.stack.hidden(1, size), 0)
        past = (8 if self.sitting.dry else WHOLE_CONTEXT) - 1
        return partial(self.stack.iterate, self.stack.hidden(size, 1), past)

    def graph(self, phase: str, size: int) -> Work:
        if (phase, size) not in self._graphs:
            with sdpa_kernel(self.ways[phase], set_priority=True):
                self._graphs[phase, size] = self.sitting.captured(self.step(phase, size))
        return self._graphs[phase, size]


def several(work: Numbered, repeats: int) -> None:
    for number in range(repeats):
        work(number)


def multiplied(bench: Bench, rows: int, inner: int, columns: int) -> Numbered:
    given, out = bench.random(rows, inner), bench.random(rows, columns)
    return lambda number: torch.mm(given, bench.part(number, columns, inner).t(), out=out)


def product(bench: Bench, rows: int, inner: int, columns: int) -> float:
    read, operations = rows * inner + inner * columns + rows * columns, 2 * rows * inner * columns
    about_s = 2e-6 + max(2 * read / 2e12, operations / 5e14)
    took_s = bench.seconds(multiplied(bench, rows, inner, columns), about_s)
    bench.points["products"].append((2 * read, operations, took_s))
    return took_s


def products(bench: Bench, model: str, devices: int = 1) -> None:
    """The matrix products of a layer and of the head, on one of so many devices."""
    shape = bench.shape(model)
    queries, hidden, inner = shape.queries // devices, shape.hidden, shape.inner // devices
    sizes = {Role.QKV: (hidden, queries + 2 * shape.kv(devices)), Role.OUTPUT: (queries, hidden)}
    sizes[Role.HEAD] = (hidden, shape.vocabulary // devices)
    if not shape.experts:
        sizes |= {Role.GATE_UP: (hidden, 2 * inner), Role.DOWN: (inner, hidden)}
    for role, (wide, out) in sizes.items():
        for rows in TOKENS:
            bench.took(model, role, rows, product(bench, rows, wide, out), devices)


def attention_of(bench: Bench, model: str, batch: int, tokens: int, context: int) -> Numbered:
    """Attention as the stack asks for it: queries amid the products' output, caches dense."""
    shape = bench.shape(model)
    asked = bench.random(batch, tokens, shape.queries + 2 * shape.kv(1))[..., : shape.queries]
    query = asked.view(batch, tokens, shape.heads, shape.head_size).transpose(1, 2)

    def work(number: int) -> object:
        held = bench.part(number, 2, batch, context, shape.kv_heads, shape.head_size)
        keys, values = held.transpose(2, 3)
        return scaled_dot_product_attention(
            query, keys, values, is_causal=tokens > 1, enable_gqa=True
        )

    return work


def attention(bench: Bench) -> None:
    """Prompts and decodes, by whichever of torch's kernels is fastest."""
    sitting = bench.sitting
    for phase, sizes in (("prefill", (1, 2048, 2048)), ("decode", (16, 1, 512))):
        found = {}
        for way in BACKENDS:
            try:
                with sdpa_kernel(way):
                    found[way] = bench.seconds(attention_of(bench, DENSE[0], *sizes), 1e-4)
                sitting.note(f"attention_{phase}_{way.name}_ms", 1e3 * found[way], f"ms, {sizes}")
            except RuntimeError as error:
                sitting.keep(f"attention_{phase}_{way.name}", str(error).split("\n")[0])
        bench.ways[phase] = sorted(found, key=lambda way: found[way])
    for model in ATTENDING:
        shape, prompts, decodes = bench.shape(model), [], []
        for tokens in PROMPTS[:2] if sitting.dry else PROMPTS:
            about_s = 3e-6 + 2 * tokens**2 * shape.queries / 3e14
            with sdpa_kernel(bench.ways["prefill"], set_priority=True):
                took_s = bench.seconds(attention_of(bench, model, 1, tokens, tokens), about_s)
            prompts.append((tokens, took_s))
            if shape.head_size == bench.shape(DENSE[0]).head_size:  # Smaller ones are slower.
                bench.points["prompts"].append((tokens, shape.queries, took_s))
        for batch, context in ((batch, context) for batch in BATCHES for context in CONTEXTS):
            read = 4 * batch * context * shape.kv(1)
            if read <= bench.pool.numel():
                with sdpa_kernel(bench.ways["decode"], set_priority=True):
                    work = attention_of(bench, model, batch, 1, context)
                    took_s = bench.seconds(work, 4e-6 + read / 2e12)
                decodes.append(((batch, context), took_s))
                bench.points["decodes"].append((batch, read / batch, took_s))
        bench.attended["prompts"][model], bench.attended["decodes"][model] = prompts, decodes


def fuse(bench: Bench) -> None:
    """Positions and activations as one kernel each, as engines have them, by torch's compiler."""
    torch._dynamo.config.recompile_limit = 64
    compiled = partial(torch.compile, dynamic=True, options={"compile_threads": 1})
    one, other = (gated, turned) if bench.sitting.dry else (compiled(gated), compiled(turned))
    for rows in TOKENS[:2]:
        one(bench.random(rows, 64))
        other(bench.random(rows, 4, 32), *bench.random(2, rows, 1, 16))
    bench.sitting.wait()
    bench.gated, bench.turned, bench.fused = one, other, True


def small_ones(bench: Bench, shape: Shape, rows: int) -> dict[Role, tuple[Numbered, int]]:
    """What multiplies no matrices, and the numbers that it moves for a row. A layer has two norms
    and two residuals.
    """
    hidden, size, kv = shape.hidden, shape.head_size, 2 * shape.kv(1)
    turning, device = shape.queries + shape.kv(1), bench.sitting.device
    weight, (held, other) = bench.random(hidden), bench.random(2, rows, hidden)
    heads = bench.random(rows, turning + shape.kv(1))[:, :turning].view(rows, -1, size)
    cos, sin = bench.random(2, rows, 1, size // 2)
    wide, new = bench.random(rows, 2 * shape.activated), bench.random(rows, kv)
    cached = bench.part(0, bench.pool.numel() // (4 * kv), kv)
    words = bench.part(0, shape.vocabulary, hidden)
    places = torch.randint(len(cached), (8, rows), device=device)
    ids = torch.randint(shape.vocabulary, (64, rows), device=device)

    def norms(_: int) -> object:
        return rms_norm(rms_norm(held, (hidden,), weight), (hidden,), weight)

    return {
        Role.NORM: (norms, 4 * hidden),
        Role.RESIDUAL: (lambda _: held + other + other, 6 * hidden),
        Role.ROPE: (lambda _: bench.turned(heads, cos, sin), 2 * turning),
        Role.ACTIVATION: (lambda _: bench.gated(wide), 3 * shape.activated),
        Role.KV_WRITE: (lambda number: cached.index_copy_(0, places[number % 8], new), 2 * kv),
        Role.EMBEDDING: (lambda number: embedding(ids[number % 64], words), 2 * hidden),
    }


def small(bench: Bench, model: str) -> None:
    for rows in TOKENS:
        for role, (work, numbers) in small_ones(bench, bench.shape(model), rows).items():
            took_s = bench.seconds(work, 4e-6 + 2 * rows * numbers / 2e12)
            bench.took(model, role, rows, took_s)
            if role in (Role.KV_WRITE, Role.EMBEDDING):
                bench.points["moves"].append((2 * rows * numbers, took_s))


def iterations(bench: Bench) -> None:
    """Iterations of the 8B stack, which turns no positions, beside the sum of its operators."""
    shape, stack, columns = bench.shape(DENSE[0]), bench.stack, bench.columns[DENSE[0], 1]
    kv = shape.kv(1)
    for phase, rows in (("prefill", WHOLE_PROMPT), *(("decode", each) for each in WHOLE_BATCHES)):
        whole_s = bench.replayed_s(bench.graph(phase, rows))
        sequences, past = (1, 0) if phase == "prefill" else (rows, WHOLE_CONTEXT - 1)
        tokens = rows // sequences
        new = bench.random(sequences, tokens, shape.queries + 2 * kv)[..., -2 * kv :]
        both = bench.random(rows, 2 * shape.inner)

        def written(number: int, new: torch.Tensor = new, at: int = past) -> None:
            held = bench.part(number, 2, len(new), at + new.shape[1], kv)
            for cache, each in zip(held, new.chunk(2, dim=-1), strict=True):
                cache[:, at:] = each

        def apart(_: int, both: torch.Tensor = both) -> object:
            return gated(both)

        layer_s = sum(columns[role][TOKENS.index(rows)] / 1e3 for role in SUMMED)
        layer_s += bench.seconds(written, 1e-5) + bench.seconds(apart, 1e-5)
        with sdpa_kernel(bench.ways[phase], set_priority=True):
            work = attention_of(bench, DENSE[0], sequences, tokens, past + tokens)
            layer_s += bench.seconds(work, 5e-5)
        head_s = columns[Role.HEAD][TOKENS.index(sequences)] / 1e3
        off = (stack.shape.layers * layer_s + head_s) / whole_s - 1
        bench.errors += [] if bench.sitting.dry else [abs(off)]
        bench.sitting.note(f"{phase}_{rows}_ms", 1e3 * whole_s, "ms, 8b, an iteration as a graph")
        bench.sitting.note(f"{phase}_{rows}_sum_error", off, "its operators' sum beside it")
    bench.sitting.note("operator_sum_error", max(bench.errors, default=0.0))


def power(bench: Bench) -> None:
    sitting = bench.sitting
    idle: Work = partial(time.sleep, 0.01 if sitting.dry else 0.1)
    works = {"idle": idle, "prefill": bench.graph("prefill", WHOLE_PROMPT)}
    works |= {f"decode_{batch}": bench.graph("decode", batch) for batch in WHOLE_BATCHES[1:]}
    for name, work in works.items():
        readings = []
        for seconds in (0.02, 0.02, 0.0) if sitting.dry else (1.0, POWER_S, 0.0):
            readings.append((time.monotonic(), joules(sitting)))
            while time.monotonic() < readings[-1][0] + seconds:
                for _ in range(5):
                    work()
                sitting.wait()
        (start_s, before_j), (end_s, after_j) = readings[1:]
        bench.watts[name] = (after_j - before_j) / (end_s - start_s)
        sitting.note(f"power_{name}_watts", bench.watts[name], "W, by NVML's energy counter")


def joules(sitting: Sitting) -> float:
    """What the device has taken so far; without one, as if it took 100 W."""
    if sitting.dry:
        return 100 * time.monotonic()
    from mesh_nodes.gpus import Gpus

    gpus = Gpus()
    return gpus.energy_j(gpus.gpu(0))


def green_stream(sitting: Sitting, processors: int) -> torch.cuda.Stream:
    """A stream whose kernels run on so many processors, rounded up to what the driver divides."""
    driver = sitting.library

    def told(answer: tuple[Any, ...]) -> Any:
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver says {answer[0]}")
        return answer[1]

    device = told(driver.cuDeviceGet(0))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    all_of_it = told(driver.cuDeviceGetDevResource(device, kind))
    groups = told(driver.cuDevSmResourceSplitByCount(1, all_of_it, 0, processors))
    described = told(driver.cuDevResourceGenerateDesc(groups, 1))
    default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = told(driver.cuGreenCtxCreate(described, device, default))
    aside = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    sitting.keep(f"green_{processors}", int(groups[0].sm.smCount))
    return torch.cuda.ExternalStream(int(told(driver.cuGreenCtxStreamCreate(context, aside, 0))))


def on(bench: Bench, stream: torch.cuda.Stream | None, work: Work) -> float:
    """Seconds of it there, as a graph that was captured there."""
    if stream is None:
        return bench.replayed_s(bench.sitting.captured(work))
    graph = torch.cuda.CUDAGraph()
    bench.sitting.wait()
    with torch.cuda.stream(stream):
        work()
        bench.sitting.wait()
        with torch.cuda.graph(graph, stream=stream):
            work()
        return bench.replayed_s(graph.replay)


def shares(bench: Bench) -> None:
    """Iterations and operators on two eighths of the processors, three, …, by green contexts."""
    sitting, dense = bench.sitting, bench.shape(DENSE[0])
    sms = 132 if sitting.dry else torch.cuda.get_device_properties(0).multi_processor_count
    counts = [round(sms * part / 64) * 8 for part in range(2, 8)] + [sms]
    every = [(phase, size) for phase, sizes in SHARE_SIZES.items() for size in sizes]
    works = {f"{phase}_{size}": bench.step(phase, size) for phase, size in every}
    parts = {"attention_prefill": attention_of(bench, DENSE[0], 1, 1024, 1024)}
    parts["attention_decode"] = attention_of(bench, DENSE[0], 16, 1, WHOLE_CONTEXT)
    for rows in (16, 1024):
        parts[f"norm_{rows}"] = small_ones(bench, dense, rows)[Role.NORM][0]
        parts[f"down_{rows}"] = multiplied(bench, rows, dense.inner, dense.hidden)
    works |= {name: partial(several, part, 50) for name, part in parts.items()}
    found: dict[str, list[float]] = defaultdict(list)
    for count in counts:
        stream = None if sitting.dry or count == sms else green_stream(sitting, count)
        for name, work in works.items():
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                found[name].append(on(bench, stream, work))
        if stream is not None and count == counts[0]:
            with torch.cuda.stream(stream):
                ratio = bench.replayed_s(works["prefill_1024"]) / found["prefill_1024"][0]
            sitting.note("shares_eager", ratio, "eager over graph: 1 if graphs keep to the share")
    bench.curves["shares"] = [round(count / sms, 4) for count in counts]
    sitting.note("shares_of", " ".join(f"{each:.3f}" for each in bench.curves["shares"]))
    for name, taken in found.items():
        ratios = [each / taken[-1] for each in taken]
        sitting.note(f"shares_{name}", " ".join(f"{each:.3f}" for each in ratios), "times as long")
        phase, size = name.split("_")
        if phase in SHARE_SIZES:
            # A curve never rises with the share: what does is noise.
            falling = [round(max(1.0, *ratios[i:]), 4) for i in range(len(ratios) - 1)]
            bench.curves.setdefault(phase, {})[size] = [*falling, 1.0]


def copies(bench: Bench) -> None:
    """Iterations beside copies between pinned host memory and the device, each against itself
    alone.
    """
    sitting, size = bench.sitting, COPIED_GB * bench.sitting.gb
    if not sitting.fits("copies", size):
        return
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not sitting.dry)
    device = torch.empty(size, dtype=torch.uint8, device=sitting.device)
    works = {f"decode_{batch}": bench.graph("decode", batch) for batch in WHOLE_BATCHES}
    works[f"prefill_{WHOLE_PROMPT}"] = bench.graph("prefill", WHOLE_PROMPT)
    for way, (into, source) in (("in", (device, host)), ("out", (host, device))):
        copy = partial(into.copy_, source, non_blocking=True)
        copy()
        alone_s = beside(sitting, copy, copy, 0)[0]
        sitting.note(f"copy_{way}_gb_per_s", size / 1e9 / alone_s, "GB/s, nothing beside it")
        for name, work in works.items():
            took_s = bench.replayed_s(work)
            copied_s, each_s = beside(sitting, copy, work, 2 + int(1.5 * alone_s / took_s))
            unit = f"times as long, {len(each_s)} beside a copy"
            sitting.note(f"copy_{way}_{name}_ratio", median(each_s) / took_s, unit)
            sitting.note(f"copy_{way}_{name}_gb_per_s", size / 1e9 / copied_s, "GB/s")


def beside(sitting: Sitting, copy: Work, work: Work, times: int) -> tuple[float, list[float]]:
    """Seconds of the copy, and of each iteration that ended before it did."""
    if sitting.dry:
        return sitting.timed_s(copy), [sitting.timed_s(work)]
    start, end, *marks = (torch.cuda.Event(enable_timing=True) for _ in range(3 + times))
    sitting.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        copy()
        end.record()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    sitting.wait()
    copied_ms = start.elapsed_time(end)
    within = [mark for mark in marks if start.elapsed_time(mark) <= copied_ms]
    return copied_ms / 1e3, [a.elapsed_time(b) / 1e3 for a, b in pairwise(within)]


def experts(bench: Bench, model: str) -> None:
    """The choice of experts (softmax, the likeliest, their order), and their products on the tokens
    that chose them, by torch's grouped product.
    """
    shape = bench.shape(model)
    hidden, inner, count, active = shape.hidden, shape.inner, shape.experts, shape.active
    numbers = torch.arange(count, device=bench.sitting.device)

    def chosen(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked = torch.softmax(logits.float(), dim=-1).topk(active).indices.view(-1)
        ordered, order = picked.sort()
        ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        return order // active, ends

    def works(rows: int) -> tuple[Numbered, Numbered]:
        given, half = bench.random(rows, hidden), bench.random(rows * active, inner)
        routes = [chosen(bench.random(rows, count)) for _ in range(4)]

        def mixed(number: int) -> object:
            tokens, ends = routes[number % len(routes)]
            both = bench.part(number, 3, count, inner, hidden)
            up = both[:2].view(count, 2 * inner, hidden).transpose(1, 2)
            down = both[2].view(count, hidden, inner).transpose(1, 2)
            torch._grouped_mm(given[tokens], up, offs=ends)
            out = torch._grouped_mm(half, down, offs=ends)
            return torch.zeros_like(given).index_add_(0, tokens, out)

        return lambda number: chosen(given @ bench.part(number, count, hidden).t()), mixed

    for rows in TOKENS:
        gate, mixed = works(rows)
        bench.took(model, Role.GATE, rows, bench.seconds(gate, 2e-5))
        met = count * (1 - (1 - active / count) ** rows)
        read, operations = 6 * met * hidden * inner, 6 * rows * active * hidden * inner
        took_s = bench.seconds(mixed, 2e-5 + max(read / 2e12, operations / 3e14))
        bench.took(model, Role.EXPERTS, rows, took_s)
        bench.points["experts"].append((read, operations, took_s))
        if wide := shape.shared_inner:
            both_s = product(bench, rows, hidden, 2 * wide) + product(bench, rows, wide, hidden)
            bench.took(model, Role.SHARED_EXPERT, rows, both_s)


Formula = Callable[..., torch.Tensor]


def combined(by: torch.Tensor, read: torch.Tensor, operations: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(((read / by[0]) ** by[2] + (operations / by[1]) ** by[2]) ** (1 / by[2]))


def fit(bench: Bench, name: str, start: dict[str, float], formula: Formula) -> dict[str, float]:
    """The numbers above 0 with which the formula comes nearest to the seconds of its points."""
    points = bench.points[name]
    with torch.inference_mode(False), torch.enable_grad():
        *given, seconds = torch.tensor(points, dtype=torch.float64).T
        logs = torch.tensor(list(start.values()), dtype=torch.float64).log().requires_grad_()
        adam = torch.optim.Adam([logs], lr=0.05)
        slower = torch.optim.lr_scheduler.ExponentialLR(adam, 0.993)
        for _ in range(1000):
            adam.zero_grad()
            off = (formula(logs.exp(), *given) / seconds).log().abs()
            torch.autograd.backward(off.mean())
            adam.step()
            slower.step()
    off, found = off.detach(), logs.detach().exp().tolist()
    least = f"{len(points)} points, in the median; one of ten is off by {off.quantile(0.9):.3f}"
    bench.sitting.note(f"fit_{name}_error", float(off.median()), least)
    return dict(zip(start, found, strict=True))


def fits(bench: Bench) -> dict[str, float]:
    """The fits of a table, from all that was measured; what one device cannot show is guessed."""
    width = A100["fit"]["attention_width"]
    start = {"bytes_per_s": 2.5e12, "operations_per_s": 6e14, "power": 1.5, "product_s": 3e-6}
    found = fit(bench, "products", start, lambda by, *of: by[3] + combined(by, *of))
    fast = torch.tensor(list(found.values()), dtype=torch.float64)
    parts: dict[str, tuple[dict[str, float], Formula]] = {
        "prompts": (
            {
                "attention_s_per_token": 1e-8,
                "attention_operations_per_s": 4e14,
                "attention_s": 5e-6,
            },
            lambda by, n, wide: by[2] + wide * (by[0] * n / width + 2 * n**2 / by[1]),
        ),
        "decodes": (
            {"decode_s": 5e-6, "decode_s_per_sequence": 1e-7, "decode_bytes_per_s": 2e12},
            lambda by, batch, read: by[0] + batch * torch.hypot(by[1], read / by[2]),
        ),
        "moves": (
            {"launch_s": 2e-6, "copy_bytes_per_s": 2e12},
            lambda by, moved: by[0] + moved / by[1],
        ),
        "experts": (
            {"expert_bytes_share": 0.7, "expert_operations_share": 0.6},
            lambda by, read, operations: combined(fast, read / by[0], operations / by[1]),
        ),
    }
    for name, (begin, formula) in parts.items():
        if bench.points[name]:
            found |= fit(bench, name, begin, formula)
    return found | {"attention_width": width, **GUESSED}


def told(bench: Bench) -> None:
    """The table, and the rows of attention and of divided products beside it."""
    sitting, found, models = bench.sitting, fits(bench), {}
    name = "a CPU" if sitting.dry else torch.cuda.get_device_name(0)
    memory = 80 * sitting.gb if sitting.dry else torch.cuda.get_device_properties(0).total_memory
    error = round(max(bench.errors, default=0.1), 3)
    for model, raw in A100["models"].items():
        shape, columns = bench.shape(model), bench.columns[model, 1]
        models[model] = {key: getattr(shape, key) for key in Shape.__slots__ if key in raw}
        models[model]["error"] = error
        if Role.NORM in columns and Role.HEAD in columns:
            models[model]["milliseconds"] = {
                role: [round(each, 5) for each in columns[role]]
                for role in Role
                if role in columns and role is not Role.EMBEDDING
            }
    watts = {phase: bench.watts.get(of) for phase, of in POWERED.items()}
    table = {
        "source": f"{name}, torch {torch.__version__}, bfloat16, by scripts/gpu/operators.py. "
        f"Attention of dense caches: {bench.ways['prefill'][0].name} for prompts, "
        f"{bench.ways['decode'][0].name} for decodes. Positions and activations: "
        f"{'compiled' if bench.fused else 'kernel by kernel'}. Guessed: all-reduce and links.",
        "device": {"name": name, "memory_bytes": int(0.9 * memory), **LINK}
        | {"idle_watts": bench.watts.get("idle"), "busy_watts": watts},
        "curves": bench.curves,
        "fit": found,
        "tokens": TOKENS,
        "models": models,
    }
    sitting.keep("table", json.loads(json.dumps(table)))
    for key, rows in bench.attended.items():
        sitting.keep(f"attention_{key}_s", rows)
    alone = table | {"fit": found | {"all_reduce_s": 0.0, "all_reduce_bytes_per_s": 1e30}}
    off: dict[int, list[float]] = defaultdict(list)
    for (model, devices), columns in bench.columns.items():
        if devices > 1:
            sitting.keep(f"{model}_{devices}_ms", columns)
            for of in read_operators(model, models[model], alone, devices):
                for rows, took_ms in zip(TOKENS, columns.get(of.role, ()), strict=False):
                    off[devices].append(of.decode.at(rows, 0) * 1e3 / took_ms - 1)
    for devices, errors in off.items():
        worst = max(errors, key=abs)
        unit = f"what the reader makes of one device for {devices}, in the median; most {worst:.2f}"
        sitting.note(f"divided_{devices}_error", median(map(abs, errors)), unit)


def measure(sitting: Sitting) -> None:
    """All parts, the most wanted first. What was measured when the time is over is told."""
    bench = Bench(sitting)
    if sitting.dry:
        torch.set_num_threads(1)
    parts = {f"products_{model}": partial(products, bench, model) for model in DENSE}
    parts |= {part.__name__: partial(part, bench) for part in (attention, fuse)}
    parts |= {f"small_{model}": partial(small, bench, model) for model in DENSE}
    parts |= {part.__name__: partial(part, bench) for part in (iterations, power, shares, copies)}
    for model in (*MIXTURES, *(() if sitting.dry else OTHERS)):
        parts[f"products_{model}"] = partial(products, bench, model)
        parts[f"small_{model}"] = partial(small, bench, model)
        if model in MIXTURES:
            parts[f"experts_{model}"] = partial(experts, bench, model)
    for devices in (2, 4, 8):
        for model in DENSE[: 1 if sitting.dry else 2]:
            parts[f"products_{model}_{devices}"] = partial(products, bench, model, devices)
    with torch.inference_mode():
        for key, work in parts.items():
            start_s = time.monotonic()
            if sitting.left_s < SPARE_S:
                sitting.skip(key, f"{sitting.left_s:.0f} s are left")
            else:
                sitting.part(key, lambda _, work=work: work())  # type: ignore[misc]
            sitting.keep(f"{key}_took_s", round(time.monotonic() - start_s, 2))
    if bench.points["products"]:
        sitting.part("table", lambda _: told(bench))


if __name__ == "__main__":
    main("operators", measure)
