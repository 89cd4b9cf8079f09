"""What a simulated cell has to reckon with beyond its tables, as one value: `MEASURED`, or `IDEAL`.

`MEASURED` is the default: what a live cell meets, as far as somebody has measured it. `IDEAL` is a
cell in which nothing but the tables counts, as in the evaluation of LLM-Mesh. Before: `scenario`
and the evaluation's cells, which choose one. After: `groups`, `cluster`.
"""

from collections.abc import Mapping

from mesh.domain.reasons import DeviceKind
from mesh.domain.values import dataclass
from mesh.sim.costs import Jitter, NodeCosts

PROCESS_BYTES = 3 << 29
"""What an engine process takes beside weights and KV cache: 1.5 GiB, as in the testbed of
LLM-Mesh.
"""


CONTEXT_BYTES = 619 << 20
"""What of that is a context of the device, which stays there for as long as the process lives: so
much was seen on an H100 (docs/gpu.md). The rest leaves with the weights.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCosts:
    """The same for all nodes of a cell, but for `nodes`."""

    lengths_told: bool
    """Callers say how long their answers will be; otherwise the most that they would take."""
    instance_bytes: int
    """What every instance takes beside weights and KV cache."""
    stays_bytes: int
    """What of that stays on the device while the weights are off it."""
    kept_process_bytes: int
    """What every process takes that a node keeps (`NodeGroup.processes`), whether it serves
    or not.
    """
    weights_use: bool
    """A node is in use while it holds the weights of any model."""
    nodes: Mapping[DeviceKind, NodeCosts]
    """What a node's own costs take the place of."""


IDEAL = CellCosts(
    lengths_told=True,
    instance_bytes=0,
    stays_bytes=0,
    kept_process_bytes=PROCESS_BYTES,
    weights_use=False,
    nodes=dict.fromkeys(DeviceKind, NodeCosts()),
)

JITTER = Jitter(
    decode_shares=(
        *(-0.11, -0.07, -0.06, -0.05, -0.05, -0.04, -0.04, -0.04, -0.04, -0.03),
        *(-0.03, -0.03, -0.02, -0.02, -0.01, 0.00, 0.02, 0.08, 0.20, 0.34),
    ),
    prefill_shares=(
        *(-0.07, -0.06, -0.05, -0.04, -0.03, -0.03, -0.03, -0.02, -0.02, -0.02),
        *(-0.02, -0.02, -0.01, -0.01, 0.00, 0.00, 0.01, 0.06, 0.14, 0.22),
    ),
)
"""Twenty equal parts of what iterations of one size took over their mean: SmolLM2-135M, OpenVINO on
one thread of a busy machine, decodes of 1, 4 and 8, prompts of 16, 32 and 64 tokens, 930 of each
kind, CPU time, 2026-11-22. Taken for GPUs as well, on which nobody has measured it.
"""
LOAD_SLOWDOWN = {DeviceKind.CPU: 2.5, DeviceKind.GPU: 1.01}
"""On a CPU 2 to 3 were measured, with OpenVINO's compile on all of two cores. On a GPU nobody has
measured it: a copy at 20 GB/s takes a hundredth of an A100's memory bandwidth.
"""
GPU_RESIZE_BYTES_PER_S = 1e9 / 0.023
"""An H100 puts memory under a GB of KV cache in 21 to 23 ms, and takes it away in 14 to 15
(docs/gpu.md).
"""

MEASURED = CellCosts(
    lengths_told=False,
    instance_bytes=PROCESS_BYTES,
    stays_bytes=CONTEXT_BYTES,
    kept_process_bytes=0,
    weights_use=True,
    nodes={
        DeviceKind.CPU: NodeCosts(jitter=JITTER, load_slowdown=LOAD_SLOWDOWN[DeviceKind.CPU]),
        DeviceKind.GPU: NodeCosts(
            jitter=JITTER,
            load_slowdown=LOAD_SLOWDOWN[DeviceKind.GPU],
            resize_bytes_per_s=GPU_RESIZE_BYTES_PER_S,
        ),
    },
)


def cell_costs(*, ideal: bool) -> CellCosts:
    return IDEAL if ideal else MEASURED
