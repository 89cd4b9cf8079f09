"""The scenes: what is deployed on which node, and the calls, drawn once and offered to both
sides.

Popularity falls with 1/rank^0.9, calls come by a Poisson process. Each deployment has a model
of its own, of the demo model's shape (`own_models`): mesh's instances share no weights, on disk or
in memory. The peer's servers all map the one file of the demo model.

In conversations a call asks with all that was said before in one of its deployment, all of which
begin alike. What was answered is made up, since calls do not wait for each other: of a last turn's
blocks those of its prompt are found again, not its answer's.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from mesh.domain.deployment import Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.model import Footprint, WeightPrecision
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call
from mesh.memory.watermark import recommended

CONTEXT_TOKENS = 1024
"""The context limit of mesh's deployments: an instance begins with a KV cache for it and its
watermark.
"""
PROMPT_TOKENS = (20, 34)
OUTPUT_TOKENS = (16, 48, 96)
"""One of these each."""
SYSTEM_TOKENS = 300
"""A deployment's conversations begin with them."""
CONVERSATIONS = 2
"""The conversations of a deployment at a time."""
POPULARITY = 0.9
TOKEN_IDS = range(100, 2000)
BASE_BYTES = 192 * 2**20
"""For a node's process without instances, which takes 165 MiB; less than an instance more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    name: str
    deployments: int
    resident_max: int
    """So many fit into memory."""
    slo: Slo
    scaling: Scaling
    rates: tuple[float, ...]
    """Calls a second."""
    seconds: float
    mark: str = ""
    """Before the names of its figures."""
    peer: str = "lru"
    """The name of its peer's."""
    gain: str = ""
    """Its peer is mesh with nothing loaded ahead, or with deployments as in `without`; the name of
    what share of calls is met over the peer's."""
    weights: WeightPrecision | None = None
    conversations: bool = False
    """Calls are turns of these, and its peer is mesh without the prefix cache."""
    prefix_cache: bool = True

    @property
    def without(self) -> "Scene":
        """As its peer has it, where that is mesh."""
        return replace(self, weights=None, prefix_cache=not self.conversations)

    def with_weights(self, weights: WeightPrecision) -> "Scene":
        """The same in the same memory with weights held so, beside those of the default."""
        return replace(self, weights=weights, peer="default_weights", gain=f"{weights}_gain")

    @property
    def resident(self) -> bool:
        """All are loaded before the first call."""
        return self.resident_max >= self.deployments

    def names(self) -> list[DeploymentName]:
        """By rank, the most popular first."""
        return [DeploymentName(f"{self.name}-{n:02}") for n in range(1, self.deployments + 1)]

    def memory_bytes(self, footprint: Footprint) -> int:
        """`--memory` of a node on which `resident_max` instances fit as they are loaded."""
        blocks = recommended(footprint.blocks_for(CONTEXT_TOKENS))
        return BASE_BYTES + self.resident_max * footprint.instance_bytes(blocks)


SCENES = (
    Scene(
        name="fleet",
        deployments=40,
        resident_max=11,
        slo=Slo(ttft_s=4.0, tpot_s=0.3),
        scaling=Scaling(),
        rates=(0.5, 1.0, 2.0),
        seconds=120.0,
    ),
    Scene(
        name="resident",
        deployments=8,
        resident_max=8,
        slo=Slo(ttft_s=1.0, tpot_s=0.12),
        scaling=Scaling(replicas_min=1, replicas_max=1, keep_alive_s=600.0),
        rates=(1.0, 2.0, 4.0),
        seconds=60.0,
        mark="resident_",
        peer="resident_peer",
    ),
    Scene(
        name="locality",
        deployments=40,
        resident_max=10,
        slo=Slo(ttft_s=0.4, tpot_s=0.3),
        scaling=Scaling(),
        rates=(0.5, 1.0),
        seconds=240.0,
        mark="locality_",
        peer="locality_without",
        gain="locality_gain",
    ),
    Scene(
        name="conversations",
        deployments=40,
        resident_max=11,
        slo=Slo(ttft_s=4.0, tpot_s=0.3),
        scaling=Scaling(),
        rates=(2.0,),
        seconds=120.0,
        mark="conversations_",
        peer="conversations_without",
        gain="conversations_gain",
        conversations=True,
    ),
)


class _Talk:
    """What was said in one conversation."""

    def __init__(self, system: Sequence[int]) -> None:
        self._system = list(system)
        self._said = list(system)

    def turn(self, question: Sequence[int], answer: Sequence[int]) -> tuple[int, ...]:
        """Its prompt. Another begins where the context has no room for it and its answer."""
        if len(self._said) + len(question) + len(answer) > CONTEXT_TOKENS:
            self._said = list(self._system)
        prompt = (*self._said, *question)
        self._said = [*prompt, *answer]
        return prompt


def calls(scene: Scene, *, rate: float, seconds: float, seed: int) -> list[Call]:
    """In order, one at least: `rate` calls a second in the mean."""
    draw, names = random.Random(seed), scene.names()
    weights = [1 / rank**POPULARITY for rank in range(1, len(names) + 1)]
    talks = _talks(names, seed) if scene.conversations else {}
    found: list[Call] = []
    at_s = min(draw.expovariate(rate), seconds)
    while at_s < seconds or not found:
        (name,) = draw.choices(names, weights)
        prompt = tuple(draw.choices(TOKEN_IDS, k=draw.randint(*PROMPT_TOKENS)))
        output_tokens = draw.choice(OUTPUT_TOKENS)
        if name in talks:
            answer = draw.choices(TOKEN_IDS, k=output_tokens)
            prompt = draw.choice(talks[name]).turn(prompt, answer)
        found.append(
            Call(
                at_s=at_s,
                deployment=name,
                slo=scene.slo,
                prompt_tokens=prompt,
                output_tokens=output_tokens,
            )
        )
        at_s += draw.expovariate(rate)
    return found


def _talks(names: Sequence[DeploymentName], seed: int) -> dict[DeploymentName, list[_Talk]]:
    draw = random.Random(f"conversations of {seed}")
    systems = {name: draw.choices(TOKEN_IDS, k=SYSTEM_TOKENS) for name in names}
    return {name: [_Talk(said) for _ in range(CONVERSATIONS)] for name, said in systems.items()}


class Kind(StrEnum):
    """What comes first hides what comes later."""

    PREFILL = "prefill"
    DECODE = "decode"
    FIRST_RUN = "first_run"
    """An iteration of a size that a new instance computes once, for nobody."""
    UNLOAD = "unload"
    LOAD = "load"
    IDLE = "idle"


class Span(NamedTuple):
    kind: Kind
    began_s: float
    ended_s: float


def seconds_by_kind(spans: Iterable[Span], from_s: float, until_s: float) -> dict[str, float]:
    """They come to `until_s - from_s` together."""
    changes: list[tuple[float, Kind, int]] = []
    for kind, began_s, ended_s in spans:
        if began_s < until_s and ended_s > from_s:
            changes += [(max(began_s, from_s), kind, 1), (min(ended_s, until_s), kind, -1)]
    seconds = dict.fromkeys(Kind, 0.0)
    under_way = dict.fromkeys(Kind, 0)
    at_s = from_s
    for change_s, kind, more in sorted(changes):
        seconds[next((k for k in Kind if under_way[k]), Kind.IDLE)] += change_s - at_s
        under_way[kind] += more
        at_s = change_s
    seconds[Kind.IDLE] += until_s - at_s
    return {str(kind): value for kind, value in seconds.items()}
