"""What the cell expects of models on devices: the best known profile, and how long a load takes."""

from collections.abc import Callable, Iterable
from math import inf

from mesh.compute.load_times import PRIORS, LoadTimes, beside_s, stated_slowdown
from mesh.compute.refining import taken_up
from mesh.compute.scaling import Target, best_profile, lengthened
from mesh.domain.ids import ModelId, NodeId
from mesh.domain.limits import forget_oldest
from mesh.domain.messages import NodeHello
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import Profile
from mesh.domain.steps import LoadRate, LoadTier
from mesh.domain.views import LoadTimesView

PROFILES_MAX = 4096
"""Measured profiles that are kept, and estimates: those that were learned first go."""
LOAD_TIMES_MAX = 2048
"""Nodes and fingerprints whose load times are kept."""


class Expectations:
    """Profiles by model and device fingerprint, load times by node; what was worked out is kept."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        self._measured = {(p.model_id, p.fingerprint): p for p in profiles}
        self._best: dict[Target, Profile] = {}
        self._tried: dict[tuple[ModelId, str], Profile] = {}
        """Estimates as iterations have corrected them."""
        self._load_times: dict[NodeId | str, LoadTimes] = {}
        """By node, and by the fingerprint of nodes."""

    def learn_profile(self, profile: Profile) -> None:
        """A profile has been measured; estimates may now be scaled from it."""
        self._keep(profile)
        self._tried.clear()

    def refine_profile(self, before: Profile, told: Profile) -> Profile:
        """A measured one is nearer to what iterations take, as a node has told that predicted
        by `before`: now and then, so that estimates which they have corrected stay so. It is kept
        for the model that was measured: one profile for all models of a shape. Returns what is
        kept.
        """
        if told.measured_as:
            model_id = ModelId(told.measured_as)
            before, told = before.taken_for(model_id), told.taken_for(model_id)
        kept = self._measured.get((told.model_id, told.fingerprint), before)
        refined = taken_up(kept, before, told)
        self._keep(refined)
        return refined

    def _keep(self, profile: Profile) -> None:
        self._measured[profile.model_id, profile.fingerprint] = profile
        forget_oldest(self._measured, PROFILES_MAX)
        self._best.clear()

    def learn_estimate(self, profile: Profile, factor: float) -> None:
        """Iterations took `factor` times what an estimate said: the next instance need not find out
        again. What was measured stays as it is.
        """
        if not profile.measured:
            self._tried[profile.model_id, profile.fingerprint] = lengthened(profile, factor)
            forget_oldest(self._tried, PROFILES_MAX)

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
            shape=model.shape,
            widths=model.widths,
            weights_bytes=footprint.at_context(0).weights_bytes,
            kv_bytes_per_token=footprint.kv_block_bytes // footprint.block_tokens,
        )
        known = self._best.get(target)
        if known is None:
            known = self._best[target] = best_profile(self._measured.values(), target)
            forget_oldest(self._best, PROFILES_MAX)
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
        computed_s: float = 0.0,
    ) -> None:
        """A load has ended well on a node, which has computed for so long beside it. Nodes come and
        go by ever other names: of those whose loads ended longest ago nothing is kept.
        """
        for key in (node.node_id, node.fingerprint):
            known = self._load_times.pop(key, None)
            if known is None or not known.is_of(node.busy_load_factor):
                known = LoadTimes(node.busy_load_factor)
            known.learn(tier, _prior(node, tier), weights_bytes, seconds, computed_s)
            self._load_times[key] = known
        forget_oldest(self._load_times, LOAD_TIMES_MAX)

    def load_s(
        self,
        node: NodeHello,
        weights_bytes: int,
        tier: LoadTier = LoadTier.DISK,
        *,
        beside: bool = False,
    ) -> float:
        """Seconds that a load on the node is planned with, which may compute `beside` it all along:
        as its own loads did, else as those of nodes like it, and longer by what they deviated.
        """
        alone_s = self._alone_s(node, weights_bytes, tier, LoadTimes.planned_s)
        return beside_s(alone_s, self.slowdown(node), inf if beside else 0.0)

    def estimate_s(
        self,
        node: NodeHello,
        weights_bytes: int,
        tier: LoadTier = LoadTier.DISK,
        *,
        computes_s: float = 0.0,
    ) -> float:
        """Seconds that a load which begins now is expected to take, no longer than it is likely to,
        if the node computes for so long beside it.
        """
        alone_s = self._alone_s(node, weights_bytes, tier, LoadTimes.expected_s)
        return beside_s(alone_s, self.slowdown(node), computes_s)

    def slowdown(self, node: NodeHello) -> float:
        """By how much a load takes longer beside which the node computes all along."""
        for key in (node.node_id, node.fingerprint):
            known = self._load_times.get(key)
            if known and known.seen and known.is_of(node.busy_load_factor):
                return known.slowdown
        return stated_slowdown(node.busy_load_factor)

    def load_times(self, node: NodeHello) -> tuple[LoadTimesView, ...]:
        """The load times of each tier that a load on the node may come from, as far as anybody
        knows.
        """
        views = []
        for tier in LoadTier:
            known = self._learned(node, tier)
            loads = known.tier(tier) if known else None
            if loads or tier is LoadTier.DISK or tier in dict(node.load_rates):
                rate = _prior(node, tier) if loads is None else loads.prior
                views.append(
                    LoadTimesView(
                        tier=tier,
                        fixed_s=rate.fixed_s,
                        bytes_per_s=rate.bytes_per_s,
                        loads=len(loads or ()),
                        factor=loads.factor(known.slowdown) if known and loads else 1.0,
                    )
                )
        return tuple(views)

    def _alone_s(
        self,
        node: NodeHello,
        weights_bytes: int,
        tier: LoadTier,
        seconds: Callable[[LoadTimes, LoadTier, int], float],
    ) -> float:
        """The time of a load alone. Where none came from the tier, it follows what the node states
        and how other loads went.
        """
        known = self._learned(node, tier)
        if known:
            return seconds(known, tier, weights_bytes)
        stated_s = _prior(node, tier).load_s(weights_bytes)
        if tier is LoadTier.DISK:
            return stated_s
        if tier is LoadTier.REMOTE:
            return max(stated_s, self._alone_s(node, weights_bytes, LoadTier.DISK, seconds))
        said = dict(node.load_rates)
        between = tuple(LoadTier)[LoadTier.DISK.nearness + 1 : tier.nearness]
        farther = [other for other in between if other in said or self._learned(node, other)]
        from_s = self._alone_s(node, weights_bytes, (LoadTier.DISK, *farther)[-1], seconds)
        return min(stated_s, from_s)

    def _learned(self, node: NodeHello, tier: LoadTier) -> LoadTimes | None:
        """From loads that have ended here: on the node, else on nodes like it."""
        for key in (node.node_id, node.fingerprint):
            known = self._load_times.get(key)
            if known and known.tier(tier):
                return known
        return None


def _prior(node: NodeHello, tier: LoadTier) -> LoadRate:
    return dict(node.load_rates).get(tier, PRIORS[tier])
