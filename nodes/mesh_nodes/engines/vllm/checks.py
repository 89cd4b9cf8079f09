"""What is found wrong with a load before anything is done for it.

Before: `engine`, at a load. After: nothing; what needs the device is checked there.
"""

from mesh.domain.errors import EngineError, UnsupportedModel
from mesh.domain.model import Footprint, ModelFormat, ModelInfo
from mesh.domain.steps import LoadOrder
from mesh_nodes.engines.page_range import PAGE_BYTES
from mesh_nodes.engines.refusals import check_bounds


def check_order(order: LoadOrder) -> None:
    """Raises UnsupportedModel, EngineError."""
    check_format(order.model)
    check_bounds(order)
    if not (order.model_path / "config.json").is_file():
        raise EngineError(f"{order.model_path} holds no model: there is no config.json in it")


def check_format(model: ModelInfo) -> None:
    if model.format is not ModelFormat.SAFETENSORS:
        raise UnsupportedModel(
            f"{model.source} is stored as {model.format}, which only the OpenVINO engine loads",
            hint="deploy it from safetensors or GGUF, or on CPU nodes",
        )


def covers_pages(model: ModelInfo, footprint: Footprint) -> bool:
    """Whether a block fills whole pages in each layer, so that it can be given back by itself."""
    return footprint.kv_block_bytes % (model.layers * PAGE_BYTES) == 0
