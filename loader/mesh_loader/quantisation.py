"""Checkpoints whose makers quantised them: by which method, and whether any engine computes those.

Their matrices stay as they are on the disk and in memory: vLLM has kernels for them, OpenVINO for
none. Each method names and shapes its tensors itself, so an import checks only that every part of
the model has some. Before: `hf_import`; `model_info`, which keeps the method's name.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh_loader.architectures import Shape, expected_tensors
from mesh_loader.config_keys import Text

MODELOPT_CONFIG = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says what others say in config.json."""
VLLM_METHODS = (
    *("auto-round", "awq", "compressed-tensors", "fbgemm_fp8", "fp8"),
    *("gptq", "modelopt", "modelopt_fp4", "mxfp4", "quark"),
)
"""The methods that every supported release of vLLM reads from plain safetensors."""


def quantisation_of(folder: Path, config: Mapping[str, Any]) -> str:
    """The method that the folder's matrices are quantised by; "" where they are plain.

    Raises TornModel where that cannot be read.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    if given is None and (folder / MODELOPT_CONFIG).is_file():
        return "modelopt"
    if given is None and isinstance(config.get("quantization"), Mapping):
        return "mlx"
    if given is None:
        return ""
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if not isinstance(method, str) or not method or not Text().takes(method):
        raise TornModel(f"{folder.name}/config.json: quantization_config names no quant_method")
    return method.lower().replace("_tensors", "-tensors")


def check_served(method: str, name: str, *, plain: bool) -> None:
    """Raises UnsupportedModel for a method that no engine has, or, where the importing node's
    engine computes `plain` weights alone, for the others; `name` is the folder's.
    """
    if method and method not in VLLM_METHODS:
        raise UnsupportedModel(
            f"{name} is quantised by {method!r}, which no engine computes: vLLM has "
            f"{', '.join(VLLM_METHODS)} in all releases that mesh works with, OpenVINO none",
            hint="use the unquantised model, one quantised by these, or a GGUF file",
        )
    if method and plain:
        raise UnsupportedModel(
            f"{name} is quantised by {method!r}, which the engine of this node does not compute",
            hint="take the unquantised model or a GGUF file, or deploy it on vLLM nodes: "
            "devices: [gpu]",
        )


def check_parts(shape: Shape, tensors: Collection[str], folder: str) -> int:
    """The model's parameters, after a look at whether there is a tensor for each of its parts.

    Raises TornModel.
    """
    parts = {name.rpartition(".")[0] for name in tensors}
    parameters = 0
    for want in expected_tensors(shape):
        part = want.name.rpartition(".")[0]
        if part not in parts:
            raise TornModel(
                f"{folder} lacks all tensors of {part}, which its config.json calls for",
                hint="fetch the folder again",
            )
        parameters += want.elements
    return parameters
