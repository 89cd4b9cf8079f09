"""Plans how many instances of a deployment its calls need, those that have come or are to come.

It tells `mesh.plan.live` of the cell's nodes: which hold an instance or have room for one, how
quick they are, how well that is known, and what else they compute. An operator may ask for a plan;
a deployment with `spec.scaling.plan` is planned again and again, and `replicas.warm` loads as many,
unless a load is quick enough for whoever calls. Admission stays the judge of every call. Before:
`core`.
"""

from math import exp
from statistics import fmean

from mesh.compute.times import Times
from mesh.core.controller.instances.kv_cache import batch_max
from mesh.core.controller.instances.node_schedule import plan_load
from mesh.core.controller.requests.replicas import warm
from mesh.core.controller.requests.search import InstanceNeeds
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import WantInstances
from mesh.domain.deployment import Deployment
from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.reasons import ProfileSource
from mesh.domain.values import replace
from mesh.domain.views import Arrivals, InstancePlan
from mesh.plan.live import Host, plan

RECEIVED_S = 300.0
"""An operator's plan, and one in a lull, is for the calls of so long, unless others are given."""
BESIDE_S = 60.0
"""What other deployments compute on a node is told by their calls of so long."""
BESIDE_MAX = 0.9
"""The most of a node's time that others are expected to take."""


def planned(ctx: EventContext, entry: DeploymentEntry, calls: Arrivals | None) -> InstancePlan:
    """The plan for these calls, or for those that have come lately. Raises InvalidInput where
    nothing can be planned, and Unavailable where no node takes the deployment.
    """
    deployment = entry.deployment
    assert deployment is not None
    if entry.spec.task is not None:
        raise InvalidInput(
            f"{entry.name!r} has task {entry.spec.task}: plans are for text, whose tokens come in "
            "batches",
            hint="say with `mesh scale` how many instances stay loaded",
        )
    if calls is None:
        calls = entry.received(ctx.now_s, RECEIVED_S)
        if not calls.prompts:
            raise InvalidInput(
                f"{entry.name!r} has had no call within {RECEIVED_S:.0f} s",
                hint="say what is to come: --rate and --lengths, or a --journal",
            )
    longest, context = max(calls.prompts, default=0), deployment.context_tokens_max
    if longest >= context:
        raise InvalidInput(
            f"a prompt has {longest} tokens; the context of {entry.name!r} holds {context}",
            hint="plan for shorter prompts",
        )
    made = plan(
        _hosts(ctx, entry, deployment, calls),
        calls,
        entry.slo,
        replicas_max=entry.spec.scaling.replicas_max,
        chunk_tokens=ctx.policy.node_rule.chunk_tokens_max,
    )
    return replace(made, revision=deployment.revision)


def _hosts(
    ctx: EventContext, entry: DeploymentEntry, deployment: Deployment, calls: Arrivals
) -> list[Host]:
    """Those that hold an instance, and then those with room for one, as the policy ranks them."""
    takers = [node for node in ctx.cell.nodes.values() if ctx.takes(node, entry.spec)]
    if not takers:
        message, hint = ctx.why_no_node(entry.spec)
        raise Unavailable(message, hint=hint)
    if too_large := ctx.why_too_large(entry):
        hint = "divide it over more devices (tensor_parallel), or start a larger node"
        raise InvalidInput(too_large, hint=hint)
    large = [node for node in takers if node.could_hold(entry)]
    there = [i.node for i in entry.instances.values() if i.takes_requests and i.node in large]
    needs = InstanceNeeds(ctx, entry, ())
    others = [node for node in large if node not in there and needs.room(node) is not None]
    ordered = [*dict.fromkeys(there), *ctx.ranked(others, deployment)]
    beside: dict[DeploymentName, float] = {}
    hosts = [_host(ctx, entry, deployment, node, calls, beside) for node in ordered]
    known = [host for host in hosts if host.profile.origin is not ProfileSource.ESTIMATE]
    if not hosts:
        raise Unavailable(
            f"none of {len(large)} nodes has room for an instance of {entry.name!r}",
            hint="`mesh top` shows who holds the memory; `mesh unload` frees it",
        )
    if not known:
        raise InvalidInput(
            f"no iteration of {entry.name!r} has been measured on {len(hosts)} nodes",
            hint=f"run `mesh profile {entry.name}`",
        )
    return known


def _host(
    ctx: EventContext,
    entry: DeploymentEntry,
    deployment: Deployment,
    node: NodeEntry,
    calls: Arrivals,
    beside: dict[DeploymentName, float],
) -> Host:
    footprint = node.footprint_of(deployment)
    tokens = sum(calls.prompts) / max(len(calls.prompts), 1) + calls.answer_tokens
    blocks = max(tokens / footprint.block_tokens, 1.0)
    kv_bytes = node.capacity_bytes - footprint.instance_bytes(0)
    fit = int(kv_bytes / (footprint.kv_block_bytes * blocks)) if footprint.kv_block_bytes else 1
    there = next((i for i in entry.instances.values() if i.node is node), None)
    return Host(
        node_id=node.node_id,
        profile=ctx.cell.expectations.profile(deployment.model, footprint, node.hello),
        batch_max=max(min(batch_max(ctx, entry, node), fit), 1),
        factor=1.0 if there is None else there.correction.factor(ctx.now_s),
        error=(there.off_p95 or None) if there is not None else None,
        power=node.power(),
        beside=min(
            sum(
                _busy(ctx, instance, beside)
                for instance in node.instances.values()
                if instance.deployment != entry.name and instance.takes_requests
            ),
            BESIDE_MAX,
        ),
    )


def _busy(ctx: EventContext, instance: InstanceEntry, known: dict[DeploymentName, float]) -> float:
    """The share of its node's time that an instance computes, by the latest calls of its
    deployment: the time with a call in an M/G/∞ queue, since calls decode together. `known`: by
    deployment, what was worked out for the same plan.
    """
    name = instance.deployment
    if name not in known:
        owner = ctx.cell.deployments.get(name)
        calls = owner.received(ctx.now_s, BESIDE_S) if owner is not None else None
        share = 0.0
        if owner is not None and calls is not None and calls.prompts and instance.profile:
            tokens, factor = fmean(calls.prompts), instance.correction.factor(ctx.now_s)
            times = Times(instance.profile, factor)
            decode_s = times.decode_s(1, tokens + calls.answer_tokens / 2)
            call_s = times.prefill_s(round(tokens), 0) + (calls.answer_tokens - 1) * decode_s
            share = 1 - exp(-calls.rate_per_s / max(owner.replicas(), 1) * call_s)
        known[name] = share
    return known[name]


def look(ctx: EventContext) -> None:
    """Plan deployments whose time it is."""
    for entry in list(ctx.cell.deployments.values()):
        rule = entry.spec.scaling.plan
        if rule is None or entry.state is not DeploymentState.READY or entry.deployment is None:
            continue
        if ctx.now_s >= entry.planned_s + rule.every_s:
            _plan_again(ctx, entry, rule.every_s)


def _plan_again(ctx: EventContext, entry: DeploymentEntry, within_s: float) -> None:
    """Have as many instances loaded ahead as the calls since the last plan need; without any, those
    of RECEIVED_S: what is called now and then is what a load makes late.
    """
    before, calls = entry.warm, entry.received(ctx.now_s, within_s)
    if not calls.prompts:
        calls = entry.received(ctx.now_s, RECEIVED_S)
    needed, why = 0, f"no call within {RECEIVED_S:g} s"
    if calls.prompts:
        try:
            made = planned(ctx, entry, calls)
            needed = made.replicas
            why = made.lacks or f"{calls.words}: {made.utilisation:.0%} of {needed} in use"
            load_s = _load_s(ctx, entry, made)
            if load_s + made.ttft_s <= entry.slo.ttft_limit_s(min(calls.prompts)):
                needed, why = 0, f"{why}, whom a load of {load_s:.2g} s does not make late"
        except MeshError as error:
            why = error.message
    entry.note_plan(needed, why, ctx.now_s)
    if entry.warm != before:
        ctx.act(WantInstances(name=entry.name, wanted=entry.warm, why=why))
    warm(ctx, entry)


def _load_s(ctx: EventContext, entry: DeploymentEntry, made: InstancePlan) -> float:
    """The longest load of those that the plan would need if nothing were loaded."""
    assert entry.deployment is not None
    mine = [i.instance_id for i in entry.instances.values()]
    nodes = [ctx.cell.nodes[node_id] for node_id in made.nodes]
    return max([plan_load(ctx, entry.deployment, n, mine).load_s for n in nodes], default=0.0)
