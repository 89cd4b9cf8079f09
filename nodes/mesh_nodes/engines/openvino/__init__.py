"""The engine of CPU nodes, on OpenVINO with its own paged attention and block tables.

The only package that imports openvino. `engine.OpenVinoEngine` implements the engine port.
"""

from mesh.domain.model import WeightPrecision
from mesh_nodes.engines.openvino.compilation import KvPrecision
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES
from mesh_nodes.engines.openvino.kv_cache import KvResize

__all__ = ["ENGINE_BYTES", "KvPrecision", "KvResize", "OpenVinoEngine", "WeightPrecision"]
