"""What the cell on paper consists of: models, their profiles, and how busy its nodes are.

Iteration times are those of a small model on a CPU node: decodes of 10 to 40 ms, a millisecond for
a prompt token. A calm node needs about a quarter of its time for the tokens that it owes.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product

from mesh.compute.shapes import Axes, survey_axes
from mesh.compute.times import Times
from mesh.core.controller.core import ControllerCore
from mesh.domain.actions import ControllerAction, SendCommand
from mesh.domain.deployment import Deployment, DeploymentSpec, Scaling
from mesh.domain.events import (
    CancelRequested,
    DrainRequested,
    InvokeRequested,
    NodeConnected,
    NodeReported,
    PlaceRetryDue,
)
from mesh.domain.history import PRIOR_TOKENS, OutputHistory
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, OperationId, RequestId
from mesh.domain.limits import PREFILL_TOKENS_MAX, CellLimits
from mesh.domain.messages import InstanceReport, NodeHello, SubmitRequest, TokensReport
from mesh.domain.model import Footprint, ModelFormat, ModelInfo
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind, FinishReason
from mesh.domain.request import Request, RequestTokens, SamplingParams
from mesh.domain.slo import PACE, SLO_TOKENS_PER_S_MAX, ColdStart, Slo
from mesh.domain.values import replace
from mesh.evaluation import polyserve
from mesh.policy.registry import policy
from mesh.sim.scenario import plan

DEPLOYMENTS = 4
"""Each has an instance on every node."""
BATCH = 8
BATCH_MAX = 32
"""Requests that run on each instance."""
SLO = Slo(ttft_s=2.0, ttft_tokens_per_s=512.0, tpot_s=0.25)
CONTEXT_TOKENS = 2048
KV_BLOCKS = 512
FOOTPRINT = Footprint(weights_bytes=1 << 30, kv_block_bytes=1 << 20, block_tokens=32)
ENGINE = "paper"
HARDWARE = "32 cores, on paper"
FINGERPRINT = "paper/32"
MODEL_ID = ModelId("sha256-00000000000admit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a node is: by how much its iterations take longer than the profile says, how much
    headroom its running requests have, and how many requests have come that it has not begun with.
    """

    correction: float
    headroom_s: tuple[float, float]
    waiting: int = 0


CALM = Load(correction=1.0, headroom_s=(0.5, 4.0))
BUSY = (
    Load(correction=2.0, headroom_s=(1.5, 4.0), waiting=2),
    Load(correction=3.6, headroom_s=(0.02, 0.4)),
    Load(correction=5.0, headroom_s=(0.02, 0.4)),
)
"""They cannot take one more, for reasons that take differently long to find out: prompts wait that
would be late then; there is too little time beside the decodes for any prompt; there is none.
"""
WAITING_PROMPT_TOKENS = 550
WAITING_SLO = replace(SLO, ttft_s=20.0, cold_start=ColdStart.REFUSE)
"""The SLO of deployments that wait for a load: one would be in time, if there were memory for it.
No request is taken late: that is tried for a moment after a request has come, and here no moment
passes.
"""
WAITING_FOOTPRINT = replace(FOOTPRINT, weights_bytes=4 << 30)
"""More than the others leave of a node, whatever they give back."""


def deployment(number: int, nodes: int) -> Deployment:
    """One that may have an instance on each of so many nodes; from `DEPLOYMENTS` on, one that has
    none.
    """
    waits = number >= DEPLOYMENTS
    spec = DeploymentSpec(
        name=DeploymentName(f"model-{number}"),
        source="file:///models/paper",
        slo=WAITING_SLO if waits else SLO,
        scaling=Scaling(replicas_max=nodes, keep_alive_s=600.0),
        devices=(DeviceKind.CPU,),
    )
    return Deployment(
        spec=spec,
        model=_model(),
        context_tokens_max=CONTEXT_TOKENS,
        footprints=((ENGINE, WAITING_FOOTPRINT if waits else FOOTPRINT),),
    )


def profile() -> Profile:
    """A profile of the size that a survey gives."""
    axes = survey_axes(
        context_tokens_max=CONTEXT_TOKENS,
        batch_max=BATCH_MAX,
        kv_tokens=KV_BLOCKS * FOOTPRINT.block_tokens,
        prefill_tokens_max=PREFILL_TOKENS_MAX,
    )
    return Profile(
        model_id=MODEL_ID,
        device=DeviceKind.CPU,
        fingerprint=FINGERPRINT,
        hardware=HARDWARE,
        cores=32,
        parameters=1_000_000_000,
        weights_bytes=FOOTPRINT.weights_bytes,
        kv_bytes_per_token=FOOTPRINT.kv_block_bytes // FOOTPRINT.block_tokens,
        prefill=_prefill(axes),
        decode=_decode(axes),
        measured_s=60.0,
    )


def _prefill(axes: Axes) -> Grid:
    rows, columns = axes.prefill_rows, axes.prefill_columns
    seconds = tuple(tuple(0.01 + 0.001 * n * (1 + past / 8192) for past in columns) for n in rows)
    return Grid(rows=rows, columns=columns, seconds=seconds)


def _decode(axes: Axes) -> Grid:
    rows, columns = axes.decode_rows, axes.decode_columns
    seconds = tuple(tuple(0.01 + n * (0.0004 + c * 0.25e-6) for c in columns) for n in rows)
    return Grid(rows=rows, columns=columns, seconds=seconds)


def _model() -> ModelInfo:
    return ModelInfo(
        model_id=MODEL_ID,
        source="file:///models/paper",
        format=ModelFormat.SAFETENSORS,
        architecture="llama",
        context_tokens_max=CONTEXT_TOKENS,
        vocabulary_tokens=32_000,
        layers=16,
        hidden_size=2048,
        attention_heads=32,
        kv_heads=8,
        head_size=64,
        parameters=1_000_000_000,
        disk_bytes=1 << 30,
        stop_token_ids=(2,),
    )


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
        self._random, self._numbers = random.Random(seed), count()
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

    def invoked(self) -> InvokeRequested:
        """One such request comes."""
        return InvokeRequested(request=self.request())

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


TIERS_S = (0.035, 0.04, 0.045, 0.05)
"""TPOT limits, at which an H200 holds TIER_BATCH requests, longer ones where they are looser."""
TIER_BATCH = 150
TIER_ANSWERS = (64, 192)
"""Tokens of answers that end: the mean stays where it is, but for a little."""


class TierCell(PaperCell):
    """Virtual H200 in four tiers under a policy that has them. One of each tier has TIER_BATCH
    requests of half the length, and room for more; all others have as many as they take, which is
    TIER_BATCH at least. The instances with room have the number 0.
    """

    def __init__(self, *, rule: str, servers: int, seed: int = 1) -> None:
        self._random, self._numbers = random.Random(seed), count()
        each = max(servers // len(TIERS_S), 1)
        load = polyserve.Load(workload="uniform_512_512", servers=each * len(TIERS_S))
        mix = ",".join(f"{tpot_s}:{1 / len(TIERS_S)}" for tpot_s in TIERS_S)
        made = plan(replace(load.scenario(rule, 1.0), slo_mix=mix))
        (self._deployment,) = made.deployments
        self.core = ControllerCore(
            epoch=1,
            deployments=made.deployments,
            limits=made.limits,
            policy=policy(rule),
            profiles=made.profiles,
        )
        model_id = self._deployment.model.model_id
        times = Times(next(of for of in made.profiles if of.model_id == model_id))
        self._prompts = [
            bisect_right(range(8192), 0.97 * tpot_s, key=lambda n: times.decode_s(TIER_BATCH, n))
            - round(PRIOR_TOKENS)
            for tpot_s in TIERS_S
        ]
        for node, (number, of) in enumerate(product(range(each), range(len(TIERS_S)))):
            hello = replace(made.nodes[node].hello, node_id=_node_id(node))
            report = self._instance(f"tier-{of}-{number:04}", hello)
            self.core.handle(
                NodeConnected(link_id=node, hello=replace(hello, instances=(report,))), NOW_S
            )
            self._fill_tier(of, node, full=number > 0)
            self._drain(node, undo=False)
        for node in range(len(made.nodes)):
            self._drain(node, undo=True)

    def _instance(self, name: str, hello: NodeHello) -> InstanceReport:
        footprint = dict(self._deployment.footprints)[hello.engine]
        return InstanceReport(
            instance_id=InstanceId(name),
            deployment=self._deployment.spec.name,
            model_id=self._deployment.model.model_id,
            footprint=footprint,
            kv_blocks=(hello.memory_bytes - footprint.instance_bytes(0))
            // footprint.kv_block_bytes,
            kv_blocks_used=0,
            context_tokens_max=self._deployment.context_tokens_max,
            batch_max=polyserve.BATCH_MAX,
            batch=0,
        )

    def _fill_tier(self, of: int, node: int, *, full: bool) -> None:
        prompt_tokens = self._prompts[of] if full else self._prompts[of] // 2
        for number in count():
            event = self.invoked(of, prompt_tokens)
            if number == TIER_BATCH and not full:
                return
            placed = placement(event.request, self.core.handle(event, NOW_S))
            if placed is None and number >= TIER_BATCH:
                self.forget(event.request, None)
                return
            if placed is None or placed.link_id != node:
                raise SystemExit(f"error: {_node_id(node)} takes {number} requests of a tier")
            self._report([placed], self._random.randint(*OUTPUT_TOKENS), NOW_S)

    def invoked(self, of: int | None = None, prompt_tokens: int | None = None) -> InvokeRequested:
        """One that a client might send, of one tier or of all in turn."""
        request = self.request(0, prompt_tokens)
        of = int(request.request_id.rpartition("-")[2]) % len(TIERS_S) if of is None else of
        slo = Slo(name=f"{TIERS_S[of]}", ttft_tokens_per_s=SLO_TOKENS_PER_S_MAX, tpot_s=TIERS_S[of])
        deployment = self._deployment.spec.name
        return InvokeRequested(request=replace(request, deployment=deployment), slo=slo)

    def last_token(self, placed: Placed) -> NodeReported:
        """A request ends with an answer."""
        tokens = self._random.randint(*TIER_ANSWERS)
        return self._reported([placed], tokens, finish=FinishReason.LENGTH)

    def check(self) -> None:
        """Raises SystemExit when it is not what it was built to be."""
        least = min(instance.batch for instance in self.core.cell.instances.values())
        if least != TIER_BATCH or self.core.cell.queued():
            raise SystemExit(f"error: the smallest batch is {least}, not {TIER_BATCH}")


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
