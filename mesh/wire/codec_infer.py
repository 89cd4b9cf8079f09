"""Text by the Open Inference Protocol: from a ModelInferRequest to an invocation, and back.

What is asked comes as Triton's backend of vLLM takes it: the input `text_input`, and what governs
the answer as inputs, as the JSON object `sampling_parameters` or as parameters of the request; of a
name that comes in several ways, the first of these counts. Before: the service. After: the gateway,
which checks the numbers as it does for everyone.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Finished, Invocation, TextPrompt
from mesh.domain.values import dataclass
from mesh.v1 import open_inference_pb2 as pb
from mesh.wire.tensors import TEXT, Value, raw_element, read_inputs

INPUT: Final = "text_input"
OUTPUT: Final = "text_output"
JSON: Final = "sampling_parameters"
STREAM: Final = "stream"
STOP: Final = "stop"
EXCLUDED: Final = "exclude_input_in_output"
_IGNORED = frozenset({"binary_data_output", "triton_enable_empty_final_response"})
"""Parameters that change nothing: an answer's last message is always told as that."""
_TENSOR_IGNORED = frozenset({"binary_data", "binary_data_size"})
_FLAGS = ("BOOL",)
_INTEGERS = ("INT8", "INT16", "INT32", "UINT8", "UINT16", "UINT32", "UINT64", "INT64")
_NUMBERS = ("FP32", "FP64")


def _flag(given: object) -> bool:
    known = {True: True, False: False, "true": True, "false": False}
    if isinstance(given, bool | str) and given in known:
        return known[given]
    raise ValueError("true or false")


def _integer(given: object) -> int:
    if not isinstance(given, bool) and isinstance(given, int | str):
        try:
            return int(given)
        except ValueError:
            pass
    raise ValueError("an integer")


def _number(given: object) -> float:
    if not isinstance(given, bool) and isinstance(given, int | float | str):
        try:
            return float(given)
        except (ValueError, OverflowError):
            pass
    raise ValueError("a number")


def _text(given: object) -> str:
    if isinstance(given, str):
        try:
            given.encode()  # not so a lone surrogate, which JSON can write
        except UnicodeEncodeError:
            pass
        else:
            return given
    raise ValueError("text")


def _texts(given: object) -> tuple[str, ...]:
    return tuple(map(_text, given)) if isinstance(given, list) else (_text(given),)


def _top_k(given: object) -> int:
    """vLLM's word for no limit is -1."""
    top_k = _integer(given)
    return 0 if top_k == -1 else top_k


_FIELDS: Mapping[str, tuple[Callable[[object], object], tuple[str, ...]]] = {
    "max_tokens": (_integer, _INTEGERS),
    "temperature": (_number, _NUMBERS),
    "top_p": (_number, _NUMBERS),
    "top_k": (_top_k, _INTEGERS),
    "min_p": (_number, _NUMBERS),
    "seed": (_integer, _INTEGERS),
    "presence_penalty": (_number, _NUMBERS),
    "frequency_penalty": (_number, _NUMBERS),
    "repetition_penalty": (_number, _NUMBERS),
    STOP: (_texts, (TEXT,)),
    "ignore_eos": (_flag, _FLAGS),
    "cache_salt": (_text, (TEXT,)),
}
"""For each field of an invocation, how its value is read, and the datatypes of its tensor."""
INPUTS: Mapping[str, tuple[str, ...]] = {
    INPUT: (TEXT,),
    STREAM: _FLAGS,
    JSON: (TEXT,),
    EXCLUDED: _FLAGS,
    **{name: datatypes for name, (_, datatypes) in _FIELDS.items()},
}
"""The datatypes that each may have; a model's metadata tells the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInference:
    """One request of ModelInfer or ModelStreamInfer; `version` is as it was given."""

    asked: Invocation
    version: str
    stream: bool
    """Whether the answer comes in pieces."""
    raw: bool
    """Whether its tensors are raw, as the answer's are then."""
    shape: tuple[int, ...]
    id: str


def inference_from_wire(request: pb.ModelInferRequest) -> TextInference:
    """What was asked, unchecked but for its form. Raises InvalidInput."""
    _check_outputs(request)
    inputs = read_inputs(request, INPUTS, STOP)
    if INPUT not in inputs:
        raise InvalidInput(f"the request lacks the input {INPUT!r}", field=INPUT)
    tensor = next(tensor for tensor in request.inputs if tensor.name == INPUT)
    (text,) = inputs.pop(INPUT)
    given = _parameters(request)
    if JSON in inputs:
        given |= _object(inputs.pop(JSON)[0])
    given |= {name: found if name == STOP else found[0] for name, found in inputs.items()}
    stream = bool(_read(STREAM, _flag, given.pop(STREAM, False)))
    if not _read(EXCLUDED, _flag, given.pop(EXCLUDED, True)):
        raise InvalidInput(
            f"{EXCLUDED} is false; {OUTPUT!r} is the answer alone", hint="leave it out"
        )
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _FIELDS:
            known = ", ".join(_FIELDS)
            raise InvalidInput(f"{name!r} is not known here", hint=f"known: {known}", field=name)
        fields[name] = _read(name, _FIELDS[name][0], value)
    return TextInference(
        asked=Invocation(
            deployment=DeploymentName(request.model_name),
            prompt=TextPrompt(text=str(text)),
            **fields,
        ),
        version=request.model_version,
        stream=stream,
        raw=bool(request.raw_input_contents),
        shape=tuple(tensor.shape),
        id=request.id,
    )


def _check_outputs(request: pb.ModelInferRequest) -> None:
    for output in request.outputs:
        if output.name != OUTPUT:
            raise InvalidInput(
                f"there is no output {output.name!r}", hint=f"outputs: {OUTPUT}", field=output.name
            )
    given = {(one.name, name) for one in request.inputs for name in one.parameters}
    given |= {(one.name, name) for one in request.outputs for name in one.parameters}
    for tensor_name, name in sorted(given):
        if name not in _TENSOR_IGNORED:
            raise InvalidInput(
                f"{tensor_name!r} has the parameter {name!r}, which is not supported here",
                hint="leave it out; there is no shared memory",
                field=tensor_name,
            )


def _parameters(request: pb.ModelInferRequest) -> dict[str, object]:
    """The parameters of the request; one without a value counts as not given."""
    return {
        name: getattr(parameter, kind)
        for name, parameter in sorted(request.parameters.items())
        if name not in _IGNORED and (kind := parameter.WhichOneof("parameter_choice"))
    }


def _object(text: Value) -> dict[str, object]:
    """Its members; one that is null counts as not given."""
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{JSON} is no valid JSON: {error}", field=JSON) from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{JSON} is no JSON object", field=JSON)
    return {name: value for name, value in found.items() if value is not None}


def _read(name: str, read: Callable[[object], object], given: object) -> object:
    try:
        return read(given)
    except ValueError as error:
        shown = repr(given)[:64]
        raise InvalidInput(f"{name} is {shown}; it must be {error}", field=name) from None


def answer_to_wire(
    inference: TextInference,
    text: str,
    *,
    version: int,
    request_id: RequestId,
    finished: Finished | None = None,
) -> pb.ModelInferResponse:
    """A piece of an answer, or with `finished` its last one, or all of it."""
    response = pb.ModelInferResponse(
        model_name=inference.asked.deployment, model_version=str(version), id=inference.id
    )
    output = response.outputs.add(name=OUTPUT, datatype=TEXT, shape=inference.shape)
    if inference.raw:
        response.raw_output_contents.append(raw_element(text))
    else:
        output.contents.bytes_contents.append(text.encode())
    told = response.parameters
    told["request_id"].string_param = request_id
    told["triton_final_response"].bool_param = finished is not None
    if finished is not None:
        told["finish_reason"].string_param = finished.reason
        told["prompt_tokens"].int64_param = finished.prompt_tokens
        told["cached_prompt_tokens"].int64_param = finished.cached_prompt_tokens
        told["output_tokens"].int64_param = finished.output_tokens
        if finished.grace_s:
            told["grace_s"].double_param = finished.grace_s
    return response
