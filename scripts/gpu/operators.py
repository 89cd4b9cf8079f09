"""Operators of real model shapes, measured one by one, as a table of `mesh.sim.operators` has them.

Weights and caches are read cold, from different places one after the other, and small kernels are
timed as CUDA graphs of many. Beside the table stand its parts' checks: whole iterations of the 8B
stack against the sum of their operators, what a share of the processors makes of both, and power.
torch alone has no kernel for paged caches, so caches are dense here.
After: `mesh.sim.operators.tables`, which reads the key `table` of the JSON object.

    python -m scripts.gpu.operators [--dry]
"""

from scripts.gpu.sitting import ROOT, Sitting, main  # isort: skip  before all of mesh

import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache, cached_property, partial
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from mesh.domain.operators import Role
from mesh.sim.operators import tables
from mesh.sim.operators.tables import Shape
from scripts.gpu.stack import Stack

A100 = json.loads((ROOT / "mesh/sim/operators/a100.json").read_text("utf-8"))
TOKENS = tuple(A100["tokens"])
DENSE, MIXTURES = ("llama-3.1-8b", "qwen2-7b"), ("qwen2-57b-a14b", "mixtral-8x7b")
OTHERS = ("qwen2-72b", "qwen2-1.5b", "qwen2-0.5b")
ATTENDING = (*DENSE, "qwen2-72b", "qwen2-0.5b")
DRY = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "head_size": 16, "inner": 128}
DRY |= {"vocabulary": 512, "experts": 4, "active": 2, "shared_inner": 64}
"""The most of each number of a shape, without a GPU."""
POOL_GB = 8
PROMPTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (128, 512, 2048, 8192, 32768)
WHOLE_BATCHES, WHOLE_CONTEXT, WHOLE_PROMPT = (1, 16, 64), 512, 2048
SHARE_SIZES = {"prefill": (1, 128, 1024), "decode": (1, 16, 128)}
SUMMED = (Role.NORM, Role.RESIDUAL, Role.QKV, Role.OUTPUT, Role.GATE_UP, Role.DOWN)
GRAPH_S, REPEATS_MAX = 2e-3, 200
POWER_S, SPARE_S = 2.5, 15.0
POWERED = {"prefill": "prefill", "decode": "decode_16"}
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
GUESSED = {"attention_width": A100["fit"]["attention_width"]}
GUESSED |= {"all_reduce_s": 18e-6, "all_reduce_bytes_per_s": 300e9}
LINK = {"link_bytes_per_s": 900e9, "link_latency_s": 10e-6}
BEGIN = {**A100["fit"], "product_s": 3e-6, "attention_s": 5e-6}
FITS = {
    "products": (tables.product_s, "bytes_per_s operations_per_s power product_s"),
    "prompts": (tables.prompt_s, "attention_s_per_token attention_operations_per_s attention_s"),
    "decodes": (tables.decode_s, "decode_s decode_s_per_sequence decode_bytes_per_s"),
    "moves": (tables.moved_s, "launch_s copy_bytes_per_s"),
    "experts": (tables.experts_s, "expert_bytes_share expert_operations_share"),
}
"""The reader's formulas and their numbers, which are sought from BEGIN on."""
FITTED = dict.fromkeys((Role.QKV, Role.OUTPUT, Role.GATE_UP, Role.DOWN, Role.HEAD), "products")
FITTED |= {Role.KV_WRITE: "moves", Role.EMBEDDING: "moves", Role.EXPERTS: "experts"}
FIT_STEPS = 2000
Work = Callable[[], object]
Numbered = Callable[[int], object]
Costed = tuple[Numbered, float, float]
"""What is done, and how many bytes and operations that takes."""


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, value = both.chunk(2, dim=-1)
    return silu(gate) * value


def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries and keys [rows, heads, size], their halves turned by [rows, 1, size / 2]."""
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def several(work: Numbered, repeats: int) -> None:
    for number in range(repeats):
        work(number)


class Bench:
    """What the parts share: memory to read from, and what was measured so far."""

    def __init__(self, sitting: Sitting) -> None:
        self.sitting = sitting
        self.random = partial(torch.randn, device=sitting.device, dtype=torch.bfloat16)
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

    def shape(self, model: str) -> Shape:
        raw = {key: A100["models"][model].get(key, 0) for key in DRY}
        return Shape(**{k: min(n, DRY[k]) if self.sitting.dry else n for k, n in raw.items()})

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
        graph = self.sitting.captured(partial(several, work, repeats))
        return self.sitting.replayed_s(graph) / repeats

    @cached_property
    def stack(self) -> Stack:
        context = 8 if self.sitting.dry else WHOLE_CONTEXT
        tokens = max(WHOLE_PROMPT, max(SHARE_SIZES["decode"]) * context)
        return Stack(self.shape(DENSE[0]), tokens, self.sitting.device, torch.bfloat16)

    def step(self, phase: str, size: int) -> Work:
        """An iteration of the stack: a prompt of so many tokens, or a token of each sequence."""
        if phase == "prefill":
            return partial(self.stack.iterate, self.stack.hidden(1, size), 0)
        past = (8 if self.sitting.dry else WHOLE_CONTEXT) - 1
        return partial(self.stack.iterate, self.stack.hidden(size, 1), past)


@cache
def graph(bench: Bench, phase: str, size: int) -> Work:
    with sdpa_kernel(bench.ways[phase], set_priority=True):
        return bench.sitting.captured(bench.step(phase, size))


def multiplied(bench: Bench, rows: int, inner: int, columns: int) -> Costed:
    given, out = bench.random(rows, inner), bench.random(rows, columns)
    read, operations = rows * inner + inner * columns + rows * columns, 2 * rows * inner * columns
    return (
        lambda number: torch.mm(given, bench.part(number, columns, inner).t(), out=out),
        *(2 * read, operations),
    )


def works(bench: Bench, shape: Shape, rows: int, devices: int) -> dict[Role, Costed]:
    """What computes each operator of a layer but attention, with its bytes and its operations; of
    several devices the matrix products alone. A layer has two norms and two residuals.
    """
    sizes = {role: shape.product(role, devices) for role in Role}
    found = {role: multiplied(bench, rows, *of) for role, of in sizes.items() if of is not None}
    if devices > 1:
        return found
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
    norm = partial(rms_norm, normalized_shape=(hidden,), weight=weight)
    small: dict[Role, tuple[Numbered, int]] = {
        Role.NORM: (lambda _: norm(norm(held)), 4 * hidden),
        Role.RESIDUAL: (lambda _: held + other + other, 6 * hidden),
        Role.ROPE: (lambda _: bench.turned(heads, cos, sin), 2 * turning),
        Role.ACTIVATION: (lambda _: bench.gated(wide), 3 * shape.activated),
        Role.KV_WRITE: (lambda number: cached.index_copy_(0, places[number % 8], new), 2 * kv),
        Role.EMBEDDING: (lambda number: embedding(ids[number % 64], words), 2 * hidden),
    }
    found |= {role: (work, 2 * rows * numbers, 0) for role, (work, numbers) in small.items()}
    return found | (mixed_works(bench, shape, rows) if shape.experts else {})


def mixed_works(bench: Bench, shape: Shape, rows: int) -> dict[Role, Costed]:
    """The choice of experts (softmax, the likeliest, their order), and their products on the tokens
    that chose them, by torch's grouped product.
    """
    hidden, inner, count, active = shape.hidden, shape.inner, shape.experts, shape.active
    numbers = torch.arange(count, device=bench.sitting.device)

    def chosen(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked = torch.softmax(logits.float(), dim=-1).topk(active).indices.view(-1)
        ordered, order = picked.sort()
        ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        return order // active, ends

    given, half = bench.random(rows, hidden), bench.random(rows * active, inner)
    routes = [chosen(bench.random(rows, count)) for _ in range(4)]

    def mixed(number: int) -> object:
        tokens, ends = routes[number % len(routes)]
        both = bench.part(number, 3, count, inner, hidden)
        up = both[:2].view(count, 2 * inner, hidden).transpose(1, 2)
        torch._grouped_mm(given[tokens], up, offs=ends)
        down = both[2].view(count, hidden, inner).transpose(1, 2)
        out = torch._grouped_mm(half, down, offs=ends)
        return torch.zeros_like(given).index_add_(0, tokens, out)

    def gate(number: int) -> object:
        return chosen(given @ bench.part(number, count, hidden).t())

    met, size = count * (1 - (1 - active / count) ** rows), 6 * hidden * inner
    found: dict[Role, Costed] = {Role.GATE: (gate, 2 * hidden * count, 0)}
    found[Role.EXPERTS] = mixed, size * met, size * rows * active
    if wide := shape.shared_inner:
        up, down = (multiplied(bench, rows, *of) for of in ((hidden, 2 * wide), (wide, hidden)))
        both = up[1] + down[1], up[2] + down[2]
        found[Role.SHARED_EXPERT] = (lambda number: (up[0](number), down[0](number)), *both)
    return found


def operators(bench: Bench, model: str, devices: int = 1) -> None:
    """All operators of a model but attention, or the products on one of so many devices."""
    for rows in TOKENS:
        for role, of in works(bench, bench.shape(model), rows, devices).items():
            work, read, operations = of
            took_s = bench.seconds(work, 4e-6 + max(read / 2e12, operations / 5e14))
            bench.columns[model, devices][role].append(1e3 * took_s)
            if role in FITTED:
                bench.points[FITTED[role]].append((read, operations, took_s))


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


def attended_s(bench: Bench, phase: str, model: str, *sizes: int) -> float:
    """By the fastest kernel; `sizes` as `attention_of` takes them."""
    shape, (batch, tokens, context) = bench.shape(model), sizes
    read, operations = 4 * batch * context * shape.kv(1), 2 * math.prod(sizes) * shape.queries
    with sdpa_kernel(bench.ways[phase], set_priority=True):
        work = attention_of(bench, model, batch, tokens, context)
        return bench.seconds(work, 4e-6 + max(read / 2e12, operations / 3e14))


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
            prompts.append((tokens, attended_s(bench, "prefill", model, 1, tokens, tokens)))
            if shape.head_size == bench.shape(DENSE[0]).head_size:  # Smaller ones are slower.
                bench.points["prompts"].append((tokens, shape.queries, prompts[-1][1]))
        for batch, context in product(BATCHES, CONTEXTS):
            read = 4 * context * shape.kv(1)
            if batch * read <= bench.pool.numel():
                took_s = attended_s(bench, "decode", model, batch, 1, context)
                decodes.append(((batch, context), took_s))
                bench.points["decodes"].append((batch, read, took_s))
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


def iterations(bench: Bench) -> None:
    """Iterations of the 8B stack, which turns no positions, beside the sum of its operators."""
    iteration(bench, "prefill", WHOLE_PROMPT, 1, 0)
    for batch in WHOLE_BATCHES:
        iteration(bench, "decode", batch, batch, WHOLE_CONTEXT - 1)
    bench.sitting.note("operator_sum_error", max(bench.errors, default=0.0))


def iteration(bench: Bench, phase: str, rows: int, sequences: int, past: int) -> None:
    shape, columns = bench.shape(DENSE[0]), bench.columns[DENSE[0], 1]
    kv, tokens = shape.kv(1), rows // sequences
    whole_s = bench.sitting.replayed_s(graph(bench, phase, rows))
    new = bench.random(sequences, tokens, shape.queries + 2 * kv)[..., -2 * kv :]
    both = bench.random(rows, 2 * shape.inner)

    def written(number: int) -> None:
        held = bench.part(number, 2, sequences, past + tokens, kv)
        for cached, each in zip(held, new.chunk(2, dim=-1), strict=True):
            cached[:, past:] = each

    layer_s = sum(columns[role][TOKENS.index(rows)] / 1e3 for role in SUMMED)
    layer_s += bench.seconds(written, 1e-5) + bench.seconds(lambda _: gated(both), 1e-5)
    layer_s += attended_s(bench, phase, DENSE[0], sequences, tokens, past + tokens)
    head_s = columns[Role.HEAD][TOKENS.index(sequences)] / 1e3
    off = (bench.stack.shape.layers * layer_s + head_s) / whole_s - 1
    bench.errors += [] if bench.sitting.dry else [abs(off)]
    bench.sitting.note(f"{phase}_{rows}_ms", 1e3 * whole_s, "ms, 8b, an iteration as a graph")
    bench.sitting.note(f"{phase}_{rows}_sum_error", off, "its operators' sum beside it")


def power(bench: Bench) -> None:
    sitting = bench.sitting
    idle: Work = partial(time.sleep, 0.01 if sitting.dry else 0.1)
    works = {"idle": idle, "prefill": graph(bench, "prefill", WHOLE_PROMPT)}
    works |= {f"decode_{batch}": graph(bench, "decode", batch) for batch in WHOLE_BATCHES[1:]}
    for name, work in works.items():
        readings = []
        for seconds in (0.02, 0.02, 0.0) if sitting.dry else (1.0, POWER_S, 0.0):
            readings.append((time.monotonic(), sitting.energy_j()))
            while time.monotonic() < readings[-1][0] + seconds:
                for _ in range(5):
                    work()
                sitting.wait()
        (start_s, before_j), (end_s, after_j) = readings[1:]
        bench.watts[name] = (after_j - before_j) / (end_s - start_s)
        sitting.note(f"power_{name}_watts", bench.watts[name], "W, by NVML's energy counter")


def shares(bench: Bench) -> None:
    """Iterations and operators on two eighths of the processors, three, …, by green contexts."""
    sitting, dense = bench.sitting, bench.shape(DENSE[0])
    sms = 132 if sitting.dry else torch.cuda.get_device_properties(0).multi_processor_count
    counts = [round(sms * part / 64) * 8 for part in range(2, 8)] + [sms]
    parts = {"attention_prefill": attention_of(bench, DENSE[0], 1, 1024, 1024)}
    parts["attention_decode"] = attention_of(bench, DENSE[0], 16, 1, WHOLE_CONTEXT)
    for rows, role in product((16, 1024), (Role.NORM, Role.DOWN)):
        parts[f"{role}_{rows}"] = works(bench, dense, rows, 1)[role][0]
    every = {f"{of}_{n}": bench.step(of, n) for of, sizes in SHARE_SIZES.items() for n in sizes}
    every |= {name: partial(several, part, 50) for name, part in parts.items()}
    found: dict[str, list[float]] = defaultdict(list)
    kernels = partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)
    for count in counts:
        stream = None if sitting.dry or count == sms else sitting.green_stream(count)
        for name, work in every.items():
            with kernels(), torch.cuda.stream(stream):
                found[name].append(bench.sitting.replayed_s(sitting.captured(work, stream)))
        if stream is not None and count == counts[0]:
            with torch.cuda.stream(stream):
                ratio = bench.sitting.replayed_s(every["prefill_1024"]) / found["prefill_1024"][0]
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


def fits(bench: Bench) -> dict[str, float]:
    """The numbers above 0 with which the reader's formulas come nearest to the seconds of their
    points, by steps in a random direction that grow while they help; what one device cannot show is
    guessed.
    """
    draw, found = random.Random(1), dict(GUESSED)
    for name, (_, keys) in FITS.items():
        if bench.points[name]:
            found |= {key: BEGIN[key] for key in keys.split()}
            errors, step = fit_errors(bench, name, found), 0.3
            for _ in range(FIT_STEPS):
                moved = {key: found[key] * math.exp(draw.gauss(0, step)) for key in keys.split()}
                tried = fit_errors(bench, name, found | moved)
                step = max(0.9 * step, 1e-4)
                if fmean(tried) < fmean(errors):
                    found, errors, step = found | moved, tried, step / 0.6
            tenth = sorted(errors)[int(0.9 * len(errors))]
            most = f"{len(errors)} points, in the median; one of ten is off by {tenth:.3f}"
            bench.sitting.note(f"fit_{name}_error", median(errors), most)
    return found


def fit_errors(bench: Bench, name: str, by: dict[str, float]) -> list[float]:
    formula, _ = FITS[name]
    try:
        return [abs(math.log(formula(by, *of) / took_s)) for *of, took_s in bench.points[name]]
    except (ArithmeticError, ValueError):  # Numbers beyond all measure.
        return [math.inf]


def told(bench: Bench) -> None:
    """The table, and the rows of attention and of divided products beside it."""
    sitting, found, models = bench.sitting, fits(bench), {}
    name = "a CPU" if sitting.dry else torch.cuda.get_device_name(0)
    memory = 80 * sitting.gb if sitting.dry else torch.cuda.get_device_properties(0).total_memory
    error = round(max(bench.errors, default=0.1), 3)
    for model, raw in A100["models"].items():
        shape, columns = bench.shape(model), bench.columns[model, 1]
        if Role.NORM in columns and Role.HEAD in columns:
            given = [role for role in Role if role in columns and role is not Role.EMBEDDING]
            rows = {role: [round(each, 5) for each in columns[role]] for role in given}
            models[model] = {key: getattr(shape, key) for key in DRY if key in raw}
            models[model] |= {"error": error, "milliseconds": rows}
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
        if devices > 1 and model in models:
            sitting.keep(f"{model}_{devices}_ms", columns)
            for of in tables.read_operators(model, models[model], alone, devices):
                for n, took_ms in zip(TOKENS, columns.get(of.role, ()), strict=False):
                    off[devices].append(of.decode.at(n, 0) * 1e3 / took_ms - 1)
    for devices, errors in off.items():
        worst = max(errors, key=abs)
        unit = f"what the reader makes of one device for {devices}, in the median; most {worst:.2f}"
        sitting.note(f"divided_{devices}_error", median(map(abs, errors)), unit)


def measure(sitting: Sitting) -> None:
    """All parts, the most wanted first. What was measured when the time is over is told."""
    bench = Bench(sitting)
    if sitting.dry:
        torch.set_num_threads(1)
    parts = {part.__name__: partial(part, bench) for part in (attention, fuse)}
    parts |= {model: partial(operators, bench, model) for model in DENSE}
    parts |= {part.__name__: partial(part, bench) for part in (iterations, power, shares)}
    others = MIXTURES if sitting.dry else (*MIXTURES, *OTHERS)
    parts |= {model: partial(operators, bench, model) for model in others}
    for devices, model in product((2, 4, 8), DENSE[: 1 if sitting.dry else 2]):
        parts[f"{model}_on_{devices}"] = partial(operators, bench, model, devices)
    with torch.inference_mode():
        for key, work in parts.items():
            start_s = time.monotonic()
            if sitting.in_time(key, SPARE_S):
                sitting.part(key, lambda _, work=work: work())  # type: ignore[misc]
            sitting.keep(f"{key}_took_s", round(time.monotonic() - start_s, 2))
    if bench.points["products"]:
        sitting.part("table", lambda _: told(bench))


if __name__ == "__main__":
    main("operators", measure)
