"""Who waits at the controller's other ports: the callers of requests, and a registry in memory.

Callers look at the clock for every token. What they were told of a request becomes its `Outcome`
when it ends; a token that is lost, wrong, comes twice, unannounced or after the end is a fault of
mesh and raises AssertionError. Before: `ControllerPerformer`. After: `mesh.domain.outcome`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

from mesh.domain.actions import (
    DeliverTokens,
    RefuseRequest,
    ReplyDone,
    ReplyError,
    ReplyProgress,
    TellAccepted,
    TellWaiting,
)
from mesh.domain.deployment import Deployment
from mesh.domain.events import CancelRequested, ControllerEvent, InvokeRequested
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.profile import Profile
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request, Resumed
from mesh.domain.revision import Revisions, public_name
from mesh.domain.slo import Slo
from mesh.domain.text import TextAssets
from mesh.domain.values import dataclass
from mesh.runtime.clock import Clock
from mesh.runtime.controller_actions import Done
from mesh.sim.sequences import answer_of


@dataclass(slots=True)
class _Waiting:
    request: Request
    deployment: Deployment
    slo: Slo
    arrival_s: float
    answer: tuple[int, ...]
    """What it has to be told."""
    grace_s: float | None = None
    """As told; None: it was not told yet that it has a place."""
    resumes: bool = False
    """It asks again where its controller is gone, and is told anew that it has a place."""
    unknown: bool = False
    """No controller knows of it until it asks again."""
    broken: bool = False
    """Its stream has broken while its controller lives: what comes before it asks is for nobody."""
    epoch: int = 0
    """The epoch of the controller that it listens to."""
    tokens_s: list[float] = field(default_factory=list)


class Callers:
    """See `mesh.runtime.controller_actions.Clients`."""

    def __init__(self, clock: Clock, ended: Callable[[Outcome], None] | None = None) -> None:
        self._clock = clock
        self.lengths: dict[RequestId, int] = {}
        """Tokens after which answers end by themselves, of those who wait: for engines, and for
        nobody in between.
        """
        self._waiting: dict[RequestId, _Waiting] = {}
        self.epoch = 0
        """The epoch of the controller that they ask."""
        self.outcomes: list[Outcome] = []
        """In the order of their ends; none where `ended` is told them instead."""
        self._ended = ended or self.outcomes.append

    def call(
        self,
        request: Request,
        deployment: Deployment,
        output_tokens: int | None = None,
        slo: Slo | None = None,
    ) -> tuple[int, ...]:
        """A caller begins to wait for an answer that ends by itself after so many tokens; None: it
        has all that it may have. `slo`: its own. Returns the answer.
        """
        # It ends with the context at the latest; a prompt that fills that has no answer.
        prompt_tokens, sampling = request.prompt_tokens, request.sampling
        most = max(deployment.context_tokens_max - len(prompt_tokens), 0)
        tokens = min(sampling.max_tokens, most)
        if output_tokens is not None:
            self.lengths[request.request_id] = output_tokens
            tokens = min(tokens, output_tokens)
        answer = answer_of(prompt_tokens, sampling, tokens, deployment.model)
        caller = _Waiting(
            request, deployment, slo or deployment.spec.slo, self._clock.now_s(), answer
        )
        caller.epoch, self._waiting[request.request_id] = self.epoch, caller
        return answer

    def hears(self, request_id: RequestId, epoch: int) -> bool:
        """Whether it listens to the controller of this epoch. Of what the last one says to who does
        not wait any more they say so themselves.
        """
        caller = self._waiting.get(request_id)
        return (self.epoch if caller is None else caller.epoch) == epoch

    def epoch_of(self, request_id: RequestId) -> int:
        """The epoch of the controller that it listens to; that of the last one where it is to ask
        again.
        """
        caller = self._waiting[request_id]
        return self.epoch if caller.unknown else caller.epoch

    def cancel(self, request_id: RequestId) -> None:
        """A caller goes; it must not be told anything any more."""
        self._end(request_id, FinishReason.CANCELLED)

    def keyed_ids(self) -> tuple[RequestId, ...]:
        """Those with a key whose streams are whole."""
        return tuple(
            r for r, caller in self._waiting.items() if caller.request.keyed and not caller.resumes
        )

    def break_stream(self, request_id: RequestId, *, felt: bool) -> None:
        """One with a key hears nothing any more until it asks again. `felt`: its controller knows
        that it has gone.
        """
        caller = self._waiting[request_id]
        caller.resumes = caller.broken = True
        caller.unknown = caller.unknown or felt

    def cut_off(self, request_ids: Iterable[RequestId]) -> None:
        """Nobody answers these any more: their streams break. Those with a key wait on."""
        for request_id in request_ids:
            if self._waiting[request_id].request.keyed:
                self._waiting[request_id].resumes = self._waiting[request_id].unknown = True
            else:
                self._end(request_id, FinishReason.FAILED)

    def of_epoch(self, epoch: int) -> tuple[RequestId, ...]:
        """Those who listen to the controller of this epoch, by their arrival."""
        return tuple(r for r, caller in self._waiting.items() if caller.epoch == epoch)

    def with_key(self, epoch: int) -> tuple[RequestId, ...]:
        """Those of them who have a key, and have not been told to ask again."""
        found = ((r, self._waiting[r]) for r in self.of_epoch(epoch))
        return tuple(r for r, caller in found if caller.request.keyed and not caller.unknown)

    def asking_again(self) -> tuple[RequestId, ...]:
        """Those whose stream has broken and who have a key, by their arrival."""
        waiting = self._waiting.items()
        return tuple(r for r, caller in waiting if caller.resumes and caller.request.keyed)

    def again(self, request_id: RequestId) -> list[ControllerEvent]:
        """What a caller asks a controller, which finds that the stream before has broken if it does
        not know that yet; nothing where it has gone, or has asked.
        """
        caller = self._waiting.get(request_id)
        if caller is None or not (caller.broken or caller.unknown):
            return []
        felt = [] if caller.unknown else [CancelRequested(request_id=request_id)]
        caller.broken = caller.unknown = False
        caller.epoch = self.epoch
        resumed = Resumed(
            output_tokens=caller.answer[: len(caller.tokens_s)],
            age_s=self._clock.now_s() - caller.arrival_s,
            accepted=True,
        )
        own = caller.slo is not caller.deployment.spec.slo
        slo = caller.slo if own else None
        return [*felt, InvokeRequested(request=caller.request, slo=slo, resumed=resumed)]

    def open_ids(self) -> tuple[RequestId, ...]:
        """The ids of those who wait, by their arrival."""
        return tuple(self._waiting)

    def unanswered_ids(self) -> tuple[RequestId, ...]:
        """Those who wait for the controller that is asked, and have not been told to ask again."""
        return tuple(r for r in self.of_epoch(self.epoch) if not self._waiting[r].unknown)

    def stuck_ids(self, since_s: float, wait_s_max: float) -> tuple[RequestId, ...]:
        """Those who wait longer than this for the first token, and their TPOT SLO for the others,
        counted from their arrival or from `since_s`.
        """
        now_s = self._clock.now_s()
        return tuple(
            request_id
            for request_id, caller in self._waiting.items()
            if now_s - max(caller.arrival_s, since_s)
            > wait_s_max + len(caller.answer) * caller.slo.tpot_s
        )

    def __len__(self) -> int:
        """Those who wait."""
        return len(self._waiting)

    def accepted(self, told: TellAccepted) -> None:
        caller = self._waiting.get(told.request_id)
        assert caller is not None, f"{told.request_id} has ended, yet it is accepted"
        if caller.broken:
            return
        assert caller.grace_s is None or caller.resumes, f"{told.request_id} was accepted twice"
        caller.resumes = False
        caller.grace_s = told.grace_s if caller.grace_s is None else caller.grace_s

    def waiting(self, told: TellWaiting) -> None:
        assert told.request_id in self._waiting, f"{told.request_id} has ended, yet it waits"

    def deliver(self, tokens: DeliverTokens) -> None:
        outputs = tokens.outputs
        caller = self._waiting.get(outputs.request_id)
        assert caller is not None, f"tokens of {outputs.request_id} after its end"
        if caller.broken:
            caller.unknown = caller.unknown or outputs.finish is not None
            return
        assert caller.grace_s is not None, f"tokens of {outputs.request_id}, which was not accepted"
        assert outputs.first_index == len(caller.tokens_s), "a token was lost, or came twice"
        first, count = outputs.first_index, len(outputs.token_ids)
        due = caller.answer[first : first + count]
        assert outputs.token_ids == due, f"tokens of {outputs.request_id} are another request's"
        caller.tokens_s += [self._clock.now_s()] * count
        if outputs.finish is not None:
            missing = len(caller.answer) - len(caller.tokens_s)
            assert not missing, f"{outputs.request_id} lacks {missing} tokens at its end"
            self._end(outputs.request_id, outputs.finish)

    def refuse(self, refusal: RefuseRequest) -> None:
        assert refusal.request_id in self._waiting, f"{refusal.request_id} ended twice"
        caller = self._waiting[refusal.request_id]
        if caller.broken:
            caller.unknown = True
            return
        if caller.request.keyed and refusal.reason is RefusalReason.SHUTTING_DOWN:
            caller.resumes = caller.unknown = True
            return
        self._end(refusal.request_id, refusal.reason)

    def _end(self, request_id: RequestId, end: FinishReason | RefusalReason) -> None:
        caller = self._waiting.pop(request_id)
        self.lengths.pop(request_id, None)
        self._ended(
            Outcome(
                request_id=request_id,
                deployment=caller.request.deployment,
                slo=caller.slo,
                arrival_s=caller.arrival_s,
                input_tokens=len(caller.request.prompt_tokens),
                tokens_s=tuple(caller.tokens_s),
                ended_s=self._clock.now_s(),
                accepted=caller.grace_s is not None,
                grace_s=caller.grace_s or 0.0,
                end=end,
            )
        )


class Streams:
    """What one of several controllers says to its callers: those that have left it hear nothing."""

    def __init__(self, callers: Callers, epoch: int) -> None:
        self._callers = callers
        self._epoch = epoch

    def accepted(self, told: TellAccepted) -> None:
        if self._callers.hears(told.request_id, self._epoch):
            self._callers.accepted(told)

    def waiting(self, told: TellWaiting) -> None:
        if self._callers.hears(told.request_id, self._epoch):
            self._callers.waiting(told)

    def deliver(self, tokens: DeliverTokens) -> None:
        if self._callers.hears(tokens.outputs.request_id, self._epoch):
            self._callers.deliver(tokens)

    def refuse(self, refusal: RefuseRequest) -> None:
        if self._callers.hears(refusal.request_id, self._epoch):
            self._callers.refuse(refusal)


class MemoryRegistry:
    """See `mesh.runtime.controller_actions.Registry`. It lasts as long as the simulation."""

    def __init__(self, deployments: Sequence[Deployment], profiles: Sequence[Profile]) -> None:
        self.deployments = {made.spec.name: made for made in deployments}
        self.histories: dict[DeploymentName, OutputHistory] = {}
        self.profiles = list(profiles)
        self.revisions: dict[DeploymentName, Revisions] = {}

    def store(
        self,
        deployment: Deployment,
        text: TextAssets | None,
        revisions: Revisions | None,
        done: Done | None = None,
    ) -> None:
        name = public_name(deployment.spec.name)
        self._forget(name)
        self.deployments[deployment.spec.name] = deployment
        if revisions is not None:
            self.revisions[name] = revisions
        if done is not None:
            done(None)

    def remove(self, name: DeploymentName, done: Done | None = None) -> None:
        self._forget(name)
        self.revisions.pop(name, None)
        self.histories.pop(name, None)
        if done is not None:
            done(None)

    def _forget(self, name: DeploymentName) -> None:
        for known in [n for n in self.deployments if public_name(n) == name]:
            del self.deployments[known]

    def store_profile(self, profile: Profile, done: Done | None = None) -> None:
        self.profiles.append(profile)
        if done is not None:
            done(None)

    def store_history(self, name: DeploymentName, history: OutputHistory) -> None:
        self.histories[name] = history


class Operators:
    """Keeps what administrative calls were answered."""

    def __init__(self) -> None:
        self.replies: list[ReplyDone | ReplyError] = []

    def reply(self, reply: ReplyProgress | ReplyDone | ReplyError) -> None:
        if not isinstance(reply, ReplyProgress):
            self.replies.append(reply)
