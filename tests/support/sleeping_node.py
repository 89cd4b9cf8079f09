"""A node agent whose vLLM engine lets an unloaded instance sleep, on a CPU.

The agent's own options give that to GPUs alone, where the host's memory is another one.
"""

import sys

from mesh_nodes.engines.choosing import BuiltEngine
from mesh_nodes.engines.host_memory import own_resident_bytes
from mesh_nodes.engines.vllm import VllmEngine
from mesh_nodes.main import main
from mesh_nodes.options import NodeOptions
from mesh_nodes.text_engine import TextEngine


def build(options: NodeOptions) -> BuiltEngine:
    engine = VllmEngine(threads=options.threads, asleep_max=1)
    engine.await_ready()
    return BuiltEngine(
        TextEngine(engine),
        lambda: own_resident_bytes() + engine.resident_bytes(),
        nearer=lambda folders: engine.in_host_memory(),
        kept_bytes=1 << 20,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
