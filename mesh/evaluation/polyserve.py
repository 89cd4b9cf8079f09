"""The evaluation of PolyServe (§5.2) on virtual servers: goodput of policies beside the optimum.

20 H200 serve Llama-3.1-8B; requests have the lengths of a published workload, come as a Poisson
process and draw their SLO. Goodput is the largest share of the optimal rate (§3.5) at which nine
tenths of the requests, or of each TPOT class, have every token in time. Before: `mesh bench
polyserve`. After: `runs`, `record`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from enum import StrEnum
from functools import partial
from itertools import chain, dropwhile, product, takewhile
from statistics import fmean
from typing import cast

from mesh.compute.times import Times
from mesh.domain.deployment import Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import CellLimits
from mesh.domain.outcome import Outcome
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import SLO_TOKENS_PER_S_MAX, Slo
from mesh.domain.values import dataclass, replace
from mesh.policy.colocated import alone_s, batched_s
from mesh.policy.rules.chunked import CHUNKED
from mesh.sim.cluster import Arrival, VirtualCell
from mesh.sim.costs import GivenCosts
from mesh.sim.groups import GIB, DeploymentGroup, NodeGroup
from mesh.sim.scenario import Scenario, arrivals, plan, trace_of
from mesh.sim.testbed import known_model
from mesh.sim.workload import Serverless, published
from mesh_workloads.processes import POISSON
from mesh_workloads.rates import Lognormal
from mesh_workloads.trace import Trace

HARDWARE, MODEL = "h200", "llama-3.1-8b"
SERVERS = 20
MEMORY_BYTES = round(0.9 * 141e9)
CONTEXT_TOKENS_MAX = 131072
BATCH_MAX = 512
SLO_MIX = "0.02:0.1,0.03:0.2,0.05:0.3,0.1:0.4"
INVERTED_MIX = "0.02:0.4,0.03:0.3,0.05:0.2,0.1:0.1"
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
TOGETHER, APART, EITHER = "co", "pd", "slo"
"""Prompts and decodes on the same servers, on servers of their own, or each request as it costs
least.
"""
OWN = {TOGETHER: "polyserve-co", APART: "polyserve-pd", EITHER: "mesh-slo"}
"""The policies that are compared with baselines."""
BASELINES = {
    TOGETHER: ("co-random", "co-minimal", "co-chunk"),
    APART: ("pd-random", "pd-minimal"),
    EITHER: ("co-random", "co-minimal", "co-chunk", "pd-random", "pd-minimal"),
}
REFUSES_NOBODY = "-no-refusal"
"""How the name of a policy ends that refuses nobody for an SLO."""
FIXED = "co-chunk"
"""The baseline with a fixed budget of tokens."""
BUDGETS = (256, 512, 1024, 2048)
"""Tokens of an iteration under FIXED; the best one counts."""
PREFILL_SHARES = (0.15, 0.3, 0.5, 0.7)
"""The servers for prompts under a baseline that has them apart; the best one counts."""
KV_LINK_BYTES_PER_S = 50e9
"""At which KV blocks go from server to server: 400 Gbit/s."""
SLOW_KV_LINK_BYTES_PER_S = 12e9
TABLES_OFF = (0.8, 1.2)
"""What the controller's tables say over what iterations take, where gains are to be robust."""
KV_MOVE_BYTES_MAX = 4 << 30
"""More than the prompts have that some SLO fits."""
ATTAINED = 0.9
PERCENT_LEAST, PERCENT_MOST = 5, 130
"""The shares of the optimal rate between which goodput is looked for; what keeps less has 0."""
OVERLOAD_PERCENT = 120
COST_PERCENTS = (25, 50, 75, 100)
"""The shares of the optimal rate at which costs are compared."""
POOL = 3
"""So many times the servers are a pool that nobody uses up at these rates."""
DRAWN = 4000
"""Requests that are drawn for the mean of the optimal cost."""
CHUNK_TOKENS_MAX = 8192
PROMPT_TOKENS = CHUNKED.alone_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What servers are offered. Requests that come in the first `warm_s` do not count."""

    workload: str
    """A key of WORKLOADS."""
    servers: int = SERVERS
    counted_s: float = 60.0
    seed: int = 1
    tables: float = 1.0
    """What the controller's tables say over what iterations take."""
    kv_link_bytes_per_s: float = KV_LINK_BYTES_PER_S
    inverted: bool = False
    """Whether the classes swap their shares halfway through what counts (§5.3)."""
    answers_of: str = ""
    """The workload whose mean answer policies expect, if not what they have seen of this one."""

    @property
    def warm_s(self) -> float:
        """As long as a mean answer takes at the slowest pace."""
        return mean_answer_tokens(self.workload) * TPOT_S_MAX

    def arrivals(self, scenario: Scenario, trace: Trace | None = None) -> Iterator[Arrival]:
        """Those of its scenario. `trace` is the scenario's, where it is at hand."""
        if not self.inverted:
            return arrivals(scenario, trace)
        inverted, half_s = replace(scenario, slo_mix=INVERTED_MIX), self.warm_s + self.counted_s / 2
        return chain(
            takewhile(lambda of: of.at_s < half_s, arrivals(scenario, trace)),
            dropwhile(lambda of: of.at_s < half_s, arrivals(inverted, trace)),
        )

    def scenario(self, policy: str, rate_per_s: float, setting: float | None = None) -> Scenario:
        """The cell and its arrivals, so many a second before those are left out that no SLO fits.
        `setting` is of a baseline: tokens of an iteration, or the share of servers for prompts.
        """
        apart = kind_of(policy) == APART
        prefill = round(self.servers * setting) if apart and setting is not None else 0
        budget = CHUNK_TOKENS_MAX if apart or setting is None else round(setting)
        return Scenario(
            policy=policy,
            seed=self.seed,
            ideal=True,
            slo_mix=SLO_MIX,
            slo_ttfts_s=TTFTS_S,
            nodes=tuple(
                NodeGroup(
                    name=name,
                    count=count,
                    device=DeviceKind.GPU,
                    hardware=HARDWARE,
                    memory_gib=MEMORY_BYTES / GIB,
                    kv_link_bytes_per_s=0.0
                    if kind_of(policy) == TOGETHER
                    else self.kv_link_bytes_per_s,
                    costs=GivenCosts({"load_s": 0.0, "load_bytes_per_s": float("inf")}),
                )
                for name, count in (("prefill", prefill), ("server", self.servers - prefill))
                if count
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
                batch_max=BATCH_MAX,
                prefill_tokens_max=budget,
                queue_requests_max=100_000,
                migrations_max=BATCH_MAX,
                kv_move_bytes_max=KV_MOVE_BYTES_MAX,
            ),
        )


def mean_answer_tokens(workload: str) -> float:
    """The mean length of its answers; `workload` is a key of WORKLOADS."""
    return published(WORKLOADS[workload], CONTEXT_TOKENS_MAX).output.mean()


class Figure(StrEnum):
    """What is looked for."""

    GOODPUT = "goodput"
    BURST = "burst"
    """Goodput where the shares of the classes are inverted halfway."""
    ROBUST = "robust"
    """Goodput where policies expect what is not so, and transfers are slow."""
    COST = "cost"
    """How many servers are taken of a pool that nobody uses up (§5.4)."""

    def loads(self, load: Load) -> dict[str, Load]:
        """The loads that it is of, by their names."""
        slow = replace(load, kv_link_bytes_per_s=SLOW_KV_LINK_BYTES_PER_S)
        match self:
            case Figure.GOODPUT | Figure.COST:
                return {"": load}
            case Figure.BURST:
                return {"inverted": replace(load, inverted=True)}
            case Figure.ROBUST:
                names = [*WORKLOADS, *WORKLOADS]
                other = names[names.index(load.workload) + 1]
                tables = {f"tables_{by:g}": replace(slow, tables=by) for by in TABLES_OFF}
                return tables | {"lengths": replace(slow, answers_of=other)}


class Untaught(OutputHistory):
    """A mean length of answers that stays, however long they turn out."""

    def mean_of(self, slo_class: str) -> float:
        return self.mean_tokens

    def after(self, output_tokens: int, slo_class: str = "") -> OutputHistory:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """The shares of requests that had every token in time."""

    overall: float
    by_class: Mapping[str, float]
    servers: float = 0.0
    """How many servers had a label when a request came, in the mean."""

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
    """At `percent`, or at PERCENT_LEAST where that is 0."""
    setting: float | None
    """The one with which a baseline comes to `percent`."""


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


def kind_of(policy: str) -> str:
    """TOGETHER, APART or EITHER."""
    return next((kind for kind in (APART, EITHER) if kind in policy.split("-")), TOGETHER)


def optimum(load: Load, kind: str = TOGETHER) -> Optimum:
    """Servers over the mean cost of a request (§3.5); the higher of both where either may be."""
    if kind == EITHER:
        both = (optimum(load, TOGETHER), optimum(load, APART))
        return max(both, key=lambda of: of.rate_per_s)
    rate_per_s = DRAWN / (load.warm_s + load.counted_s)
    scenario = load.scenario(OWN[kind], rate_per_s)
    trace = trace_of(scenario)
    assert trace is not None, "it is generated"
    drawn = list(load.arrivals(scenario, trace))
    profile = known_model(MODEL).costs[HARDWARE].profile
    capacity = (MEMORY_BYTES - profile.weights_bytes) // profile.kv_bytes_per_token
    cost = cost_s if kind == TOGETHER else cost_apart_s
    costs = [cost(Times(profile), capacity, each) for each in drawn]
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


def cost_apart_s(times: Times, capacity_tokens: int, request: Arrival) -> float:
    """The same where prompts and decodes have servers of their own; iterations of prompts have
    PROMPT_TOKENS.
    """
    assert request.slo is not None, "it has been drawn"
    prompt, answer = request.input_tokens, request.output_tokens
    context = prompt + answer // 2
    sizes = range(1, max(min(BATCH_MAX, capacity_tokens // context), 1) + 1)
    fits = bisect_left(sizes, request.slo.tpot_s, key=lambda of: times.decode_s(of, context))
    decode_s = times.decode_s(max(fits, 1), context) / max(fits, 1)
    attention_s = max(alone_s(prompt, times) - batched_s(prompt, times), 0.0)
    token_s = times.prefill_s(PROMPT_TOKENS, 0) / PROMPT_TOKENS
    return prompt * token_s + attention_s + answer * decode_s


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
    setting: float | None = None
    known: dict[int, Attained] = field(default_factory=dict)
    missed: dict[int, Attained] = field(default_factory=dict)
    """What was seen of simulations that ended early, as too little was met."""

    def at(self, percent: int, least: float = 0.0) -> Attained:
        """What is met at a share of the optimal rate; of what is less than `least`, no more than
        that.
        """
        if percent in self.known:
            return self.known[percent]
        if not least or percent not in self.missed:
            rate_per_s = self.rate_per_s * percent / 100
            found = attained(self.policy, self.load, rate_per_s, self.setting, least)
            if found.overall >= least:
                self.known[percent] = found
                return found
            self.missed[percent] = found
        return self.missed[percent]

    def largest(
        self, met: Callable[[Attained], float], over: int = 0, most: int = PERCENT_MOST
    ) -> int:
        """The largest share of the optimal rate at which so much is met; `over` where none larger
        than that is.
        """
        least = -(-PERCENT_LEAST // self.step) * self.step
        shares = range(max(over + self.step, least), most + self.step, self.step)

        def misses(percent: int) -> bool:
            return met(self.at(percent, ATTAINED)) < ATTAINED

        if over and shares and misses(shares[0]):
            return over
        found = bisect_left(shares, True, key=misses)
        return shares[found - 1] if found else over


def goodput(searches: Sequence[Search]) -> Goodput:
    """The goodput of a policy; of one with several settings, each measure by its own best."""
    best, percent, each = searches[0], 0, 0
    for search in searches:
        found = search.largest(lambda at: at.overall, percent)
        if found > percent:
            best, percent = search, found
        each = search.largest(lambda at: at.least, each, percent)
    overload = best.at(OVERLOAD_PERCENT)
    return Goodput(
        percent=percent,
        percent_each_class=each,
        overload_share=overload.overall * OVERLOAD_PERCENT / 100,
        overload_least=overload.least,
        attained=best.at(percent or PERCENT_LEAST),
        setting=best.setting,
    )


class _Missed(Exception):
    """So many requests are late already that the rest of a simulation does not matter."""


def attained(
    policy: str,
    load: Load,
    rate_per_s: float,
    setting: float | None = None,
    least: float = 0.0,
) -> Attained:
    """One simulation. It ends as soon as fewer than the share `least` can still have every token in
    time; those whose end it has not seen count as met then.
    """
    scenario = load.scenario(policy, rate_per_s, setting)
    warm_s = load.warm_s
    counted = [of for of in load.arrivals(scenario) if of.at_s >= warm_s]
    if not counted:
        raise InvalidInput(f"no request of {load.workload} came in {load.counted_s:g} s")
    late: Counter[str] = Counter()
    labelled: list[int] = []

    def came(at_s: float) -> None:
        if at_s >= warm_s:
            labelled.append(sum(bool(of.label) for of in cell.core.cell.instances.values()))

    def ended(outcome: Outcome) -> None:
        if outcome.arrival_s - cell.started_s >= warm_s and not outcome.met_without_grace:
            late[outcome.slo.name] += 1
            if 1 - late.total() / len(counted) < least:
                raise _Missed

    made = plan(scenario)
    told = tuple(_off(profile, load.tables) for profile in made.profiles)
    histories: dict[DeploymentName, OutputHistory] = {}
    if load.answers_of:
        expected = Untaught(mean_tokens=mean_answer_tokens(load.answers_of))
        histories = {of.spec.name: expected for of in made.deployments}
    cell = VirtualCell(replace(made, profiles=told, histories=histories), ended=ended)
    with suppress(_Missed):
        cell.run(load.arrivals(scenario), came)
    of_class = Counter(of.slo.name for of in counted if of.slo is not None)
    return Attained(
        overall=1 - late.total() / len(counted),
        by_class={name: 1 - late[name] / count for name, count in sorted(of_class.items())},
        servers=fmean(labelled or (0.0,)),
    )


def _off(profile: Profile, factor: float) -> Profile:
    """The profile with all times so many times as long."""

    def longer(grid: Grid) -> Grid:
        return replace(grid, seconds=tuple(tuple(s * factor for s in row) for row in grid.seconds))

    return replace(profile, prefill=longer(profile.prefill), decode=longer(profile.decode))


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureJob:
    """What one policy comes to under one load (`mesh.evaluation.runs.Job`)."""

    policy: str
    load: Load
    rate_per_s: float
    """The optimal one, as in `Search`."""
    figure: Figure = Figure.GOODPUT
    step: int = 1

    @property
    def name(self) -> str:
        load = self.load
        off = f" by tables of {load.tables:g}" if load.tables != 1.0 else ""
        off += f" by answers of {load.answers_of}" if load.answers_of else ""
        return f"{load.workload} {self.policy}{off}"

    @property
    def weight(self) -> float:
        return self.rate_per_s

    def compute(self) -> "Goodput | Servers":
        if self.figure is Figure.COST:
            return self._servers()
        return goodput([self._search(setting) for setting in self._settings()])

    def _settings(self) -> Sequence[float | None]:
        name = self.policy.removesuffix(REFUSES_NOBODY)
        if name in BASELINES[APART]:
            return PREFILL_SHARES
        return BUDGETS if name == FIXED else (None,)

    def _search(self, setting: float | None) -> Search:
        return Search(
            policy=self.policy,
            load=self.load,
            rate_per_s=self.rate_per_s,
            step=self.step,
            setting=setting,
        )

    def _servers(self) -> "Servers":
        """What a baseline needs at each rate, or another policy takes of a pool."""
        most, needed = POOL * self.load.servers, 1
        found: dict[int, float | None] = {}
        for percent in COST_PERCENTS:
            rate_per_s = self.rate_per_s * percent / 100
            if self.policy.removesuffix(REFUSES_NOBODY) in BASELINES[EITHER]:
                # No higher rate needs fewer servers, nor does a setting count that needs more.
                least, needed = needed, most + 1
                for setting in self._settings():
                    keeps = partial(self._keeps, rate_per_s, setting)
                    needed = least + bisect_left(range(least, needed), True, key=keeps)
                found[percent] = needed if needed <= most else None
            else:
                taken = attained(self.policy, replace(self.load, servers=most), rate_per_s)
                found[percent] = taken.servers if taken.overall >= ATTAINED else None
        return found

    def _keeps(self, rate_per_s: float, setting: float | None, servers: int) -> bool:
        load = replace(self.load, servers=servers)
        return attained(self.policy, load, rate_per_s, setting, ATTAINED).overall >= ATTAINED


Servers = Mapping[int, float | None]
"""By the share of the optimal rate, how many servers meet ATTAINED; `None` where no pool does."""
Found = Mapping[str, Mapping[str, Goodput]]
"""By workload and policy."""


def record(optima: Mapping[tuple[str, str], Optimum], found: Found) -> dict[str, object]:
    """As one plain value, for `-o json`; `optima` by workload and kind. Gains are over the best
    baseline of a workload that refuses alike, by requests a second, in the mean over workloads that
    have both.
    """
    figures: dict[str, object] = {}
    for kind, ending in product(OWN, ("", REFUSES_NOBODY)):
        own = {name: of for name, of in found.items() if OWN[kind] + ending in of}
        if not own and (ending or kind == EITHER):
            continue
        whole = [of[OWN[kind] + ending] for of in own.values()]
        gains = [_gains(of, optima, workload, kind, ending) for workload, of in own.items()]
        of_kind = kind + ending.replace("-", "_")
        figures |= {
            f"gain_{of_kind}": _mean(gain for gain, _ in gains),
            f"gain_each_class_{of_kind}": _mean(each for _, each in gains),
            f"optimal_share_{of_kind}": _mean(one.percent / 100 for one in whole),
            f"optimal_share_each_class_{of_kind}": _mean(
                one.percent_each_class / 100 for one in whole
            ),
            f"overload_share_{of_kind}": _mean(one.overload_share for one in whole),
        }
    return figures | {
        "workloads": {
            name: {
                "optimal_per_s": {
                    kind: round(of.rate_per_s, 3)
                    for (workload, kind), of in optima.items()
                    if workload == name
                },
                "fits_some_slo": round(_fitting(optima, name), 4),
                "policies": {policy: _of(one) for policy, one in policies.items()},
            }
            for name, policies in found.items()
        },
    }


def record_of_loads(
    figure: Figure, optima: Mapping[tuple[str, str], Optimum], found: Mapping[str, Found]
) -> dict[str, object]:
    """The same for each load of a figure, by its name, and the least of their gains."""
    records = {name: record(optima, of) for name, of in found.items()}
    figures: dict[str, object] = {**records}
    for kind in OWN:
        known = [of[f"gain_{kind}"] for of in records.values() if f"gain_{kind}" in of]
        gains = cast(list[float | None], known)
        if gains:
            least = min((gain for gain in gains if gain is not None), default=None)
            figures[f"{figure}_gain_{kind}"] = least
    return figures


def cost_record(found: Mapping[str, Mapping[str, Servers]]) -> dict[str, object]:
    """The servers that policies take, by workload, policy and share of the optimal rate, and over
    what the best baseline of a kind needs there, in the mean and at most.
    """
    figures: dict[str, object] = {}
    for kind, ending in product(OWN, ("", REFUSES_NOBODY)):
        ratios: list[float] = []
        for of in found.values():
            others = [of[name + ending] for name in BASELINES[kind] if name + ending in of]
            for percent, servers in of.get(OWN[kind] + ending, {}).items():
                needed = [n for other in others if (n := other[percent]) is not None]
                if servers is not None and needed:
                    ratios.append(servers / min(needed))
        if ratios:
            of_kind = kind + ending.replace("-", "_")
            figures[f"cost_ratio_{of_kind}"] = _mean(ratios)
            figures[f"cost_ratio_most_{of_kind}"] = round(max(ratios), 4)
    return figures | {"workloads": found}


def _fitting(optima: Mapping[tuple[str, str], Optimum], workload: str) -> float:
    """The share of its requests that some SLO fits: the others are left out."""
    return next(of.offered_share for (name, _), of in optima.items() if name == workload)


def _gains(
    of: Mapping[str, Goodput],
    optima: Mapping[tuple[str, str], Optimum],
    workload: str,
    kind: str,
    ending: str,
) -> tuple[float | None, float | None]:
    """Those of our policy of a kind over the best baseline that refuses as it does. Goodput below
    PERCENT_LEAST is not known: a baseline counts as that then, so that a gain is the least it is.
    """
    own = of[OWN[kind] + ending]
    names = [name + ending for name in BASELINES[kind]]
    others = [(of[name], kind_of(name)) for name in names if name in of]

    def gain(percent: Callable[[Goodput], int]) -> float | None:
        def per_s(share: int, of_kind: str) -> float:
            return share * optima[workload, of_kind].rate_per_s

        known = percent(own) or any(percent(one) for one, _ in others)
        best = [per_s(max(percent(one), PERCENT_LEAST), of_kind) for one, of_kind in others]
        return per_s(percent(own), kind) / max(best) if best and known else None

    return gain(lambda one: one.percent), gain(lambda one: one.percent_each_class)


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
        "setting": one.setting,
    }
