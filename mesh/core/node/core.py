"""The node core: which instance gets the next turn, and what the controller is told.

`handle` takes commands, and what came of engine calls, and returns engine calls and reports. At
most one turn is under way on a node; as soon as it is over, the next one is given, by the turn rule
of the controller's policy. The core owns the node's view of its instances and requests; the engine
owns the tokens.
"""

from collections.abc import Sequence
from typing import assert_never

from mesh.core.node import imports, instances, measuring, prefixes, swapping
from mesh.core.node.context import NodeEventContext
from mesh.core.node.energy import EnergyMeter
from mesh.core.node.instances import cancel
from mesh.core.node.iterations import broken, learn, step_finished, submit_broke, tell_refined
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.priming import to_prime
from mesh.core.node.request import LocalRequest
from mesh.core.node.state import LocalNode
from mesh.domain.actions import FetchKv, NodeAction, StartStep, SubmitToEngine
from mesh.domain.energy import Power
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import (
    AbortRequest,
    CancelImport,
    CancelProfile,
    ComputedAhead,
    ContinueRequest,
    HeldRequest,
    ImportDone,
    ImportFailed,
    ImportModel,
    ImportProgress,
    InstanceGone,
    InstanceLoaded,
    InstanceReport,
    KvArrived,
    KvResized,
    LoadFailed,
    LoadInstance,
    LoadProgress,
    NodeCommand,
    OfferKv,
    ProfileInstance,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.node_events import (
    AbortFinished,
    CommandReceived,
    HeartbeatDue,
    LinkClosed,
    LinkOpened,
    MeasureBroke,
    MeasureFinished,
    NodeEvent,
    PrefixesTold,
    StepBroke,
    StepFinished,
    SubmitBroke,
    SubmitFinished,
    SwapFinished,
)
from mesh.domain.request import RequestOrder
from mesh.domain.steps import EngineRequest
from mesh.policy.rules.registry import rule_named
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import (
    Grant,
    TurnRule,
    best_effort_tokens,
    leaves_time,
    may_wait,
    name_all,
    next_turn,
)


class NodeCore:
    def __init__(
        self,
        *,
        limits: NodeLimits,
        own_rule: TurnRule | None = None,
        power: Power | None = None,
    ) -> None:
        """`own_rule`: the turn rule of the node's own policy file, if it has one. `power`: the
        watts by which its joules are reckoned where no counter tells them.
        """
        self._limits = limits
        self._own_rule = own_rule
        self._node = LocalNode(energy=EnergyMeter(power=power))
        self._now_s = 0.0
        """The time of the last event."""

    def instances(self) -> tuple[InstanceReport, ...]:
        """What is loaded, for the hello of a new link."""
        return self._node.reports(self._now_s, whole=True)

    def requests(self) -> tuple[HeldRequest, ...]:
        """What it has computed on without a controller, for the same."""
        return self._node.held(self._now_s)

    @property
    def base_bytes(self) -> int:
        """See `Heartbeat.base_bytes`."""
        return self._node.base_bytes

    def handle(self, event: NodeEvent, now_s: float) -> list[NodeAction]:
        self._now_s = now_s
        ctx = NodeEventContext(now_s=now_s, node=self._node)
        if isinstance(event, _DISTURBING):
            self._node.note_disturbed(now_s)
        self._dispatch(ctx, event)
        swapping.decide(ctx, self._node, self._limits.deadline_margin_s_max)
        self._grant(ctx, primes=_is_calm(event))
        return ctx.ordered()

    def _grant(self, ctx: NodeEventContext, *, primes: bool) -> None:
        """The next turn, if the engine is free and an instance has work, of best effort where that
        may be; else a measurement.
        """
        node = self._node
        if node.stepping is not None:
            return
        margin_s = self._limits.deadline_margin_s_max
        care, whole = node.rule.overestimate, node.shows_all
        run_queues = [
            run_queue
            for instance in node.instances.values()
            if instance.requests
            and (whole or node.computes(instance))
            and (run_queue := instance.run_queue(ctx.now_s, margin_s, node.slowdown, care))
            is not None
        ]
        most = min(self._limits.prefill_tokens_max, node.rule.chunk_tokens_max)
        turn_s_max = node.rule.turn_s_max
        for run_queue in run_queues if whole else ():
            node.place(run_queue, ctx.now_s)
        grant = next_turn(
            node.turns, run_queues, ctx.now_s, prefill_tokens_max=most, turn_s_max=turn_s_max
        )
        turn = self._best_effort_turn(run_queues, ctx.now_s, most, alone=grant is None)
        if turn is not None and (grant is None or leaves_time(turn, run_queues, ctx.now_s, most)):
            grant = turn
        if grant is None:
            measuring.grant(ctx, node, primes=primes)
            return
        if node.instances[grant.queue.instance_id].has_best_effort:
            # Either they alone or the others alone.
            name_all(grant)
        node.begin_turn(grant, ctx.now_s)
        ctx.engine(
            StartStep(
                instance_id=grant.queue.instance_id,
                prefill=grant.prefill,
                iterations=grant.iterations,
                decode=grant.decode,
            )
        )

    def _best_effort_turn(
        self, others: Sequence[RunQueue], now_s: float, prefill_tokens_max: int, *, alone: bool
    ) -> Grant | None:
        """Whose turn of best effort it would be, if it may have one: `alone`, or beside others."""
        node = self._node
        if not alone and not may_wait(node.turns, others):
            return None
        having = [i for i in node.instances.values() if i.has_best_effort and node.computes(i)]
        if not having or (node.weights_come() if alone else node.expects()):
            return None
        care = node.rule.overestimate
        found = [instance.best_effort_queue(now_s, care) for instance in having]
        queues = [queue for queue in found if queue is not None]
        if not queues:
            return None
        tokens = min(best_effort_tokens(queue.times, prefill_tokens_max) for queue in queues)
        return next_turn(node.turns, queues, now_s, prefill_tokens_max=tokens)

    def _dispatch(self, ctx: NodeEventContext, event: NodeEvent) -> None:
        match event:
            case StepFinished():
                self._node.end_turn(ctx.now_s)
                instance = self._node.instances.get(event.instance_id)
                if instance is not None:
                    learn(ctx, self._node, instance, event.result)
                    step_finished(ctx, instance, event.result, self._node.steps_started)
                    prefixes.changed(ctx, instance, event.result.prefixes)
                    _submit_mates(ctx, instance, self._node.steps_started + 1)
                    _tell_changed(ctx, instance)
            case CommandReceived():
                self._command(ctx, event.command)
            case HeartbeatDue():
                models = self._node.beat(event)
                instances.end_held(ctx, self._node, self._limits.hold_s_max)
                prefixes.ask(ctx, self._node)
                energy = self._node.take_energy(event, ctx.now_s)
                ctx.report(self._node.heartbeat(ctx.now_s, models, energy))
                tell_refined(ctx, self._node)
            case MeasureFinished() | MeasureBroke():
                self._measured(ctx, event)
            case StepBroke():
                self._node.end_turn(ctx.now_s)
                self._broken(ctx, event)
            case InstanceGone() if event.error:
                self._broken(ctx, event)
            case SubmitBroke():
                for instance in self._node.instances.values():
                    leader = instance.requests.get(event.request_id)
                    submit_broke(ctx, instance, event)
                    if leader is not None and leader.request_id not in instance.requests:
                        instance.follow_another(leader)
                    _submit_mates(ctx, instance, self._node.steps_started + 1)
            case SubmitFinished():
                for instance in self._node.instances.values():
                    prefixes.submitted(ctx, instance, event)
            case PrefixesTold():
                prefixes.told(ctx, self._node, event)
            case LoadProgress() | InstanceLoaded() | LoadFailed() | InstanceGone():
                instances.loading(ctx, self._node, event)
                loaded = self._node.instances.get(event.instance_id)
                if isinstance(event, InstanceLoaded) and loaded is not None:
                    decodes = loaded.command.model.task is None
                    shapes = to_prime(
                        batch_max=min(loaded.command.batch_max, self._limits.primed_batch_max),
                        # The output of a model with a task is never computed.
                        context_tokens_max=loaded.command.context_tokens_max - (not decodes),
                        tokens_max=self._limits.primed_tokens_max,
                        decodes=decodes,
                    )
                    most = self._limits.prefill_tokens_max if shapes else 0
                    loaded.prime(shapes, surveyed_chunk=most)
            case KvArrived():
                self._arrived(ctx, event)
            case KvResized():
                instances.resized(ctx, self._node, event)
            case ImportProgress() | ImportDone() | ImportFailed():
                imports.importing(ctx, self._node, event)
            case AbortFinished():
                instance = self._node.instances.get(event.instance_id)
                if instance is not None:
                    instance.note_blocks_used(event.kv_blocks_used)
            case SwapFinished():
                margin_s = self._limits.deadline_margin_s_max
                swapping.finished(ctx, self._node, event, margin_s)
            case LinkOpened():
                turns = rule_named(event.rule.turn, self._own_rule)
                self._node.link_opened(event.rule, turns)
                swapping.end(ctx, self._node)
                # An instance may have broken since the hello.
                ctx.report(self._node.heartbeat(ctx.now_s, self._node.models))
                instances.open_link(ctx, self._node, event.rule.adopted)
                prefixes.tell_left(ctx, self._node)
            case LinkClosed():
                instances.close_link(ctx, self._node)
            case _:
                assert_never(event)

    def _broken(self, ctx: NodeEventContext, event: StepBroke | InstanceGone) -> None:
        instance = self._node.instances.get(event.instance_id)
        if instance is not None:
            broken(ctx, self._node, instance, event)

    def _command(self, ctx: NodeEventContext, command: NodeCommand) -> None:
        match command:
            case SubmitRequest():
                self._submit(ctx, command)
            case AbortRequest():
                self._abort(ctx, command)
            case ContinueRequest():
                self._continue(ctx, command)
            case OfferKv():
                self._offer(ctx, command)
            case LoadInstance():
                instances.load(ctx, self._node, command)
            case UnloadInstance():
                instances.unload(ctx, self._node, command.instance_id)
            case ResizeKv():
                instances.resize(ctx, self._node, command)
            case ImportModel():
                imports.start_import(ctx, self._node, command)
            case CancelImport():
                imports.cancel_import(ctx, self._node, command)
            case ProfileInstance():
                measuring.start(ctx, self._node, command, self._limits.prefill_tokens_max)
            case CancelProfile():
                measuring.cancel(self._node, command)
            case UseProfile():
                measuring.use(self._node, command)
            case _:
                assert_never(command)

    def _submit(self, ctx: NodeEventContext, command: SubmitRequest) -> None:
        order, instance = command.order, self._node.instances.get(command.instance_id)
        request = order.request
        if instance is None or instance.state is not LocalState.READY:
            message = f"{command.instance_id} is not ready on its node"
            ctx.give_back(request.request_id, order.attempt, message)
            return
        tokens = len(request.prompt_tokens) + len(order.output_tokens)
        local = LocalRequest(
            order=order,
            start_s=ctx.now_s - order.age_s,
            output_tokens=len(order.output_tokens),
            first_step=self._node.steps_started + 1,
            due_s=ctx.now_s + order.due_in_s,
            # A paused one has its last token computed when it goes on.
            prefill_left=tokens - order.paused - order.cached_tokens,
            paused=order.paused,
            fetching=(order.kv is not None and order.paused) or instance.computes(request.first),
        )
        instance.cache.note_request(request.cache_salt)
        instance.add(local)
        submitted = _to_engine(instance, order)
        if local.fetching and order.kv is not None:
            ctx.engine(
                FetchKv(
                    instance_id=instance.instance_id, request=submitted.request, source=order.kv
                )
            )
        elif not local.fetching:
            ctx.engine(submitted)

    def _offer(self, ctx: NodeEventContext, command: OfferKv) -> None:
        """What has ended meanwhile is not offered: whoever comes for it finds nothing."""
        instance = self._node.instances.get(command.instance_id)
        request = instance.requests.get(command.request_id) if instance is not None else None
        if request is not None and request.order.attempt == command.attempt:
            ctx.engine(command)

    def _arrived(self, ctx: NodeEventContext, event: KvArrived) -> None:
        """A request was submitted with the KV blocks that came for it; with none it is submitted
        now. One that has nothing left to compute is ahead already.
        """
        for instance in self._node.instances.values():
            request = instance.requests.get(event.request_id)
            if request is None or request.order.attempt != event.attempt or not request.fetching:
                continue
            if event.error:
                ctx.engine(_to_engine(instance, request.order))
            request.note_arrived(event.tokens, self._node.steps_started + 1)
            instance.request_changed()
            ctx.report(event)
            if not request.prefill_left:
                ctx.report(ComputedAhead(request_id=event.request_id, attempt=event.attempt))

    def _continue(self, ctx: NodeEventContext, command: ContinueRequest) -> None:
        """A request has more tokens, is paused or goes on. One that is not here has been given
        back. An iteration that is under way may be its last: the engine is told after it, if it is
        not.
        """
        instance = self._node.instances.get(command.instance_id)
        request = instance.requests.get(command.request_id) if instance is not None else None
        if instance is None or request is None or request.order.attempt != command.attempt:
            return
        request.go_on(
            command.token_ids,
            paused=command.paused,
            due_s=ctx.now_s + command.due_in_s,
            first_step=self._node.steps_started + 1,
        )
        instance.request_changed()
        if self._node.stepping != instance.instance_id:
            _tell_changed(ctx, instance)

    def _measured(self, ctx: NodeEventContext, event: MeasureFinished | MeasureBroke) -> None:
        """What was told of requests meanwhile the engine hears now."""
        self._node.end_turn(ctx.now_s)
        if instance := self._node.instances.get(event.instance_id):
            _tell_changed(ctx, instance)
        measuring.measured(ctx, self._node, event)

    def _abort(self, ctx: NodeEventContext, command: AbortRequest) -> None:
        for instance in self._node.instances.values():
            request = instance.requests.get(command.request_id)
            if request is not None and request.order.attempt == command.attempt:
                cancel(ctx, instance, request)
                instance.follow_another(request)
                _submit_mates(ctx, instance, self._node.steps_started + 1)


_DISTURBING = CommandReceived | StepFinished | StepBroke | InstanceLoaded | LinkOpened
"""After these a request is likelier than after others: a survey that nobody asked for waits."""


def _submit_mates(ctx: NodeEventContext, instance: LocalInstance, first_step: int) -> None:
    """The engine is given those whose prompt another one has computed by now. What of it is missing
    is told as for any other.
    """
    for request in instance.requests.values():
        order = request.order
        if not request.fetching or order.kv is not None or instance.computes(order.request.first):
            continue
        request.note_arrived(order.cached_tokens, first_step)
        instance.request_changed()
        ctx.engine(_to_engine(instance, order))


def _tell_changed(ctx: NodeEventContext, instance: LocalInstance) -> None:
    """Have the engine know of requests that have more tokens, are paused or go on."""
    for request in instance.requests.values():
        if request.order is not request.told and request.order != request.told:
            request.note_told()
            ctx.engine(_to_engine(instance, request.order))


def _to_engine(instance: LocalInstance, order: RequestOrder) -> SubmitToEngine:
    request = order.request
    return SubmitToEngine(
        instance_id=instance.instance_id,
        request=EngineRequest(
            request_id=request.request_id,
            attempt=order.attempt,
            prompt_tokens=request.prompt_tokens,
            output_tokens=order.output_tokens,
            sampling=request.sampling,
            stop_token_ids=instance.command.model.stop_token_ids,
            paused=order.paused,
            cache_salt=request.cache_salt,
        ),
    )


def _is_calm(event: NodeEvent) -> bool:
    """Whether a request is unlikely within milliseconds, which would wait for a size that is
    computed for nobody: after a load or a grow comes whom it was for, after an answer the same
    client's next turn.
    """
    return isinstance(event, HeartbeatDue | MeasureFinished | MeasureBroke)
