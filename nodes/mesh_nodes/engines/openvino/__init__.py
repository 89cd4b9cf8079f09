"""The engine of CPU nodes, on OpenVINO with its own paged attention and block tables.

The only package that imports openvino. `engine.OpenVinoEngine` implements the engine port. What is
named here is imported when it is asked for: a child process that prepares weights needs no
OpenVINO, whose import takes longer than a small model's weights do.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.domain.model import KvPrecision, WeightPrecision
    from mesh_nodes.engines.openvino.engine import OpenVinoEngine, release
    from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES
    from mesh_nodes.engines.openvino.kv_cache import KvResize
    from mesh_nodes.engines.openvino.precision_choice import chosen, shape_of_store
    from mesh_nodes.engines.openvino.trial_wish import TrialWish

__all__ = [
    "ENGINE_BYTES",
    "KvPrecision",
    "KvResize",
    "OpenVinoEngine",
    "TrialWish",
    "WeightPrecision",
    "chosen",
    "release",
    "shape_of_store",
]
_MODULES = {
    "ENGINE_BYTES": "mesh_nodes.engines.openvino.footprint",
    "KvPrecision": "mesh.domain.model",
    "KvResize": "mesh_nodes.engines.openvino.kv_cache",
    "OpenVinoEngine": "mesh_nodes.engines.openvino.engine",
    "TrialWish": "mesh_nodes.engines.openvino.trial_wish",
    "WeightPrecision": "mesh.domain.model",
    "chosen": "mesh_nodes.engines.openvino.precision_choice",
    "release": "mesh_nodes.engines.openvino.engine",
    "shape_of_store": "mesh_nodes.engines.openvino.precision_choice",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
