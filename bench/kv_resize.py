"""Resizes the demo model's KV cache with 0.1 to 4 GB live in it, the elastic way and by a copy.

What is timed is the engine's `resize_kv`, which the node's iterations wait for; when the memory has
left the process is watched besides. Then what an elastic cache costs while it is not resized:
decode beside a fixed cache, on pages that earlier requests have left and (`_growing_`) while pages
come, the footprint of an idle instance, and decode while another instance's pages go back. The last
line is one JSON object; `elastic_ms_max` is the worst of all elastic
resizes, of any size, the first included, `cached_ms_max` of those that give cached blocks back,
`speedup_1gb` the lesser of grow and shrink by medians.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import numpy as np

from bench.cells import wait_until
from bench.demo_model import stored_model
from bench.driving import INSTANCE, no_progress, order, request
from bench.harness import Report, Table
from mesh.cli import output
from mesh.domain.ids import RequestId
from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.profile import IterationShape
from mesh.domain.steps import InstanceMemory
from mesh.memory.cache_budget import CacheBudget
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.footprint import estimate
from mesh_nodes.engines.openvino.instance import Instance
from mesh_nodes.engines.openvino.kv_cache import KvResize
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.precisions import Precisions
from mesh_nodes.engines.openvino.sequence import Sequence


def resident_bytes() -> int:
    """As the page tables have it; /proc/self/statm lags behind by what each core has yet to add."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no Rss")


def _given_back(reached: Callable[[], bool]) -> None:
    wait_until(reached, "the KV cache holds what it should give back", 60.0, poll_s=0.0005)


REQUEST_BLOCKS = 32
"""So many hold the blocks in turns, each one every REQUEST_BLOCKS-th: one that ends leaves holes of
one block each, the most there can be."""


class DemoGraph:
    """The demo model compiled once, for several instances of it."""

    def __init__(self, threads: int) -> None:
        self.stored = stored_model()
        weights, kv = WeightPrecision.I8, KvPrecision.F16
        compiler = Compiler(threads=threads, weights=weights, precisions=Precisions(kv=kv))
        compiler.prepare(self.stored.info, self.stored.path, no_progress)
        self._graph = compiler.compile(
            self.stored.info, self.stored.path, CONTEXT_TOKENS, no_progress
        )
        self._footprint = estimate(self.stored.info, weights=weights, kv=kv)

    def instance(self, how: KvResize, *, kv_blocks: int, batch_max: int) -> Instance:
        return Instance(
            order(
                self.stored,
                kv_blocks=kv_blocks,
                context_tokens_max=CONTEXT_TOKENS,
                batch_max=batch_max,
            ),
            self._graph,
            footprint=self._footprint,
            budget=CacheBudget(),
            kv_resize=how,
        )


class LiveInstance:
    """Reaches into its instance to fill it."""

    def __init__(self, graph: DemoGraph, how: KvResize, blocks_max: int) -> None:
        self.how = how
        batch_max = -(-blocks_max * BLOCK_TOKENS // CONTEXT_TOKENS)
        self._instance = graph.instance(how, kv_blocks=1, batch_max=batch_max)
        stored = graph.stored
        self._vocabulary_tokens = stored.info.vocabulary_tokens
        self._numbers = count(1)
        self.block_bytes = self._instance.footprint.kv_block_bytes

    def blocks(self, gigabytes: float) -> int:
        return max(1, round(gigabytes * 1e9 / self.block_bytes))

    @property
    def held_bytes(self) -> int:
        return self._instance.memory().kv_held_bytes

    @property
    def used_blocks(self) -> int:
        return self._instance.memory().kv_blocks_used

    def resize(self, blocks: int) -> int:
        return self._instance.resize_kv(blocks)

    def fill(self, blocks: int) -> None:
        """Further requests, which hold so many more blocks, written to."""
        pool, cache = self._instance._pool, self._instance._cache
        made = [self._sequence() for _ in range(-(-blocks // REQUEST_BLOCKS))]
        for number in range(blocks):
            sequence = made[number % len(made)]
            sequence.computed = number // len(made) * BLOCK_TOKENS
            sequence.reserve(BLOCK_TOKENS, pool)
        for sequence in made:
            assert cache is not None
            cache.back(np.array(sequence.blocks(), np.int64))
            self._instance._sequences[sequence.request_id] = sequence
        self._instance._books = self._instance._count()

    def keep(self) -> None:
        """What is held now is cached once it is let go."""
        for sequence in self._instance._sequences.values():
            for block in sequence.blocks():
                self._instance._pool.name(block, f"kept-{next(self._numbers)}".encode())

    def drop_to(self, blocks: int, draw: random.Random) -> None:
        """End requests at random until no more than so many blocks are held."""
        running = sorted(self._instance._sequences)
        draw.shuffle(running)
        while self.used_blocks > blocks:
            self._instance.abort(running.pop())

    def close(self) -> None:
        self._instance.close()

    def _sequence(self) -> Sequence:
        prompt = (0,) * (CONTEXT_TOKENS - 2)
        return Sequence(
            request(f"live-{next(self._numbers)}", prompt, 1),
            context_tokens_max=CONTEXT_TOKENS,
            vocabulary_tokens=self._vocabulary_tokens,
        )


DECODES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    taken_bytes: int
    booked_bytes: int
    """Weights with graph and activations, as the engine states them, and KV blocks in use."""
    packed_bytes: int
    """One byte a weight: the least that an instance could do with."""


def measure_footprint(threads: int, draw: random.Random) -> Footprint:
    stored = stored_model()
    engine = OpenVinoEngine(threads=threads)
    engine.prepare(stored.info, stored.path, no_progress)
    wanted = order(stored, kv_blocks=BLOCKS, context_tokens_max=CONTEXT_TOKENS, batch_max=BATCH)
    try:
        engine.load(wanted, no_progress)
        _work(engine, draw)
        engine.unload(INSTANCE)
        base = resident_bytes()
        engine.load(wanted, no_progress)
        _work(engine, draw)
        (books,) = engine.memory()
        return Footprint(
            taken_bytes=resident_bytes() - base,
            booked_bytes=books.weights_bytes + books.kv_used_bytes,
            packed_bytes=stored.info.parameters + books.kv_used_bytes,
        )
    finally:
        engine.close()


def _work(engine: OpenVinoEngine, draw: random.Random) -> None:
    """Serve a full batch for a while, and come to rest."""
    served = Served(engine._instance(INSTANCE))
    served.begin(draw_prompts(draw, BATCH))
    for _ in range(DECODES):
        served.step_s()
    served.drop()
    _given_back(lambda: served.books.kv_held_bytes == 0)


SPARE_SHARE = 0.25
GROW, SHRINK, EMPTY, CACHED = "grow", "shrink", "empty", "empty, all cached"
OPERATIONS = GROW, SHRINK, EMPTY, CACHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    how: KvResize
    operation: str
    live_gb: float
    """Before the resize, and after it; nothing is live in EMPTY and CACHED, which give so much
    back.
    """
    stall_s: float
    """That the call takes."""
    returned_s: float
    """From its begin until the books say that nothing is left to give back."""
    given_back_bytes: int
    """What the books hold less."""
    left_bytes: int
    """What the process holds less."""


def resizes(live: LiveInstance, gigabytes: float, draw: random.Random) -> list[Resize]:
    blocks = live.blocks(gigabytes)
    more = blocks + max(1, round(blocks * SPARE_SHARE))
    live.resize(blocks)
    live.fill(blocks)
    grown = _resize(live, GROW, gigabytes, more)
    live.fill(more - blocks)
    live.drop_to(blocks, draw)
    shrunk = _resize(live, SHRINK, gigabytes, max(blocks, live.used_blocks))
    live.fill(blocks - live.used_blocks)
    live.drop_to(0, draw)
    emptied = _resize(live, EMPTY, gigabytes, 1)
    live.resize(blocks)
    live.fill(blocks)
    live.keep()
    live.drop_to(0, draw)
    return [grown, shrunk, emptied, _resize(live, CACHED, gigabytes, 1)]


def _resize(live: LiveInstance, operation: str, gigabytes: float, blocks: int) -> Resize:
    held, resident = live.held_bytes, resident_bytes()
    start_s = time.perf_counter()
    live.resize(blocks)
    stall_s = time.perf_counter() - start_s
    target = blocks * live.block_bytes
    _given_back(lambda: live.held_bytes <= target)
    returned_s = time.perf_counter() - start_s
    return Resize(
        how=live.how,
        operation=operation,
        live_gb=gigabytes,
        stall_s=stall_s,
        returned_s=returned_s,
        given_back_bytes=max(0, held - live.held_bytes),
        left_bytes=resident - resident_bytes(),
    )


BATCH = 32
CONTEXT_TOKENS = 1024
PROMPT_TOKENS = (17, 112)
BLOCKS = BATCH * CONTEXT_TOKENS // 32
PREFILL_TOKENS = 512
QUIET_SHARE = 0.9
"""The longest tenth of the pairs of steps met something else that the machine did: this share is
counted.
"""


class Served:
    """One instance and the requests that run in it."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._running: list[RequestId] = []

    @property
    def books(self) -> InstanceMemory:
        return self._instance.memory()

    def back(self) -> None:
        """Put memory under the whole cache, as far as a full batch could use it."""
        shape = IterationShape(decode_batch=BATCH, decode_context_tokens=CONTEXT_TOKENS - 1)
        self._instance.measure(shape)

    def empty(self) -> None:
        """Drop all requests, take all memory from the cache, and let it have its size again."""
        self.drop()
        self._instance.resize_kv(1)
        _given_back(lambda: self.books.kv_held_bytes <= self.books.kv_block_bytes)
        self._instance.resize_kv(BLOCKS)

    def drop(self) -> None:
        while self._running:
            self._instance.abort(self._running.pop())

    def begin(self, prompts: list[list[int]]) -> None:
        """Requests that run until they are dropped, with their prompts computed."""
        for number, prompt in enumerate(prompts):
            made = request(f"r{number}", prompt, CONTEXT_TOKENS)
            self._instance.submit(made)
            self._running.append(made.request_id)
        while self._instance.step(PREFILL_TOKENS).prefill_left:
            pass

    def step_s(self) -> float:
        """One decode of the whole batch."""
        start_s = time.perf_counter()
        result = self._instance.step(0)
        elapsed_s = time.perf_counter() - start_s
        if result.decode_batch != len(self._running):
            raise RuntimeError(f"{result.decode_batch} of {len(self._running)} requests decoded")
        return elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Mean steps of one round."""

    elastic_s: float
    fixed_s: float

    @property
    def cost_share(self) -> float:
        return self.elastic_s / self.fixed_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRound:
    """One pair of instances: first while pages come under the tokens, then on the pages that those
    requests have left.
    """

    growing: Decoded
    steady: Decoded


def decode_rounds(
    make: Callable[[KvResize], Instance], rounds: int, steps: int, draw: random.Random
) -> Iterator[DecodedRound]:
    """`make` gives instances of one compiled model. Two equal ones differ by a per cent, for as
    long as they live, so each round has a pair of its own.
    """
    for number in range(rounds):
        kinds = (KvResize.ELASTIC, KvResize.COPYING)
        made = {how: make(how) for how in (kinds if number % 2 else kinds[::-1])}
        elastic, fixed = Served(made[KvResize.ELASTIC]), Served(made[KvResize.COPYING])
        fixed.back()
        elastic.empty()
        growing = _decode(elastic, fixed, steps, draw_prompts(draw, BATCH))
        steady = _decode(elastic, fixed, steps, draw_prompts(draw, BATCH))
        for instance in made.values():
            instance.close()
        yield DecodedRound(growing=growing, steady=steady)


def _decode(elastic: Served, fixed: Served, steps: int, prompts: list[list[int]]) -> Decoded:
    """A full batch each, in turns; which goes first changes from step to step."""
    for served in (elastic, fixed):
        served.begin(prompts)
    pairs = []
    for number in range(steps):
        if number % 2:
            pairs.append((elastic.step_s(), fixed.step_s()))
        else:
            pairs.append((fixed.step_s(), elastic.step_s())[::-1])
    for served in (elastic, fixed):
        served.drop()
    pairs = sorted(pairs, key=sum)[: round(steps * QUIET_SHARE)]
    return Decoded(
        elastic_s=mean(elastic_s for elastic_s, _ in pairs),
        fixed_s=mean(fixed_s for _, fixed_s in pairs),
    )


def draw_prompts(draw: random.Random, count: int) -> list[list[int]]:
    return [
        [draw.randrange(500, 40_000) for _ in range(draw.randint(*PROMPT_TOKENS))]
        for _ in range(count)
    ]


def steps_during(served: Served, going_on: Callable[[], bool]) -> list[float]:
    """Each step of a running batch, in seconds, that begins while something goes on."""
    took_s = []
    while going_on():
        took_s.append(served.step_s())
    return took_s


SIZES_GB = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
RETURN_GB_MIN = 0.1
"""What goes back of less than this drowns in what else the process does."""
DECODE_STEPS = 96
BESIDE_BATCH = 8
BESIDE_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    resizes: list[Resize]
    decoded: list[DecodedRound]
    footprint: Footprint
    quiet_step_s: float
    returning_step_s: float
    """Mean step of a batch, alone and while pages go back."""

    def of(self, how: KvResize, operation: str, live_gb: float) -> list[Resize]:
        return [
            r for r in self.resizes if (r.how, r.operation, r.live_gb) == (how, operation, live_gb)
        ]

    def stall_ms(self, how: KvResize, operation: str, live_gb: float) -> float:
        return 1e3 * median(r.stall_s for r in self.of(how, operation, live_gb))


def measure(
    sizes_gb: tuple[float, ...], rounds: int, decode_rounds_: int, threads: int, seed: int
) -> Measured:
    draw = random.Random(seed)
    output.message("footprint of an idle instance")
    footprint = measure_footprint(threads, draw)
    found: list[Resize] = []
    blocks_max = round(max(sizes_gb) * (1 + 2 * SPARE_SHARE) * 1e9 / 700_000)
    graph = DemoGraph(threads)
    lives = [LiveInstance(graph, how, blocks_max) for how in KvResize]
    for number in range(rounds):
        for gigabytes in sizes_gb:
            for live in lives:
                output.message(f"round {number + 1} of {rounds}: {gigabytes} GB, {live.how}")
                found += resizes(live, gigabytes, draw)

    def make(how: KvResize) -> Instance:
        return graph.instance(how, kv_blocks=BLOCKS, batch_max=BATCH)

    decoded = []
    for round_ in decode_rounds(make, decode_rounds_, DECODE_STEPS, draw):
        decoded.append(round_)
        growing, steady = 100 * round_.growing.cost_share, 100 * round_.steady.cost_share
        output.message(
            f"decode, round {len(decoded)}: {steady:+.1f} %, {growing:+.1f} % while it grows"
        )
    beside = make(KvResize.COPYING)
    fixed = Served(beside)
    fixed.back()
    output.message("decode while pages go back")
    quiet_s, returning_s = _beside(lives[0], fixed, max(sizes_gb), draw)
    for live in lives:
        live.close()
    beside.close()
    return Measured(
        resizes=found,
        decoded=decoded,
        footprint=footprint,
        quiet_step_s=mean(quiet_s),
        returning_step_s=mean(returning_s),
    )


def _beside(
    live: LiveInstance, served: Served, gigabytes: float, draw: random.Random
) -> tuple[list[float], list[float]]:
    """Steps of a batch before the pages of another instance go back, and while they do."""
    quiet_s: list[float] = []
    returning_s: list[float] = []
    for _ in range(BESIDE_ROUNDS):
        live.resize(live.blocks(gigabytes))
        live.fill(live.blocks(gigabytes))
        served.begin(draw_prompts(draw, BESIDE_BATCH))
        quiet_s += [served.step_s() for _ in range(DECODE_STEPS // BESIDE_ROUNDS)]
        live.drop_to(0, draw)
        live.resize(1)
        returning_s += steps_during(served, lambda: live.held_bytes > live.block_bytes)
        served.drop()
    return quiet_s, returning_s


def figures(measured: Measured) -> dict[str, float | None]:
    elastic = [r for r in measured.resizes if r.how is KvResize.ELASTIC]
    returning = [r for r in elastic if r.given_back_bytes >= RETURN_GB_MIN * 1e9]
    sizes_gb = {r.live_gb for r in elastic}
    most_gb = max(sizes_gb)
    returned_s = [r.returned_s for r in measured.of(KvResize.ELASTIC, EMPTY, most_gb)]
    footprint = measured.footprint
    return {
        "elastic_ms_max": round(1e3 * max(r.stall_s for r in elastic), 3),
        "elastic_ms_p50": round(1e3 * median(r.stall_s for r in elastic), 3),
        "cached_ms_max": round(1e3 * max(r.stall_s for r in elastic if r.operation == CACHED), 3),
        "speedup_1gb": _speedup(measured, 1.0) if 1.0 in sizes_gb else None,
        "returned_share": _returned_share(returning) if returning else None,
        "returned_ms_at_most_gb": round(1e3 * median(returned_s), 1),
        "live_gb_max": most_gb,
        "decode_cost_share": round(median(d.steady.cost_share for d in measured.decoded), 4),
        "decode_cost_growing_share": round(
            median(d.growing.cost_share for d in measured.decoded), 4
        ),
        "returning_cost_share": round(measured.returning_step_s / measured.quiet_step_s - 1, 4),
        "footprint_ratio": round(footprint.taken_bytes / footprint.booked_bytes, 3),
        "footprint_ratio_packed": round(footprint.taken_bytes / footprint.packed_bytes, 3),
    }


def _speedup(measured: Measured, live_gb: float) -> float:
    ratios = [
        measured.stall_ms(KvResize.COPYING, operation, live_gb)
        / measured.stall_ms(KvResize.ELASTIC, operation, live_gb)
        for operation in (GROW, SHRINK)
    ]
    return round(min(ratios), 1)


def _returned_share(returning: list[Resize]) -> float:
    left = sum(r.left_bytes for r in returning)
    return round(left / sum(r.given_back_bytes for r in returning), 4)


def report(measured: Measured, sizes_gb: tuple[float, ...]) -> Report:
    rows = []
    for live_gb in sizes_gb:
        for operation in OPERATIONS:
            ours = measured.of(KvResize.ELASTIC, operation, live_gb)
            elastic_ms = measured.stall_ms(KvResize.ELASTIC, operation, live_gb)
            copying_ms = measured.stall_ms(KvResize.COPYING, operation, live_gb)
            back = "" if operation == GROW else f"{1e3 * median(r.returned_s for r in ours):.0f}"
            worst_ms = 1e3 * max(r.stall_s for r in ours)
            times = (f"{elastic_ms:.2f}", f"{worst_ms:.2f}", f"{copying_ms:.1f}")
            ratio = f"{copying_ms / elastic_ms:.0f}"
            rows.append((f"{live_gb:g}", operation, *times, ratio, back))
    found = figures(measured)
    footprint = measured.footprint
    table = Table(
        headings=("live GB", "", "elastic", "worst", "copying", "ratio", "pages back"),
        rows=rows,
        title="one resize, medians in ms; all elastic pages are back after",
        words=2,
    )
    given = (
        f"given back: {100 * (found['returned_share'] or 0):.1f} % of it left the process. "
        f"Decode: {100 * (found['decode_cost_share'] or 0):+.1f} % against a fixed cache, "
        f"{100 * (found['decode_cost_growing_share'] or 0):+.1f} % while pages come, "
        f"{100 * (found['returning_cost_share'] or 0):+.1f} % while another instance's pages go "
        "back."
    )
    idle = (
        f"an idle instance takes {footprint.taken_bytes / 1e6:.0f} MB; by the books "
        f"{footprint.booked_bytes / 1e6:.0f} MB, one byte a weight "
        f"{footprint.packed_bytes / 1e6:.0f} MB"
    )
    return Report(figures=found, shown=(table, given, idle))


def run(
    *,
    sizes: Annotated[tuple[float, ...], "GB that are live"] = SIZES_GB,
    rounds: int = 3,
    decode_rounds: Annotated[int, "rounds of decode"] = 8,
    threads: int = len(os.sched_getaffinity(0)),
    seed: int = 1,
) -> Report:
    return report(measure(tuple(sizes), rounds, decode_rounds, threads, seed), sizes)
