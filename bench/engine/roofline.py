"""The least that an iteration could take on this machine: its bytes by the memory, its operations
by the cores, whichever is longer.

The memory's rate is measured. The cores' is reckoned from what their instruction sets do in a
cycle, at the clock rate that the system states: a core that runs above it may come to more than
its whole share. Before: the trial of precisions. After: `report`.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from mesh.domain.model import ComputePrecision, KvPrecision
from mesh.domain.profile import IterationShape
from mesh_nodes.engines.openvino.architecture import Architecture
from mesh_nodes.engines.openvino.precisions import Precisions
from mesh_nodes.engines.openvino.weights import Matrix, weight_plan

OPERATIONS = {
    ComputePrecision.F32: (("amx_int8", 256), ("avx512_vnni", 256), ("avx_vnni", 128)),
    ComputePrecision.BF16: (("amx_bf16", 2048), ("avx512_bf16", 128)),
    ComputePrecision.F16: (("amx_fp16", 2048), ("avx512_fp16", 128)),
}
"""In a cycle of a core, by the kernel's flag, the first that there is: multiplications and
additions. f32 rounds activations to 8 bits, for which the plugin has kernels for VNNI alone."""
PLAIN_OPERATIONS = (("avx512f", 64), ("avx2", 32))
READ_BYTES = 256 << 20
READS = 5
_KV_BYTES = {KvPrecision.F32: 4, KvPrecision.F16: 2, KvPrecision.BF16: 2, KvPrecision.U8: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    bytes_per_s: float
    flags: frozenset[str]
    cycles_per_s: float
    """The cycles a second of all physical cores that compute."""

    def least_s(
        self, architecture: Architecture, shape: IterationShape, precisions: Precisions
    ) -> float:
        """The least time of an iteration of a model with weights of 8 bits."""
        a, prefill = architecture, shape.prefill_tokens
        matrices = [each for each in weight_plan(a) if isinstance(each, Matrix)]
        weights = sum(each.columns * sum(n for _, n in each.sources) for each in matrices)
        tokens = shape.decode_batch + prefill
        seen = shape.decode_batch * shape.decode_context_tokens
        attended = seen + prefill * (shape.prefill_past_tokens + prefill / 2)
        operations = (
            2 * weights * tokens + 4 * attended * a.layers * a.attention_heads * a.head_size
        )
        kept = (seen + shape.prefill_past_tokens) * 2 * a.layers * a.kv_heads * a.head_size
        read = weights + kept * _KV_BYTES[precisions.kv]
        peak = self.cycles_per_s * self._operations(precisions.compute)
        return max(read / self.bytes_per_s, operations / peak)

    def _operations(self, compute: ComputePrecision) -> int:
        sets = (*OPERATIONS[compute], *PLAIN_OPERATIONS)
        return next((number for flag, number in sets if flag in self.flags), 8)


def measured(threads: int) -> Roofline:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    rates = [float(rate) for rate in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)]
    flags = re.search(r"^flags\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    beside = len(re.findall(r"\d+", siblings.read_text())) if siblings.exists() else 1
    return Roofline(
        bytes_per_s=_read_bytes_per_s(threads),
        flags=frozenset(flags.group(1).split() if flags else ()),
        cycles_per_s=max(rates, default=2000.0) * 1e6 * max(threads / beside, 1),
    )


def _read_bytes_per_s(threads: int) -> float:
    parts = np.array_split(np.ones(READ_BYTES // 8, np.int64), threads)
    shortest_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READS):
            start_s = perf_counter()
            list(pool.map(np.sum, parts))
            shortest_s = min(shortest_s, perf_counter() - start_s)
    return READ_BYTES / shortest_s
