"""The engine of GPU nodes, on vLLM: one process per instance, stepped by the node agent.

Neither vLLM nor torch is ever imported by the agent: `engine.VllmEngine` implements the engine port
there, `forkserver` imports vLLM once and forks engine processes, `process` and `instance` run in
them. Only `internals` uses private parts of vLLM.
"""

from mesh_nodes.engines.vllm.engine import VllmEngine
from mesh_nodes.engines.vllm.footprint import GPU_PROCESS_BYTES
from mesh_nodes.engines.vllm.releases import VllmRelease, installed_release, served_architectures
from mesh_nodes.engines.vllm.spawner import start_spawner

__all__ = [
    "GPU_PROCESS_BYTES",
    "VllmEngine",
    "VllmRelease",
    "installed_release",
    "served_architectures",
    "start_spawner",
]
