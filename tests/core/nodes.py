"""A node core at a time that the test moves, and what its engine says."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction, SendReport
from mesh.domain.energy import Power
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import (
    Heartbeat,
    InstanceLoaded,
    LoadInstance,
    NodeCommand,
    NodeReport,
    SubmitRequest,
    TokensReport,
)
from mesh.domain.node_events import (
    CommandReceived,
    HeartbeatDue,
    LinkClosed,
    LinkOpened,
    NodeEvent,
    StepFinished,
)
from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestOrder, RequestTokens
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.turns import TurnRule, name_of
from tests.core.cells import FOOTPRINT, load_instance, only, request, step_result

RSS_BYTES, ENGINE_BYTES = 300, 200
"""Every heartbeat reports these."""


def loaded(instance_id: InstanceId, tier: LoadTier = LoadTier.DISK) -> InstanceLoaded:
    """A load that took 0.1 s."""
    return InstanceLoaded(
        instance_id=instance_id, footprint=FOOTPRINT, kv_blocks=16, elapsed_s=0.1, tier=tier
    )


class NodeUnderTest:
    """A node core whose instances of these names are loaded."""

    def __init__(
        self,
        *names: str,
        turns: TurnRule = HEADROOM,
        turn_s_max: float = 0.0,
        power: Power | None = None,
    ) -> None:
        limits = NodeLimits(deadline_margin_s_max=0.0, primed_tokens_max=0)
        own_rule = turns if name_of(turns).digest else None
        self.core = NodeCore(limits=limits, own_rule=own_rule, power=power)
        self.now_s = 50.0
        self.tell(LinkOpened(rule=NodeRule(turn=name_of(turns), turn_s_max=turn_s_max)))
        for name in names:
            self.load(name)

    def tell(self, event: NodeEvent) -> list[NodeAction]:
        return self.core.handle(event, self.now_s)

    def reconnect(self) -> None:
        self.tell(LinkClosed(reason="reset"))
        self.tell(LinkOpened())

    def command(self, command: NodeCommand) -> list[NodeAction]:
        return self.tell(CommandReceived(command=command))

    def load(
        self,
        name: str = "i1",
        tier: LoadTier = LoadTier.DISK,
        *,
        command: LoadInstance | None = None,
    ) -> list[NodeAction]:
        """Commands a load and has it succeed."""
        self.command(command or load_command(name))
        return self.tell(loaded(InstanceId(name), tier))

    def submit(
        self,
        name: str,
        on: str = "i1",
        *,
        age_s: float = 0.0,
        attempt: int = 1,
        so_far: Sequence[int] = (),
        slo: Slo | None = None,
        prompt: int = 3,
        keyed: bool = False,
    ) -> list[NodeAction]:
        order = RequestOrder(
            request=replace(request(name, prompt=(1,) * prompt), keyed=keyed),
            attempt=attempt,
            output_tokens=tuple(so_far),
            slo=slo or Slo(),
            age_s=age_s,
            due_in_s=(slo or Slo()).ttft_limit_s(prompt) - age_s,
            slack_s=10.0,
        )
        return self.command(SubmitRequest(instance_id=InstanceId(on), order=order))

    def step(
        self,
        on: str,
        *outputs: RequestTokens,
        starved: Sequence[str] = (),
        prefill_left: Mapping[str, int] | None = None,
        prefill_tokens: int = 0,
        iterations: int = 1,
    ) -> list[NodeAction]:
        """A turn is over: decodes of those that have tokens, beside so much of prompts."""
        result = step_result(
            outputs=outputs,
            prefill_tokens=prefill_tokens,
            decode_batch=len(outputs),
            prefill_left=tuple((RequestId(r), left) for r, left in (prefill_left or {}).items()),
            starved=tuple(RequestId(s) for s in starved),
            elapsed_s=0.01,
            iterations=iterations,
        )
        return self.tell(StepFinished(instance_id=InstanceId(on), result=result))

    def heartbeat_unheard(self) -> list[NodeAction]:
        """What it does at a heartbeat that nobody hears."""
        return self.tell(HeartbeatDue(rss_bytes=RSS_BYTES, engine_bytes=ENGINE_BYTES))

    def heartbeat(self) -> Heartbeat:
        actions = self.tell(HeartbeatDue(rss_bytes=RSS_BYTES, engine_bytes=ENGINE_BYTES))
        return only(reports(actions), Heartbeat)


def load_command(name: str = "i1") -> LoadInstance:
    return load_instance(instance_id=InstanceId(name), kv_blocks=16, context_tokens_max=512)


def token(
    name: str, index: int, *, count: int = 1, attempt: int = 1, finish: FinishReason | None = None
) -> RequestTokens:
    """One token, or so many from this index on."""
    return RequestTokens(
        request_id=RequestId(name),
        attempt=attempt,
        first_index=index,
        token_ids=tuple(range(40 + index, 40 + index + count)),
        text="x" * count,
        finish=finish,
    )


def reports(actions: Sequence[NodeAction]) -> list[NodeReport]:
    return [action.report for action in actions if isinstance(action, SendReport)]


def outputs(actions: Sequence[NodeAction]) -> tuple[RequestTokens, ...]:
    """The outputs of the iteration that the actions report."""
    return only(reports(actions), TokensReport).outputs
