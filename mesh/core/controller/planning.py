"""Plans how many instances of a deployment its calls need, those that have come or are to come.

It tells `mesh.plan.live` of the cell's nodes: which hold an instance or have room for one, how
quick they are, and how well that is known. An operator may ask for a plan; a deployment with
`spec.scaling.plan` is planned again and again, and `replicas.warm` loads as many. Admission stays
the judge of every call. Before: `core`.
"""

from mesh.core.controller.instances.kv_cache import batch_max
from mesh.core.controller.requests.replicas import warm
from mesh.core.controller.requests.search import InstanceNeeds
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import WantInstances
from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.reasons import ProfileSource
from mesh.domain.revision import public_name
from mesh.domain.values import replace
from mesh.domain.views import Arrivals, InstancePlan
from mesh.plan.live import Host, plan

RECEIVED_S = 300.0
"""An operator's plan is for the calls of so long, unless it says for which."""


def planned(
    ctx: EventContext, entry: DeploymentEntry, calls: Arrivals | None, *, beside: bool = True
) -> InstancePlan:
    """The plan for these calls, or for those that have come lately; `beside` what other deployments
    compute, or as if each node were this one's alone. Raises InvalidInput where
    nothing can be planned, and Unavailable where no node takes the deployment.
    """
    deployment = entry.made
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
        _hosts(ctx, entry, calls, beside),
        calls,
        entry.slo,
        replicas_max=entry.spec.scaling.replicas_max,
        chunk_tokens=ctx.policy.node_rule.chunk_tokens_max,
    )
    return replace(made, revision=deployment.revision)


def _hosts(ctx: EventContext, entry: DeploymentEntry, calls: Arrivals, beside: bool) -> list[Host]:
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
    ordered = [*dict.fromkeys(there), *ctx.ranked(others, entry.made)]
    hosts = [_host(ctx, entry, node, calls, beside) for node in ordered]
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
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, calls: Arrivals, beside: bool
) -> Host:
    footprint = node.footprint_of(entry.made)
    tokens = sum(calls.prompts) / max(len(calls.prompts), 1) + calls.answer_tokens
    blocks = max(tokens / footprint.block_tokens, 1.0)
    kv_bytes = node.capacity_bytes - footprint.instance_bytes(0)
    fit = int(kv_bytes / (footprint.kv_block_bytes * blocks)) if footprint.kv_block_bytes else 1
    there = next((i for i in entry.instances.values() if i.node is node), None)
    name = public_name(entry.name)
    return Host(
        node_id=node.node_id,
        profile=ctx.cell.profile_on(node, entry.made),
        batch_max=max(min(batch_max(ctx, entry, node), fit), 1),
        factor=1.0 if there is None else there.correction.factor(ctx.now_s),
        left_share=node.left_share(name, ctx.now_s) if beside else 1.0,
        turn_of_others_s=node.turn_of_others_s(name, ctx.now_s) if beside else 0.0,
        error=(there.off_p95 or None) if there is not None else None,
        power=node.power(),
    )


def look(ctx: EventContext) -> None:
    """Plan deployments whose time it is."""
    for entry in list(ctx.cell.deployments.values()):
        rule = entry.spec.scaling.plan
        if rule is None or entry.state is not DeploymentState.READY or entry.deployment is None:
            continue
        if ctx.now_s >= entry.planned_s + rule.every_s:
            _plan_again(ctx, entry, rule.every_s)


def _plan_again(ctx: EventContext, entry: DeploymentEntry, within_s: float) -> None:
    """Have as many instances loaded ahead as the calls since the last plan need."""
    before, calls = entry.warm, entry.received(ctx.now_s, within_s)
    needed, why = 0, f"no call within {within_s:g} s"
    if calls.prompts:
        try:
            # Others may give way to it: what they took does not unload its instances.
            made = planned(ctx, entry, calls, beside=False)
            needed = made.replicas
            why = made.lacks or f"{calls.words}: {made.utilisation:.0%} of {needed} in use"
        except MeshError as error:
            why = error.message
    entry.note_plan(needed, why, ctx.now_s)
    if entry.warm != before:
        ctx.act(WantInstances(name=entry.name, wanted=entry.warm, why=why))
    warm(ctx, entry)
