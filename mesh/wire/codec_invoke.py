"""Invocations between client and gateway: what is asked, and the events of the answer."""

from typing import Any, assert_never

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, NodeId, RequestId
from mesh.domain.invocation import (
    Accepted,
    ChatPrompt,
    Finished,
    Invocation,
    InvocationEvent,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Tokens,
    Waiting,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.text import ChatMessage
from mesh.v1 import inference_pb2 as pb
from mesh.wire.codec_request import (
    grammar_from_wire,
    grammar_to_wire,
    logprobs_from_wire,
    logprobs_to_wire,
)
from mesh.wire.malformed import nothing_known, shown

_OPTIONAL: tuple[Any, ...] = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("slo_ttft_s", "slo_tpot_s"),
)
"""Fields of the same name in message and invocation."""


def invocation_to_wire(asked: Invocation) -> pb.InvokeRequest:
    message = pb.InvokeRequest(
        deployment=asked.deployment,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        repetition_penalty=asked.repetition_penalty,
        max_tokens=asked.max_tokens,
        ignore_eos=asked.ignore_eos,
        stop=asked.stop,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logprobs=asked.logprobs,
        slo_ttft_s=asked.slo_ttft_s,
        slo_tpot_s=asked.slo_tpot_s,
        grammar=grammar_to_wire(asked.grammar),
        cache_salt=asked.cache_salt,
    )
    match asked.prompt:
        case TextPrompt():
            message.prompt = asked.prompt.text
        case ChatPrompt():
            turns = (
                pb.ChatMessage(
                    role=m.role,
                    content=m.content,
                    name=m.name,
                    tool_calls=m.tool_calls,
                    tool_call_id=m.tool_call_id,
                    reasoning_content=m.reasoning_content,
                )
                for m in asked.prompt.messages
            )
            kwargs, tools = asked.prompt.template_kwargs, asked.prompt.tools
            message.chat.CopyFrom(pb.Chat(messages=turns, template_kwargs=kwargs, tools=tools))
        case TokenPrompt():
            message.tokens.CopyFrom(pb.TokenIds(ids=asked.prompt.token_ids))
        case _:
            assert_never(asked.prompt)
    return message


def invocation_from_wire(message: pb.InvokeRequest) -> Invocation:
    """What was asked, unresolved and unchecked but for its form."""
    return Invocation(
        deployment=DeploymentName(message.deployment),
        prompt=_prompt(message),
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        cache_salt=message.cache_salt,
        grammar=grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
        **{name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)},
    )


def _prompt(message: pb.InvokeRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "prompt":
            return TextPrompt(text=message.prompt)
        case "chat":
            return ChatPrompt(
                messages=tuple(
                    ChatMessage(
                        role=m.role,
                        content=m.content,
                        name=m.name,
                        tool_calls=m.tool_calls,
                        tool_call_id=m.tool_call_id,
                        reasoning_content=m.reasoning_content,
                    )
                    for m in message.chat.messages
                ),
                template_kwargs=message.chat.template_kwargs,
                tools=message.chat.tools,
            )
        case "tokens":
            return TokenPrompt(token_ids=tuple(message.tokens.ids))
        case _:
            raise InvalidInput(
                "the request holds no input", hint="give one of prompt, chat or tokens"
            )


def event_to_wire(event: InvocationEvent) -> pb.InvokeResponse:
    match event:
        case Tokens():
            return pb.InvokeResponse(
                tokens=pb.Tokens(
                    first_index=event.first_index,
                    token_ids=event.token_ids,
                    text=event.text,
                    logprobs=logprobs_to_wire(event.logprobs),
                )
            )
        case Accepted():
            accepted = pb.Accepted(
                request_id=event.request_id,
                prompt_tokens=event.prompt_tokens,
                ttft_limit_s=event.ttft_limit_s,
                tpot_limit_s=event.tpot_limit_s,
                grace_s=event.grace_s,
                cached_prompt_tokens=event.cached_prompt_tokens,
            )
            return pb.InvokeResponse(accepted=accepted)
        case Waiting():
            return pb.InvokeResponse(waiting=pb.Waiting(phase=event.phase, share=event.share))
        case Finished():
            finished = pb.Finished(
                reason=event.reason,
                prompt_tokens=event.prompt_tokens,
                output_tokens=event.output_tokens,
                ttft_s=event.ttft_s,
                tpot_s=event.tpot_s,
                grace_s=event.grace_s,
                node=event.node_id or "",
                cached_prompt_tokens=event.cached_prompt_tokens,
            )
            return pb.InvokeResponse(finished=finished)
        case _:
            assert_never(event)


def event_from_wire(message: pb.InvokeResponse) -> InvocationEvent:
    """The event. Raises InvalidInput for a malformed one."""
    match message.WhichOneof("event"):
        case "tokens":
            tokens = message.tokens
            return Tokens(
                first_index=tokens.first_index,
                token_ids=tuple(tokens.token_ids),
                text=tokens.text,
                logprobs=logprobs_from_wire(tokens.logprobs),
            )
        case "accepted":
            accepted = message.accepted
            return Accepted(
                request_id=RequestId(accepted.request_id),
                prompt_tokens=accepted.prompt_tokens,
                ttft_limit_s=accepted.ttft_limit_s,
                tpot_limit_s=accepted.tpot_limit_s,
                grace_s=accepted.grace_s,
                cached_prompt_tokens=accepted.cached_prompt_tokens,
            )
        case "waiting":
            return Waiting(phase=message.waiting.phase, share=message.waiting.share)
        case "finished":
            finished = message.finished
            return Finished(
                reason=shown(FinishReason, finished.reason, finished, "reason"),
                prompt_tokens=finished.prompt_tokens,
                output_tokens=finished.output_tokens,
                ttft_s=finished.ttft_s,
                tpot_s=finished.tpot_s,
                grace_s=finished.grace_s,
                node_id=NodeId(finished.node) if finished.node else None,
                cached_prompt_tokens=finished.cached_prompt_tokens,
            )
        case _:
            raise nothing_known(message)
