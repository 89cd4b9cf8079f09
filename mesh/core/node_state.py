"""What the node core knows: its instances and the requests on each, with their headroom."""

from dataclasses import dataclass, field
from enum import StrEnum

from mesh.domain.ids import InstanceId, OperationId, RequestId
from mesh.domain.messages import Heartbeat, InstanceReport, LoadInstance
from mesh.domain.model import Footprint
from mesh.domain.request import RequestOrder
from mesh.domain.slo import headroom_s


class LocalState(StrEnum):
    """An instance on its node. WAITING: to be loaded, once what the controller does not know of has
    left its memory. ABANDONED: it loads, and will be dropped as soon as it has.
    """

    WAITING = "waiting"
    LOADING = "loading"
    ABANDONED = "abandoned"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass(slots=True, kw_only=True, eq=False)
class LocalRequest:
    order: RequestOrder
    start_s: float
    """When it arrived at the cell, on this node's clock."""
    output_tokens: int
    first_step: int
    """The first iteration that it can have a part in: tokens of an earlier one under this id are
    of an earlier attempt.
    """

    @property
    def request_id(self) -> RequestId:
        return self.order.request.request_id

    def headroom_s(self, now_s: float) -> float:
        """Eq. 1 of LLM-Mesh §5.1, with the load grace on top of the TTFT deadline."""
        slo = self.order.slo
        prompt_tokens = len(self.order.request.prompt_tokens)
        return headroom_s(
            start_s=self.start_s,
            ttft_limit_s=slo.ttft_limit_s(prompt_tokens) + self.order.grace_s,
            tpot_s=slo.tpot_s,
            output_tokens=self.output_tokens,
            now_s=now_s,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LocalInstance:
    command: LoadInstance
    state: LocalState = LocalState.LOADING
    footprint: Footprint | None = None
    """None until it is loaded."""
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    requests: dict[RequestId, LocalRequest] = field(default_factory=dict)
    unbooked: bool = False
    """It was loading or leaving when a link broke: no later controller knows of its memory."""
    error: str = ""
    """Why it is being unloaded, when it broke."""
    message: str = ""

    @property
    def instance_id(self) -> InstanceId:
        return self.command.instance_id

    def least_headroom_s(self, now_s: float) -> float | None:
        """Of its requests; None when it has none or is not ready."""
        if self.state is not LocalState.READY or not self.requests:
            return None
        return min(request.headroom_s(now_s) for request in self.requests.values())

    def report(self) -> InstanceReport | None:
        """None while it is not loaded."""
        if self.footprint is None or self.state is not LocalState.READY:
            return None
        return InstanceReport(
            instance_id=self.instance_id,
            deployment=self.command.deployment,
            model_id=self.command.model.model_id,
            footprint=self.footprint,
            kv_blocks=self.kv_blocks,
            kv_blocks_used=self.kv_blocks_used,
            context_tokens_max=self.command.context_tokens_max,
            batch_max=self.command.batch_max,
            batch=len(self.requests),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LocalNode:
    instances: dict[InstanceId, LocalInstance] = field(default_factory=dict)
    imports: dict[OperationId, str] = field(default_factory=dict)
    """Sources being imported."""
    steps_started: int = 0
    stepping: InstanceId | None = None
    """Whose iteration is under way."""
    linked: bool = False
    rss_bytes: int = 0
    """At the last heartbeat."""

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(rss_bytes=self.rss_bytes, instances=self.reports())

    def reports(self) -> tuple[InstanceReport, ...]:
        reports = (instance.report() for instance in self.instances.values())
        return tuple(report for report in reports if report is not None)
