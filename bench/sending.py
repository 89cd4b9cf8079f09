"""The calls that a scenario's load sends, drawn from a seed: when, to whom, and how long.

Nothing here waits or sends. Before: a scenario. After: `live`, which offers the calls.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

from bench.judging import Judgement
from mesh.compute.times import Times
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import CellLimits
from mesh.domain.model import Footprint
from mesh.domain.slo import Slo
from mesh.evaluation import bursts as arriving
from mesh.evaluation.load_client import Call
from mesh.memory.shared_weights import SharedWeights, counted_once
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES

TOKEN_IDS = range(100, 2000)
Bounds = tuple[int, int]
"""The least and the most, drawn evenly."""


def drawn_call(
    draw: random.Random,
    at_s: float,
    spec: DeploymentSpec,
    prompt_tokens: Bounds,
    output_tokens: Bounds,
    slo: Slo | None = None,
) -> Call:
    return Call(
        at_s=at_s,
        deployment=spec.name,
        slo=slo or spec.slo,
        prompt_tokens=tuple(draw.choices(TOKEN_IDS, k=draw.randint(*prompt_tokens))),
        output_tokens=draw.randint(*output_tokens),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(ABC):
    """One load of a scene."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The heading of its column."""

    @abstractmethod
    def calls(self, specs: Sequence[DeploymentSpec], seed: int, times: Times | None) -> list[Call]:
        """In the order of their times. `times` are the model's on the node, where it was measured
        before.
        """

    def shortened(self) -> Self:
        """As a quick run has it."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AtOnce(Load):
    """Calls of every deployment that come together."""

    called: str = ""
    of_each: int = 1
    """Calls of each deployment."""
    one_by_one: bool = False
    """Each comes when the one before it has ended instead."""
    prompt_tokens: Bounds
    output_tokens: Bounds

    @property
    def name(self) -> str:
        return self.called or f"{self.of_each} at once"

    def calls(self, specs: Sequence[DeploymentSpec], seed: int, times: Times | None) -> list[Call]:
        draw = random.Random(f"{seed} {self.of_each}")
        return [
            drawn_call(draw, 0.0, spec, self.prompt_tokens, self.output_tokens)
            for spec in specs
            for _ in range(self.of_each)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload(Load):
    """Bursts with pauses between them, by how much the node can compute: see `bursts`. Each class
    with limits of a deployment has bursts of its own.
    """

    load: float
    """What is offered over what the node can compute in the time."""
    seconds: float
    quick_seconds: float
    best_effort: float = 0.0
    """The same of the classes of best effort, whose calls come evenly, beside that."""

    @property
    def name(self) -> str:
        return f"{self.load:g} × capacity"

    def shortened(self) -> Self:
        return replace(self, seconds=self.quick_seconds)

    def calls(self, specs: Sequence[DeploymentSpec], seed: int, times: Times | None) -> list[Call]:
        assert times is not None, "the model has been measured"
        offered = [(spec, slo) for spec in specs for slo in spec.classes or (spec.slo,)]
        batch = batch_at_capacity(times, _quickest((spec.name, slo) for spec, slo in offered))
        streams = {
            f"{spec.name} {slo.name}": (spec.name, slo)
            for spec, slo in offered
            if not slo.best_effort
        }
        arrivals = arriving.bursts(
            tuple(streams), times, batch, seconds=self.seconds, load=self.load, seed=seed
        )
        found = arriving.calls_of(arrivals, {key: slo for key, (_, slo) in streams.items()}, seed)
        found = [replace(call, deployment=streams[call.deployment][0]) for call in found]
        draw = random.Random(f"best effort {seed}")
        sizes = arriving.INPUT_TOKENS, arriving.OUTPUT_TOKENS
        for spec, slo in offered:
            left_s = self.best_effort * self.seconds if slo.best_effort else 0.0
            while left_s > 0.0:
                at_s = draw.uniform(0.0, self.seconds)
                found.append(drawn_call(draw, at_s, spec, *sizes, slo))
                left_s -= _compute_s([(found[-1], 1.0)], times, batch)
        return sorted(found, key=lambda call: call.at_s)

    def offered(self, calls: Sequence[Call], times: Times) -> float:
        """How much these calls are to compute, over what the node can in the time, without those of
        best effort.
        """
        batch = batch_at_capacity(times, _quickest((c.deployment, c.slo) for c in calls))
        limited = [call for call in calls if not call.slo.best_effort]
        return _compute_s([(call, 1.0) for call in limited], times, batch) / self.seconds

    def best_effort_share(self, judged: Judgement, times: Times) -> tuple[float, ...]:
        """The tokens of best effort that came while calls did, over those for which the rest had
        left time, by the profile; empty where nobody asked for any.
        """
        calls = [each.call for each in judged.all]
        batch = batch_at_capacity(times, _quickest((c.deployment, c.slo) for c in calls))
        until_s = self.seconds + min(e.answer.sent_s - e.call.at_s for e in judged.all)
        taken_s = {True: 0.0, False: 0.0}
        for each in judged.all:
            came = sum(each.answer.sent_s + at_s <= until_s for at_s in each.answer.tokens_s)
            part = [(each.call, came / each.call.output_tokens)]
            taken_s[each.call.slo.best_effort] += _compute_s(part, times, batch)
        idle_s = self.seconds - taken_s[False]
        asked = any(call.slo.best_effort for call in calls)
        return (taken_s[True] / idle_s,) if asked and idle_s > 0.0 else ()


def _quickest(offered: Iterable[tuple[str, Slo]]) -> list[Slo]:
    """The SLO with the least TPOT of each deployment: all that it computes decode together."""
    found: dict[str, Slo] = {}
    for name, slo in offered:
        if name not in found or slo.tpot_s < found[name].tpot_s:
            found[name] = slo
    return list(found.values())


def _compute_s(parts: Iterable[tuple[Call, float]], times: Times, batch: int) -> float:
    """Seconds that shares of calls take to compute in batches of this size."""
    return sum(
        share * arriving.request_s(times, len(call.prompt_tokens), call.output_tokens, batch)
        for call, share in parts
    )


def calls_for(
    specs: Sequence[DeploymentSpec], calls: Iterable[Call], *, best_effort: bool
) -> list[Call]:
    """The calls as a cell with these deployments gets them: each of its own deployment or the first
    that has its class, or else of the first, without a class. Those of best effort only if asked.
    """
    found = []
    for call in calls:
        if call.slo.best_effort and not best_effort:
            continue
        having = [
            spec.name
            for spec in specs
            if call.slo.name in {slo.name for slo in spec.classes or (spec.slo,)}
        ]
        if not having:
            found.append(replace(call, deployment=specs[0].name, slo=replace(call.slo, name="")))
        elif call.deployment in having:
            found.append(call)
        else:
            found.append(replace(call, deployment=having[0]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns(Load):
    """The turns of one conversation of each deployment, one call after the other. All instances are
    unloaded before each call; answers are made up, as those of `Poisson`.
    """

    turns: int
    system_tokens: int
    prompt_tokens: Bounds
    output_tokens: Bounds

    @property
    def name(self) -> str:
        return f"{self.turns} turns"

    def calls(self, specs: Sequence[DeploymentSpec], seed: int, times: Times | None) -> list[Call]:
        draw = random.Random(seed)
        found: list[Call] = []
        for spec in specs:
            system = draw.choices(TOKEN_IDS, k=self.system_tokens)
            talk = _Talk(system, spec.context_tokens_max or 0)
            for _ in range(self.turns):
                call = drawn_call(draw, 0.0, spec, self.prompt_tokens, self.output_tokens)
                answer = draw.choices(TOKEN_IDS, k=call.output_tokens)
                found.append(replace(call, prompt_tokens=talk.turn(call.prompt_tokens, answer)))
        return found


CONTEXT_TOKENS = sum(arriving.INPUT_TOKENS) / 2 + sum(arriving.OUTPUT_TOKENS) / 4
"""The mean context of a call of `Overload` in its middle."""


def batch_at_capacity(times: Times, slos: Sequence[Slo]) -> int:
    """The batch of every deployment when as many requests run as the SLOs allow."""
    per_s = sum(1 / slo.tpot_s for slo in slos)
    batches = range(1, CellLimits().batch_max + 1)
    fitting = [b for b in batches if per_s * times.decode_s(b, CONTEXT_TOKENS) <= 1.0]
    return max(fitting, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson(Load):
    """Calls at a mean rate; the n-th deployment gets calls by 1/n to the power of `popularity`.

    With `conversations` a call asks with all that was said before in one of its deployment, all of
    which begin alike. What was answered is made up, since calls do not wait for each other: of a
    last turn's blocks those of its prompt are found again, not its answer's.
    """

    rate: float
    """Calls a second."""
    seconds: float
    popularity: float = 0.9
    prompt_tokens: Bounds = (20, 34)
    output_tokens: tuple[int, ...] = (16, 48, 96)
    """One of these each."""
    conversations: int = 0
    """The conversations of a deployment at a time."""
    system_tokens: int = 300
    """A deployment's conversations begin with them."""

    @property
    def name(self) -> str:
        return f"{self.rate:g} calls/s"

    def calls(self, specs: Sequence[DeploymentSpec], seed: int, times: Times | None) -> list[Call]:
        """One at least."""
        draw = random.Random(seed)
        weights = [1 / rank**self.popularity for rank in range(1, len(specs) + 1)]
        talks = self._talks(specs, seed)
        found: list[Call] = []
        at_s = min(draw.expovariate(self.rate), self.seconds)
        while at_s < self.seconds or not found:
            (spec,) = draw.choices(specs, weights)
            prompt = tuple(draw.choices(TOKEN_IDS, k=draw.randint(*self.prompt_tokens)))
            output_tokens = draw.choice(self.output_tokens)
            if spec.name in talks:
                answer = draw.choices(TOKEN_IDS, k=output_tokens)
                prompt = draw.choice(talks[spec.name]).turn(prompt, answer)
            found.append(
                Call(
                    at_s=at_s,
                    deployment=spec.name,
                    slo=spec.slo,
                    prompt_tokens=prompt,
                    output_tokens=output_tokens,
                )
            )
            at_s += draw.expovariate(self.rate)
        return found

    def _talks(
        self, specs: Sequence[DeploymentSpec], seed: int
    ) -> dict[DeploymentName, list["_Talk"]]:
        if not self.conversations:
            return {}
        draw = random.Random(f"conversations of {seed}")
        systems = {spec: draw.choices(TOKEN_IDS, k=self.system_tokens) for spec in specs}
        return {
            spec.name: [
                _Talk(system, spec.context_tokens_max or 0) for _ in range(self.conversations)
            ]
            for spec, system in systems.items()
        }


class _Talk:
    """What was said in one conversation."""

    def __init__(self, system: Sequence[int], context_tokens: int) -> None:
        self._system = list(system)
        self._said = list(system)
        self._context_tokens = context_tokens

    def turn(self, question: Sequence[int], answer: Sequence[int]) -> tuple[int, ...]:
        """Its prompt. Another begins where the context has no room for it and its answer."""
        if len(self._said) + len(question) + len(answer) > self._context_tokens:
            self._said = list(self._system)
        prompt = (*self._said, *question)
        self._said = [*prompt, *answer]
        return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The waves of one deployment."""

    prompt_tokens: Bounds
    output_tokens: Bounds
    calls_max: int
    """The most calls of one wave."""


LARGE, SMALL = (0.75, 1.0), (0.05, 0.5)
"""The bounds of large and of small waves, as shares of the calls of the largest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves(Load):
    """Large and small waves of calls of each deployment by turns, with pauses between them, so that
    waves of different deployments meet, and a deployment wants nothing at times.
    """

    seconds: float
    quick_seconds: float
    traffic: Mapping[str, Traffic]
    """By deployment."""
    scale: float = 1.0
    """Waves have so many times as many calls."""
    first_s: float = 5.0
    """Each deployment's first wave comes within so much of the start."""
    wave_s: float = 1.0
    pause_s: tuple[float, float] = (30.0, 90.0)
    """From one wave of a deployment to its next."""

    @property
    def name(self) -> str:
        return f"{self.seconds:g} s of waves"

    def shortened(self) -> Self:
        """Waves are over sooner, too, and others get their turn."""
        return replace(self, seconds=self.quick_seconds, scale=0.5)

    def calls(self, specs: Sequence[DeploymentSpec], seed: int, times: Times | None) -> list[Call]:
        return sorted(
            (call for wave in self.waves(specs, seed) for call in wave), key=lambda call: call.at_s
        )

    def waves(self, specs: Sequence[DeploymentSpec], seed: int) -> list[tuple[Call, ...]]:
        """By deployment, each one's in order."""
        draw = random.Random(seed)
        found = []
        for spec in specs:
            traffic = self.traffic[spec.name]
            at_s, share = draw.uniform(0.0, min(self.first_s, self.seconds)), LARGE
            while at_s < self.seconds:
                size = max(round(draw.uniform(*share) * self.scale * traffic.calls_max), 1)
                found.append(
                    tuple(
                        drawn_call(
                            draw,
                            at_s + draw.uniform(0.0, self.wave_s),
                            spec,
                            traffic.prompt_tokens,
                            traffic.output_tokens,
                        )
                        for _ in range(size)
                    )
                )
                at_s, share = at_s + draw.uniform(*self.pause_s), SMALL if share is LARGE else LARGE
        return found


def limit_bytes(
    waves: Sequence[Sequence[Call]],
    specs: Sequence[DeploymentSpec],
    footprint: Footprint,
    overcommit: float,
) -> int:
    """`--memory` of a node of which the peaks of these deployments (their weights, and KV blocks
    for their largest waves, but never less than for one full context) want `overcommit` times as
    much, and which has what they share beside that; weights that some share count once.
    """

    def blocks(wave: Sequence[Call]) -> int:
        return sum(footprint.blocks_for(len(c.prompt_tokens) + c.output_tokens) for c in wave)

    largest = {
        name: max(map(blocks, mine))
        for name, mine in groupby(waves, key=lambda wave: wave[0].deployment)
    }
    sizes, shares = [], []
    for spec in specs:
        context_tokens = spec.context_tokens_max or 0
        full = footprint.blocks_for(context_tokens)
        sizes.append(footprint.instance_bytes(max(largest.get(spec.name, 0), full)))
        shares.append(SharedWeights(key=context_tokens, size_bytes=footprint.shared_bytes))
    return int(sum(counted_once(zip(sizes, shares, strict=True))) / overcommit) + ENGINE_BYTES
