"""Bursts of calls to four deployments with different lengths and SLOs, and what each wants at most.

Drawn once from a seed; pure. A burst comes within a second, so all of its calls want KV blocks at
the same time: the largest burst of a deployment is its peak.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.domain.ids import DeploymentName
from mesh.domain.model import Footprint
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Call

FIRST_S = 5.0
"""Each deployment's first burst comes within so much of the start."""
BURST_S = 1.0
PAUSE_S = (30.0, 90.0)
"""From one burst of a deployment to its next. Large and small ones alternate. Bursts of different
deployments meet, and there are times at which a deployment wants nothing."""
LARGE, SMALL = (0.75, 1.0), (0.05, 0.5)
"""Of the calls of the largest burst."""
TOKEN_IDS = range(100, 2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A deployment and its traffic. Pairs are the least and the most, drawn evenly."""

    slo: Slo
    context_tokens: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    calls_max: int
    """Of one burst."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstCall(Call):
    """It comes with others of its deployment."""

    burst: int
    """Of its deployment's, from 0 on."""

    @property
    def tokens(self) -> int:
        """When it ends."""
        return len(self.prompt_tokens) + self.output_tokens


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


def calls(*, seconds: float, seed: int, scale: float = 1.0) -> list[BurstCall]:
    """What is sent in `seconds`, in order. Bursts have `scale` times as many calls."""
    draw = random.Random(seed)
    found: list[BurstCall] = []
    for name, kind in KINDS.items():
        at_s, burst = draw.uniform(0.0, min(FIRST_S, seconds)), 0
        while at_s < seconds:
            share = draw.uniform(*(SMALL if burst % 2 else LARGE))
            size = max(round(share * scale * kind.calls_max), 1)
            found += [_call(draw, name, kind, at_s, burst) for _ in range(size)]
            at_s, burst = at_s + draw.uniform(*PAUSE_S), burst + 1
    return sorted(found, key=lambda call: call.at_s)


def _call(draw: random.Random, name: str, kind: Kind, at_s: float, burst: int) -> BurstCall:
    prompt = tuple(draw.choice(TOKEN_IDS) for _ in range(draw.randint(*kind.prompt_tokens)))
    return BurstCall(
        at_s=at_s + draw.uniform(0.0, BURST_S),
        deployment=DeploymentName(name),
        slo=kind.slo,
        burst=burst,
        prompt_tokens=prompt,
        output_tokens=draw.randint(*kind.output_tokens),
    )


def peaks(sent: Sequence[BurstCall], footprint: Footprint) -> list[Peak]:
    """One for each deployment; never less than one full context, which a node asks for anyway."""
    found = []
    for name, kind in KINDS.items():
        blocks: dict[int, int] = {}
        counts: dict[int, int] = {}
        for call in sent:
            if call.deployment == name:
                wanted = footprint.blocks_for(call.tokens)
                blocks[call.burst] = blocks.get(call.burst, 0) + wanted
                counts[call.burst] = counts.get(call.burst, 0) + 1
        largest = max(blocks, key=lambda burst: blocks[burst], default=0)
        least = footprint.blocks_for(kind.context_tokens)
        found.append(
            Peak(
                deployment=name,
                calls=counts.get(largest, 0),
                kv_blocks=max(blocks.get(largest, 0), least),
                footprint=footprint,
            )
        )
    return found


def limit_bytes(wanted: Sequence[Peak], overcommit: float) -> int:
    """`--memory` of a node of which the peaks, all together, want `overcommit` times as much."""
    return int(sum(peak.size_bytes for peak in wanted) / overcommit)
