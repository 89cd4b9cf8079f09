"""What a CUDA context takes, how long weights sleep, wake and swap, what a resize by copy costs.

The ways are the engine's own: `weights.Weights` puts 16 GB of made-up weights into a pool as the
node's is, sleeps, wakes, is swapped by parts, in torch's memory and at addresses that stay, by
pieces of several sizes and under a CUDA graph, and restores another model from there;
`kv_memory.CopyingKv` makes caches of 1, 10 and 40 GB a quarter larger and small again. NVML is
asked before and after: what it counts beside the books is the process's own.

    python -m scripts.gpu.sleep_and_resize [--dry]
"""

from scripts.gpu.sitting import CACHES_GB, LAYERS, Sitting, main  # isort: skip  before all of mesh

import gc
import os
from dataclasses import replace
from functools import partial
from math import isqrt

import torch

from mesh_nodes.engines.vllm.host_pool import range_bytes
from mesh_nodes.engines.vllm.kv_memory import CopyingKv
from mesh_nodes.engines.vllm.messages import Range
from mesh_nodes.engines.vllm.pooled import PooledMemory
from mesh_nodes.engines.vllm.weights import Weights
from mesh_nodes.engines.vllm.weights_memory import FixedMemory

WEIGHTS_GB, TENSORS = 16, 384
PARTS = (1, 4, 8, 16)
"""In so many parts weights are swapped."""
PIECES = (1, 16, 128)
"""So many of the driver's chunks come and go at once where addresses stay."""


def context(sitting: Sitting) -> None:
    before = sitting.used_bytes()
    seconds = sitting.timed_s(lambda: torch.ones(64, 64, device=sitting.device).sum().item())
    taken = sitting.used_bytes() - before
    own = 0 if sitting.dry else torch.cuda.memory_reserved()
    sitting.note("context_s", seconds, "s, with the first kernel")
    sitting.note("context_mib", (taken - own) / 2**20, "MiB beside torch's own, by NVML")


def sleep_and_wake(sitting: Sitting) -> None:
    size_bytes = WEIGHTS_GB * sitting.gb
    if not sitting.fits("sleep_s", size_bytes, seconds=60):
        return
    parts = [
        torch.nn.Parameter(
            torch.randn(size_bytes // TENSORS // 2, device=sitting.device).to(torch.bfloat16),
            requires_grad=False,
        )
        for _ in range(TENSORS)
    ]
    pool, model = os.memfd_create("pool"), torch.nn.ParameterList(parts)
    pooled = PooledMemory(pool, sitting.library)
    weights = Weights(model, sitting.device, pooled)
    layout, gb = weights.layout(), weights.device_bytes / sitting.gb
    where = Range(offset=0, size_bytes=range_bytes(layout), layout=layout, whole=False)
    os.ftruncate(pool, where.size_bytes)
    sums = [float(part.float().sum()) for part in parts]
    used = sitting.used_bytes()
    fill_s = sitting.timed_s(lambda: weights.fill(where).join())
    sleep_s = sitting.timed_s(weights.to_host)
    freed = used - sitting.used_bytes()
    wake_s = sitting.timed_s(weights.to_device)
    swap_by_parts(sitting, weights, "swap")
    where = replace(where, whole=True)
    # The stand-in takes its time for single chunks.
    for chunks in PIECES[sitting.dry :]:
        weights = at_fixed_addresses(sitting, model, pooled, where, chunks)
    same = sums == [float(part.float().sum()) for part in parts]
    weights.to_host()
    memory, again = PooledMemory(pool, sitting.library), []
    pin_s = sitting.timed_s(lambda: memory.map(where))
    for _ in parts:
        zeros = torch.zeros(size_bytes // TENSORS // 2, device=sitting.device, dtype=torch.bfloat16)
        again.append(torch.nn.Parameter(zeros, requires_grad=False))
    other = Weights(torch.nn.ParameterList(again), sitting.device, memory)
    restore_s = sitting.timed_s(lambda: other.restore(where))
    same = same and sums == [float(part.float().sum()) for part in again]
    for key, seconds, what in (
        ("pool_fill", fill_s, "pages, pinning and the copy, beside a model's first requests"),
        ("sleep", sleep_s, "copies nothing"),
        ("wake", wake_s, "from the pool"),
        ("pool_pin", pin_s, "mapping and pinning what stands there, of a first load"),
        ("pool_load", restore_s, "the copy of a first load from the pool"),
    ):
        sitting.note(f"{key}_s", seconds, f"s, {gb:.1f} GB: {what}")
    sitting.note("wake_gb_per_s", gb / wake_s, "GB/s")
    sitting.note("pool_load_gb_per_s", gb / (pin_s + restore_s), "GB/s, pinning included")
    sitting.note("pool_pinned", sitting.dry or memory.pinned)
    sitting.note("sleep_freed_share", freed / size_bytes, "of the weights' bytes, by NVML")
    sitting.note("weights_same", same)


def at_fixed_addresses(
    sitting: Sitting, model: torch.nn.ParameterList, pooled: PooledMemory, where: Range, chunks: int
) -> Weights:
    """Swaps as before, and a CUDA graph of eight layers before and after."""
    driver = sitting.driver()
    key = f"fixed_{chunks * driver.chunk_bytes >> 20}" if not sitting.dry else f"fixed_{chunks}"
    made: list[FixedMemory] = []
    place_s = sitting.timed_s(
        lambda: made.append(FixedMemory(driver, model, sitting.device, chunks))
    )
    weights = Weights(model, sitting.device, pooled, memory=made[0])
    side = isqrt(model[0].numel())
    out = torch.ones(side, device=sitting.device, dtype=torch.bfloat16)

    def layers() -> None:
        given = out.fill_(1.0)
        for part in (*model[:4], *model[-4:]):
            given = (part[: side**2].view(side, side) @ given).tanh()
        out.copy_(given)

    replay = sitting.captured(layers)
    replay_s = sitting.timed_s(replay, 5)
    answer = out.clone()
    taken, used = weights.device_bytes, sitting.used_bytes()
    sleep_s = sitting.timed_s(lambda: weights.to_host(where))
    freed = used - sitting.used_bytes()
    wake_s = sitting.timed_s(weights.to_device)
    again_s = sitting.timed_s(replay)
    right = torch.equal(out, answer)
    swap_by_parts(sitting, weights, key)
    replay()
    sitting.note(f"{key}_place_s", place_s, f"s, pieces of {chunks} chunks: a copy on the device")
    sitting.note(f"{key}_freed_share", freed / taken, "of its memory, by NVML")
    sitting.note(f"{key}_sleep_s", sleep_s, "s")
    sitting.note(f"{key}_wake_s", wake_s, "s")
    sitting.note(f"{key}_replay_us", 1e6 * replay_s, "us, a graph of 8 layers")
    sitting.note(f"{key}_first_replay_us", 1e6 * again_s, "us, right after a wake")
    sitting.note(f"{key}_graph_right", right and torch.equal(out, answer))
    return weights


def swap_by_parts(sitting: Sitting, weights: Weights, key: str) -> None:
    """Swap all weights out and in, by as many parts: what a part costs beside its bytes."""
    whole_s = 0.0
    for parts in PARTS:
        shares = [number / parts for number in range(parts + 1)]
        out_s = [sitting.timed_s(partial(weights.move, share)) for share in shares[-2::-1]]
        in_s = [sitting.timed_s(partial(weights.move, share)) for share in shares[1:]]
        sitting.note(f"{key}_out_{parts}_s", sum(out_s), f"s, in parts: {parts}")
        sitting.note(f"{key}_in_{parts}_s", sum(in_s), f"s, in parts: {parts}")
        if parts == 1:
            whole_s = sum(out_s) + sum(in_s)
        else:
            fixed_s = (sum(out_s) + sum(in_s) - whole_s) / (2 * (parts - 1))
            sitting.note(f"{key}_part_{parts}_ms", 1e3 * fixed_s, "ms a part, beside its bytes")
    weights.move(0.5)
    if not sitting.dry:
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        sitting.note(f"{key}_half_kept_mib", kept / 2**20, "MiB that torch keeps after half went")
    weights.to_device()


def resize_by_copy(sitting: Sitting, size_gb: int) -> None:
    key, block_bytes = f"copy_{size_gb}gb", LAYERS * sitting.layer_block_bytes
    blocks = size_gb * sitting.gb // block_bytes
    larger = blocks + blocks // 4
    # The larger one, and one layer twice.
    if not sitting.fits(f"{key}_grow_ms", larger * block_bytes * (LAYERS + 1) // LAYERS):
        return
    before = sitting.used_bytes()
    kv = CopyingKv(block_bytes, blocks, sitting.device, sitting.free_bytes)
    buffer = kv.allocate(2 * larger * block_bytes).view(torch.bfloat16)
    layers = kv.bind(list(buffer.view(LAYERS, 2 * larger, sitting.layer_block_bytes // 2)))
    layers[-1][1] = 1.5

    def replace(old: torch.Tensor, new: torch.Tensor) -> None:
        layers[:] = [new if layer is old else layer for layer in layers]

    used = range(1, blocks + 1)
    kv.check_room(larger)
    grow_s = sitting.timed_s(lambda: kv.resize(larger, used, [], replace))
    off = sitting.used_bytes() - before - kv.held_bytes
    shrink_s = sitting.timed_s(lambda: kv.resize(blocks, used, [], replace))
    sitting.note(f"{key}_grow_ms", 1e3 * grow_s, "ms, by a quarter")
    sitting.note(f"{key}_shrink_ms", 1e3 * shrink_s, "ms, back")
    sitting.note(f"{key}_off_books_mib", off / 2**20, "MiB more by NVML than in the books")
    sitting.note(f"{key}_kept", bool((layers[-1][1] == 1.5).all()))


def measure(sitting: Sitting) -> None:
    sitting.part("context", context)
    for size_gb in CACHES_GB:
        gc.collect()
        if not sitting.dry:
            torch.cuda.empty_cache()
        sitting.part(f"copy_{size_gb}gb", partial(resize_by_copy, size_gb=size_gb))
    # The last, because it leaves addresses that the driver goes on taking for pinned memory.
    sitting.part("sleep", sleep_and_wake)


if __name__ == "__main__":
    main("sleep_and_resize", measure)
