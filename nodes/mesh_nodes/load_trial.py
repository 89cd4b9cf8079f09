"""What loads of prepared models take on this node, measured before there has been any: by trying.

The smallest stored model that needs no compile is loaded twice and unloaded again, the second time
as an instance that shares its weights, before the node serves; and once before, since the first
load of a process pays for more than itself. Before: the composition root, where `kept_loads` knows
nothing. After: the node's hello.
"""

from collections.abc import Sequence

from mesh.compute.load_times import PRIORS, fitted
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceLoaded
from mesh.domain.steps import HeldModel, LoadOrder, LoadRate, LoadTier
from mesh.runtime.engine import Engine
from mesh_loader.store import ModelStore, StoredModel

WEIGHTS_BYTES_MAX = 512 << 20
"""Larger models would hold up the node's start."""
COMPILE_RATIO = 5.0
"""A load with its compile over one without: 1.6 to 3.9 s over 0.25 to 0.8 s, of 135M parameters."""
_NAMES = InstanceId("trial-1"), InstanceId("trial-2")


def tried_rates(
    engine: Engine, store: ModelStore, prepared: Sequence[HeldModel], bytes_max: int
) -> dict[LoadTier, LoadRate]:
    """By tier; of loads from the disk it is derived. Nothing where no model is small enough:
    `bytes_max` is what both instances may take. Raises EngineError, ModelError or StorageError.
    """
    tried = [
        (loaded.tier, (loaded.footprint.weights_bytes, loaded.elapsed_s))
        for loaded in _tried(engine, store, prepared, bytes_max)
    ]
    rates = {tier: fitted([load], PRIORS[tier]) for tier, load in tried}
    spared = rates.get(LoadTier.PREPARED) or rates.get(LoadTier.CACHED)
    if spared is None:
        return rates
    compiled = LoadRate(
        fixed_s=spared.fixed_s * COMPILE_RATIO, bytes_per_s=spared.bytes_per_s / COMPILE_RATIO
    )
    # It is the second load of these files that was measured.
    return {LoadTier.DISK: compiled, LoadTier.PREPARED: spared, LoadTier.CACHED: spared, **rates}


def _tried(
    engine: Engine, store: ModelStore, prepared: Sequence[HeldModel], bytes_max: int
) -> tuple[InstanceLoaded, ...]:
    whole = {stored.info.model_id: stored for stored in store.models()}
    found = [(whole[held.model_id], held) for held in prepared if held.model_id in whole]
    sizes = [engine.footprint(stored.info).weights_bytes for stored, _ in found]
    if not found or min(sizes) > min(WEIGHTS_BYTES_MAX, bytes_max // 2):
        return ()
    stored, held = found[sizes.index(min(sizes))]
    try:
        engine.load(_order(_NAMES[0], stored, held), _silent)
        engine.unload(_NAMES[0])
        return tuple(engine.load(_order(name, stored, held), _silent) for name in _NAMES)
    finally:
        for name in _NAMES:
            engine.unload(name)


def _order(name: InstanceId, stored: StoredModel, held: HeldModel) -> LoadOrder:
    return LoadOrder(
        instance_id=name,
        deployment=DeploymentName("trial"),
        model=stored.info,
        model_path=stored.path,
        kv_blocks=1,
        context_tokens_max=held.context_tokens_max,
        batch_max=1,
    )


def _silent(phase: str, share: float) -> None:
    """Nobody watches."""
