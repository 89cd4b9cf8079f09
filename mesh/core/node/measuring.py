"""Profiling on a node: one shape of an instance is timed whenever nothing else is to be computed.

Requests always go first, and wait for one timed iteration at most. What to measure is up to
`mesh.compute.survey`; the profile that comes of it is used here at once, and reported.
"""

from dataclasses import replace

from mesh.compute.survey import Survey
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
from mesh.domain.node_events import MeasureBroke, MeasureFinished

PROGRESS_SHARE = 0.01
"""Told to the controller after each such part."""


def start(
    ctx: NodeEventContext, node: LocalNode, command: ProfileInstance, prefill_tokens: int
) -> None:
    """Begin to measure; `prefill_tokens` is the largest chunk that an iteration may have."""
    instance = node.instances.get(command.instance_id)
    if node.survey is not None:
        busy = node.survey.instance.instance_id
        _fail(ctx, command.operation_id, f"the node measures {busy} at the moment")
    elif instance is None or instance.footprint is None or instance.state is not LocalState.READY:
        _fail(ctx, command.operation_id, f"{command.instance_id} is not ready on its node")
    else:
        survey = Survey(
            context_tokens_max=instance.command.context_tokens_max,
            batch_max=instance.command.batch_max,
            kv_tokens=instance.kv_blocks_next * instance.footprint.block_tokens,
            prefill_tokens_max=prefill_tokens,
        )
        local = LocalSurvey(operation_id=command.operation_id, instance=instance, survey=survey)
        node.begin_survey(local)
        phase = "wait until the node has nothing else to compute"
        ctx.report(ProfileProgress(operation_id=command.operation_id, phase=phase, share=0.0))


def grant(ctx: NodeEventContext, node: LocalNode, *, primes: bool) -> None:
    """Time the next shape, if a survey is under way and nothing disturbs it; else prime."""
    if node.loading():
        return
    running = node.survey
    if running is None:
        if primes:
            priming.grant(ctx, node)
        return
    shape = running.survey.next_shape()
    if shape is None:
        node.end_survey()
        _finish(ctx, running)
        return
    node.begin_measured(running.instance, ctx.now_s)
    running.ask()
    ctx.engine(StartMeasure(instance_id=running.instance.instance_id, shape=shape))


def measured(ctx: NodeEventContext, node: LocalNode, event: MeasureFinished | MeasureBroke) -> None:
    """A shape has been timed, or could not be."""
    running = node.survey
    if running is None or not running.asked:
        return
    running.answered()
    if isinstance(event, MeasureFinished):
        running.survey.note(event.elapsed_s)
    else:
        running.survey.skip()
    share = running.survey.share
    if share >= running.told_share + PROGRESS_SHARE:
        running.note_told(share)
        ctx.report(
            ProfileProgress(
                operation_id=running.operation_id, phase=running.survey.phase, share=share
            )
        )


def cancel(node: LocalNode, command: CancelProfile) -> None:
    if node.survey is not None and node.survey.operation_id == command.operation_id:
        node.end_survey()


def stop(ctx: NodeEventContext, node: LocalNode, instance: LocalInstance) -> None:
    """The instance is about to go, and with it a survey of it."""
    survey = node.survey
    if survey is not None and survey.instance is instance:
        node.end_survey()
        _fail(ctx, survey.operation_id, f"{instance.instance_id} was unloaded")


def use(node: LocalNode, command: UseProfile) -> None:
    """Predict by a better profile."""
    instance = node.instances.get(command.instance_id)
    if instance is not None and instance.profile != command.profile:
        instance.use_profile(command.profile)


def _finish(ctx: NodeEventContext, running: LocalSurvey) -> None:
    instance, survey = running.instance, running.survey
    try:
        prefill, decode = survey.grids()
    except EngineError as error:
        _fail(ctx, running.operation_id, error.message)
        return
    profile = replace(
        instance.profile,
        prefill=prefill,
        decode=decode,
        scaled_from="",
        measured_s=survey.measured_s,
    )
    instance.use_profile(profile)
    ctx.report(ProfileDone(operation_id=running.operation_id, profile=profile))


def _fail(ctx: NodeEventContext, operation_id: OperationId, message: str) -> None:
    ctx.report(
        ProfileFailed(
            operation_id=operation_id,
            error="Unavailable",
            message=message,
            hint="try again when the node has less to do",
        )
    )
