"""Bursts of calls to four deployments with different lengths and SLOs, and what each wants at most.

Drawn once from a seed; pure. A burst comes within a second, so all of its calls want KV blocks at
the same time: the largest burst of a deployment is its peak.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mesh.domain.ids import DeploymentName
from mesh.domain.model import Footprint
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call
from mesh.memory.shares import Share, counted_once
from mesh_nodes.engines.openvino.footprint import ENGINE_BYTES

FIRST_S = 5.0
"""Each deployment's first burst comes within so much of the start."""
BURST_S = 1.0
PAUSE_S = (30.0, 90.0)
"""From one burst of a deployment to its next. Large and small ones alternate. Bursts of different
deployments meet, and there are times at which a deployment wants nothing."""
LARGE, SMALL = (0.75, 1.0), (0.05, 0.5)
"""The bounds of large and of small bursts, as shares of the calls of the largest one."""
TOKEN_IDS = range(100, 2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A deployment and its traffic. Pairs are the least and the most, drawn evenly."""

    slo: Slo
    context_tokens: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    calls_max: int
    """The most calls of one burst."""


KINDS = {
    "oc-chat": Kind(
        slo=Slo(ttft_s=6.0, tpot_s=0.4),
        context_tokens=512,
        prompt_tokens=(16, 256),
        output_tokens=(16, 192),
        calls_max=28,
    ),
    "oc-draft": Kind(
        slo=Slo(ttft_s=12.0, tpot_s=0.6),
        context_tokens=1024,
        prompt_tokens=(32, 128),
        output_tokens=(128, 384),
        calls_max=28,
    ),
    "oc-read": Kind(
        slo=Slo(ttft_s=25.0, tpot_s=0.8),
        context_tokens=1024,
        prompt_tokens=(256, 768),
        output_tokens=(8, 48),
        calls_max=16,
    ),
    "oc-long": Kind(
        slo=Slo(ttft_s=20.0, tpot_s=1.0),
        context_tokens=2048,
        prompt_tokens=(64, 512),
        output_tokens=(64, 512),
        calls_max=16,
    ),
}
"""By deployment; all of them are the demo model."""


Burst = tuple[Call, ...]
"""Calls of one deployment that come together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that a deployment wants: its weights, and KV blocks for its largest burst."""

    deployment: str
    calls: int
    kv_blocks: int
    footprint: Footprint

    @property
    def size_bytes(self) -> int:
        return self.footprint.instance_bytes(self.kv_blocks)


def bursts(*, seconds: float, seed: int, scale: float = 1.0) -> list[Burst]:
    """What is sent in `seconds`: by deployment, each one's in order. Bursts have `scale` times as
    many calls.
    """
    draw = random.Random(seed)
    found: list[Burst] = []
    for name, kind in KINDS.items():
        at_s, share = draw.uniform(0.0, min(FIRST_S, seconds)), LARGE
        while at_s < seconds:
            size = max(round(draw.uniform(*share) * scale * kind.calls_max), 1)
            found.append(tuple(_call(draw, name, kind, at_s) for _ in range(size)))
            at_s, share = at_s + draw.uniform(*PAUSE_S), SMALL if share is LARGE else LARGE
    return found


def calls(sent: Iterable[Burst]) -> list[Call]:
    """In order."""
    return sorted((call for burst in sent for call in burst), key=lambda call: call.at_s)


def _call(draw: random.Random, name: str, kind: Kind, at_s: float) -> Call:
    prompt = tuple(draw.choice(TOKEN_IDS) for _ in range(draw.randint(*kind.prompt_tokens)))
    return Call(
        at_s=at_s + draw.uniform(0.0, BURST_S),
        deployment=DeploymentName(name),
        slo=kind.slo,
        prompt_tokens=prompt,
        output_tokens=draw.randint(*kind.output_tokens),
    )


def peaks(sent: Sequence[Burst], footprint: Footprint) -> list[Peak]:
    """One for each deployment; never less than one full context."""

    def blocks(burst: Burst) -> int:
        return sum(footprint.blocks_for(len(c.prompt_tokens) + c.output_tokens) for c in burst)

    found = []
    for name, kind in KINDS.items():
        mine = [burst for burst in sent if burst[0].deployment == name]
        largest = max(mine, key=blocks, default=())
        found.append(
            Peak(
                deployment=name,
                calls=len(largest),
                kv_blocks=max(blocks(largest), footprint.blocks_for(kind.context_tokens)),
                footprint=footprint,
            )
        )
    return found


def limit_bytes(wanted: Sequence[Peak], overcommit: float) -> int:
    """`--memory` of a node of which the peaks, all together, want `overcommit` times as much, and
    which has what they share beside that; weights that some share count once.
    """
    shares = [
        Share(key=KINDS[peak.deployment].context_tokens, size_bytes=peak.footprint.shared_bytes)
        for peak in wanted
    ]
    sizes = counted_once(zip([peak.size_bytes for peak in wanted], shares, strict=True))
    return int(sum(sizes) / overcommit) + ENGINE_BYTES
