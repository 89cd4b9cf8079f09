"""Profiling on a node: one shape of an instance is timed whenever nothing else is to be computed.

Requests always go first, and wait for one timed iteration at most. What to measure is up to
`mesh.compute.survey`; the profile that comes of it is used here at once, and reported.

A survey is made because somebody asked for it (`mesh profile`), or by itself while the node rests:
of a model whose times are estimated a few sizes once those of `priming` are done, and later, when
the node has had nothing to do for a while, all that its KV cache holds without what is cached in
it, or a quarter of it at least. These pieces are short, and give way to whatever comes: a request,
a load, a command.
"""

from mesh.compute.operators import OperatorSurvey
from mesh.compute.survey import Survey
from mesh.compute.times import Times
from mesh.core.node import priming
from mesh.core.node.context import NodeEventContext
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.state import LocalNode, LocalSurvey
from mesh.domain.actions import StartMeasure
from mesh.domain.errors import EngineError
from mesh.domain.ids import OperationId
from mesh.domain.messages import (
    CancelProfile,
    ProfileDone,
    ProfileFailed,
    ProfileInstance,
    ProfileProgress,
    UseProfile,
)
from mesh.domain.model import ENCODERS
from mesh.domain.node_events import MeasureBroke, MeasureFinished
from mesh.domain.profile import CoresTimes, IterationShape
from mesh.domain.reasons import ProfileSource
from mesh.domain.values import replace

PROGRESS_SHARE = 0.01
"""The controller is told of the progress whenever the survey has got on by this share."""
REST_S = 5.0
"""Nothing to do for so long: then a whole survey may go on that nobody asked for."""
REST_SHARE = 0.02
"""A piece may take this share of the rest so far: a request that comes after a long rest rarely
waits for it.
"""
PIECE_S_MAX = 0.25
"""The longest that a piece is expected to take, where a decode of one request takes no longer."""
PIECE_DECODES_MAX = 1.5
"""The same over such a decode."""
PIECE_OVER_MAX = 2.0
"""A shape that takes longer than a piece may by so much is not timed again."""
SHORT_RESTS_MAX = 3
"""A shape that so many rests in a row were too short for is left out, with all that take longer:
else a survey would never end on a node that is called every ten seconds.
"""


def start(
    ctx: NodeEventContext, node: LocalNode, command: ProfileInstance, prefill_tokens: int
) -> None:
    """Begin to measure; `prefill_tokens` is the largest chunk that an iteration may have."""
    instance = node.instances.get(command.instance_id)
    if node.survey is not None and node.survey.operation_id is not None:
        busy = node.survey.instance.instance_id
        _fail(ctx, command.operation_id, f"the node measures {busy} at the moment")
    elif instance is None or instance.footprint is None or instance.state is not LocalState.READY:
        _fail(ctx, command.operation_id, f"{command.instance_id} is not ready on its node")
    else:
        kv_tokens = instance.kv_blocks_next * instance.footprint.block_tokens
        # What counts by no part of its cores says so first, before anything is counted.
        by_cores = (*sorted(set(command.cores)), None) if command.operators else ()
        counted = [
            OperatorSurvey(
                context_tokens_max=instance.command.context_tokens_max,
                batch_max=instance.command.batch_max,
                kv_tokens=kv_tokens,
                prefill_tokens_max=prefill_tokens,
                expected_s=Times(instance.profile).iteration_s,
                cores=cores,
            )
            for cores in by_cores
        ]
        local = LocalSurvey(
            operation_id=command.operation_id,
            instance=instance,
            survey=_survey(instance, kv_tokens, prefill_tokens),
            counted=tuple(counted),
        )
        node.begin_survey(local)
        phase = "wait until the node has nothing else to compute"
        ctx.report(ProfileProgress(operation_id=command.operation_id, phase=phase, share=0.0))


def _survey(
    instance: LocalInstance, kv_tokens: int, chunk_tokens: int, *, coarse: bool = False
) -> Survey:
    """The survey of what requests may have the instance compute: a model with a task ends each with
    its prompt, and an encoder computes a prompt at once.
    """
    command = instance.command
    model = command.model
    whole = model.architecture in ENCODERS
    reach_tokens = command.context_tokens_max - (model.task is not None)
    return Survey(
        context_tokens_max=reach_tokens,
        batch_max=command.batch_max,
        kv_tokens=kv_tokens,
        prefill_tokens_max=reach_tokens if whole else chunk_tokens,
        coarse=coarse,
        decodes=model.task is None,
        pasts=not whole,
    )


def grant(ctx: NodeEventContext, node: LocalNode, *, primes: bool) -> None:
    """Time the next shape, if a survey is under way and nothing disturbs it; else prime, and then
    time what nobody has asked for.
    """
    if node.loading():
        return
    running = node.survey
    if running is not None and not node.computes(running.instance):
        if running.operation_id is not None:
            return
        node.end_survey()
    if running is None or running.operation_id is None:
        if primes and not priming.grant(ctx, node):
            _grant_at_rest(ctx, node)
        return
    counting = running.counting
    shape = (counting or running.survey).next_shape()
    if shape is None:
        _finish(ctx, node, running)
    else:
        _time(ctx, node, running, shape, counting)


def _time(
    ctx: NodeEventContext,
    node: LocalNode,
    running: LocalSurvey,
    shape: IterationShape,
    counting: OperatorSurvey | None = None,
) -> None:
    node.begin_measured(running.instance, ctx.now_s)
    running.ask()
    instance_id = running.instance.instance_id
    counted, cores = counting is not None, None if counting is None else counting.cores
    ctx.engine(StartMeasure(instance_id=instance_id, shape=shape, counted=counted, cores=cores))


def _grant_at_rest(ctx: NodeEventContext, node: LocalNode) -> None:
    """Time the next shape that is short enough for the node's rest and finds room in the cache.
    Without a link nobody would hear what comes of it.
    """
    rest_s = ctx.now_s - node.disturbed_s
    if not node.linked or any(instance.requests for instance in node.instances.values()):
        return
    running = _begin_at_rest(node, rest_s)
    if running is None:
        return
    instance, survey = running.instance, running.survey
    times = Times(instance.profile, max(instance.correction.factor(ctx.now_s), running.slower))
    while (shape := survey.next_shape()) is not None:
        expected_s = times.iteration_s(shape)
        too_long = expected_s > _piece_s(times) or expected_s >= running.left_out_s
        if too_long or not priming.fits(instance, shape, instance.surveyed_blocks):
            survey.skip()
        elif running.source is ProfileSource.REST and expected_s > REST_SHARE * rest_s:
            running.note_short_rest(node.disturbed_s, expected_s, SHORT_RESTS_MAX)
            return
        else:
            _time(ctx, node, running, shape)
            return
    _finish(ctx, node, running)


def _piece_s(times: Times) -> float:
    return max(PIECE_S_MAX, PIECE_DECODES_MAX * times.decode_s(1, 1))


def _begin_at_rest(node: LocalNode, rest_s: float) -> LocalSurvey | None:
    """The survey that is wanted most: of any instance a few sizes before all of another."""
    sources = [ProfileSource.PRIMING]
    if rest_s >= REST_S:
        sources.append(ProfileSource.REST)
    for source in sources:
        for instance in node.instances.values():
            footprint = instance.footprint
            wants = instance.wants_survey(source) and node.computes(instance)
            if footprint is None or not wants:
                continue
            running = node.rest_surveys.get(instance.instance_id)
            if running is None or running.source is not source:
                survey = _survey(
                    instance,
                    instance.surveyed_blocks * footprint.block_tokens,
                    instance.surveyed_chunk,
                    coarse=source is ProfileSource.PRIMING,
                )
                running = LocalSurvey(
                    operation_id=None, instance=instance, survey=survey, source=source
                )
            node.begin_survey(running)
            return running
    return None


def measured(ctx: NodeEventContext, node: LocalNode, event: MeasureFinished | MeasureBroke) -> None:
    """A shape has been timed, or could not be."""
    running = node.survey
    if running is None or not running.asked:
        return
    running.answered()
    operation_id, phase = running.operation_id, running.survey.phase
    if (counting := running.counting) is not None:
        phase = "count operators"
        _note_counted(ctx, node, counting, event)
    elif isinstance(event, MeasureBroke):
        running.survey.skip()
    elif operation_id is None:
        _note_piece(running, event.elapsed_s)
    else:
        running.survey.note(event.elapsed_s)
    if operation_id is None or node.survey is not running:
        return
    share = running.share
    if share >= running.told_share + PROGRESS_SHARE:
        running.note_told(share)
        ctx.report(ProfileProgress(operation_id=operation_id, phase=phase, share=share))


def _note_counted(
    ctx: NodeEventContext,
    node: LocalNode,
    counting: OperatorSurvey,
    event: MeasureFinished | MeasureBroke,
) -> None:
    """An engine that counts nothing says so at once, before anything takes minutes."""
    running = node.survey
    if isinstance(event, MeasureFinished):
        counting.note(event.elapsed_s, event.operators)
    elif counting.begun or running is None or running.operation_id is None:
        counting.skip()
    else:
        node.end_survey()
        _fail(ctx, running.operation_id, event.message, event.hint, event.error)


def _note_piece(running: LocalSurvey, elapsed_s: float) -> None:
    """One that was longer than expected is not computed again, so that nobody has to wait for it a
    second time.
    """
    times, shape = Times(running.instance.profile), running.survey.next_shape()
    if shape is not None:
        running.note_predicted(times.iteration_s(shape))
    if elapsed_s > PIECE_OVER_MAX * _piece_s(times):
        running.survey.note_too_long(elapsed_s)
    else:
        running.survey.note(elapsed_s)


def cancel(node: LocalNode, command: CancelProfile) -> None:
    if node.survey is not None and node.survey.operation_id == command.operation_id:
        node.end_survey()


def stop(ctx: NodeEventContext, node: LocalNode, instance: LocalInstance) -> None:
    """The instance is about to go, and with it a survey of it."""
    survey = node.survey
    if survey is not None and survey.instance is instance:
        node.end_survey()
        if survey.operation_id is not None:
            hint = "measure again: what serves then is measured"
            _fail(ctx, survey.operation_id, f"{instance.instance_id} was unloaded", hint)


def use(node: LocalNode, command: UseProfile) -> None:
    """Predict by a better profile."""
    instance = node.instances.get(command.instance_id)
    if instance is not None and instance.profile != command.profile:
        instance.use_profile(command.profile)
        running = node.survey
        if running is None or running.operation_id is not None:
            return
        if running.instance is instance and not instance.wants_survey(running.source):
            node.end_survey()
            node.forget_rest_survey(instance.instance_id)


def _finish(ctx: NodeEventContext, node: LocalNode, running: LocalSurvey) -> None:
    node.end_survey()
    instance, survey = running.instance, running.survey
    if running.operation_id is None:
        node.forget_rest_survey(instance.instance_id)
    instance.note_surveyed(running.source)
    try:
        prefill, decode = survey.grids()
        operators, by_cores = instance.profile.operators, instance.profile.by_cores
        if running.counted:
            *some, all_cores = running.counted
            operators = all_cores.operators(prefill, decode)
            found = [(each.cores, each.operators(*each.grids())) for each in some]
            by_cores = tuple(CoresTimes(cores=n, operators=o) for n, o in found if n) or by_cores
    except EngineError as error:
        if running.operation_id is not None:
            _fail(ctx, running.operation_id, error.message)
        return
    profile = replace(
        instance.profile,
        prefill=prefill,
        decode=decode,
        scaled_from="",
        measured_s=survey.measured_s,
        source=running.source,
        measured_as="",
        operators=operators,
        by_cores=by_cores,
        widths=instance.command.model.widths,
    )
    instance.use_profile(profile)
    if running.operation_id is None:
        ctx.report(instance.tell_profile(ctx.now_s))
    else:
        ctx.report(ProfileDone(operation_id=running.operation_id, profile=profile))


def _fail(
    ctx: NodeEventContext,
    operation_id: OperationId,
    message: str,
    hint: str = "try again when the node has less to do",
    error: str = "Unavailable",
) -> None:
    ctx.report(ProfileFailed(operation_id=operation_id, error=error, message=message, hint=hint))
