"""A node agent whose OpenVINO engine computes in its exact form, weights as stored and KV in f32.

In it a token does not depend on which tokens are computed together, so that a request goes on with
the same ones wherever it is computed anew.
"""

import sys

from mesh.domain.model import KvPrecision, WeightPrecision
from mesh_nodes.engines.choosing import BuiltEngine
from mesh_nodes.engines.host_memory import own_resident_bytes
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES
from mesh_nodes.main import main
from mesh_nodes.options import NodeOptions
from mesh_nodes.text_engine import TextEngine


def build(options: NodeOptions) -> BuiltEngine:
    engine = OpenVinoEngine(
        threads=options.threads, weights=WeightPrecision.F16, kv=KvPrecision.F32
    )
    return BuiltEngine(TextEngine(engine), own_resident_bytes, kept_bytes=ENGINE_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
