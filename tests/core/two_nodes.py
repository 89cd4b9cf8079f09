"""A cell of two nodes with an instance of one deployment each: what runs on the first moves."""

from collections.abc import Sequence
from typing import Any, Self

from mesh.domain.actions import ControllerAction, DeliverTokens, SetTimer
from mesh.domain.events import DrainRequested, MigrationDue
from mesh.domain.ids import InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import MigrationState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import ComputedAhead, ContinueRequest, NodeHello, TokensReport
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens
from mesh.domain.slo import Slo
from tests.core.admission import instance, node
from tests.core.cells import CellUnderTest, commands, deployment, of_kind, only, request

LIMITS = CellLimits(delivery_s_max=0.02)
SOURCE = node("n1", instance("i1", "a"))
TARGET = node("n2", instance("i2", "a"))
ITERATION_S = 0.002
"""An iteration of the instances takes about this long."""
SOON_S = ITERATION_S / 4


class TwoNodes(CellUnderTest):
    """On node n1 `r1` and others have three tokens; node n2 has such an instance, too."""

    def __init__(
        self,
        *,
        limits: CellLimits = LIMITS,
        source: NodeHello = SOURCE,
        to: NodeHello = TARGET,
        beside: Sequence[str] = (),
        policy: Any = "llm-mesh",
        slo: Slo | None = None,
    ) -> None:
        super().__init__(*(deployment(name, slo=slo) for name in "ab"), limits=limits, rule=policy)
        self.source, _ = self.join(source)
        self.counts: dict[str, int] = {}
        for name in ("r1", *beside):
            self.invoke(request(name, of="a", prompt=(1,) * 100, max_tokens=100))
            self.counts[name] = 0
            self.yielded(3, of=name)
        self.target, _ = self.join(to)

    @property
    def state(self) -> MigrationState | None:
        moves = self.core.cell.migrations.get(RequestId("r1"))
        return moves.state if moves is not None else None

    @property
    def runs_on(self) -> str | None:
        found = self.core.cell.requests[RequestId("r1")].instance
        return found.instance_id if found is not None else None

    def yielded(
        self,
        count: int = 1,
        *,
        of: str = "r1",
        at: int = 0,
        attempt: int = 1,
        finish: FinishReason | None = None,
    ) -> list[ControllerAction]:
        """So many tokens more, from the source unless said otherwise."""
        first = self.counts[of]
        ids = tuple(range(40 + first, 40 + first + count))
        outputs = RequestTokens(
            request_id=RequestId(of),
            attempt=attempt,
            first_index=first,
            token_ids=ids,
            finish=finish,
        )
        link, on = (at, "i2") if at else (self.source, "i1")
        said = TokensReport(instance_id=InstanceId(on), outputs=(outputs,))
        told = of_kind(actions := self.report(link, said), DeliverTokens)
        self.counts[of] += sum(len(d.outputs.token_ids) for d in told)
        self.now_s += SOON_S
        return actions

    def moving(self) -> Self:
        """Its target has four tokens of it, and draws the next ones, too."""
        self.drain()
        self.computed()
        assert not continued(self.yielded()).paused
        return self

    def draining(self) -> Self:
        """Its target computes it."""
        self.drain()
        return self

    def drawn(self, token: int, *, drew: int | None = None) -> list[ControllerAction]:
        """The target has drawn the token of that index, or another."""
        outputs = RequestTokens(
            request_id=RequestId("r1"),
            attempt=2,
            first_index=token - 40,
            token_ids=(drew or token,),
        )
        return self.report(
            self.target, TokensReport(instance_id=InstanceId("i2"), outputs=(outputs,))
        )

    def drain(self, name: str = "n1") -> list[ControllerAction]:
        asked = DrainRequested(operation_id=OperationId("d"), node_id=NodeId(name))
        timers = of_kind(self.tell(asked), SetTimer)
        assert MigrationDue() in [timer.timer for timer in timers]
        return self.tell(MigrationDue())

    def computed(self, attempt: int = 2, *, of: str = "r1") -> list[ControllerAction]:
        said = ComputedAhead(request_id=RequestId(of), attempt=attempt)
        return self.report(self.target, said)


def continued(actions: Sequence[ControllerAction]) -> ContinueRequest:
    return only(commands(actions, ContinueRequest), ContinueRequest)
