"""Imports an OpenVINO IR folder: a stateful language model with its tokenizer.

The graph is read as XML, without OpenVINO: enough to see that it is whole, that it keeps its KV
cache as state, and that its weights file is as long as the graph expects.
"""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader.config_keys import shown
from mesh_loader.disk import place
from mesh_loader.model_files import opened
from mesh_loader.model_info import companions, read_json
from mesh_loader.sources import IR_XML
from mesh_loader.tokenizer_file import complete_tokenizer, require_tokenizer

IR_BIN = "openvino_model.bin"
NEEDED_FILES = (IR_XML, IR_BIN, "config.json", "tokenizer.json")
COUNT_MAX = 2**63 - 1
DIMENSIONS_MAX = 16
OPTIONAL_FILES = (
    "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class IrPlan:
    """An OpenVINO IR folder that mesh can import."""

    path: Path
    own_files: bool
    parameters: int
    form: ModelFormat = ModelFormat.OPENVINO_IR

    def write(self, folder: Path, progress: Progress) -> int:
        """Writes the model; returns the number of its parameters.

        Raises StorageError for a full disk.
        """
        names = (*NEEDED_FILES, *OPTIONAL_FILES)
        files = [(self.path / name, name) for name in names if (self.path / name).is_file()]
        place(files, folder, own_files=self.own_files, progress=progress)
        complete_tokenizer(self.path, folder)
        return self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    weights_end_bytes: int
    parameters: int
    states: int


def plan_ir(path: Path, *, own_files: bool) -> IrPlan:
    """The plan for a folder with an openvino_model.xml.

    Raises TornModel for files that are missing, cut off or broken, UnsupportedModel for a model
    that keeps no state.
    """
    for name in NEEDED_FILES:
        if not (path / name).is_file():
            raise TornModel(
                f"{path.name} lacks {name}",
                hint="export the whole model: optimum-cli export openvino --model NAME DIR",
            )
    read_json(path / "config.json")
    companions(path)
    require_tokenizer(path)
    graph = _read_graph(path / IR_XML)
    weights_bytes = (path / IR_BIN).stat().st_size
    if weights_bytes < graph.weights_end_bytes:
        raise TornModel(
            f"{path.name}/{IR_BIN} is truncated: the graph's weights end at byte "
            f"{graph.weights_end_bytes}, the file has {weights_bytes}",
            hint="fetch or export the folder again",
        )
    if graph.states == 0:
        raise UnsupportedModel(
            f"{path.name}/{IR_XML} keeps no state (it has no ReadValue layer)",
            hint="export it stateful: optimum-cli export openvino "
            "--task text-generation-with-past --model NAME DIR",
        )
    return IrPlan(path=path, own_files=own_files, parameters=graph.parameters)


def _read_graph(path: Path) -> _Graph:
    weights_end_bytes = parameters = states = layers = 0
    try:
        with opened(path) as file:
            for _, element in ElementTree.iterparse(file):
                if element.tag != "layer":
                    continue
                layers += 1
                states += element.get("type") == "ReadValue"
                data = element.find("data")
                if element.get("type") == "Const" and data is not None:
                    offset_bytes, size_bytes = _counts(data.get("offset"), data.get("size"))
                    weights_end_bytes = max(weights_end_bytes, offset_bytes + size_bytes)
                    dimensions = _counts(*filter(None, data.get("shape", "").split(",")))
                    # Matrices are weights; vectors and scalars are norms, scales and constants.
                    parameters += math.prod(dimensions) if len(dimensions) > 1 else 0
                element.clear()
    except (ElementTree.ParseError, ValueError) as error:
        raise TornModel(
            f"{path.name} is cut off or no OpenVINO graph: {error}", hint="export the folder again"
        ) from error
    if layers == 0:
        raise TornModel(f"{path.name} is no OpenVINO graph: it has no layers")
    if not 0 < parameters <= COUNT_MAX:
        raise TornModel(
            f"{path.name} holds {shown(parameters)} parameters; it must be from 1 to {COUNT_MAX}",
            hint="export the folder again",
        )
    return _Graph(weights_end_bytes=weights_end_bytes, parameters=parameters, states=states)


def _counts(*texts: str | None) -> list[int]:
    """The numbers, 0 for one that is not given. Raises ValueError for what counts nothing."""
    counts = [int(text or "0") for text in texts]
    if len(counts) > DIMENSIONS_MAX or not all(0 <= count <= COUNT_MAX for count in counts):
        raise ValueError(f"{shown(texts)} is out of range")
    return counts
