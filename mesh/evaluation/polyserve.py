"""The evaluation of PolyServe (§5.2) on virtual servers: goodput of policies beside the optimum.

20 H200 serve Llama-3.1-8B; requests have the lengths of a published workload, come as a Poisson
process and draw their SLO. Goodput is the largest share of the optimal rate (§3.5) at which nine
tenths of the requests, or of each TPOT class, have every token in time. Before: `mesh bench
polyserve`. After: `runs`, `record`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from mesh.compute.times import Times
from mesh.domain.deployment import Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.limits import CellLimits
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import SLO_TOKENS_PER_S_MAX, Slo
from mesh.sim.cluster import Arrival, VirtualCell
from mesh.sim.costs import GivenCosts
from mesh.sim.groups import GIB, DeploymentGroup, NodeGroup
from mesh.sim.scenario import Scenario, arrivals, plan, trace_of
from mesh.sim.testbed import known_model
from mesh.sim.workload import Serverless, published
from mesh_workloads.processes import POISSON
from mesh_workloads.rates import Lognormal

HARDWARE, MODEL = "h200", "llama-3.1-8b"
SERVERS = 20
MEMORY_BYTES = round(0.9 * 141e9)
CONTEXT_TOKENS_MAX = 131072
BATCH_MAX = 512
SLO_MIX = "0.02:0.1,0.03:0.2,0.05:0.3,0.1:0.4"
TTFTS_S = (0.3, 0.5, 1.0)
TPOT_S_MAX = 0.1
WORKLOADS: Mapping[str, str] = {
    "uniform_4096_1024": "uniform-4096-1024",
    "uniform_512_512": "uniform-512-512",
    "mooncake_conversation": "long-context",
    "mooncake_synthetic": "mooncake-synthetic",
    "mooncake_toolagent": "tool-agent",
    "lmsys": "lmsys",
    "sharegpt": "sharegpt",
    "splitwise": "azure-conversation",
}
"""The paper's data sets (Table 1), and the lengths that have their percentiles."""
POLYSERVE = "polyserve-co"
BASELINES = ("co-random", "co-minimal", "co-chunk")
REFUSES_NOBODY = "-no-refusal"
"""How the name of a policy ends that refuses nobody for an SLO."""
BUDGETS = (512, 1024, 2048)
"""Tokens of an iteration under a baseline; the best one counts."""
BUDGET_PERCENT = 50
"""The share of the optimal rate at which it is chosen."""
ATTAINED = 0.9
PERCENT_LEAST, PERCENT_MOST = 5, 130
"""The shares of the optimal rate between which goodput is looked for."""
OVERLOAD_PERCENT = 120
DRAWN = 4000
"""Requests that are drawn for the mean of the optimal cost."""
CHUNK_TOKENS_MAX = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What servers are offered. Requests that come in the first `warm_s` do not count."""

    workload: str
    """A key of WORKLOADS."""
    servers: int = SERVERS
    counted_s: float = 60.0
    seed: int = 1

    @property
    def warm_s(self) -> float:
        """As long as a mean answer takes at the slowest pace."""
        lengths = published(WORKLOADS[self.workload], CONTEXT_TOKENS_MAX)
        return lengths.output.mean() * TPOT_S_MAX

    def scenario(self, policy: str, rate_per_s: float, budget: int = CHUNK_TOKENS_MAX) -> Scenario:
        """The cell and its arrivals, so many a second before those are left out that no SLO fits.
        `budget` bounds the tokens of an iteration, or of its prompts.
        """
        return Scenario(
            policy=policy,
            seed=self.seed,
            ideal=True,
            slo_mix=SLO_MIX,
            slo_ttfts_s=TTFTS_S,
            nodes=(
                NodeGroup(
                    name="server",
                    count=self.servers,
                    device=DeviceKind.GPU,
                    hardware=HARDWARE,
                    memory_gib=MEMORY_BYTES / GIB,
                    costs=GivenCosts({"load_s": 0.0, "load_bytes_per_s": float("inf")}),
                ),
            ),
            deployments=(
                DeploymentGroup(
                    name="llama",
                    model=MODEL,
                    context_tokens_max=CONTEXT_TOKENS_MAX,
                    slo=Slo(ttft_tokens_per_s=SLO_TOKENS_PER_S_MAX),
                    scaling=Scaling(
                        replicas_min=self.servers, replicas_max=self.servers, keep_alive_s=3600.0
                    ),
                    devices=(DeviceKind.GPU,),
                    prefix_cache=False,
                ),
            ),
            workload=Serverless(
                duration_s=self.warm_s + self.counted_s,
                rate_per_s=rate_per_s,
                rates=Lognormal(sigma=0.0),
                process=POISSON,
                lengths=WORKLOADS[self.workload],
                context_tokens_max=CONTEXT_TOKENS_MAX,
            ),
            limits=CellLimits(
                batch_max=BATCH_MAX, prefill_tokens_max=budget, queue_requests_max=100_000
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """The shares of requests that had every token in time."""

    overall: float
    by_class: Mapping[str, float]

    @property
    def least(self) -> float:
        """The share of the class that has the least."""
        return min(self.by_class.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What a policy came to under a load, in per cent of the optimal rate."""

    percent: int
    percent_each_class: int
    overload_share: float
    """What is met of a rate of 1.2 times the optimum, over the optimum."""
    overload_least: float
    """The share that the class with the least has met of it."""
    attained: Attained
    """At `percent`."""
    budget: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The rate that the servers would serve at the least cost of each request."""

    rate_per_s: float
    offered_share: float
    """The share of drawn requests that some SLO fits: the others do not come."""

    @property
    def drawn_per_s(self) -> float:
        """The same rate before those are left out."""
        return self.rate_per_s / self.offered_share


def optimum(load: Load) -> Optimum:
    """Servers over the mean cost of a request, co-located (§3.5)."""
    scenario = load.scenario(POLYSERVE, DRAWN / (load.warm_s + load.counted_s))
    trace = trace_of(scenario)
    assert trace is not None, "it is generated"
    drawn = list(arrivals(scenario, trace))
    profile = known_model(MODEL).costs[HARDWARE].profile
    capacity = (MEMORY_BYTES - profile.weights_bytes) // profile.kv_bytes_per_token
    costs = [cost_s(Times(profile), capacity, each) for each in drawn]
    return Optimum(
        rate_per_s=load.servers / fmean(costs), offered_share=len(drawn) / len(trace.arrivals)
    )


def cost_s(times: Times, capacity_tokens: int, request: Arrival) -> float:
    """Seconds of a server for a request, if all others were like it, in the largest iterations that
    its TPOT and the KV cache allow (§3.4).
    """
    assert request.slo is not None, "it has been drawn"
    prompt, answer = request.input_tokens, request.output_tokens
    low, high = 1, CHUNK_TOKENS_MAX
    while low < high:
        batch = (low + high + 1) // 2
        decodes = batch * answer / (prompt + answer)
        held = decodes * (prompt + answer / 2) + prompt
        fits = held < capacity_tokens and decodes <= BATCH_MAX
        if fits and _iteration_s(times, prompt, answer, batch) < request.slo.tpot_s:
            low = batch
        else:
            high = batch - 1
    return (prompt + answer) / low * _iteration_s(times, prompt, answer, low)


def _iteration_s(times: Times, prompt: int, answer: int, batch: int) -> float:
    """Seconds of an iteration of so many tokens, in the ratio that the request has."""
    decodes = max(round(batch * answer / (prompt + answer)), 1)
    return times.seconds(max(batch - decodes, 0), prompt // 2, decodes, prompt + answer // 2)


@dataclass(slots=True, kw_only=True)
class Search:
    """The goodput of one policy under one load. Each rate is simulated once."""

    policy: str
    load: Load
    rate_per_s: float
    """The optimal one, of requests before those are left out that no SLO fits."""
    step: int = 1
    budget: int | None = None
    known: dict[int, Attained] = field(default_factory=dict)

    def at(self, percent: int) -> Attained:
        if percent not in self.known:
            rate_per_s = self.rate_per_s * percent / 100
            self.known[percent] = attained(self.policy, self.load, rate_per_s, self.budget)
        return self.known[percent]

    def largest(self, met: Callable[[Attained], float], most: int = PERCENT_MOST) -> int:
        """The largest share of the optimal rate at which so much is met; 0 where none is."""
        low, high = 0, -(-most // self.step)
        while low < high:
            middle = (low + high + 1) // 2
            if met(self.at(middle * self.step)) >= ATTAINED:
                low = middle
            else:
                high = middle - 1
        return low * self.step

    def goodput(self) -> Goodput:
        percent = self.largest(lambda at: at.overall)
        each = self.largest(lambda at: at.least, percent)
        overload = self.at(OVERLOAD_PERCENT)
        return Goodput(
            percent=percent,
            percent_each_class=each,
            overload_share=overload.overall * OVERLOAD_PERCENT / 100,
            overload_least=overload.least,
            attained=self.at(max(percent, self.step)),
            budget=self.budget,
        )


def attained(policy: str, load: Load, rate_per_s: float, budget: int | None = None) -> Attained:
    """One simulation."""
    scenario = load.scenario(policy, rate_per_s, budget or CHUNK_TOKENS_MAX)
    met: dict[str, list[bool]] = {}

    def ended(outcome: Outcome) -> None:
        if outcome.arrival_s - cell.started_s >= load.warm_s:
            met.setdefault(outcome.slo.name, []).append(outcome.met_without_grace)

    cell = VirtualCell(plan(scenario), ended=ended)
    cell.run(arrivals(scenario))
    every = [one for of in met.values() for one in of]
    if not every:
        raise InvalidInput(f"no request of {load.workload} came in {load.counted_s:g} s")
    by_class = {name: fmean(of) for name, of in sorted(met.items())}
    return Attained(overall=fmean(every), by_class=by_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputJob:
    """A search (`mesh.evaluation.runs.Job`)."""

    policy: str
    load: Load
    rate_per_s: float
    step: int = 1

    @property
    def name(self) -> str:
        return f"{self.load.workload} {self.policy}"

    @property
    def weight(self) -> float:
        return self.rate_per_s

    def compute(self) -> Goodput:
        """A baseline has the budget with which most is met at BUDGET_PERCENT."""
        searches = [self._search(budget) for budget in self._budgets()]
        if len(searches) > 1:
            searches.sort(key=lambda of: -of.at(BUDGET_PERCENT).overall)
        return searches[0].goodput()

    def _budgets(self) -> Sequence[int | None]:
        baseline = self.policy.removesuffix(REFUSES_NOBODY) in BASELINES
        return BUDGETS if baseline else (None,)

    def _search(self, budget: int | None) -> Search:
        return Search(
            policy=self.policy,
            load=self.load,
            rate_per_s=self.rate_per_s,
            step=self.step,
            budget=budget,
        )


Found = Mapping[str, Mapping[str, Goodput]]
"""By workload and policy."""


def record(optima: Mapping[str, Optimum], found: Found) -> dict[str, object]:
    """As one plain value, for `-o json`. Gains are over the best baseline of a workload, in the
    mean over workloads that have both.
    """
    gains = [_gains(of) for of in found.values()]
    own = [of[name] for of in found.values() for name in of if name.startswith(POLYSERVE)]
    return {
        "gain_co": _mean(gain for gain, _ in gains),
        "gain_each_class_co": _mean(each for _, each in gains),
        "optimal_share_co": _mean(of.percent / 100 for of in own),
        "optimal_share_each_class_co": _mean(of.percent_each_class / 100 for of in own),
        "overload_share": _mean(of.overload_share for of in own),
        "workloads": {
            name: {
                "optimal_per_s": round(optima[name].rate_per_s, 3),
                "offered_share": round(optima[name].offered_share, 4),
                "policies": {policy: _of(one) for policy, one in policies.items()},
            }
            for name, policies in found.items()
        },
    }


def _gains(of: Mapping[str, Goodput]) -> tuple[float | None, float | None]:
    own = [one for name, one in of.items() if name.startswith(POLYSERVE)]
    others = [one for name, one in of.items() if not name.startswith(POLYSERVE)]
    if not own or not others:
        return None, None
    best = max(one.percent for one in others)
    best_each = max(one.percent_each_class for one in others)
    percent, each = max(one.percent for one in own), max(one.percent_each_class for one in own)
    return percent / best if best else None, each / best_each if best_each else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def _of(one: Goodput) -> dict[str, object]:
    return {
        "share": one.percent / 100,
        "share_each_class": one.percent_each_class / 100,
        "overload_share": round(one.overload_share, 4),
        "overload_least": round(one.overload_least, 4),
        "attained": {name: round(of, 4) for name, of in one.attained.by_class.items()},
        "budget": one.budget,
    }
