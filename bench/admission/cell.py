"""A cell on paper: a controller core that believes in nodes full of running requests.

It is built through events alone, as a live cell would be: nodes connect with four instances each,
take eight requests on each of these, and report tokens. No process, no engine, no clock.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from bench.admission.setting import (
    BATCH,
    BATCH_MAX,
    BUSY,
    CALM,
    CONTEXT_TOKENS,
    DEPLOYMENTS,
    ENGINE,
    FINGERPRINT,
    FOOTPRINT,
    HARDWARE,
    KV_BLOCKS,
    MODEL_ID,
    SLO,
    WAITING_PROMPT_TOKENS,
    Load,
    deployment,
    profile,
)
from mesh.core.controller.core import ControllerCore
from mesh.domain.actions import ControllerAction, SendCommand
from mesh.domain.events import (
    CancelRequested,
    DrainRequested,
    InvokeRequested,
    NodeConnected,
    NodeReported,
    PlaceRetryDue,
)
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import InstanceReport, NodeHello, SubmitRequest, TokensReport
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.request import Request, RequestTokens, SamplingParams
from mesh.domain.slo import PACE
from mesh.policy.registry import policy

NOW_S = 1000.0
"""When decisions are made: time stands still, so that all of them meet the same cell."""
ITERATION_S = 0.02
"""Between the last iterations of a node's instances; the one in flight began at most that ago."""
PROMPT_TOKENS = (64, 512)
OUTPUT_TOKENS = (16, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a request went, and how many tokens are reported of it."""

    request_id: RequestId
    link_id: int
    instance_id: InstanceId
    tokens: int = 0


class PaperCell:
    """Its first `busy` nodes cannot take a further request; they are the first candidates of every
    deployment. The others follow in an order of their own for each. So many more deployments have
    no instance, and no node has memory for one: they are `unloaded`.
    """

    def __init__(self, *, nodes: int, busy: int = 0, unloaded: int = 0, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._numbers = count()
        self.core = ControllerCore(
            epoch=1,
            deployments=[deployment(number, nodes) for number in range(DEPLOYMENTS + unloaded)],
            limits=CellLimits(),
            policy=policy("llm-mesh"),
            profiles=[profile()],
        )
        calm = list(range(busy, nodes))
        places = [[*range(busy), *self._random.sample(calm, len(calm))] for _ in range(DEPLOYMENTS)]
        for node in range(nodes):
            self._connect(node, [order[node] for order in places])
            self._fill(node, BUSY[(node + seed) % len(BUSY)] if node < busy else CALM)
            # Else the next node's requests would go here: large batches come first.
            self._drain(node, undo=False)
        for node in range(nodes):
            self._drain(node, undo=True)

    def request(self, of: int | None = None, prompt_tokens: int | None = None) -> Request:
        """One that a client might send, of one deployment or of all that are loaded in turn."""
        serial = next(self._numbers)
        of = serial % DEPLOYMENTS if of is None else of
        prompt_tokens = prompt_tokens or self._random.randint(*PROMPT_TOKENS)
        return Request(
            request_id=RequestId(f"r1-{serial}"),
            deployment=DeploymentName(f"model-{of}"),
            prompt_tokens=tuple(range(prompt_tokens)),
            sampling=SamplingParams(max_tokens=2 * OUTPUT_TOKENS[1], seed=1),
        )

    def forget(self, request: Request, placed: Placed | None) -> None:
        """It ends, so that the cell is as before: with its only token, or while it waits."""
        if placed is not None:
            self.core.handle(self.last_token(placed), NOW_S)
        else:
            self.core.handle(CancelRequested(request_id=request.request_id), NOW_S)
            self.core.handle(PlaceRetryDue(), NOW_S)

    def last_token(self, placed: Placed) -> NodeReported:
        """A request ends with it."""
        return self._reported([placed], 1, finish=FinishReason.LENGTH)

    def check(self) -> None:
        """Raises SystemExit when it is not what it was built to be."""
        batches = {instance.batch for instance in self.core.cell.instances.values()}
        if batches != {BATCH} or self.core.cell.queued():
            raise SystemExit(f"error: batches are {sorted(batches)}, not all {BATCH}")

    def _connect(self, node: int, places: Sequence[int]) -> None:
        instances = tuple(
            InstanceReport(
                instance_id=InstanceId(f"model-{number}-{place:04}"),
                deployment=DeploymentName(f"model-{number}"),
                model_id=MODEL_ID,
                footprint=FOOTPRINT,
                kv_blocks=KV_BLOCKS,
                kv_blocks_used=0,
                context_tokens_max=CONTEXT_TOKENS,
                batch_max=BATCH_MAX,
                batch=0,
            )
            for number, place in enumerate(places)
        )
        hello = NodeHello(
            node_id=_node_id(node),
            run_id="1",
            device=DeviceKind.CPU,
            hardware=HARDWARE,
            cores=32,
            engine=ENGINE,
            memory_bytes=DEPLOYMENTS * FOOTPRINT.instance_bytes(KV_BLOCKS),
            fingerprint=FINGERPRINT,
            instances=instances,
        )
        self.core.handle(NodeConnected(link_id=node, hello=hello), 0.0)

    def _drain(self, node: int, *, undo: bool) -> None:
        operation_id = OperationId(f"drain-{node}-{undo}")
        drain = DrainRequested(operation_id=operation_id, node_id=_node_id(node), undo=undo)
        self.core.handle(drain, NOW_S)

    def _fill(self, node: int, load: Load) -> None:
        """Requests of every age come to a node, which reports what it has computed of them by now;
        last a token of each, instance after instance.
        """
        running: dict[int, list[Placed]] = {number: [] for number in range(DEPLOYMENTS)}
        for arrival_s, number, tokens in sorted(self._arrivals(load)):
            request = self.request(number, None if tokens else WAITING_PROMPT_TOKENS)
            event = InvokeRequested(request=request)
            placed = placement(request, self.core.handle(event, arrival_s))
            if placed is None or placed.link_id != node:
                raise SystemExit(f"error: {_node_id(node)} does not take its share of requests")
            if tokens:
                self._report([placed], tokens - 1, arrival_s)
                running[number].append(replace(placed, tokens=tokens - 1))
        began_s = NOW_S - self._random.uniform(0.0, ITERATION_S)
        for number, of in running.items():
            ended_s = began_s - ITERATION_S * (DEPLOYMENTS - 1 - number)
            self._report(of, 1, ended_s, correction=load.correction)

    def _arrivals(self, load: Load) -> list[tuple[float, int, int]]:
        """When requests came, of which deployment, and how many tokens they have got. Their first
        token comes at once, so that its slack is what they are behind their pace by at most.
        """
        slack_s = PACE.slack_s(SLO, OutputHistory().mean_tokens)
        arrivals = []
        for place in range(DEPLOYMENTS * BATCH):
            tokens = self._random.randint(*OUTPUT_TOKENS)
            headroom_s = self._random.uniform(*load.headroom_s)
            age_s = slack_s + PACE.token_s(SLO) * tokens - headroom_s
            if place < load.waiting:
                tokens, age_s = 0, self._random.uniform(0.0, ITERATION_S)
            arrivals.append((NOW_S - age_s, place % DEPLOYMENTS, tokens))
        return arrivals

    def _report(
        self,
        of: Sequence[Placed],
        tokens: int,
        now_s: float,
        *,
        correction: float = CALM.correction,
    ) -> None:
        """So many new tokens for requests of one instance."""
        self.core.handle(self._reported(of, tokens, correction=correction), now_s)

    def _reported(
        self,
        of: Sequence[Placed],
        tokens: int,
        *,
        correction: float = CALM.correction,
        finish: FinishReason | None = None,
    ) -> NodeReported:
        outputs = tuple(
            RequestTokens(
                request_id=placed.request_id,
                attempt=1,
                first_index=placed.tokens,
                token_ids=(7,) * tokens,
                text="",
                finish=finish,
            )
            for placed in of
        )
        report = TokensReport(instance_id=of[0].instance_id, outputs=outputs, correction=correction)
        return NodeReported(link_id=of[0].link_id, report=report)


def placement(request: Request, actions: Sequence[ControllerAction]) -> Placed | None:
    """What was decided: where the request goes now, if anywhere."""
    for action in actions:
        if isinstance(action, SendCommand) and isinstance(action.command, SubmitRequest):
            return Placed(
                request_id=request.request_id,
                link_id=action.link_id,
                instance_id=action.command.instance_id,
            )
    return None


def _node_id(node: int) -> NodeId:
    return NodeId(f"node-{node:04}")
