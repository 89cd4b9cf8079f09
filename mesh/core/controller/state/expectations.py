"""What the cell expects of models on devices: the best known profile, and how long a load takes."""

from collections.abc import Iterable

from mesh.compute.load_times import PRIORS, LoadTimes
from mesh.compute.scaling import Target, best_profile, lengthened
from mesh.domain.ids import ModelId, NodeId
from mesh.domain.messages import NodeHello
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import Profile
from mesh.domain.steps import LoadRate, LoadTier
from mesh.domain.views import LoadTimesView

LOAD_TIMES_MAX = 2048
"""Nodes and fingerprints whose load times are kept, each by tier and by whether they computed."""


class Expectations:
    """Profiles by model and device fingerprint, load times by node; what was worked out is kept."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        self._measured = {(p.model_id, p.fingerprint): p for p in profiles}
        self._best: dict[Target, Profile] = {}
        self._tried: dict[tuple[ModelId, str], Profile] = {}
        """Estimates as iterations have corrected them."""
        self._load_times: dict[tuple[NodeId | str, LoadTier, bool], LoadTimes] = {}
        """By node, and by the fingerprint of nodes; and by whether the node computed meanwhile."""

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
            mixture=model.mixture,
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
        node: NodeHello,
        weights_bytes: int,
        seconds: float,
        tier: LoadTier = LoadTier.DISK,
        *,
        beside: bool = False,
    ) -> None:
        """A load has ended well on a node, which may have computed `beside` it. Nodes come and go
        by ever other names: of those whose loads ended longest ago nothing is kept.
        """
        beside = beside and node.busy_load_factor != 1.0
        for key in (node.node_id, node.fingerprint):
            known = self._load_times.pop((key, tier, beside), None)
            times = known or LoadTimes(_prior(node, tier))
            times.learn(weights_bytes, seconds)
            self._load_times[key, tier, beside] = times
        while len(self._load_times) > LOAD_TIMES_MAX:
            del self._load_times[next(iter(self._load_times))]

    def load_s(
        self,
        node: NodeHello,
        weights_bytes: int,
        tier: LoadTier = LoadTier.DISK,
        *,
        beside: bool = False,
    ) -> float:
        """Seconds that a load on the node is expected to take, which may compute `beside` it: as
        its own loads did, else as those of nodes like it; where there was none of the kind, as
        others did and the node says that this one differs.
        """
        factor = node.busy_load_factor if beside else 1.0
        beside = factor != 1.0
        times = self._learned(node, tier, beside)
        if times:
            return times.expected_s(weights_bytes)
        times = self._learned(node, tier, not beside)
        if times:
            ratio = factor if beside else 1.0 / node.busy_load_factor
            return times.expected_s(weights_bytes) * ratio
        expected_s = _prior(node, tier).load_s(weights_bytes) * factor
        if tier is LoadTier.DISK:
            return expected_s
        from_disk_s = self.load_s(node, weights_bytes, beside=beside)
        if tier is LoadTier.REMOTE:
            return max(expected_s, from_disk_s)
        return min(expected_s, from_disk_s)

    def load_times(self, node: NodeHello) -> tuple[LoadTimesView, ...]:
        """Of each tier that a load on the node may come from, as far as anybody knows."""
        views = []
        for tier in LoadTier:
            times = self._learned(node, tier, False) or self._learned(node, tier, True)
            if times or tier is LoadTier.DISK or tier in dict(node.load_rates):
                rate = _prior(node, tier) if times is None else times.prior
                views.append(
                    LoadTimesView(
                        tier=tier,
                        fixed_s=rate.fixed_s,
                        bytes_per_s=rate.bytes_per_s,
                        loads=len(times or ()),
                        factor=times.factor if times else 1.0,
                    )
                )
        return tuple(views)

    def _learned(self, node: NodeHello, tier: LoadTier, beside: bool) -> LoadTimes | None:
        """From loads that have ended here: on the node, else on nodes like it."""
        return self._load_times.get((node.node_id, tier, beside)) or self._load_times.get(
            (node.fingerprint, tier, beside)
        )


def _prior(node: NodeHello, tier: LoadTier) -> LoadRate:
    return dict(node.load_rates).get(tier, PRIORS[tier])
