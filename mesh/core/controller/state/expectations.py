"""What the cell expects of models on devices: the best known profile, and how long a load takes."""

from collections.abc import Iterable

from mesh.compute.scaling import Target, best_profile, lengthened
from mesh.domain.ids import ModelId
from mesh.domain.messages import NodeHello
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import Profile
from mesh.domain.steps import LoadTier

LOAD_S_LEAST = 0.5
LOAD_BYTES_PER_S = 0.5e9
"""Expected of a load until one has been seen: a fixed part, and the rate for its weights."""
WAKE_S_LEAST = 0.2
WAKE_BYTES_PER_S = 4e9
"""The same for weights in the host's memory: at most half of the rate of its bus."""
LEARNED_SHARE = 0.5
"""Weight of the last load in the mean of a model's loads."""


class Expectations:
    """By model and device fingerprint. What has been worked out once is kept."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        self._measured = {(p.model_id, p.fingerprint): p for p in profiles}
        self._best: dict[Target, Profile] = {}
        self._tried: dict[tuple[ModelId, str], Profile] = {}
        """Estimates as iterations have corrected them."""
        self._load_s: dict[tuple[ModelId, str, LoadTier], float] = {}

    def learn_profile(self, profile: Profile) -> None:
        """A profile has been measured; estimates may now be scaled from it."""
        self._measured[profile.model_id, profile.fingerprint] = profile
        self._best.clear()
        self._tried.clear()

    def learn_estimate(self, profile: Profile, factor: float) -> None:
        """Iterations took `factor` times what an estimate said: the next instance need not find out
        again. What was measured stays as it is.
        """
        if not profile.measured:
            self._tried[profile.model_id, profile.fingerprint] = lengthened(profile, factor)

    def measured(self, model_id: ModelId) -> list[Profile]:
        """All measured profiles of a model, by fingerprint."""
        found = [p for p in self._measured.values() if p.model_id == model_id]
        return sorted(found, key=lambda profile: profile.fingerprint)

    def profile(self, model: ModelInfo, footprint: Footprint, node: NodeHello) -> Profile:
        """The measured profile of a model on a node's device; else an estimate, as iterations have
        corrected it there, or scaled from what is known elsewhere.
        """
        target = Target(
            model_id=model.model_id,
            device=node.device,
            fingerprint=node.fingerprint,
            hardware=node.hardware,
            cores=node.cores,
            parameters=model.parameters,
            weights_bytes=footprint.weights_bytes,
            kv_bytes_per_token=footprint.kv_block_bytes // footprint.block_tokens,
        )
        known = self._best.get(target)
        if known is None:
            known = self._best[target] = best_profile(self._measured.values(), target)
        if known.measured:
            return known
        return self._tried.get((target.model_id, target.fingerprint), known)

    def learn_load(
        self,
        model_id: ModelId,
        fingerprint: str,
        elapsed_s: float,
        tier: LoadTier = LoadTier.DISK,
    ) -> None:
        key = (model_id, fingerprint, tier)
        before_s = self._load_s.get(key, elapsed_s)
        self._load_s[key] = before_s + (elapsed_s - before_s) * LEARNED_SHARE

    def load_s(
        self,
        model_id: ModelId,
        fingerprint: str,
        weights_bytes: int,
        tier: LoadTier = LoadTier.DISK,
    ) -> float:
        """Seconds that a load from there is expected to take."""
        known_s = self._load_s.get((model_id, fingerprint, tier))
        if known_s is not None:
            return known_s
        if tier is LoadTier.DISK:
            return LOAD_S_LEAST + weights_bytes / LOAD_BYTES_PER_S
        guess_s = WAKE_S_LEAST + weights_bytes / WAKE_BYTES_PER_S
        return min(guess_s, self.load_s(model_id, fingerprint, weights_bytes))
