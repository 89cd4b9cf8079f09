"""Says what is wrong with a manifest, and what to write instead, in terms of the file.

`specs` hands over what pydantic found; the answer is one InvalidInput: the line, the path of the
field, what stands there, and a hint with the nearest known field or an example.
"""

import difflib
import reprlib
from collections.abc import Sequence

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from mesh.domain.errors import InvalidInput
from mesh.manifest.documents import Document, path_text

_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of names",
    "model_type": "a mapping of fields",
    "finite_number": "a finite number",
}
_COMPARISONS = {
    "greater_than": ("gt", "not above"),
    "greater_than_equal": ("ge", "below"),
    "less_than_equal": ("le", "above"),
}
_EXAMPLES = {
    "apiVersion": "write apiVersion: mesh/v1",
    "kind": "write kind: Model",
    "metadata": "write metadata: {name: chat-small}",
    "metadata.name": "use 1 to 63 lower-case letters, digits and dashes, such as chat-small",
    "spec": "write spec: with at least a source",
    "spec.source": "write pkg://package/file, file:///path, hf://org/name@revision, "
    "https://host/file or s3://bucket/prefix",
    "spec.context_tokens_max": "write a number of tokens, such as 2048, or leave the field out",
    "spec.devices": "list cpu, gpu or both, each once: devices: [cpu, gpu]",
    "spec.scaling": "write scaling: {replicas_min: 0, replicas_max: 4, keep_alive_s: 1.0}",
    "spec.slo": "write slo: {ttft_s: 2.0, tpot_s: 0.25}",
    "spec.classes": "write classes: {chat: {ttft_s: 1.0, tpot_s: 0.1}, "
    "batch: {best_effort: true, within_s: 3600}}",
    "spec.class_default": "name one of the classes that have limits",
    "spec.scaling.replicas_min": "write a number of instances that stay loaded, such as 0",
    "spec.scaling.replicas_max": "write a number of instances, such as 4",
    "spec.scaling.plan": "write plan: {every_s: 10}, or leave it out",
    "spec.tensor_parallel": "write how many devices an instance spans, such as 1",
    "spec.cells": "write how many cells are to serve it, such as 2",
    "spec.weights": "write i8, i4, i4-g128, f16, or file for a GGUF's own 4 bits, or leave it out",
    "spec.precision": "write f32, bf16 or f16, or leave it to each node",
    "spec.task": "write embed or rerank, or leave it out for text",
    "spec.tool_format": "write hermes, llama3 or none, or leave it to the chat template",
    "spec.text.special_tokens_in_content": "write true to have messages hold special tokens",
    "spec.slo.cold_start": "late: who only a load makes late is told so; refuse: is refused",
    "spec.slo.ttft_tokens_per_s": "write a number of tokens per second, such as 512",
}


def explain(
    errors: Sequence[ErrorDetails], document: Document, origin: str, schema: type[BaseModel]
) -> InvalidInput:
    """The error that stands first in the file, and how many there are beside it."""

    def line(error: ErrorDetails) -> int:
        return document.line_of(error["loc"])

    # An unknown field is often the misspelt one that is then reported missing: it goes first.
    first = min(errors, key=lambda error: (error["type"] != "extra_forbidden", line(error)))
    path = path_text(first["loc"])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    field = f"{path}: " if path else ""
    return InvalidInput(
        f"{origin}:{line(first)}: {field}{_problem(first)}{more}", hint=_hint(first, schema)
    )


def _problem(error: ErrorDetails) -> str:
    kind, found, context = error["type"], _describe_value(error["input"]), error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown field"
    if kind == "missing":
        return "missing"
    if kind in _KINDS:
        return f"{found} is not {_KINDS[kind]}" if error["input"] is not None else "is empty"
    if kind in _COMPARISONS:
        key, words = _COMPARISONS[kind]
        return f"{found} is {words} {context[key]:.9g}"
    if kind in ("literal_error", "enum"):
        return f"{found} is not {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{found} is not a name" if error["loc"][-1] == "name" else "is empty"
    if kind == "too_short":
        return "is empty"
    if kind in ("replicas", "devices", "classes"):
        return error["msg"]
    return f"{found}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _describe_value(value: object) -> str:
    """The value as YAML would write it, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python will print
        return "a number of thousands of digits"


def _hint(error: ErrorDetails, schema: type[BaseModel]) -> str:
    path = tuple(part for part in error["loc"] if isinstance(part, str))
    if path[:2] == ("spec", "classes") and len(path) < 4:
        return _EXAMPLES["spec.classes"]
    if error["type"] == "extra_forbidden":
        return _nearest(path, schema)
    name = ".".join(path)
    if name in _EXAMPLES:
        return _EXAMPLES[name]
    if name.endswith("_s"):
        return "write seconds as a plain number, such as 0.25"
    return "`mesh deploy --help` shows a manifest"


def _nearest(path: tuple[str, ...], schema: type[BaseModel]) -> str:
    """A known field like the unknown one at `path`: beside it if there is one, or elsewhere."""
    everywhere = _known_fields(schema, ())
    here = [known[-1] for known in everywhere if known[:-1] == path[:-1]]
    close = difflib.get_close_matches(path[-1], here, n=1)
    if close:
        return f"did you mean {close[0]}?"
    for known in everywhere:
        if known[-1] == path[-1]:
            return f"{path[-1]} belongs into {'.'.join(known[:-1])}"
    return f"known here: {', '.join(here)}"


def _known_fields(part: type[BaseModel], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    fields: list[tuple[str, ...]] = []
    for name, info in part.model_fields.items():
        own = (*path, info.alias or name)
        fields.append(own)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            fields.extend(_known_fields(info.annotation, own))
    return fields
