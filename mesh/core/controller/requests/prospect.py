"""What would become of a deployment that is not there yet: whether an instance fits each node, and
whether the calls so far would keep its SLO there.

It asks by the prices and tests that admission uses, and changes nothing. The size of a model that
the cell has never imported is not known: a deployment of the same source and precision tells it.
Before: the core's `prospect`. After: the page and its API.
"""

from collections.abc import Iterable
from itertools import count

from mesh.compute.times import Times
from mesh.core.controller.instances.kv_cache import batch_max
from mesh.core.controller.instances.node_schedule import (
    Forecast,
    alone_s,
    decodes_share,
    forecast_on_start,
    plan_load,
)
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.requests.search import InstanceNeeds
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.ids import RequestId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.reasons import Verdict
from mesh.domain.request import Request, SamplingParams
from mesh.domain.views import Fit, NodeProspect, Prospect
from mesh.request.candidates import Candidates
from mesh.request.shadow import LOOKAHEAD_TOKENS

PROMPT_TOKENS_GUESSED = 256
"""The length of a prompt where no call has shown one."""


def prospect(ctx: EventContext, spec: DeploymentSpec) -> Prospect | None:
    """`None` where no deployment has told how large the model is. A context of `None` is what the
    model allows, and one beyond that counts as that.
    """
    like = _like(ctx.cell.deployments.values(), spec)
    if like is None or like.deployment is None:
        return None
    allowed = like.deployment.model.context_tokens_max
    context = min(spec.context_tokens_max or allowed, allowed)
    made = Deployment(
        spec=spec,
        model=like.deployment.model,
        context_tokens_max=context,
        footprints=like.footprints,
    )
    called = ctx.cell.current(spec.name) or like
    entry = DeploymentEntry(
        spec=spec,
        state=DeploymentState.READY,
        candidates=Candidates(ctx.policy.instance_rank),
        deployment=made,
        history=called.history,
    )
    prompts = called.served and called.prompt_tokens // called.served
    prompt_tokens = max(min(prompts or PROMPT_TOKENS_GUESSED, context - 1), 1)
    output_tokens = max(round(min(entry.answer_tokens, context - prompt_tokens)), 1)
    request = _request(ctx, spec, prompt_tokens, output_tokens)
    calls_per_s = called.calls_per_s(ctx.now_s)
    nodes = [node for _, node in sorted(ctx.cell.nodes.items()) if ctx.takes(node, spec)]
    return Prospect(
        like=called.name,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        calls_per_s=calls_per_s,
        nodes=tuple(_on(ctx, entry, node, request, output_tokens, calls_per_s) for node in nodes),
    )


def _like(entries: Iterable[DeploymentEntry], spec: DeploymentSpec) -> DeploymentEntry | None:
    """A deployment of the same model, held and computed in the same way."""

    def kind(one: DeploymentSpec) -> tuple[object, ...]:
        return one.source, one.weights, one.precision, one.task, one.tensor_parallel

    known = (e for e in entries if e.deployment is not None and kind(e.spec) == kind(spec))
    return next(known, None)


def _request(
    ctx: EventContext, spec: DeploymentSpec, prompt_tokens: int, output_tokens: int
) -> RequestEntry:
    """A call as the calls so far were, which comes now."""
    pace = ctx.policy.pace(spec.slo)
    return RequestEntry(
        original=Request(
            request_id=RequestId("prospect"),
            deployment=spec.name,
            prompt_tokens=(0,) * prompt_tokens,
            sampling=SamplingParams(max_tokens=output_tokens),
        ),
        slo=spec.slo,
        pace=pace,
        arrival_s=ctx.now_s,
        queued_at_s=ctx.now_s,
        slack_s=pace.slack_s(spec.slo, output_tokens),
    )


def _on(
    ctx: EventContext,
    entry: DeploymentEntry,
    node: NodeEntry,
    request: RequestEntry,
    output_tokens: int,
    calls_per_s: float,
) -> NodeProspect:
    deployment, now_s = entry.made, ctx.now_s
    footprint = node.footprint_of(deployment)
    needs = InstanceNeeds(ctx, entry, [request])
    room = needs.room(node)
    needed_bytes = footprint.instance_bytes(needs.kv_blocks(node, footprint)[0])
    if room is not None:
        fit = Fit.ONCE_IDLE_GO if room.unloads else Fit.NOW
    else:
        fit = Fit.ONCE_OTHERS_GO if needed_bytes <= node.capacity_bytes else Fit.NEVER
    profile = ctx.cell.profile_on(node, deployment)
    price = Price(ctx, None, entry, node, None, request, room=room)
    share = ctx.share_of(node, decodes_share)
    if ctx.policy.promises:
        cold = price.forecast()
        warm = forecast_on_start(
            node, profile, lambda: now_s, request, share=share, now_s=now_s, limits=ctx.limits
        )
    else:
        # Nobody validates: what it takes on a node that does nothing else.
        seconds = alone_s(profile, request, node.rule, ctx.limits)
        cold, warm = (
            Forecast(verdict=Verdict.PASSES, first_token_s=ready_s + seconds)
            for ready_s in (price.slot.ready_s, now_s)
        )
    times = Times(profile, node.rule.overestimate)
    most = batch_max(ctx, entry, node)
    context = request.tokens + output_tokens / 2 + LOOKAHEAD_TOKENS
    prefill_s = times.prefill_s(request.tokens, 0)

    def takes_s(batch: int) -> float:
        return prefill_s + output_tokens * times.decode_s(batch, context)

    # Little's law: so many are decoded at once as arrive while one of them is served.
    batch = next(n for n in count(1) if n >= most or calls_per_s * takes_s(n) <= n)
    decode_s = times.decode_s(batch, context)
    # Those of its calls that run already are among the calls so far.
    busy_share = decodes_share(node, now_s, without=entry.name) + decode_s / request.pace_s
    carries = calls_per_s * takes_s(batch) <= batch
    in_time = warm.verdict is Verdict.PASSES and warm.first_token_s <= request.due_s
    return NodeProspect(
        node_id=node.node_id,
        fit=fit,
        needed_bytes=needed_bytes,
        free_bytes=node.free_bytes_for(deployment),
        capacity_bytes=node.capacity_bytes,
        tier=node.tier_of(deployment),
        load_s=plan_load(ctx, deployment, node).load_s,
        measured=profile.measured,
        cold=cold.verdict,
        cold_ttft_s=cold.first_token_s - now_s,
        warm=warm.verdict,
        warm_ttft_s=warm.first_token_s - now_s,
        batch=batch,
        tpot_s=decode_s,
        busy_share=busy_share,
        keeps_slo=in_time and carries and busy_share <= 1.0,
    )
