"""The name of a blob: a hash of everything that a compiled graph holds besides the weights.

Two models of one key may share a blob; whatever changes the compiled graph must change the key. The
architecture and the context limit are constants in it; precisions, threads and the CPU decide which
kernels OpenVINO chooses; the layout says where each weight lies. The context limit ends the name:
a node can say for which limits its blobs are.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mesh_nodes.engines.openvino.architecture import Architecture
from mesh_nodes.engines.openvino.prepared import Layout

_VERSION = 3
"""The version rises whenever `graph` builds another graph, or `exported` makes another blob of it.
"""
_DIGITS = 24
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
"""As x86 and Arm name them."""


def shape_key(
    *,
    architecture: Architecture,
    context_tokens_max: int,
    layout: Layout,
    properties: Mapping[str, object],
    platform: Mapping[str, str],
) -> str:
    """`properties`: those that the model is compiled with. `platform`: OpenVINO and the CPU."""
    shape = {
        "version": _VERSION,
        "architecture": asdict(architecture),
        "context_tokens_max": context_tokens_max,
        "layout": {"bytes": layout.size_bytes, "tensors": dict(layout.tensors)},
        "properties": dict(properties),
        "platform": dict(platform),
    }
    text = json.dumps(shape, sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}-{context_tokens_max}"


def context_of(key: str) -> int | None:
    """The context limit that a key is for; None where it is no key."""
    digits, _, context = key.rpartition("-")
    return int(context) if len(digits) == _DIGITS and context.isdecimal() else None


def cpu_fields(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What the system says of the first processor; nothing where it says nothing."""
    try:
        first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: fields[name] for name in _CPU_FIELDS if name in fields}
