"""Builds small cells for tests: a controller core with deployments and nodes, and its answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mesh.core.controller.core import ControllerCore
from mesh.domain.actions import ControllerAction, SendCommand
from mesh.domain.deployment import Deployment, DeploymentSpec, PlanRule, Scaling
from mesh.domain.events import (
    ControllerEvent,
    InvokeRequested,
    NodeConnected,
    NodeReported,
    PlaceRetryDue,
)
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    InstanceLoaded,
    InstanceReport,
    LoadInstance,
    NodeCommand,
    NodeHello,
    NodeReport,
    TokensReport,
)
from mesh.domain.model import Footprint
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.request import Request, RequestTokens, SamplingParams
from mesh.domain.revision import Revisions
from mesh.domain.slo import Slo
from mesh.domain.steps import StepResult
from mesh.policy.registry import policy
from tests.support import profiles
from tests.support.profiles import FINGERPRINT, PROFILE

MIB = 1024 * 1024
FOOTPRINT = Footprint(weights_bytes=100 * MIB, kv_block_bytes=MIB, block_tokens=32)
MODEL = profiles.MODEL
OTHER_MODEL = replace(MODEL, model_id=ModelId("sha256-00000000000000ff"), source="file:///other")
CHAT = DeploymentName("chat")
Said = dict[str, Any]


def instance_report(**said: Any) -> InstanceReport:
    """An idle instance of MODEL as its node reports it, but for what is `said`."""
    usual: Said = {"deployment": CHAT, "model_id": MODEL.model_id, "footprint": FOOTPRINT}
    sizes: Said = {"kv_blocks_used": 0, "context_tokens_max": 512, "batch_max": 8, "batch": 0}
    return InstanceReport(**(usual | sizes | said))


def load_instance(**said: Any) -> LoadInstance:
    """The command to load an instance of MODEL, but for what is `said`."""
    usual: Said = {"deployment": CHAT, "model": MODEL, "profile": PROFILE}
    sizes: Said = {"kv_blocks": 8, "context_tokens_max": 256, "batch_max": 8}
    return LoadInstance(**(usual | sizes | said))


def step_result(**said: Any) -> StepResult:
    """A turn that computed nothing, but for what is `said`; `elapsed_s` has to be."""
    sizes = ("prefill_tokens", "prefill_past_tokens", "decode_batch", "context_tokens")
    usual: Said = {"outputs": (), "prefill_left": (), "starved": (), "kv_blocks_used": 1}
    return StepResult(**(usual | dict.fromkeys(sizes, 0) | said))


A = TypeVar("A")


def deployment(
    name: str = "chat",
    *,
    replicas_min: int = 0,
    replicas_max: int = 4,
    keep_alive_s: float = 1.0,
    slo: Slo | None = None,
    plan: PlanRule | None = None,
) -> Deployment:
    spec = DeploymentSpec(
        name=DeploymentName(name),
        source=MODEL.source,
        slo=slo or Slo(),
        scaling=Scaling(
            replicas_min=replicas_min,
            replicas_max=replicas_max,
            keep_alive_s=keep_alive_s,
            plan=plan,
        ),
        devices=(DeviceKind.CPU,),
    )
    return Deployment(
        spec=spec, model=MODEL, context_tokens_max=512, footprints=(("scripted", FOOTPRINT),)
    )


def hello(
    name: str = "n1",
    *,
    run_id: str = "run-1",
    memory_bytes: int = 1024 * MIB,
    fingerprint: str = FINGERPRINT,
    tensor_parallel_max: int = 1,
) -> NodeHello:
    """The hello of a node for which `PROFILE` holds, unless another fingerprint is given."""
    return NodeHello(
        node_id=NodeId(name),
        run_id=run_id,
        device=DeviceKind.CPU,
        hardware="test",
        cores=2,
        engine="scripted",
        memory_bytes=memory_bytes,
        fingerprint=fingerprint,
        tensor_parallel_max=tensor_parallel_max,
        computes_ahead=True,
    )


def request(
    name: str = "r1", *, of: str = "chat", prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8
) -> Request:
    return Request(
        request_id=RequestId(name),
        deployment=DeploymentName(of),
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


class CellUnderTest:
    """A controller core at a time that the test moves, and the nodes that it thinks it has. `rule`:
    a policy, or the name of one.
    """

    def __init__(
        self,
        *deployments: Deployment,
        limits: CellLimits | None = None,
        profiles: Sequence[Profile] = (PROFILE,),
        rule: Any = "llm-mesh",
        revisions: Mapping[DeploymentName, Revisions] | None = None,
        recorder: Callable[[float, object, Sequence[object]], None] = lambda *_: None,
    ) -> None:
        self.core = ControllerCore(
            epoch=1,
            deployments=deployments,
            limits=limits or CellLimits(delivery_s_max=0.02),
            policy=policy(rule) if isinstance(rule, str) else rule,
            profiles=profiles,
            revisions=revisions,
        )
        self._record = recorder
        self.now_s = 100.0
        self._links = 0

    def tell(self, event: ControllerEvent) -> list[ControllerAction]:
        actions = self.core.handle(event, self.now_s)
        self._record(self.now_s, event, actions)
        return actions

    def join(self, node: NodeHello | None = None) -> tuple[int, list[ControllerAction]]:
        """A node connects; its link id and what the core decided."""
        self._links += 1
        return self._links, self.tell(NodeConnected(link_id=self._links, hello=node or hello()))

    def report(self, link_id: int, said: NodeReport) -> list[ControllerAction]:
        return self.tell(NodeReported(link_id=link_id, report=said))

    def invoke(self, asked: Request | None = None) -> list[ControllerAction]:
        return self.tell(InvokeRequested(request=asked or request()))

    def retry(self) -> list[ControllerAction]:
        """It is time to try those who wait again."""
        return self.tell(PlaceRetryDue())

    def loaded(self, link_id: int, instance_id: InstanceId) -> list[ControllerAction]:
        """The node says that an instance is up, as large as it was asked for."""
        blocks = self.core.cell.instances[instance_id].kv_blocks
        return self.report(
            link_id,
            InstanceLoaded(
                instance_id=instance_id, footprint=FOOTPRINT, kv_blocks=blocks, elapsed_s=0.5
            ),
        )

    def bring_up(self, link_id: int, asked: Request | None = None) -> LoadInstance:
        """A request has an instance loaded, and its node says that it is up."""
        (load,) = commands(self.invoke(asked), LoadInstance)
        self.loaded(link_id, load.instance_id)
        return load

    def tokens(
        self,
        link_id: int,
        request_id: str,
        ids: Sequence[int],
        *,
        first: int = 0,
        attempt: int = 1,
        finish: FinishReason | None = None,
    ) -> list[ControllerAction]:
        outputs = RequestTokens(
            request_id=RequestId(request_id),
            attempt=attempt,
            first_index=first,
            token_ids=tuple(ids),
            text="".join(f"<{i}>" for i in ids),
            finish=finish,
        )
        held = self.core.cell.requests.get(outputs.request_id)
        instance_id = held.instance.instance_id if held and held.instance else InstanceId("any")
        return self.report(link_id, TokensReport(instance_id=instance_id, outputs=(outputs,)))


def one_node(
    *deployments: Deployment, node: NodeHello | None = None, **how: Any
) -> tuple[CellUnderTest, int]:
    """A cell of one node, and the id of its link."""
    cell = CellUnderTest(*deployments, **how)
    return cell, cell.join(node)[0]


def only(actions: Sequence[object], kind: type[A]) -> A:
    """The one action of this kind."""
    found = of_kind(actions, kind)
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {actions}"
    return found[0]


def of_kind(actions: Sequence[object], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def commands(actions: Sequence[object], kind: type[A]) -> list[A]:
    """The commands of this kind that were sent to nodes."""
    sent: list[NodeCommand] = [a.command for a in actions if isinstance(a, SendCommand)]
    return [command for command in sent if isinstance(command, kind)]
