"""Turns a stateful OpenVINO IR, as optimum-intel exports it, into a paged model.

OpenVINO's own transformation replaces the state by paged attention; the gather of the rows whose
logits are wanted is added here. The result has the inputs that `paged_attention` names, and goes to
`compilation` like a built graph.
"""

from pathlib import Path

import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Type
from openvino._offline_transformations import paged_attention_transformation

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh_nodes.engines.openvino import paged_attention as names
from mesh_nodes.engines.openvino.paged_attention import parameter

_KNOWN_INPUTS = frozenset(
    {
        names.INPUT_IDS,
        names.POSITION_IDS,
        names.PAST_LENS,
        names.SUBSEQUENCE_BEGINS,
        names.BLOCK_INDICES,
        names.BLOCK_INDICES_BEGINS,
        names.MAX_CONTEXT_LEN,
        names.SAMPLED_INDICES,
    }
)
_HEAD_DEPTH_MAX = 8
"""Operations between a model's result and its last matrix product, at most."""


def read_ir(core: ov.Core, model_path: Path) -> ov.Model:
    """The paged model of `openvino_model.xml` in this folder.

    Raises TornModel when the file cannot be read, UnsupportedModel when it is no stateful decoder
    or needs inputs beyond token ids and positions.
    """
    path = model_path / "openvino_model.xml"
    try:
        model = core.read_model(path)
    except RuntimeError as error:
        raise TornModel(f"{path} cannot be read: {_first_line(error)}") from error
    if not any(op.get_type_name() == "ReadValue" for op in model.get_ops()):
        raise _unsupported(path, "it is not stateful")
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise _unsupported(path, _first_line(error)) from error
    _gather_before_head(model, path)
    unknown = [
        port.any_name
        for port in model.inputs
        if port.any_name not in _KNOWN_INPUTS
        and not port.any_name.startswith((names.KEY_CACHE, names.VALUE_CACHE))
    ]
    if unknown:
        raise _unsupported(path, f"it has inputs {', '.join(unknown)}")
    return model


def _gather_before_head(model: ov.Model, path: Path) -> None:
    """Without it the head, the largest product, would run for every prompt token."""
    head = _head(model.output(0).get_node(), path)
    sampled = parameter(names.SAMPLED_INDICES, [-1], Type.i64)
    rows = ops.gather(head.input_value(0), sampled, ops.constant(0))
    head.input(0).replace_source_output(rows.output(0))
    model.add_parameters([sampled])
    model.validate_nodes_and_infer_types()


def _head(result: Node, path: Path) -> Node:
    node = result
    for _ in range(_HEAD_DEPTH_MAX):
        if node.get_type_name() == "MatMul":
            return node
        node = node.input_value(0).get_node()
    raise _unsupported(path, "its logits do not come from a matrix product")


def _unsupported(path: Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the OpenVINO engine does not run {path}: {why}",
        hint="supported: stateful text-generation models as optimum-intel exports them",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
