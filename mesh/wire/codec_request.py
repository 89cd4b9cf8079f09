"""Requests on the link between controller and node: orders down, tokens up.

Tokens are the hot path: one report an iteration, for all requests of its batch. They are coded by
hand, field by field, and checked no more than they need to be.
"""

from collections.abc import Iterable

from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import SubmitRequest, TokensReport
from mesh.domain.reasons import FinishReason
from mesh.domain.request import (
    Request,
    RequestOrder,
    RequestTokens,
    SamplingParams,
    TokenLogprobs,
)
from mesh.domain.slo import PACE
from mesh.v1 import model_pb2, node_link_pb2
from mesh.wire.codec_model import slo_from_wire, slo_to_wire
from mesh.wire.codec_profile import factor_from_wire
from mesh.wire.malformed import identifier, member, require

_FINISHES: dict[str, FinishReason | None] = {"": None, **{r.value: r for r in FinishReason}}


def sampling_to_wire(sampling: SamplingParams) -> model_pb2.SamplingParams:
    return model_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logprobs=sampling.logprobs,
        grammar=grammar_to_wire(sampling.grammar),
    )


def sampling_from_wire(message: model_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        repetition_penalty=message.repetition_penalty,
        max_tokens=message.max_tokens,
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        grammar=grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
    )


def grammar_to_wire(grammar: Grammar | None) -> model_pb2.Grammar | None:
    return None if grammar is None else model_pb2.Grammar(kind=grammar.kind, text=grammar.text)


def grammar_from_wire(message: model_pb2.Grammar) -> Grammar:
    return Grammar(kind=member(GrammarKind, message.kind, message, "kind"), text=message.text)


def submit_to_wire(submit: SubmitRequest) -> node_link_pb2.SubmitRequest:
    order, request = submit.order, submit.order.request
    return node_link_pb2.SubmitRequest(
        instance_id=submit.instance_id,
        request_id=request.request_id,
        deployment=request.deployment,
        attempt=order.attempt,
        prompt_tokens=request.prompt_tokens,
        output_tokens=order.output_tokens,
        sampling=sampling_to_wire(request.sampling),
        slo=slo_to_wire(order.slo),
        age_s=order.age_s,
        due_in_s=order.due_in_s,
        pace_share=order.pace_share,
        slack_s=order.slack_s,
        held=order.held,
        cache_salt=request.cache_salt,
        cached_tokens=order.cached_tokens,
    )


def submit_from_wire(message: node_link_pb2.SubmitRequest) -> SubmitRequest:
    require(message, "sampling", "slo")
    request = Request(
        request_id=RequestId(identifier(message.request_id, message, "request_id")),
        deployment=DeploymentName(message.deployment),
        prompt_tokens=tuple(message.prompt_tokens),
        sampling=sampling_from_wire(message.sampling),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
    )
    return SubmitRequest(
        instance_id=InstanceId(identifier(message.instance_id, message, "instance_id")),
        order=RequestOrder(
            request=request,
            attempt=message.attempt,
            output_tokens=tuple(message.output_tokens),
            slo=slo_from_wire(message.slo),
            age_s=message.age_s,
            due_in_s=message.due_in_s,
            pace_share=message.pace_share if message.HasField("pace_share") else PACE.share,
            slack_s=message.slack_s,
            held=message.held,
            cached_tokens=message.cached_tokens,
        ),
    )


def tokens_to_wire(report: TokensReport) -> node_link_pb2.TokensReport:
    return node_link_pb2.TokensReport(
        instance_id=report.instance_id,
        outputs=[
            model_pb2.RequestTokens(
                request_id=output.request_id,
                attempt=output.attempt,
                first_index=output.first_index,
                token_ids=output.token_ids,
                text=output.text,
                finish=output.finish or "",
                logprobs=logprobs_to_wire(output.logprobs),
                cached_tokens=output.cached_tokens,
            )
            for output in report.outputs
        ],
        prefill_left=[
            node_link_pb2.PrefillLeft(request_id=request_id, tokens=tokens)
            for request_id, tokens in report.prefill_left
        ],
        starved=report.starved,
        correction=report.correction,
    )


def tokens_from_wire(message: node_link_pb2.TokensReport) -> TokensReport:
    return TokensReport(
        instance_id=InstanceId(message.instance_id),
        outputs=tuple(_outputs(message.outputs)),
        prefill_left=tuple(
            (RequestId(left.request_id), left.tokens) for left in message.prefill_left
        ),
        starved=tuple(
            RequestId(identifier(request_id, message, "starved")) for request_id in message.starved
        ),
        correction=factor_from_wire(message.correction, message, "correction"),
    )


def _outputs(messages: Iterable[model_pb2.RequestTokens]) -> Iterable[RequestTokens]:
    for message in messages:
        yield RequestTokens(
            request_id=RequestId(message.request_id),
            attempt=message.attempt,
            first_index=message.first_index,
            token_ids=tuple(message.token_ids),
            text=message.text,
            # An end that is not known here is nothing to tell a client as an answer's.
            finish=_FINISHES.get(message.finish, FinishReason.FAILED),
            logprobs=logprobs_from_wire(message.logprobs),
            cached_tokens=message.cached_tokens,
        )


def logprobs_to_wire(logprobs: Iterable[TokenLogprobs]) -> list[model_pb2.TokenLogprobs]:
    return [
        model_pb2.TokenLogprobs(
            logprob=one.logprob,
            top_ids=[token_id for token_id, _ in one.top],
            top_logprobs=[logprob for _, logprob in one.top],
        )
        for one in logprobs
    ]


def logprobs_from_wire(
    messages: Iterable[model_pb2.TokenLogprobs],
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        [
            TokenLogprobs(
                logprob=one.logprob,
                top=tuple(zip(one.top_ids, one.top_logprobs, strict=False)),
            )
            for one in messages
        ]
    )
