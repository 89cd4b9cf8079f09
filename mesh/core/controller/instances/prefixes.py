"""Where the beginning of a request is computed already, by what nodes have told of their KV caches.

Validation takes the prefill that is left; among the places that would do, a request goes where the
longest part of it is, unless that place is the busier by more than this saves (as llm-d and Dynamo
route). What nodes told may be out of date: a node says so when a request misses what it was
submitted with. Before: `node_schedule`, `requests.search`. After: nothing.
"""

from collections.abc import Collection, Iterable

from mesh.compute.times import Times
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import Deployment


def cached_tokens(instance: InstanceEntry, request: RequestEntry) -> int:
    """How many of the request's tokens the instance need not compute, as far as its prompt goes:
    what it was answered may be there, too; nor what is on its way to it. At least one token is left
    to compute. Answers to the same prompt go where it is computed, and take its full blocks.
    """
    if request.carried_tokens:
        return request.carried_tokens
    if request.follows_to(instance):
        return led_tokens(request, instance.footprint.block_tokens)
    return _found_tokens(instance.prefixes, instance.footprint.block_tokens, request)


def led_tokens(request: RequestEntry, block_tokens: int) -> int:
    """How many of its tokens another answer of its call computes for it."""
    blocks = min(len(request.digests(block_tokens)), (request.tokens - 1) // block_tokens)
    return blocks * block_tokens


def left_tokens(node: NodeEntry, deployment: Deployment, request: RequestEntry) -> int:
    """The same of an instance that the node would load: what unloaded ones have left to it."""
    digests = node.left.get(deployment.spec.name)
    if not digests:
        return 0
    return _found_tokens(digests, node.footprint_of(deployment).block_tokens, request)


def _found_tokens(there: Collection[int], size: int, request: RequestEntry) -> int:
    if not there:
        return 0
    found = 0
    for digest in request.digests(size):
        if digest not in there:
            break
        found += size
    return found if found < request.tokens else found - size


def preferred(candidates: Iterable[InstanceEntry], request: RequestEntry) -> InstanceEntry | None:
    """The candidate to try before the policy's first: where more of the request is computed than
    what lies before it there takes longer. None: the policy's order is as good.
    """
    heads = {digests[0] for _, digests in request.original.digests if digests}
    if not heads:
        return None
    holders = [i for i in candidates if not heads.isdisjoint(i.prefixes) and _is_open(i)]
    first = next((i for i in candidates if _is_open(i)), None) if holders else None
    best, best_s = None, 0.0
    for instance in holders:
        saved = cached_tokens(instance, request)
        if saved and instance.profile is not None:
            gain_s = Times(instance.profile).prefill_s(saved, 0) - _prefill_ahead_s(instance.node)
            if best is None or gain_s > best_s:
                best, best_s = instance, gain_s
    if first is None or best is None or best is first or best_s <= -_prefill_ahead_s(first.node):
        return None
    return best


def _is_open(instance: InstanceEntry) -> bool:
    return instance.takes_now and not instance.is_full


def _prefill_ahead_s(node: NodeEntry) -> float:
    return sum(
        Times(instance.profile).prefill_s(r.prefill_left, r.tokens - r.prefill_left)
        for instance in node.instances.values()
        if instance.profile is not None
        for r in instance.requests.values()
        if r.prefill_left
    )
