"""Brings a bound blob into OpenVINO, in place of a compile.

OpenVINO cannot import its own paged attention: what the CPU plugin reads from the operation's
rt_info is not exported. So a blob names another operation in its place, one of an extension, which
builds the attention anew from its inputs. `shape_blob` comes before, an instance after.
"""

from collections.abc import Mapping
from typing import Any

import openvino as ov
from openvino import Node, Output
from openvino._pyopenvino import DiscreteTypeInfo

from mesh_nodes.engines.openvino.paged_attention import paged_attention

ATTENTION_TYPE = "PagedAttentionExtension"
"""As an export has it."""
IMPORTED_TYPE = "PagedAttentionImported"
"""As a blob has it; OpenVINO knows it by `enable_import`."""
PLAIN_GRAPH = {"CACHE_ENCRYPTION_CALLBACKS": [lambda text: text, lambda text: text]}
"""A property for export and import: without it the graph of an export is scrambled."""
_KEYS, _KEY_CACHE = 1, 3
"""Inputs of the attention: keys [tokens, kv heads * head size], their cache [blocks, kv heads, …].
"""


def enable_import(core: ov.Core) -> None:
    """From now on this core can import blobs."""
    core.add_extension(_Importable)


def import_compiled(
    core: ov.Core, blob: ov.Tensor, properties: Mapping[str, Any]
) -> ov.CompiledModel:
    """The compiled model refers to the tensor's memory for its constants. Raises RuntimeError."""
    return core.import_model(blob, "CPU", {**properties, **PLAIN_GRAPH})


class _Rebuilt:
    """What OpenVINO takes for an operation of the extension while it reads a graph: it sets the
    inputs, and asks for the outputs; those are the attention's."""

    _attention: Node

    def set_arguments(self, inputs: list[Output]) -> None:
        keys, cache = (inputs[at].get_partial_shape() for at in (_KEYS, _KEY_CACHE))
        heads = cache[1].get_length()
        self._attention = paged_attention(
            list(inputs), kv_heads=heads, head_size=keys[1].get_length() // heads
        )

    def visit_attributes(self, visitor: object) -> bool:
        return False

    def constructor_validate_and_infer_types(self) -> None: ...

    def outputs(self) -> list[Output]:
        return list(self._attention.outputs())

    def get_type_info(self) -> DiscreteTypeInfo:
        return _TYPE


_TYPE = DiscreteTypeInfo(IMPORTED_TYPE, "extension")


class _Rebuilding(type(ov.Op)):  # type: ignore[misc]
    """Has OpenVINO get the above where it makes an operation of the class."""

    def __call__(cls, *arguments: object, **named: object) -> _Rebuilt:
        return _Rebuilt()


class _Importable(ov.Op, metaclass=_Rebuilding):  # type: ignore[misc]
    @staticmethod
    def get_type_info() -> DiscreteTypeInfo:
        return _TYPE
