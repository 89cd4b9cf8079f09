"""Plans for the nodes of a live cell: how many instances of a whole model, on which nodes, in what
batches, and what callers are to expect of them.

A replica is an instance that has what other deployments leave of a node's time. Its prompts and its
tokens share that, counted once: `conserving`. Prompts wait as in M/G/1, for others' turns too, and
then have the whole node. Tokens come in the batches that form, as much later as others take time.
Calls join an instance that computes before one that rests, as the policies have it.
No engine here runs single operators on other devices, so that nothing smaller than a model is
planned. Before: the controller core, which knows nodes, profiles and calls. After: `replicas_min`,
or what `spec.scaling.plan` has loaded ahead.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

from mesh.compute.times import Times
from mesh.domain.energy import Power
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import NodeId
from mesh.domain.profile import Profile
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass, replace
from mesh.domain.views import Arrivals, InstancePlan
from mesh.plan.conserving import service_s, token_s
from mesh.plan.problem import check_demand, sample_of
from mesh.plan.queueing import shared_s

USED_MAX = 0.8
"""Instances are planned for so much of what they can carry: up to there the formulas hold."""
ROUNDS = 16
"""The steps after which a fixed point is near enough."""
FILLED = 0.95
"""An instance is expected to be used so far before calls go to another one, when admission holds it
to the SLO.
"""
ALONE = (0.0, 1.0)
"""What a device yields that has one iteration at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node that holds an instance, or can hold one."""

    node_id: NodeId
    profile: Profile
    batch_max: int
    """How many sequences its engine, the policy and its memory allow at a time."""
    factor: float = 1.0
    """How many times as long as the profile says its last iterations took."""
    left_share: float = 1.0
    """The share of its time that other deployments leave."""
    turn_of_others_s: float = 0.0
    """How long a turn of theirs takes that somebody comes upon."""
    error: float | None = None
    """By what share predictions of its last iterations were off (p95); `None` without any."""
    power: Power | None = None


class _Expected(NamedTuple):
    """What calls are to expect of an instance; by default of one that is full."""

    ttft_s: float = math.inf
    """Without the turns of others."""
    turns: float = 0.0
    """How many turns of others a first token waits for."""
    tpot_s: float = math.inf
    busy: float = 1.0
    """The share of its time in which it computes."""

    def ttft_beside_s(self, host: Host) -> float:
        """The TTFT with the turns of others on the host."""
        return self.ttft_s + self.turns * host.turn_of_others_s


class _Work:
    """The work that a call is for a host, whose times are multiplied by `longer`."""

    def __init__(
        self, host: Host, calls: Arrivals, slo: Slo, chunk_tokens: int, longer: float = 1.0
    ) -> None:
        self.expected = cache(self._fixed_point)
        """What calls are to expect at so many a second."""
        longer *= host.factor / host.left_share
        self._left_share = host.left_share
        self._times, self._prompts = Times(host.profile, longer), calls.prompts
        self._chunk_tokens = chunk_tokens
        alone_s = [self._prompt_s(tokens, 0) for tokens in calls.prompts]
        self.prompt_s = fmean(alone_s)
        """Seconds of a prompt on an instance that does nothing else, in its share of the node."""
        self._variation = max(fmean([s**2 for s in alone_s]) / self.prompt_s**2 - 1, 0.0)
        self._tokens = max(calls.answer_tokens - 1, 0.0)
        """The tokens of an answer that are decoded: the first comes with its prompt."""
        self._tpot_slo_s = slo.tpot_s
        self._ttft_slo_s = fmean([slo.ttft_limit_s(tokens) for tokens in calls.prompts])
        context = fmean(calls.prompts) + calls.answer_tokens / 2
        chunks = fmean(calls.prompts) / chunk_tokens
        self._whole_chunks = fmean([-(-tokens // chunk_tokens) for tokens in calls.prompts])
        most = max(min(host.batch_max, round(self._tokens / chunks)), 1)
        # Each chunk comes beside a decode, so that no larger batches form.
        sizes = [*(2**n for n in range(most.bit_length())), most]
        self._seconds = {b: self._times.decode_s(b, context) for b in sorted({*sizes})}
        """Seconds of a decode, by its batch."""
        carried = {batch: self._carried(batch) for batch in self._seconds}
        self.batch_max = max(carried, key=lambda batch: (carried[batch], -batch))
        self.carried_per_s = max(carried[self.batch_max], 0.0)
        """Calls a second that an instance carries at the most, at the pace of the SLO."""

    @property
    def token_s(self) -> float:
        """Seconds of a token on an instance that does nothing else."""
        return self._seconds[1]

    def unloaded(self, decodes: float = 0.0) -> _Expected:
        """What a call is to expect that is the only one, where so many decodes of others are due
        before its prompt.
        """
        ttft_s = self._left_share * self.prompt_s
        return _Expected(ttft_s, self._turns_of_others(0.0, decodes), self.token_s, 0.0)

    @property
    def unloaded_most(self) -> _Expected:
        """The same with as many as can be, whatever the SLO."""
        return self.unloaded(self._tokens / 2)

    def _turns_of_others(self, used: float, decodes: float) -> float:
        """How many turns of others a prompt waits for: the rest of the one under way, those that
        come until it is its turn, as background load of M/G/1, and `decodes` before it. Then it has
        the node, but for one between two of its chunks. `used` is the share of the deployment's own
        time that its prompts take.
        """
        waits = 0.5 / (self._left_share * (1 - used))
        return (1 - self._left_share) * (waits + decodes + self._whole_chunks - 1)

    def _decodes_due(self, tpot_s: float) -> float:
        """How many decodes of others are due before a prompt, in the mean over an answer, and are
        computed first by the rule `headroom`. Others are taken to be like this deployment: each
        token brings an answer forward by what it takes less than the SLO allows.
        """
        ahead = self._tokens * max(self._tpot_slo_s - tpot_s, 0.0) / self._ttft_slo_s
        share = 1 - ahead / 2 if ahead < 1 else 0.5 / ahead
        return min(share * self._ttft_slo_s / self._tpot_slo_s, self._tokens / 2)

    def _prompt_s(self, tokens: int, batch: int) -> float:
        """Seconds of a prompt in chunks, as nodes compute it; beside decodes what it adds."""
        at, step = self._times, self._chunk_tokens
        return sum(
            at.chunk_s(min(step, tokens - past), past, batch)
            if batch
            else at.prefill_s(min(step, tokens - past), past)
            for past in range(0, tokens, step)
        )

    def _beside_s(self, batch: float) -> float:
        """What a prompt adds to decodes of so many sequences, in the mean."""
        return fmean([self._prompt_s(tokens, max(round(batch), 1)) for tokens in self._prompts])

    def _carried(self, batch: int) -> float:
        """With full batches of this size: as much as its time allows, of which prompts leave enough
        for the pace of tokens.
        """
        if not self._tokens:
            return 1 / self.prompt_s
        beside_s, decode_s = self._beside_s(batch), self._seconds[batch]
        most = 1 / (beside_s + self._tokens * decode_s / batch)
        return min(most, (1 - decode_s / self._tpot_slo_s) / beside_s)

    def _fixed_point(self, rate_per_s: float) -> _Expected:
        """How long tokens take depends on what prompts add to their iterations, and that on how
        many sequences there are.
        """
        tokens_per_s = rate_per_s * self._tokens
        together = 1.0 if tokens_per_s else 0.0
        tpot_s, found = 0.0, _Expected()
        chunks = fmean(self._prompts) / self._chunk_tokens
        for _ in range(ROUNDS):
            decoding = 1 - math.exp(-together)
            beside_s = self._beside_s(together) if together else 0.0
            adds_s = decoding * beside_s + (1 - decoding) * self.prompt_s
            prompts = rate_per_s * adds_s
            decode_s = decoding * service_s(self._seconds, max(together, 1.0))
            takes_s = adds_s + chunks * decode_s
            full = prompts >= 1 or rate_per_s * takes_s >= 1
            if tokens_per_s and not full:
                slowed = {batch: s / (1 - prompts) for batch, s in self._seconds.items()}
                tpot_s = token_s(tokens_per_s, slowed, lambda _: ALONE, 1, 1, self.batch_max)
            if full or math.isinf(tpot_s):
                if together >= self.batch_max or not tokens_per_s:
                    return _Expected()
                # What is late comes in larger batches, beside which a prompt adds less.
                together, tpot_s = min(2 * max(together, 1.0), self.batch_max), 0.0
                continue
            sojourn_s = sum(shared_s(rate_per_s, takes_s, 1, ALONE, self._variation))
            together = tokens_per_s * tpot_s
            batch = min(max(together, 1.0), self.batch_max)
            decodes = tokens_per_s * service_s(self._seconds, batch) / batch
            ttft_s = sojourn_s + (self._whole_chunks - chunks + 0.5) * decode_s
            turns = self._turns_of_others(rate_per_s * takes_s, self._decodes_due(tpot_s))
            busy = min(prompts + decodes, 1.0)
            found = _Expected(self._left_share * ttft_s, turns, tpot_s, busy)
        return found


def plan(
    hosts: Sequence[Host], calls: Arrivals, slo: Slo, *, replicas_max: int, chunk_tokens: int
) -> InstancePlan:
    """The fewest instances with which the SLO is kept in the mean, on the first hosts that can keep
    it. Where none do, the fewest that carry the rate, or else those that are there at the most,
    with what they lack; none where no host keeps the SLO even unloaded. Raises InvalidInput for
    calls that nothing can be planned for.
    """
    if not (math.isfinite(calls.answer_tokens) and calls.answer_tokens >= 1):
        raise InvalidInput(f"answers have {calls.answer_tokens:g} tokens; they must have 1 or more")
    calls = replace(calls, prompts=sample_of(calls.prompts))
    ttft_slo_s = fmean([slo.ttft_limit_s(tokens) for tokens in calls.prompts] or [slo.ttft_s])
    check_demand(calls.rate_per_s, calls.prompts, ttft_slo_s)
    made: dict[tuple[int, int, float, float, float], _Work] = {}

    def work(host: Host, longer: float = 1.0) -> _Work:
        """Its work, made once for hosts that are alike: a cell has a hundred nodes of one kind."""
        like = id(host.profile), host.batch_max, host.factor, host.left_share, longer
        if like not in made:
            made[like] = _Work(host, calls, slo, chunk_tokens, longer)
        return made[like]

    unloaded_s = {host.node_id: work(host).unloaded().ttft_beside_s(host) for host in hosts}
    able = [
        host
        for host in hosts
        if work(host).carried_per_s > 0 and unloaded_s[host.node_id] <= ttft_slo_s
    ]
    none = InstancePlan(calls=calls)
    beside = " beside other deployments" if any(host.left_share < 1.0 for host in hosts) else ""
    if not able:
        ttft_s = min(unloaded_s.values())
        tpot_s = min(work(host).token_s for host in hosts)
        feasible_s = min(work(host).unloaded_most.ttft_beside_s(host) for host in hosts)
        where = f"unloaded{beside}"
        return _lacking(none, slo, ttft_slo_s, ttft_s, tpot_s, where, feasible_s=feasible_s)
    most = min(len(able), replicas_max)
    found, carries = none, list[InstancePlan]()
    for count in range(1, most + 1):
        taken = able[:count]
        carried_per_s = sum(work(host).carried_per_s for host in taken)
        if count < most and calls.rate_per_s > USED_MAX * carried_per_s:
            continue
        found = _planned(taken, work, calls, slo, ttft_slo_s)
        if found.utilisation <= USED_MAX:
            if found.ttft_s <= ttft_slo_s and found.tpot_s <= slo.tpot_s:
                return found
            carries.append(found)
    if found.utilisation > USED_MAX:
        carried_per_s = USED_MAX * calls.rate_per_s / found.utilisation
        limit = " (replicas_max)" if replicas_max < len(able) else ""
        message = f"{calls.rate_per_s:.3g} calls a second are above the {carried_per_s:.3g} that "
        message += f"{most} instances{limit} carry{beside} at {USED_MAX:.0%} of use"
        hint = "raise replicas_max" if limit else "add a node, or plan for a lower rate"
        return replace(found, lacks=message, hint=hint)
    where = f"on {most} instances at {calls.rate_per_s:.3g} calls a second"
    return _lacking(carries[0], slo, ttft_slo_s, found.ttft_s, found.tpot_s, where)


def _lacking(
    found: InstancePlan,
    slo: Slo,
    ttft_slo_s: float,
    ttft_s: float,
    tpot_s: float,
    where: str,
    *,
    feasible_s: float | None = None,
) -> InstancePlan:
    """`feasible_s`: the TTFT to ask for, where it is more than the least."""
    message = f"a TTFT of {ttft_s:.3g} s and a TPOT of {tpot_s:.3g} s are the least {where}; the "
    message += f"SLO asks for {ttft_slo_s:.3g} and {slo.tpot_s:.3g} s"
    # A hundredth more, since three digits may be less than it is.
    ttft_s = feasible_s or ttft_s
    hint = f"feasible are ttft_s: {1.01 * ttft_s:.3g} and tpot_s: {1.01 * tpot_s:.3g}, or more"
    return replace(found, lacks=message, hint=hint)


def _planned(
    hosts: Sequence[Host], work: Callable[..., _Work], calls: Arrivals, slo: Slo, ttft_slo_s: float
) -> InstancePlan:
    """What calls are to expect of these hosts, which are filled one after the other."""
    carried_per_s = sum(work(host).carried_per_s for host in hosts)
    errors = [host.error for host in hosts if host.error is not None]
    error = max(errors) if len(errors) == len(hosts) else None
    means = [0.0] * 4
    watts, left_per_s = 0.0, calls.rate_per_s
    used = max(FILLED, calls.rate_per_s / carried_per_s)
    for host in hosts:
        rate_per_s = min(left_per_s, used * work(host).carried_per_s)
        left_per_s -= rate_per_s
        busy = 0.0
        if rate_per_s > 0:
            found = work(host).expected(rate_per_s)
            later = work(host, 1 + (error or 0.0)).expected(rate_per_s)
            times = [s for e in (found, later) for s in (e.ttft_beside_s(host), e.tpot_s)]
            if left_per_s > 0:
                times = [*map(min, times, 2 * (ttft_slo_s, slo.tpot_s))]
            share = rate_per_s / calls.rate_per_s
            means = [mean + share * one for mean, one in zip(means, times, strict=True)]
            busy = found.busy * host.left_share
        watts += host.power.joules(1.0, busy) if host.power is not None else 0.0
    known = all(host.power is not None for host in hosts)
    return InstancePlan(
        calls=calls,
        replicas=len(hosts),
        nodes=tuple(host.node_id for host in hosts),
        batch_max=min(work(host).batch_max for host in hosts),
        ttft_s=means[0],
        tpot_s=means[1],
        error=error,
        ttft_most_s=None if error is None else means[2],
        tpot_most_s=None if error is None else means[3],
        utilisation=calls.rate_per_s / carried_per_s,
        watts=watts if known else None,
        j_per_token=watts / (calls.rate_per_s * max(calls.answer_tokens, 1.0)) if known else None,
    )
