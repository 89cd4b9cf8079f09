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
from mesh_loader.config_keys import shown
from mesh_loader.gguf_names import begins_with_magic
from mesh_loader.hf_import import has_whole_weights, plan_hf
from mesh_loader.ir_import import plan_ir
from mesh_loader.links import SNAPSHOTS
from mesh_loader.model_files import check_fetched
from mesh_loader.model_info import read_json
from mesh_loader.sources import IR_XML

ADAPTER_CONFIG = "adapter_config.json"
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


def plan_import(
    path: Path, *, own_files: bool, as_is: Collection[str] = (), plain: bool = False
) -> Plan:
    """The plan for a file or folder; with `own_files` its files may be linked instead of copied.
    `as_is`, `plain`: see `plan_hf`.

    Raises TornModel or UnsupportedModel, with the name of the file that is to blame.
    """
    check_fetched(path)
    if not path.is_dir():
        # By its first bytes too: a blob of a cache has no suffix.
        if path.suffix != ".gguf" and not begins_with_magic(path):
            holds = (path.parent / "config.json").is_file() or (path.parent / IR_XML).is_file()
            whole = f"name the folder that it is part of: file://{path.parent}"
            raise UnsupportedModel(
                f"{path.name} is not a GGUF file", hint=whole if holds else ACCEPTED
            )
        # Only here: see gguf_names.
        from mesh_loader.gguf_import import plan_gguf

        return plan_gguf(path)
    if (path / ADAPTER_CONFIG).is_file() and not has_whole_weights(path):
        raise _adapter(path)
    if (path / IR_XML).is_file():
        return plan_ir(path, own_files=own_files)
    if (path / "config.json").is_file():
        return plan_hf(path, own_files=own_files, as_is=as_is, plain=plain)
    ggufs = sorted(
        (file.name for file in path.glob("*.gguf")), key=lambda name: ("mmproj" in name, name)
    )
    if ggufs:
        raise UnsupportedModel(
            f"{path} holds GGUF files, of which one must be named",
            hint=f"for instance file://{path / ggufs[0]}",
        )
    raise UnsupportedModel(
        f"{path} holds no model: there is no config.json",
        hint=_hint_of_cache(path) or _hint_below(path) or ACCEPTED,
    )


def _adapter(path: Path) -> UnsupportedModel:
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    of = f" of {shown(base)}" if base else ""
    return UnsupportedModel(
        f"{path.name} is a LoRA adapter{of}, not a whole model",
        hint="merge it into its base, with peft's merge_and_unload, and save that",
    )


def _hint_below(path: Path) -> str:
    """Which folder is meant, where those below it are models, as after a training."""
    configs = (config for config in path.glob("*/config.json") if config.is_file())
    found = sorted(configs, key=lambda config: config.stat().st_mtime_ns)
    return f"name the folder of a model: file://{found[-1].parent}" if found else ""


def _hint_of_cache(path: Path) -> str:
    """Which folder is meant, where this is one of a Hugging Face cache."""
    folder = path if path.name == SNAPSHOTS else path / SNAPSHOTS
    if folder.is_dir():
        snapshots = sorted(one for one in folder.iterdir() if one.is_dir())
        whole = [one for one in snapshots if (one / "config.json").is_file()] or snapshots
        return f"a Hugging Face cache: name a snapshot, as file://{whole[-1]}" if whole else ""
    names = sorted(one.name for one in path.glob("models--*--*"))
    if not names:
        return ""
    source = names[0].removeprefix("models--").replace("--", "/", 1)
    return f"a Hugging Face cache: write hf://{source}, or name a folder of its snapshots"
