"""What a node tells its controller: NodeReport to and from the wire."""

from math import inf
from typing import assert_never

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, RequestId
from mesh.domain.limits import BATCH_MAX
from mesh.domain.messages import (
    ComputedAhead,
    Heartbeat,
    ImportDone,
    ImportFailed,
    ImportProgress,
    InstanceGone,
    InstanceLoaded,
    InstanceReport,
    KvResized,
    LoadFailed,
    LoadProgress,
    NodeHello,
    NodeReport,
    PrefixesChanged,
    PrefixMissed,
    ProfileDone,
    ProfileFailed,
    ProfileProgress,
    ProfileRefined,
    RequestReturned,
    TokensReport,
)
from mesh.domain.reasons import DeviceKind
from mesh.domain.steps import HeldModel, LoadRate, LoadTier, PrefixChange
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.codec_import import import_report_from_wire, import_report_to_wire
from mesh.wire.codec_load import load_report_from_wire, load_report_to_wire
from mesh.wire.codec_model import footprint_from_wire, footprint_to_wire
from mesh.wire.codec_profile import factor_from_wire, stalls_from_wire, stalls_to_wire
from mesh.wire.codec_profiling import profile_report_from_wire, profile_report_to_wire
from mesh.wire.codec_request import tokens_from_wire, tokens_to_wire
from mesh.wire.malformed import identifier, known, member, nothing_known, require


def report_to_wire(report: NodeReport) -> pb.NodeReport:
    match report:
        case TokensReport():
            return pb.NodeReport(tokens=tokens_to_wire(report))
        case Heartbeat():
            beat = pb.Heartbeat(
                rss_bytes=report.rss_bytes,
                engine_bytes=report.engine_bytes,
                base_bytes=report.base_bytes,
                instances=map(_instance_to_wire, report.instances),
                load_slowdown=report.load_slowdown,
                models=_held_to_wire(report.models),
            )
            return pb.NodeReport(heartbeat=beat)
        case RequestReturned():
            return pb.NodeReport(
                request_returned=pb.RequestReturned(
                    request_id=report.request_id,
                    attempt=report.attempt,
                    error=report.error,
                    message=report.message,
                )
            )
        case ComputedAhead():
            return pb.NodeReport(
                computed_ahead=pb.ComputedAhead(
                    request_id=report.request_id, attempt=report.attempt
                )
            )
        case PrefixesChanged(instance_id=instance_id, change=change):
            changed = pb.PrefixesChanged(
                instance_id=instance_id, came=change.came, went=change.went
            )
            return pb.NodeReport(prefixes_changed=changed)
        case PrefixMissed():
            missed = pb.PrefixMissed(
                request_id=report.request_id,
                attempt=report.attempt,
                cached_tokens=report.cached_tokens,
            )
            return pb.NodeReport(prefix_missed=missed)
        case InstanceLoaded() | InstanceGone() | KvResized() | LoadProgress() | LoadFailed():
            return load_report_to_wire(report)
        case ImportProgress() | ImportDone() | ImportFailed():
            return import_report_to_wire(report)
        case ProfileProgress() | ProfileDone() | ProfileRefined() | ProfileFailed():
            return profile_report_to_wire(report)
        case NodeHello():
            return pb.NodeReport(hello=_hello_to_wire(report))
        case _:
            assert_never(report)


def report_from_wire(message: pb.NodeReport) -> NodeReport:
    """The report. Raises InvalidInput for a malformed one."""
    match message.WhichOneof("report"):
        case "tokens":
            return tokens_from_wire(message.tokens)
        case "heartbeat":
            beat = message.heartbeat
            return Heartbeat(
                rss_bytes=beat.rss_bytes,
                engine_bytes=beat.engine_bytes,
                base_bytes=beat.base_bytes,
                instances=tuple(_instance_from_wire(i) for i in beat.instances),
                load_slowdown=factor_from_wire(beat.load_slowdown, beat, "load_slowdown"),
                models=_held_from_wire(beat.models) if beat.HasField("models") else None,
            )
        case "request_returned":
            returned = message.request_returned
            return RequestReturned(
                request_id=RequestId(identifier(returned.request_id, returned, "request_id")),
                attempt=returned.attempt,
                error=returned.error,
                message=returned.message,
            )
        case "computed_ahead":
            ahead = message.computed_ahead
            return ComputedAhead(
                request_id=RequestId(identifier(ahead.request_id, ahead, "request_id")),
                attempt=ahead.attempt,
            )
        case "prefixes_changed":
            changed = message.prefixes_changed
            return PrefixesChanged(
                instance_id=InstanceId(identifier(changed.instance_id, changed, "instance_id")),
                change=PrefixChange(came=tuple(changed.came), went=tuple(changed.went)),
            )
        case "prefix_missed":
            missed = message.prefix_missed
            return PrefixMissed(
                request_id=RequestId(identifier(missed.request_id, missed, "request_id")),
                attempt=missed.attempt,
                cached_tokens=missed.cached_tokens,
            )
        case "instance_loaded" | "instance_gone" | "kv_resized" | "load_progress" | "load_failed":
            return load_report_from_wire(message)
        case "import_progress" | "import_done" | "import_failed":
            return import_report_from_wire(message)
        case "profile_progress" | "profile_done" | "profile_refined" | "profile_failed":
            return profile_report_from_wire(message)
        case "hello":
            return _hello_from_wire(message.hello)
        case _:
            raise nothing_known(message)


def _hello_to_wire(hello: NodeHello) -> pb.NodeHello:
    return pb.NodeHello(
        node_id=hello.node_id,
        run_id=hello.run_id,
        device=hello.device,
        hardware=hello.hardware,
        cores=hello.cores,
        engine=hello.engine,
        memory_bytes=hello.memory_bytes,
        base_bytes=hello.base_bytes,
        instances=map(_instance_to_wire, hello.instances),
        version=hello.version,
        fingerprint=hello.fingerprint,
        tensor_parallel_max=hello.tensor_parallel_max,
        batch_max=hello.batch_max,
        computes_ahead=hello.computes_ahead,
        shares_weights=hello.shares_weights,
        as_published=hello.as_published,
        busy_load_factor=hello.busy_load_factor,
        prefetch_bytes=hello.prefetch_bytes,
        models=_held_to_wire(hello.models),
        load_rates={
            tier: pb.LoadRate(fixed_s=rate.fixed_s, bytes_per_s=rate.bytes_per_s)
            for tier, rate in hello.load_rates
        },
    )


def _hello_from_wire(message: pb.NodeHello) -> NodeHello:
    if message.base_bytes > message.memory_bytes:
        raise InvalidInput(
            f"NodeHello.base_bytes is {message.base_bytes}, above memory_bytes, which is "
            f"{message.memory_bytes}: nothing is left for instances",
            hint="give the node more --memory",
        )
    return NodeHello(
        node_id=NodeId(identifier(message.node_id, message, "node_id")),
        run_id=identifier(message.run_id, message, "run_id"),
        device=member(DeviceKind, message.device, message, "device"),
        hardware=message.hardware,
        cores=message.cores,
        engine=message.engine,
        memory_bytes=message.memory_bytes,
        base_bytes=message.base_bytes,
        version=message.version,
        fingerprint=message.fingerprint,
        tensor_parallel_max=message.tensor_parallel_max or 1,
        batch_max=message.batch_max or BATCH_MAX,
        computes_ahead=message.computes_ahead,
        shares_weights=message.shares_weights,
        as_published=message.as_published,
        busy_load_factor=factor_from_wire(message.busy_load_factor, message, "busy_load_factor"),
        prefetch_bytes=message.prefetch_bytes,
        models=_held_from_wire(message.models) if message.HasField("models") else None,
        load_rates=tuple(
            (tier, _load_rate_from_wire(rate))
            for word, rate in sorted(message.load_rates.items())
            if (tier := known(LoadTier, word)) is not None
        ),
        instances=tuple(_instance_from_wire(i) for i in message.instances),
    )


def _held_to_wire(models: tuple[HeldModel, ...] | None) -> pb.HeldModels | None:
    if models is None:
        return None
    return pb.HeldModels(
        held=[
            pb.HeldModel(
                model_id=model.model_id,
                tier=model.tier,
                context_tokens_max=model.context_tokens_max,
            )
            for model in models
        ]
    )


def _held_from_wire(message: pb.HeldModels) -> tuple[HeldModel, ...]:
    """But for what is held in tiers that are not known here."""
    return tuple(
        HeldModel(
            model_id=ModelId(model.model_id),
            tier=tier,
            context_tokens_max=model.context_tokens_max,
        )
        for model in message.held
        if (tier := known(LoadTier, model.tier)) is not None
    )


def _load_rate_from_wire(rate: pb.LoadRate) -> LoadRate:
    if not (0.0 <= rate.fixed_s < inf and rate.bytes_per_s > 0.0):
        raise InvalidInput(
            f"NodeHello.load_rates has {rate.fixed_s:g} s and {rate.bytes_per_s:g} B/s: a load "
            "takes 0 s or more, and finite, at a rate above 0"
        )
    return LoadRate(fixed_s=rate.fixed_s, bytes_per_s=rate.bytes_per_s)


def _instance_to_wire(report: InstanceReport) -> pb.InstanceReport:
    return pb.InstanceReport(
        instance_id=report.instance_id,
        deployment=report.deployment,
        model_id=report.model_id,
        footprint=footprint_to_wire(report.footprint),
        kv_blocks=report.kv_blocks,
        kv_blocks_used=report.kv_blocks_used,
        context_tokens_max=report.context_tokens_max,
        batch_max=report.batch_max,
        batch=report.batch,
        correction=report.correction,
        correction_planned=report.correction_planned,
        stalls=stalls_to_wire(report.stalls),
        kv_blocks_cached=report.kv_blocks_cached,
        prefixes=report.prefixes,
    )


def _instance_from_wire(message: pb.InstanceReport) -> InstanceReport:
    require(message, "footprint")
    return InstanceReport(
        instance_id=InstanceId(identifier(message.instance_id, message, "instance_id")),
        deployment=DeploymentName(message.deployment),
        model_id=ModelId(message.model_id),
        footprint=footprint_from_wire(message.footprint),
        kv_blocks=message.kv_blocks,
        kv_blocks_used=message.kv_blocks_used,
        context_tokens_max=message.context_tokens_max,
        batch_max=message.batch_max,
        batch=message.batch,
        correction=factor_from_wire(message.correction, message, "correction"),
        correction_planned=factor_from_wire(
            message.correction_planned, message, "correction_planned"
        ),
        stalls=stalls_from_wire(message.stalls),
        kv_blocks_cached=message.kv_blocks_cached,
        prefixes=tuple(message.prefixes),
    )
