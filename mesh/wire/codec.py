"""All that crosses the wire by the mapping: the rules for what types cannot say, and the unions.

`to_wire` and `from_wire` are for any dataclass that has a message of the same fields. Commands and
reports are members of a oneof. Orders and tokens are coded by hand, field by field, and checked no
more than they need to be: there is a report of tokens for each iteration.
"""

from collections.abc import Iterable
from dataclasses import MISSING
from itertools import pairwise
from math import isfinite
from typing import Any, TypeVar, assert_never, cast

from google.protobuf.message import Message

from mesh.domain.checks import check_slo
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.energy import Energy
from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import Grammar
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.invocation import (
    ChatPrompt,
    FillPrompt,
    Finished,
    Invocation,
    InvocationEvent,
    PairPrompt,
    Prompt,
    Resume,
    TextPrompt,
    TokenPrompt,
    Tokens,
)
from mesh.domain.messages import (
    Heartbeat,
    HeldRequest,
    InstanceLoaded,
    NodeCommand,
    NodeHello,
    NodeReport,
    SubmitRequest,
    TokensReport,
)
from mesh.domain.model import Mixture, Task
from mesh.domain.node_rule import CELL_RULE, Adopted, NodeRule, RuleName
from mesh.domain.profile import Grid
from mesh.domain.ranges import Range
from mesh.domain.reasons import FinishReason
from mesh.domain.request import (
    KvSource,
    Request,
    RequestOrder,
    RequestTokens,
    SamplingParams,
    TokenBias,
    TokenLogprobs,
)
from mesh.domain.slo import PACE, Slo
from mesh.domain.values import replace
from mesh.domain.views import RevisionView
from mesh.policy.rules.registry import rule_named
from mesh.policy.rules.swapping import SwapRule
from mesh.runtime.link_life import NO_EPOCH, CellEpoch
from mesh.v1 import inference_pb2, model_pb2, profile_pb2
from mesh.v1 import node_link_pb2 as pb
from mesh.wire.malformed import identifier, member, require, shown, within
from mesh.wire.mapping import ByHand, Mappings, Rule

V = TypeVar("V")

HELD_BYTES_MAX = 16 << 20
"""The most bytes of a hello that are of requests: a link takes four times as many in a message."""
UNSENDABLE = (TypeError, ValueError, OverflowError)
"""What protobuf raises for a number beyond its field, a lone surrogate, or another type."""
SIZES_MAX = 64
"""Rows, and columns, of a grid: sizes of powers of two never come to as many."""


def welcome(heartbeat_s: float, rule: NodeRule, epoch: CellEpoch = NO_EPOCH) -> pb.NodeCommand:
    """The first message of an accepted link; `epoch` is that of the controller's lease."""
    greeting = pb.Welcome(
        heartbeat_s=heartbeat_s,
        turns=rule.turn.name,
        turn_parameters=dict(rule.turn.parameters),
        turn_digest=rule.turn.digest,
        turn_s_max=rule.turn_s_max,
        overestimate=rule.overestimate,
        chunk_tokens_max=rule.chunk_tokens_max,
        swap_bytes=rule.swap_bytes,
        epoch=epoch.number,
        cell=epoch.cell,
        adopted=[to_wire(one, pb.Adopted) for one in rule.adopted],
    )
    return pb.NodeCommand(welcome=greeting)


def rule_of(message: pb.Welcome) -> NodeRule:
    """The rule of a welcome; what a controller's version does not know is as by default."""
    turn = RuleName(
        name=message.turns or CELL_RULE.turn.name,
        parameters=tuple(message.turn_parameters.items()),
        digest=message.turn_digest,
    )
    if not turn.digest and not isinstance(rule_named(turn), SwapRule) and message.swap_bytes:
        raise InvalidInput(
            f"the turn rule {turn.name!r} of this node swaps no weights, as its controller wants",
            hint="run controller and nodes of one version",
        )
    return NodeRule(
        turn=turn,
        turn_s_max=message.turn_s_max,
        overestimate=message.overestimate or CELL_RULE.overestimate,
        chunk_tokens_max=message.chunk_tokens_max or CELL_RULE.chunk_tokens_max,
        swap_bytes=message.swap_bytes,
        adopted=tuple(from_wire(one, Adopted) for one in message.adopted),
    )


def _check_hello(hello: NodeHello) -> None:
    if hello.base_bytes > hello.memory_bytes:
        raise InvalidInput(
            f"NodeHello.base_bytes is {hello.base_bytes}, above memory_bytes, which is "
            f"{hello.memory_bytes}: nothing is left for instances",
            hint="give the node more --memory",
        )


def _check_mixture(mixture: Mixture) -> None:
    """Times are divided by the share of the experts that a token reads."""
    if mixture.chosen > mixture.experts:
        raise InvalidInput(
            f"Mixture.chosen is {mixture.chosen}; of {mixture.experts} experts it cannot be"
        )


def _grid_to_wire(grid: Grid) -> profile_pb2.Grid:
    seconds = [value for row in grid.seconds for value in row]
    return profile_pb2.Grid(rows=grid.rows, columns=grid.columns, seconds=seconds)


def _grid_from_wire(grid: profile_pb2.Grid, name: str) -> Grid:
    """The grid that a profile has under this name. It is divided by and indexed with at every turn
    of a node and every placement of the controller, so that nothing malformed gets past here.
    """
    rows, columns = tuple(grid.rows), tuple(grid.columns)
    _check_sizes(rows, f"{name}.rows", least=1)
    _check_sizes(columns, f"{name}.columns", least=0)
    wide, found = len(columns), len(grid.seconds)
    if found != len(rows) * wide:
        raise InvalidInput(
            f"Profile.{name} has {found} seconds for {len(rows)} rows and {wide} columns; "
            f"it must have {len(rows) * wide}"
        )
    for value in grid.seconds:
        if not (isfinite(value) and value > 0.0):
            raise InvalidInput(
                f"Profile.{name}.seconds has {value:g}; iterations take some time, and a finite one"
            )
    flat = tuple(grid.seconds)
    seconds = tuple(flat[first : first + wide] for first in range(0, found, wide))
    return Grid(rows=rows, columns=columns, seconds=seconds)


def _check_sizes(sizes: tuple[int, ...], name: str, *, least: int) -> None:
    if not 1 <= len(sizes) <= SIZES_MAX:
        raise InvalidInput(f"Profile.{name} has {len(sizes)} sizes; it must have 1 to {SIZES_MAX}")
    if sizes[0] < least:
        raise InvalidInput(f"Profile.{name} begins with {sizes[0]}; it must be {least} or more")
    if any(size >= following for size, following in pairwise(sizes)):
        raise InvalidInput(f"Profile.{name} is {', '.join(map(str, sizes))}; it must ascend")


_FACTOR = Range(least=0.0, above=True)
_SECONDS = Range(least=0.0)
_FINISHES: dict[str, FinishReason | None] = {"": None, **{r.value: r for r in FinishReason}}


def _submit_to_wire(submit: SubmitRequest) -> pb.SubmitRequest:
    order, request = submit.order, submit.order.request
    return pb.SubmitRequest(
        instance_id=submit.instance_id,
        request_id=request.request_id,
        deployment=request.deployment,
        attempt=order.attempt,
        prompt_tokens=request.prompt_tokens,
        output_tokens=order.output_tokens,
        sampling=to_wire(request.sampling, model_pb2.SamplingParams),
        slo=to_wire(order.slo, model_pb2.Slo),
        age_s=order.age_s,
        due_in_s=order.due_in_s,
        pace_share=order.pace_share,
        slack_s=order.slack_s,
        paused=order.paused,
        cache_salt=request.cache_salt,
        cached_tokens=order.cached_tokens,
        kv=None if order.kv is None else to_wire(order.kv, pb.KvSource),
        first=request.first,
        keyed=request.keyed,
        asked_digest=request.asked_digest,
    )


def _submit_from_wire(message: pb.SubmitRequest, _: str) -> SubmitRequest:
    require(message, "sampling", "slo")
    request = Request(
        request_id=RequestId(identifier(message.request_id, message, "request_id")),
        deployment=DeploymentName(message.deployment),
        prompt_tokens=tuple(message.prompt_tokens),
        sampling=from_wire(message.sampling, SamplingParams),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        first=RequestId(message.first) if message.HasField("first") else None,
        keyed=message.keyed,
        asked_digest=message.asked_digest,
    )
    return SubmitRequest(
        instance_id=InstanceId(identifier(message.instance_id, message, "instance_id")),
        order=RequestOrder(
            request=request,
            attempt=message.attempt,
            output_tokens=tuple(message.output_tokens),
            slo=from_wire(message.slo, Slo),
            age_s=message.age_s,
            due_in_s=message.due_in_s,
            pace_share=message.pace_share if message.HasField("pace_share") else PACE.share,
            slack_s=message.slack_s,
            paused=message.paused,
            cached_tokens=message.cached_tokens,
            kv=from_wire(message.kv, KvSource) if message.HasField("kv") else None,
        ),
    )


def _tokens_to_wire(report: TokensReport) -> pb.TokensReport:
    return pb.TokensReport(
        instance_id=report.instance_id,
        outputs=_outputs_to_wire(report.outputs),
        prefill_left=[
            pb.PrefillLeft(request_id=request_id, tokens=tokens)
            for request_id, tokens in report.prefill_left
        ],
        starved=report.starved,
        correction=report.correction,
        busy_s=report.busy_s,
    )


def _outputs_to_wire(outputs: Iterable[RequestTokens]) -> list[model_pb2.RequestTokens]:
    return [
        model_pb2.RequestTokens(
            request_id=output.request_id,
            attempt=output.attempt,
            first_index=output.first_index,
            token_ids=output.token_ids,
            text=output.text,
            finish=output.finish or "",
            logprobs=map(_logprobs_to_wire, output.logprobs),
            cached_tokens=output.cached_tokens,
            prompt_logprobs=map(_logprobs_to_wire, output.prompt_logprobs),
            embedding=output.embedding,
        )
        for output in outputs
    ]


def _held_to_wire(held: HeldRequest) -> pb.HeldRequest:
    submitted = SubmitRequest(instance_id=held.instance_id, order=held.order)
    return pb.HeldRequest(
        submitted=_submit_to_wire(submitted),
        outputs=_outputs_to_wire(held.outputs),
        prefill_left=held.prefill_left,
    )


def _held_from_wire(message: pb.HeldRequest, _: str) -> Any:
    """The request; MISSING for one that this version cannot read, which is left out of its hello:
    its client goes on without what the node has of it.
    """
    try:
        require(message, "submitted")
        submitted = _submit_from_wire(message.submitted, "")
    except InvalidInput:
        return MISSING
    return HeldRequest(
        instance_id=submitted.instance_id,
        order=submitted.order,
        outputs=tuple(_outputs(message.outputs)),
        prefill_left=message.prefill_left,
    )


def _tokens_from_wire(message: pb.TokensReport, _: str) -> TokensReport:
    return TokensReport(
        instance_id=InstanceId(message.instance_id),
        outputs=tuple(_outputs(message.outputs)),
        prefill_left=tuple(
            (RequestId(left.request_id), left.tokens) for left in message.prefill_left
        ),
        starved=tuple(
            RequestId(identifier(request_id, message, "starved")) for request_id in message.starved
        ),
        correction=within(_FACTOR, message.correction or 1.0, message, "correction"),
        busy_s=tuple([within(_SECONDS, one, message, "busy_s") for one in message.busy_s]),
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
            logprobs=tuple(map(_logprobs_from_wire, message.logprobs)),
            cached_tokens=message.cached_tokens,
            prompt_logprobs=tuple(map(_logprobs_from_wire, message.prompt_logprobs)),
            embedding=tuple(message.embedding),
        )


def _logprobs_to_wire(one: TokenLogprobs) -> model_pb2.TokenLogprobs:
    return model_pb2.TokenLogprobs(
        logprob=one.logprob,
        top_ids=[token_id for token_id, _ in one.top],
        top_logprobs=[logprob for _, logprob in one.top],
    )


def _logprobs_from_wire(one: model_pb2.TokenLogprobs, _: str = "") -> TokenLogprobs:
    return TokenLogprobs(
        logprob=one.logprob, top=tuple(zip(one.top_ids, one.top_logprobs, strict=False))
    )


def _answer_to_wire(told: Tokens) -> inference_pb2.Tokens:
    message = inference_pb2.Tokens(
        first_index=told.first_index, token_ids=told.token_ids, text=told.text
    )
    if told.logprobs:
        message.logprobs.extend(map(_logprobs_to_wire, told.logprobs))
    if told.prompt_token_ids:
        message.prompt_token_ids.extend(told.prompt_token_ids)
    if told.prompt_logprobs:
        message.prompt_logprobs.extend(map(_logprobs_to_wire, told.prompt_logprobs))
    if told.embedding:
        message.embedding.extend(told.embedding)
    return message


def _answer_from_wire(message: inference_pb2.Tokens, _: str) -> Tokens:
    """Most messages have the first three fields alone."""
    logprobs, prompt_logprobs = message.logprobs, message.prompt_logprobs
    prompt, embedding = message.prompt_token_ids, message.embedding
    return Tokens(
        first_index=message.first_index,
        token_ids=tuple(message.token_ids[:]),
        text=message.text,
        logprobs=tuple(map(_logprobs_from_wire, logprobs)) if logprobs else (),
        prompt_token_ids=tuple(prompt[:]) if prompt else (),
        prompt_logprobs=tuple(map(_logprobs_from_wire, prompt_logprobs)) if prompt_logprobs else (),
        embedding=tuple(embedding[:]) if embedding else (),
    )


_MAPPINGS = Mappings(
    {
        DeploymentSpec: Rule(required=frozenset({"slo", "scaling"})),
        Finished: Rule(names={"node_id": "node"}),
        Grid: ByHand(encode=_grid_to_wire, decode=_grid_from_wire),
        HeldRequest: ByHand(encode=_held_to_wire, decode=_held_from_wire),
        Energy: Rule(tolerant=frozenset({"source"})),
        Heartbeat: Rule(tolerant=frozenset({"models"})),
        InstanceLoaded: Rule(tolerant=frozenset({"tier"})),
        Mixture: Rule(check=_check_mixture),
        NodeHello: Rule(tolerant=frozenset({"models", "load_rates"}), check=_check_hello),
        RevisionView: Rule(names={"ready": "instances_ready", "wanted": "instances_wanted"}),
        Slo: Rule(check=check_slo),
        SubmitRequest: ByHand(encode=_submit_to_wire, decode=_submit_from_wire),
        Tokens: ByHand(encode=_answer_to_wire, decode=_answer_from_wire),
        TokenLogprobs: ByHand(encode=_logprobs_to_wire, decode=_logprobs_from_wire),
        TokensReport: ByHand(encode=_tokens_to_wire, decode=_tokens_from_wire),
    }
)
to_wire = _MAPPINGS.to_wire
from_wire = _MAPPINGS.from_wire


def view_from_wire(message: Message, kind: type[V]) -> V:
    """A picture of the cell, for people. Nobody decides by it: a word that only the controller's
    version knows is `shown`, and costs nothing of what stands beside it.
    """
    return from_wire(message, kind, shown)


def command_to_wire(command: NodeCommand) -> pb.NodeCommand:
    return _MAPPINGS.member_to_wire(command, pb.NodeCommand)


def command_from_wire(message: pb.NodeCommand) -> NodeCommand:
    """The command. Raises InvalidInput for a malformed one; `welcome` is none, the link's own."""
    return cast(NodeCommand, _MAPPINGS.member_from_wire(message, NodeCommand))


def report_to_wire(report: NodeReport) -> pb.NodeReport:
    """The report. A hello has those of its requests that can be written, up to HELD_BYTES_MAX."""
    if not isinstance(report, NodeHello):
        return _MAPPINGS.member_to_wire(report, pb.NodeReport)
    message = _MAPPINGS.member_to_wire(replace(report, requests=()), pb.NodeReport)
    left_bytes = HELD_BYTES_MAX
    for held in report.requests:
        try:
            written = _held_to_wire(held)
        except UNSENDABLE:
            continue
        size_bytes = written.ByteSize()
        if size_bytes <= left_bytes:
            message.hello.requests.append(written)
            left_bytes -= size_bytes
    return message


def report_from_wire(message: pb.NodeReport) -> NodeReport:
    """The report. Raises InvalidInput for a malformed one."""
    return cast(NodeReport, _MAPPINGS.member_from_wire(message, NodeReport))


_SAME: tuple[str, ...] = (
    *("deployment", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "stop"),
    *("slo_ttft_s", "slo_tpot_s", "slo_class", "cache_salt", "min_tokens", "stop_token_ids"),
    *("prompt_logprobs", "key"),
)
"""Fields of the same name and form in an invocation and its message."""


def invocation_to_wire(asked: Invocation) -> inference_pb2.InvokeRequest:
    grammar = to_wire(asked.grammar, model_pb2.Grammar) if asked.grammar is not None else None
    same: dict[str, Any] = {name: getattr(asked, name) for name in _SAME}
    biases = [to_wire(one, model_pb2.TokenBias) for one in asked.logit_bias]
    resume = None if asked.resume is None else to_wire(asked.resume, inference_pb2.Resume)
    message = inference_pb2.InvokeRequest(
        resume=resume, grammar=grammar, logit_bias=biases, task=asked.task or "", **same
    )
    match asked.prompt:
        case TextPrompt():
            message.prompt = asked.prompt.text
        case ChatPrompt():
            message.chat.CopyFrom(to_wire(asked.prompt, inference_pb2.Chat))
        case TokenPrompt():
            message.tokens.CopyFrom(inference_pb2.TokenIds(ids=asked.prompt.token_ids))
        case FillPrompt():
            message.fill.CopyFrom(to_wire(asked.prompt, inference_pb2.Fill))
        case PairPrompt():
            message.pair.CopyFrom(to_wire(asked.prompt, inference_pb2.Pair))
        case _:
            assert_never(asked.prompt)
    return message


def invocation_from_wire(message: inference_pb2.InvokeRequest) -> Invocation:
    """What was asked, unresolved and unchecked but for its form. Raises InvalidInput."""
    same = {name: getattr(message, name) for name in _SAME if _has_field(message, name)}
    return Invocation(
        prompt=_prompt(message),
        grammar=from_wire(message.grammar, Grammar) if message.HasField("grammar") else None,
        task=member(Task, message.task, message, "task") if message.task else None,
        resume=from_wire(message.resume, Resume) if message.HasField("resume") else None,
        logit_bias=tuple(from_wire(one, TokenBias) for one in message.logit_bias),
        **same | {"stop": tuple(message.stop), "stop_token_ids": tuple(message.stop_token_ids)},
    )


def _has_field(message: inference_pb2.InvokeRequest, name: str) -> bool:
    """Fields without presence always have a value."""
    found: Message = message
    return not found.DESCRIPTOR.fields_by_name[name].has_presence or found.HasField(name)


def _prompt(message: inference_pb2.InvokeRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "prompt":
            return TextPrompt(text=message.prompt)
        case "chat":
            return from_wire(message.chat, ChatPrompt)
        case "tokens":
            return TokenPrompt(token_ids=tuple(message.tokens.ids))
        case "fill":
            return from_wire(message.fill, FillPrompt)
        case "pair":
            return from_wire(message.pair, PairPrompt)
        case _:
            raise InvalidInput(
                "the request holds no input", hint="give one of prompt, chat, tokens, fill or pair"
            )


def event_to_wire(event: InvocationEvent) -> inference_pb2.InvokeResponse:
    return _MAPPINGS.member_to_wire(event, inference_pb2.InvokeResponse)


def event_from_wire(message: inference_pb2.InvokeResponse) -> InvocationEvent:
    """The event, as a client is shown it. Raises InvalidInput for a malformed one."""
    return cast(InvocationEvent, _MAPPINGS.member_from_wire(message, InvocationEvent, shown))
