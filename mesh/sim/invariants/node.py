"""What holds of a node core after every event: what it has is counted, and the engine has work; and
of an engine's KV blocks: each is free, used or cached, and its key says what it holds.

Before: whoever watches a node. After: nothing; a rule that is broken raises.
"""

from collections import Counter

from mesh.core.node.core import NodeCore
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.state import LocalNode
from mesh.domain.limits import HEARTBEAT_S
from mesh.memory.block_keys import next_key
from mesh.sim.invariants.rule import hold
from mesh.sim.sequences import Instance, Sequence
from mesh.sim.virtual_engine import VirtualEngine

LOADS = (LocalState.LOADING, LocalState.ABANDONED)


def check_node_core(core: NodeCore) -> None:
    """All of it."""
    node = core._node  # the state as it is kept
    loads = sum(instance.state in LOADS for instance in node.instances.values())
    under_way = node.beside_loads.under_way
    hold(under_way == loads, "{} loads are under way, not {}", under_way, loads)
    for instance_id, instance in node.instances.items():
        hold(instance.instance_id == instance_id, "{} is known by another id", instance_id)
        _check_instance(node, instance)
        _check_requests(node, instance)
    running = [r for instance in node.instances.values() for r in instance.requests]
    hold(len(running) == len(set(running)), "a request is here twice: {}", sorted(running))
    _check_work(node)
    if not node.linked:
        every = (r for of in node.instances.values() for r in of.requests.values())
        others = [r.request_id for r in every if not r.order.request.keyed]
        hold(not others, "{} run for nobody", others)
        since_s = core._now_s - node.unlinked_s
        held = since_s <= core._limits.hold_s_max + HEARTBEAT_S
        hold(held or not running, "{} run without a controller for {} s", running, since_s)
        asked = node.imports or node.survey is not None
        hold(not asked, "{} or a survey go on for nobody", list(node.imports))


def _check_instance(node: LocalNode, instance: LocalInstance) -> None:
    name, state = instance.instance_id, instance.state
    ready = state is LocalState.READY
    hold(not ready or instance.footprint is not None, "{} is ready, and of no size", name)
    hold(ready or not instance.requests, "{} is {}, with requests", name, state)
    unasked, under_way = instance.resizing_unasked, len(instance.resizing)
    hold(unasked <= under_way, "{}: {} of {} resizes unasked", name, unasked, under_way)
    waits = state is LocalState.WAITING or (ready and instance.resize_waiting is not None)
    lacks = node.waits(instance.waiting_bytes) or node.swapping == name
    hold(not waits or lacks, "{} waits for memory that is free", name)
    hold(node.linked or state is not LocalState.WAITING, "{} is to be loaded for nobody", name)
    hold(not (ready and instance.unbooked), "{} is ready, and unbooked", name)


def _check_requests(node: LocalNode, instance: LocalInstance) -> None:
    batch_max = instance.command.batch_max
    batch = len(instance.requests)
    hold(batch <= batch_max, "{} has {} requests of {}", instance.instance_id, batch, batch_max)
    for request_id, request in instance.requests.items():
        tokens = len(request.order.request.prompt_tokens) + request.output_tokens
        hold(
            request.tokens == tokens, "{} has {} tokens, not {}", request_id, request.tokens, tokens
        )
        left = request.prefill_left
        hold(0 <= left <= tokens, "{} has {} of {} tokens to compute", request_id, left, tokens)
        hold(request.paused == request.order.paused, "{} is paused: {}", request_id, request.paused)
        step = request.first_step
        hold(step <= node.steps_started + 1, "{} is to begin with step {}", request_id, step)
    if instance.kept_run_queue is not None:
        _check_run_queue(instance)


def _check_run_queue(instance: LocalInstance) -> None:
    """It holds the requests that the instance has now, for the profile that it has now."""
    kept = instance.kept_run_queue
    assert kept is not None
    name = instance.instance_id
    if not instance.requests:
        hold(False, "{} has work without requests", name)
    now = instance._filled_run_queue(0.0, 0.0, kept.times.factor)
    hold(kept.batch == now.batch, "{}: {} decode, not {}", name, kept.batch, now.batch)
    same = (kept.context_tokens, kept.oldest_s, kept.decode_s)
    hold(same == (now.context_tokens, now.oldest_s, now.decode_s), "{}: kept {}", name, same)
    prompts = [(prompt.left, prompt.past) for prompt in kept.prompts]
    hold(prompts == [(p.left, p.past) for p in now.prompts], "{}: prompts {}", name, prompts)
    margins_s = {round(due - at, 6) for due, at in zip(now.dues_s, kept.dues_s, strict=True)}
    early = len(margins_s) <= 1 and all(0.0 <= s <= now.tpot_s / 4 + 1e-6 for s in margins_s)
    hold(early, "{}: deadlines come earlier by {} s", name, margins_s)


def _check_work(node: LocalNode) -> None:
    """The engine is idle only when there is nothing to compute, or nothing but best effort while
    the weights of others come.
    """
    survey, stepping, comes = node.survey, node.stepping, node.weights_come()
    if survey is not None:
        known = node.instances.get(survey.instance.instance_id) is survey.instance
        ready = survey.instance.state is LocalState.READY
        hold(known and ready, "{} is measured, and not ready", survey.instance.instance_id)
    if stepping is not None:
        there = stepping not in node.instances or node.computes(node.instances[stepping])
        hold(there, "{} computes without weights", stepping)
        return
    for instance_id, instance in node.instances.items():
        ready = instance.state is LocalState.READY and node.computes(instance)
        works = ready and instance.has_work() and instance.promising
        waits = comes and all(r.order.slo.best_effort for r in instance.requests.values())
        hold(waits or not works, "{} has work, and the engine is idle", instance_id)
    asked = survey is not None and survey.operation_id is not None
    out = survey is not None and not node.computes(survey.instance)
    hold(not asked or out or node.loading(), "a survey waits, and the engine is idle")


def check_blocks(engine: VirtualEngine) -> None:
    for name, instance in engine.instances():
        pool, sequences = instance.pool, instance.sequences.values()
        size = instance.footprint.block_tokens
        tables = [s.prefix.table for s in sequences if s.prefix is not None]
        holders = Counter(block for table in tables for block in table)
        counted = sum(s.capacity_tokens // size for s in sequences if s.prefix is None)
        used = counted + len(holders)
        hold(pool.used == used, "{} has {} KV blocks used, not {}", name, pool.used, used)
        named = dict(pool.named())
        cached = sum(block not in holders for block in named.values())
        hold(pool.cached == cached, "{} has {} KV blocks cached, not {}", name, pool.cached, cached)
        for block in named.values():
            have, told = holders.get(block, 0), pool.holders(block)
            hold(have == told, "{} have block {} of {}, not {}", have, block, name, told)
        for sequence in sequences:
            if sequence.prefix is not None:
                _check_keys(instance, sequence, named)
                break  # one of them at a time is enough


def _check_keys(instance: Instance, sequence: Sequence, named: dict[bytes, int]) -> None:
    """Its blocks have the keys of its tokens, worked out anew."""
    prefix, size = sequence.prefix, instance.footprint.block_tokens
    assert prefix is not None
    key = prefix.walk.root
    for n in range(sequence.computed // size):
        key = next_key(key, prefix.tokens[n * size : (n + 1) * size])
        found, has = named.get(key), prefix.table[n]
        hold(found == has, "block {} of {} has another key", has, sequence.request_id)
