"""What mesh knows of an imported model, independent of any engine."""

from dataclasses import dataclass
from enum import StrEnum

from mesh.domain.ids import ModelId


class ModelFormat(StrEnum):
    """How the model's folder in the store is laid out."""

    SAFETENSORS = "safetensors"
    """config.json, model.safetensors (Hugging Face tensor names), tokenizer.json."""
    OPENVINO_IR = "openvino_ir"
    """openvino_model.xml and .bin (stateful), config.json, tokenizer.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model in the store. Shapes as in its config.json; sizes in bytes."""

    model_id: ModelId
    source: str
    format: ModelFormat
    architecture: str
    context_tokens_max: int
    vocabulary_tokens: int
    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_size: int
    parameters: int
    disk_bytes: int
    stop_token_ids: tuple[int, ...]

    @property
    def shape(self) -> str:
        """Equal for models that take equally much, on one engine: all but the weights' values."""
        if self.format is ModelFormat.OPENVINO_IR:
            return self.model_id
        heads = f"{self.attention_heads}x{self.kv_heads}x{self.head_size}"
        rows = f"{self.layers}x{self.hidden_size}-{self.vocabulary_tokens}"
        return f"{self.architecture}-{self.parameters}-{rows}-{heads}"

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """KV cache bytes of one token over all layers: keys and values (C of LLM-Mesh eq. 2)."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What an instance of a model takes on a kind of node, as that node's engine states it."""

    weights_bytes: int
    """Resident weights and fixed buffers, without any KV cache."""
    kv_block_bytes: int
    block_tokens: int

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def instance_bytes(self, kv_blocks: int) -> int:
        return self.weights_bytes + kv_blocks * self.kv_block_bytes
