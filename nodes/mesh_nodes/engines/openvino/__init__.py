"""The engine of CPU nodes, on OpenVINO with its own paged attention and block tables.

The only package that imports openvino. `engine.OpenVinoEngine` implements the engine port.
"""

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
