"""Who waits at the controller's other ports: the callers of requests, and a registry in memory.

Callers look at the clock for every token. What they were told of a request becomes its `Outcome`
when it ends; a token that is lost, comes twice or comes after the end is a fault of mesh and raises
AssertionError. Before: `ControllerPerformer`. After: `mesh.report.outcomes`.
"""

from dataclasses import dataclass, field

from mesh.domain.actions import (
    DeliverTokens,
    RefuseRequest,
    ReplyDone,
    ReplyError,
    ReplyProgress,
    TellWaiting,
)
from mesh.domain.deployment import Deployment
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.profile import Profile
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request
from mesh.domain.slo import Slo
from mesh.domain.text import TextAssets
from mesh.report.outcomes import Outcome
from mesh.runtime.clock import Clock


@dataclass(slots=True)
class _Waiting:
    request: Request
    slo: Slo
    arrival_s: float
    tokens_s: list[float] = field(default_factory=list)


class Callers:
    """See `mesh.runtime.controller_actions.Clients`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[RequestId, _Waiting] = {}
        self.outcomes: list[Outcome] = []
        """In the order of their ends."""

    def call(self, request: Request, slo: Slo) -> None:
        """A caller begins to wait."""
        self._waiting[request.request_id] = _Waiting(request, slo, self._clock.now_s())

    def __len__(self) -> int:
        """Those who wait."""
        return len(self._waiting)

    def waiting(self, told: TellWaiting) -> None:
        assert told.request_id in self._waiting, f"{told.request_id} has ended, yet it waits"

    def deliver(self, tokens: DeliverTokens) -> None:
        outputs = tokens.outputs
        held = self._waiting.get(outputs.request_id)
        assert held is not None, f"tokens of {outputs.request_id} after its end"
        assert outputs.first_index == len(held.tokens_s), "a token was lost, or came twice"
        held.tokens_s += [self._clock.now_s()] * len(outputs.token_ids)
        if outputs.finish is not None:
            self._end(outputs.request_id, outputs.finish, tokens.grace_s)

    def refuse(self, refusal: RefuseRequest) -> None:
        assert refusal.request_id in self._waiting, f"{refusal.request_id} ended twice"
        self._end(refusal.request_id, refusal.reason, 0.0)

    def _end(
        self, request_id: RequestId, end: FinishReason | RefusalReason, grace_s: float
    ) -> None:
        held = self._waiting.pop(request_id)
        self.outcomes.append(
            Outcome(
                request_id=request_id,
                deployment=held.request.deployment,
                slo=held.slo,
                arrival_s=held.arrival_s,
                input_tokens=len(held.request.prompt_tokens),
                tokens_s=tuple(held.tokens_s),
                ended_s=self._clock.now_s(),
                grace_s=grace_s,
                end=end,
            )
        )


class MemoryRegistry:
    """See `mesh.runtime.controller_actions.Registry`. It lasts as long as the simulation."""

    def __init__(self) -> None:
        self.deployments: dict[DeploymentName, Deployment] = {}
        self.histories: dict[DeploymentName, OutputHistory] = {}
        self.profiles: list[Profile] = []

    def store(self, deployment: Deployment, text: TextAssets | None) -> None:
        self.deployments[deployment.spec.name] = deployment

    def remove(self, name: DeploymentName) -> None:
        self.deployments.pop(name, None)
        self.histories.pop(name, None)

    def store_profile(self, profile: Profile) -> None:
        self.profiles.append(profile)

    def store_history(self, name: DeploymentName, history: OutputHistory) -> None:
        self.histories[name] = history


class Operators:
    """Keeps what administrative calls were answered."""

    def __init__(self) -> None:
        self.replies: list[ReplyDone | ReplyError] = []

    def reply(self, reply: ReplyProgress | ReplyDone | ReplyError) -> None:
        if not isinstance(reply, ReplyProgress):
            self.replies.append(reply)
