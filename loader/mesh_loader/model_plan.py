"""Looks at fetched files and decides how they become a model, or that they cannot.

A plan has made all refusals that can be made without reading the weights; writing it is the long
part. sources comes before it, the store after it.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from mesh.domain.errors import UnsupportedModel
from mesh.domain.model import ModelFormat
from mesh.runtime.engine import Progress
from mesh_loader.gguf_names import begins_with_magic
from mesh_loader.hf_import import plan_hf
from mesh_loader.ir_import import IR_XML, plan_ir

ACCEPTED = (
    "mesh imports a .gguf file, a folder with openvino_model.xml and .bin, or a Hugging Face "
    "folder with config.json and safetensors"
)


class Plan(Protocol):
    """How one model is imported."""

    @property
    def form(self) -> ModelFormat: ...

    def write(self, folder: Path, progress: Progress) -> int:
        """Writes the model into an empty folder; returns the number of its parameters."""
        ...


def plan_import(path: Path, *, own_files: bool, as_is: Collection[str] = ()) -> Plan:
    """The plan for a file or folder; with `own_files` its files may be linked instead of copied.
    `as_is`: see `plan_hf`.

    Raises TornModel or UnsupportedModel, with the name of the file that is to blame.
    """
    if path.is_file():
        # By its first bytes too: a blob of a cache has no suffix.
        if path.suffix != ".gguf" and not begins_with_magic(path):
            raise UnsupportedModel(f"{path.name} is not a GGUF file", hint=ACCEPTED)
        # Only here: see gguf_names.
        from mesh_loader.gguf_import import plan_gguf

        return plan_gguf(path)
    if (path / IR_XML).is_file():
        return plan_ir(path, own_files=own_files)
    if (path / "config.json").is_file():
        return plan_hf(path, own_files=own_files, as_is=as_is)
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    if ggufs:
        raise UnsupportedModel(
            f"{path} holds GGUF files, of which one must be named",
            hint=f"for instance file://{path / ggufs[0]}",
        )
    raise UnsupportedModel(f"{path} holds no model: there is no config.json", hint=ACCEPTED)
