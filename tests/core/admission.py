"""Cells for tests of admission: times that are easy to reckon with, and instances that are there.

A decode takes 100 ms whatever its batch, a prompt 4 ms a token; validation adds 10 %, and 20 ms for
the delivery.
"""

from collections.abc import Sequence
from dataclasses import replace

from mesh.compute.correction import RATIO_MIN
from mesh.domain.actions import ControllerAction
from mesh.domain.deployment import Deployment
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import InstanceReport, NodeHello, SubmitRequest, TokensReport
from mesh.domain.profile import Grid, Profile
from tests.core.cells import CellUnderTest, commands, deployment, hello, instance_report, request
from tests.support.profiles import profile

SLOW = profile(
    prefill=Grid(rows=(1, 256), columns=(4096,), seconds=((0.004,), (1.024,))),
    decode=Grid(rows=(32,), columns=(4096,), seconds=((0.1,),)),
)


def instance(name: str, of: str, correction: float = 1.0) -> InstanceReport:
    """A loaded instance with room for many requests, planned with what it is corrected by."""
    return instance_report(
        instance_id=InstanceId(name),
        deployment=DeploymentName(of),
        kv_blocks=200,
        batch_max=32,
        correction=correction,
        correction_planned=RATIO_MIN,
    )


def node(name: str, *instances: InstanceReport, memory_bytes: int = 4 << 30) -> NodeHello:
    return replace(hello(name, run_id=name, memory_bytes=memory_bytes), instances=instances)


class BusyCell(CellUnderTest):
    """Deployments `a`, `b` and `c`, each with an instance of its name on one node."""

    def __init__(
        self,
        *deployments: Deployment,
        limits: CellLimits | None = None,
        profiles: Sequence[Profile] = (SLOW,),
        rule: str = "llm-mesh",
    ) -> None:
        wanted = deployments or tuple(deployment(name) for name in "abc")
        super().__init__(*wanted, limits=limits, profiles=profiles, rule=rule)
        names = [entry.spec.name for entry in wanted]
        self.link, _ = self.join(node("n1", *(instance(name, name) for name in names)))

    def ask(
        self, name: str, of: str, prompt: int = 3, *, max_tokens: int = 256
    ) -> list[ControllerAction]:
        return self.invoke(request(name, of=of, prompt=(1,) * prompt, max_tokens=max_tokens))

    def iterated(
        self, on: str, *, correction: float = 1.0, **prefill_left: int
    ) -> list[ControllerAction]:
        """An iteration has ended that gave nobody a token."""
        left = tuple((RequestId(name), tokens) for name, tokens in prefill_left.items())
        said = TokensReport(
            instance_id=InstanceId(on), outputs=(), prefill_left=left, correction=correction
        )
        return self.report(self.link, said)


def submitted(actions: Sequence[ControllerAction]) -> list[tuple[str, str]]:
    """Requests that were placed, and on which instance."""
    orders = commands(actions, SubmitRequest)
    return [(order.order.request.request_id, order.instance_id) for order in orders]
