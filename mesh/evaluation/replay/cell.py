"""What a replay has to know of the cell that it calls: deployments, their tokenizers, its counts.

The controller's counts before and after a replay are what it has seen of it: they should be those
of the client. Before: `mesh replay`. After: `replay_plan`, which needs the contexts; `running`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from mesh.domain.errors import NotFound
from mesh.domain.ids import ModelId
from mesh.domain.values import dataclass
from mesh.domain.views import DeploymentSnapshot
from mesh.evaluation.replay.results import CallResult
from mesh.text.tokenizer import TextCodec
from mesh.wire.client import MeshClient
from mesh_workloads.prompts import Prompts, encoded

COUNTS_DIFFERENCE_MAX = 0.01
"""The counts may differ by this share of all calls. Beyond it, somebody else calls the deployments,
or calls were lost.
"""
BEGAN_S_ERROR = 1.0
"""The time at which a controller began is known here with this error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCounts:
    """What a controller has counted since it began."""

    began_s: float
    """When the controller began, on this machine's monotonic clock."""
    served: Mapping[str, int]
    """The requests served, by deployment."""
    refused: Mapping[str, int]
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """The prompt tokens among those that the prefix cache had, by deployment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountPair:
    """Two counts of one deployment: the controller's while the replay ran, and its caller's."""

    deployment: str
    served: int
    finished: int
    refused: int
    refused_seen: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """How many of the prompt tokens the prefix cache had."""

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def difference(self) -> int:
        return abs(self.served - self.finished) + abs(self.refused - self.refused_seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    pairs: tuple[CountPair, ...]
    restarted: bool
    """The controller began anew meanwhile, and its counts with it: they say nothing then."""

    @property
    def difference(self) -> float:
        """As a share of the calls that either side has counted."""
        seen = sum(max(p.served + p.refused, p.finished + p.refused_seen) for p in self.pairs)
        return sum(p.difference for p in self.pairs) / seen if seen else 0.0


def deployed(client: MeshClient) -> dict[str, DeploymentSnapshot]:
    """The deployments that can be called, by name."""
    return {view.spec.name: view for view in client.list() if view.model is not None}


def contexts_of(found: Mapping[str, DeploymentSnapshot]) -> dict[str, int]:
    """Tokens that fit, by name."""
    return {name: view.context_tokens_max for name, view in found.items()}


def prompts_of(
    client: MeshClient, views: Iterable[DeploymentSnapshot], *, seed: int
) -> dict[str, Prompts]:
    """By deployment; those of one model share their prompts. Raises NotFound for a deployment that
    has gone meanwhile.
    """
    by_model: dict[ModelId, Prompts] = {}
    found: dict[str, Prompts] = {}
    for view in views:
        if view.model is None:
            raise NotFound(f"deployment {view.spec.name!r} has no model yet")
        model_id = view.model.model_id
        if model_id not in by_model:
            codec = TextCodec(client.tokenizer(view.spec.name))
            by_model[model_id] = Prompts(encoded(codec.encode_part), seed=seed)
        found[view.spec.name] = by_model[model_id]
    return found


def counts(client: MeshClient) -> CellCounts:
    views = client.list()
    return CellCounts(
        began_s=time.monotonic() - client.status().uptime_s,
        served={view.spec.name: view.served for view in views},
        refused={view.spec.name: view.refused for view in views},
        prompt_tokens={view.spec.name: view.prompt_tokens for view in views},
        cached_tokens={view.spec.name: view.cached_tokens for view in views},
    )


def counted(
    before: CellCounts, after: CellCounts, results: Sequence[CallResult], names: Iterable[str]
) -> Counted:
    def grown(of: Callable[[CellCounts], Mapping[str, int]], name: str) -> int:
        return of(after).get(name, 0) - of(before).get(name, 0)

    finished = Counter(r.call.deployment for r in results if r.finished)
    refused = Counter(r.call.deployment for r in results if r.refused)
    return Counted(
        pairs=tuple(
            CountPair(
                deployment=name,
                served=grown(lambda counts: counts.served, name),
                finished=finished[name],
                refused=grown(lambda counts: counts.refused, name),
                refused_seen=refused[name],
                prompt_tokens=grown(lambda counts: counts.prompt_tokens, name),
                cached_tokens=grown(lambda counts: counts.cached_tokens, name),
            )
            for name in names
        ),
        restarted=after.began_s > before.began_s + BEGAN_S_ERROR,
    )
