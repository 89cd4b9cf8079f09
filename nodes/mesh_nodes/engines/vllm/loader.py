"""Loads an instance's weights from the node's store: a load format of vLLM's, by the name "mesh".

`read_ahead` asks for the files while vLLM still sets itself up: reading them while they are mapped
fetches little at a time, and took 1.4 s where this took 0.6 (269 MB of no page cache). The loader
hands vLLM views of the mapped files and copies nothing itself. Where parameters stand in the node's
pool it reads nothing: the model is made, and filled afterwards. Before: `instance`, which names the
folder. After: vLLM's models, which take their tensors by name.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from mesh.domain.errors import TornModel
from mesh.domain.model import ENCODERS
from mesh.domain.values import dataclass
from mesh_loader.config_keys import PREFIX
from mesh_nodes.engines.device_range import Driver
from mesh_nodes.engines.vllm.device import device
from mesh_nodes.engines.vllm.modules import changes, held_beside
from mesh_nodes.engines.vllm.weights_memory import FixedMemory

FORMAT = "mesh"
LOAD = "load"
_WEIGHTS = ("bias", "qweight", "weight", "weight_packed")
"""The last words of what no quantised checkpoint may lack."""


def read_ahead(model_path: Path) -> None:
    """Have the system read what of the files is not in memory, beside whatever follows."""

    def ask() -> None:
        for path in _files(model_path):
            with contextlib.suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=ask, name="mesh-read-ahead", daemon=True).start()


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """What is wanted of a load, and what it has shown."""

    watches: bool
    """Whether `beside` is wanted."""
    reads: bool
    """False: parameters stay zero, for somebody else to fill."""
    driver: Driver | None
    """What places the model at addresses that stay; `None` leaves it where vLLM has put it."""
    beside: tuple[tuple[str, str], ...] = ()
    """What the load has changed but parameters."""
    memory: FixedMemory | None = None
    """The place that the driver has given to the model."""


@register_model_loader(FORMAT)
class StoreLoader(BaseModelLoader):  # type: ignore[misc]
    """See vLLM's `BaseModelLoader` for who calls what, and makes it with the `Load` as `LOAD` of
    its extra configuration.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._load: Load = load_config.model_loader_extra_config[LOAD]

    def download_model(self, model_config: Any) -> None:
        """It is in the store."""

    def load_model(self, *arguments: Any, **named: Any) -> Any:
        model = super().load_model(*arguments, **named)
        load = self._load
        if load.watches:
            load.beside = changes(self._before, held_beside(model))
        if load.driver is not None:
            load.memory = FixedMemory(load.driver, model, device())
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Raises TornModel when the folder lacks a tensor of the model, or a file is cut short."""
        self._before = held_beside(model) if self._load.watches else {}
        if not self._load.reads:
            for parameter in model.parameters():
                parameter.data.zero_()
            return
        path = Path(model_config.model)
        loaded = model.load_weights(_named(_tensors(path), model_config.hf_config))
        missing = sorted({name for name, _ in model.named_parameters()} - loaded)
        if model_config.quantization is not None:
            # Scales, zero points and orders that a method does without have values to start with.
            missing = [name for name in missing if name.rpartition(".")[2] in _WEIGHTS]
        if missing:
            raise TornModel(
                f"{path} lacks {len(missing)} of its model's tensors, {missing[0]} among them"
            )


def _files(model_path: Path) -> list[Path]:
    """The store's folders hold one file, or all shards of one model."""
    return sorted(model_path.glob("*.safetensors"))


def _named(
    tensors: Iterable[tuple[str, torch.Tensor]], config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """By the names that vLLM's classes know. A decoder that was saved without its head lacks the
    beginning of each; an encoder that embeds has none there, and heads for other tasks go.
    """
    prefix = getattr(config, PREFIX, "model.")
    encoder = config.model_type in ENCODERS
    scores = encoder and config.architectures[0].endswith("ForSequenceClassification")
    for name, tensor in tensors:
        head = name.startswith(("cls.", "lm_head."))
        if head and encoder:
            continue
        if not head and not scores and name.startswith(prefix):
            name = ("" if encoder else "model.") + name.removeprefix(prefix)
        yield name, tensor


def _tensors(model_path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """By their names in the files; views of the mapped files, which outlive them."""
    for path in _files(model_path):
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise TornModel(f"{path} cannot be read: {error}") from error
        with file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)
