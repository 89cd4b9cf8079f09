"""Models and deployments: protobuf messages to domain values and back.

Every `…_from_wire` raises InvalidInput for a message that cannot be meant, and reads its words as
it is told to; every `…_to_wire` raises ValueError for a value outside the message's range (a lone
surrogate, a number too large).
"""

from google.protobuf.message import Message

from mesh.domain.checks import check_slo
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.model import (
    ComputePrecision,
    Footprint,
    Mixture,
    ModelFormat,
    ModelInfo,
    WeightPrecision,
)
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import ColdStart, Slo
from mesh.domain.text import SamplingDefaults, TextAssets, ToolFormat
from mesh.v1 import model_pb2 as pb
from mesh.v1 import profile_pb2
from mesh.wire.malformed import Words, at_least_one, identifier, member, require


def model_to_wire(model: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        model_id=model.model_id,
        source=model.source,
        format=model.format,
        architecture=model.architecture,
        context_tokens_max=model.context_tokens_max,
        vocabulary_tokens=model.vocabulary_tokens,
        layers=model.layers,
        hidden_size=model.hidden_size,
        attention_heads=model.attention_heads,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        parameters=model.parameters,
        disk_bytes=model.disk_bytes,
        stop_token_ids=model.stop_token_ids,
        weights=model.weights or "",
        precision=model.precision or "",
        quantisation=model.quantisation,
        mixture=mixture_to_wire(model.mixture),
    )


def model_from_wire(message: pb.ModelInfo, words: Words = member) -> ModelInfo:
    return ModelInfo(
        model_id=ModelId(identifier(message.model_id, message, "model_id")),
        source=message.source,
        format=words(ModelFormat, message.format, message, "format"),
        architecture=message.architecture,
        context_tokens_max=at_least_one(message.context_tokens_max, message, "context_tokens_max"),
        vocabulary_tokens=message.vocabulary_tokens,
        layers=message.layers,
        hidden_size=message.hidden_size,
        attention_heads=message.attention_heads,
        kv_heads=message.kv_heads,
        head_size=message.head_size,
        parameters=message.parameters,
        disk_bytes=message.disk_bytes,
        stop_token_ids=tuple(message.stop_token_ids),
        weights=weights_from_wire(message.weights, message, words),
        precision=_precision_from_wire(message.precision, message, words),
        quantisation=message.quantisation,
        mixture=mixture_from_wire(message),
    )


def mixture_to_wire(mixture: Mixture | None) -> pb.Mixture | None:
    if mixture is None:
        return None
    return pb.Mixture(experts=mixture.experts, chosen=mixture.chosen, parameters=mixture.parameters)


def mixture_from_wire(of: pb.ModelInfo | profile_pb2.Profile) -> Mixture | None:
    """Each token takes at least one expert: times are divided by the share that it reads."""
    if not of.HasField("mixture"):
        return None
    message = of.mixture
    chosen = at_least_one(message.chosen, message, "chosen")
    if chosen > message.experts:
        raise InvalidInput(f"Mixture.chosen is {chosen}; of {message.experts} experts it cannot be")
    return Mixture(experts=message.experts, chosen=chosen, parameters=message.parameters)


def weights_from_wire(text: str, message: Message, words: Words = member) -> WeightPrecision | None:
    """Those who say nothing of weights leave it to nodes."""
    return words(WeightPrecision, text, message, "weights") if text else None


def _tool_format_from_wire(text: str, message: Message, words: Words) -> ToolFormat | None:
    return words(ToolFormat, text, message, "tool_format") if text else None


def _precision_from_wire(text: str, message: Message, words: Words) -> ComputePrecision | None:
    return words(ComputePrecision, text, message, "precision") if text else None


def footprint_to_wire(footprint: Footprint) -> pb.Footprint:
    return pb.Footprint(
        weights_bytes=footprint.weights_bytes,
        kv_block_bytes=footprint.kv_block_bytes,
        block_tokens=footprint.block_tokens,
        shared_bytes=footprint.shared_bytes,
    )


def footprint_from_wire(message: pb.Footprint) -> Footprint:
    return Footprint(
        weights_bytes=message.weights_bytes,
        kv_block_bytes=at_least_one(message.kv_block_bytes, message, "kv_block_bytes"),
        block_tokens=at_least_one(message.block_tokens, message, "block_tokens"),
        shared_bytes=message.shared_bytes,
    )


def assets_to_wire(assets: TextAssets) -> pb.TextAssets:
    return pb.TextAssets(
        tokenizer_json=assets.tokenizer_json,
        chat_template=assets.chat_template,
        tool_template=assets.tool_template,
        bos_token=assets.bos_token,
        eos_token=assets.eos_token,
        special_tokens=assets.special_tokens,
        add_bos=assets.add_bos,
        sampling=pb.SamplingDefaults(
            temperature=assets.sampling.temperature,
            top_p=assets.sampling.top_p,
            top_k=assets.sampling.top_k,
            repetition_penalty=assets.sampling.repetition_penalty,
        ),
    )


def assets_from_wire(message: pb.TextAssets) -> TextAssets:
    return TextAssets(
        tokenizer_json=message.tokenizer_json,
        chat_template=message.chat_template if message.HasField("chat_template") else None,
        tool_template=message.tool_template if message.HasField("tool_template") else None,
        bos_token=message.bos_token if message.HasField("bos_token") else None,
        eos_token=message.eos_token if message.HasField("eos_token") else None,
        special_tokens=message.special_tokens,
        add_bos=message.add_bos,
        sampling=_sampling_defaults(message.sampling),
    )


def _sampling_defaults(message: pb.SamplingDefaults) -> SamplingDefaults:
    penalty = message.repetition_penalty if message.HasField("repetition_penalty") else None
    return SamplingDefaults(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        repetition_penalty=penalty,
    )


def slo_to_wire(slo: Slo) -> pb.Slo:
    return pb.Slo(
        ttft_s=slo.ttft_s,
        ttft_tokens_per_s=slo.ttft_tokens_per_s,
        tpot_s=slo.tpot_s,
        cold_start=slo.cold_start,
    )


def slo_from_wire(message: pb.Slo, words: Words = member) -> Slo:
    """Checked here already: everybody divides by its fields."""
    slo = Slo(
        ttft_s=message.ttft_s,
        ttft_tokens_per_s=message.ttft_tokens_per_s,
        tpot_s=message.tpot_s,
        cold_start=words(ColdStart, message.cold_start or ColdStart.LATE, message, "cold_start"),
    )
    check_slo(slo)
    return slo


def spec_to_wire(spec: DeploymentSpec) -> pb.DeploymentSpec:
    return pb.DeploymentSpec(
        name=spec.name,
        source=spec.source,
        context_tokens_max=spec.context_tokens_max,
        slo=slo_to_wire(spec.slo),
        scaling=pb.Scaling(
            replicas_min=spec.scaling.replicas_min,
            replicas_max=spec.scaling.replicas_max,
            keep_alive_s=spec.scaling.keep_alive_s,
        ),
        devices=spec.devices,
        tensor_parallel=spec.tensor_parallel,
        weights=spec.weights or "",
        precision=spec.precision or "",
        tenant=spec.tenant,
        prefix_cache=None if spec.prefix_cache else False,
        tool_format=spec.tool_format or "",
        special_tokens_in_content=spec.special_tokens_in_content,
    )


def spec_from_wire(message: pb.DeploymentSpec, words: Words = member) -> DeploymentSpec:
    """The spec as it was written; `mesh.domain.checks` says whether it can be deployed."""
    require(message, "slo", "scaling")
    given = message.HasField("context_tokens_max")
    return DeploymentSpec(
        name=DeploymentName(message.name),
        source=message.source,
        context_tokens_max=message.context_tokens_max if given else None,
        slo=slo_from_wire(message.slo, words),
        scaling=Scaling(
            replicas_min=message.scaling.replicas_min,
            replicas_max=message.scaling.replicas_max,
            keep_alive_s=message.scaling.keep_alive_s,
        ),
        devices=tuple(words(DeviceKind, d, message, "devices") for d in message.devices),
        tensor_parallel=message.tensor_parallel or 1,
        weights=weights_from_wire(message.weights, message, words),
        precision=_precision_from_wire(message.precision, message, words),
        tenant=message.tenant,
        prefix_cache=message.prefix_cache or not message.HasField("prefix_cache"),
        tool_format=_tool_format_from_wire(message.tool_format, message, words),
        special_tokens_in_content=message.special_tokens_in_content,
    )
