"""What mesh knows of an imported model, independent of any engine."""

from dataclasses import fields
from enum import StrEnum
from typing import NamedTuple

from mesh.domain.ids import ModelId
from mesh.domain.ranges import Count
from mesh.domain.values import dataclass, replace

_HELD_AS = "+"
_COMPUTED_IN = "+in-"
_SERVES = "+for-"
DIMENSIONS_MAX = 8192
"""An embedding travels in one message and has no more dimensions."""


def decodes(model_id: ModelId) -> bool:
    """Whether the model generates text: one with a task ends each request with its prompt."""
    return _SERVES not in model_id


class ModelFormat(StrEnum):
    """How the model's folder in the store is laid out."""

    SAFETENSORS = "safetensors"
    """config.json, model.safetensors (Hugging Face tensor names), tokenizer.json."""
    OPENVINO_IR = "openvino_ir"
    """openvino_model.xml and .bin (stateful), config.json, tokenizer.json."""


class WeightPrecision(StrEnum):
    """How an engine for CPUs holds matrices. Norms and biases are f32 in all."""

    I8 = "i8"
    """Symmetric, one f32 scale per output channel."""
    I4 = "i4"
    """In groups of 32, a scale and an offset each; the embedding and the head as in I8."""
    I4_G128 = "i4-g128"
    """In groups of 128, or of 64 where rows do not divide so, a scale each: quicker than I4, and
    less exact.
    """
    F16 = "f16"
    """Most models are published in this precision: it is exact."""
    FILE = "file"
    """Where the model's GGUF file has 4 bits, just these; all else as in I8."""

    @property
    def quantised(self) -> bool:
        return self is not WeightPrecision.F16


class ComputePrecision(StrEnum):
    """What an engine for CPUs multiplies in."""

    F32 = "f32"
    """In f32 with quantised weights, activations are quantised on the fly and multiplied as
    integers.
    """
    BF16 = "bf16"
    """What AMX is quick at."""
    F16 = "f16"


class Task(StrEnum):
    """What a deployment computes in place of text. Each prompt gets one vector."""

    EMBED = "embed"
    """The vector is the embedding of a text."""
    RERANK = "rerank"
    """The vector has one number: how well a document fits a query."""


class KvPrecision(StrEnum):
    """Elements of a CPU node's KV cache. u8 halves it and changes tokens; f16 keeps them."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    """What the plugin has in place of f16 where it computes in bf16."""
    U8 = "u8"


def held_id(stored: ModelId, weights: WeightPrecision | None) -> ModelId:
    """The id of a stored model whose weights are loaded in this precision."""
    return stored if weights is None else ModelId(f"{stored}{_HELD_AS}{weights}")


def imported_id(model_id: ModelId) -> ModelId:
    """Under which nodes import it, whatever it is computed in and whatever for."""
    return ModelId(model_id.partition(_COMPUTED_IN)[0].partition(_SERVES)[0])


def stored_id(model_id: ModelId) -> ModelId:
    """Under which the store has it, however its weights are held."""
    return ModelId(model_id.partition(_HELD_AS)[0])


def variant(model_id: ModelId) -> str:
    """How its weights are held, and what it is computed in and for; empty where nothing is said."""
    return model_id.removeprefix(stored_id(model_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Experts in place of some layers' MLPs, of which each token takes a few."""

    experts: int
    """The experts of one layer."""
    chosen: Count
    """How many of those each token passes."""
    parameters: int
    """The parameters of all experts of all layers together."""

    def unread(self, tokens: int) -> float:
        """The share of the experts that so many tokens in one iteration are expected to leave
        alone, if each takes its own as if by lot.
        """
        return float((1.0 - self.chosen / self.experts) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The sizes of a decoder without experts, by which its operators take longer or shorter."""

    layers: Count
    hidden_size: Count
    intermediate_size: Count
    attention_heads: Count
    kv_heads: Count
    head_size: Count
    vocabulary_tokens: Count


ENCODERS = ("bert", "roberta", "xlm-roberta")
"""The architectures whose tokens attend to all others: a text is computed in one iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model in the store. Shapes as in its config.json; sizes in bytes."""

    model_id: ModelId
    source: str
    format: ModelFormat
    architecture: str
    context_tokens_max: Count
    vocabulary_tokens: int
    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_size: int
    parameters: int
    disk_bytes: int
    stop_token_ids: tuple[int, ...]
    weights: WeightPrecision | None = None
    """The precision of the weights; `None` stands for the one that nodes use for models of which
    nothing is said.
    """
    precision: ComputePrecision | None = None
    """The precision in which the model is computed; `None` stands for each node's own."""
    quantisation: str = ""
    """The method by which its makers quantised its matrices, as its config names it: fp8, awq. Only
    vLLM nodes compute those, as they are; "": they are plain.
    """
    mixture: Mixture | None = None
    """The mixture, or `None` when each token multiplies all parameters."""
    task: Task | None = None
    """What it is deployed for; `None` stands for text."""
    only_task: Task | None = None
    """What alone it can do; `None`: it generates text, and its hidden states can embed."""
    matryoshka: bool = False
    """Whether the first dimensions of its embeddings are embeddings, as its config states."""
    intermediate_size: int = 0
    """The inner width of each MLP; 0 where its config states none, or an earlier version of mesh
    has imported it.
    """

    def held_as(self, weights: WeightPrecision | None) -> "ModelInfo":
        """The stored model, for deployments that want it so: a model of its own to all but the
        store, since it takes other memory and time.
        """
        return replace(self, weights=weights, model_id=held_id(self.model_id, weights))

    def computed_in(self, precision: ComputePrecision | None) -> "ModelInfo":
        """The imported model, for deployments that want it so: again one of its own."""
        if precision is None:
            return self
        model_id = ModelId(f"{self.model_id}{_COMPUTED_IN}{precision}")
        return replace(self, precision=precision, model_id=model_id)

    def serving(self, task: Task | None) -> "ModelInfo":
        """The imported model, for deployments with this task: again one of its own."""
        if task is None:
            return self
        return replace(self, task=task, model_id=ModelId(f"{self.model_id}{_SERVES}{task}"))

    def unfit_for(self, task: Task | None) -> str:
        """Why the model cannot do the task; empty where it can."""
        if task is None:
            only = self.only_task
            return f"it generates no text: deploy it with spec.task {only}" if only else ""
        if self.format is ModelFormat.OPENVINO_IR:
            return "an exported model has no other output than logits"
        if task is not (self.only_task or Task.EMBED):
            fits = self.only_task or Task.EMBED
            return f"it has no head for task {task}; task {fits} is what it can do"
        if self.hidden_size > DIMENSIONS_MAX:
            return f"its hidden size is {self.hidden_size}; {DIMENSIONS_MAX} is the limit"
        return ""

    @property
    def active_parameters(self) -> int:
        """Those that one token multiplies."""
        unread = self.mixture.unread(1) * self.mixture.parameters if self.mixture else 0.0
        return self.parameters - int(unread)

    @property
    def widths(self) -> Widths | None:
        """The widths of a decoder that generates text; `None` where one is not known, and where the
        operators are others: a mixture's, those of a graph that was exported, those of matrices
        that are as their file has them.
        """
        sizes = {one.name: int(getattr(self, one.name)) for one in fields(Widths)}
        built = self.format is ModelFormat.SAFETENSORS and self.mixture is None
        built &= self.weights is not WeightPrecision.FILE
        text = self.task is None and self.only_task is None
        return Widths(**sizes) if built and text and min(sizes.values()) > 0 else None

    @property
    def shape(self) -> str:
        """Equal for models that take equally much, on one engine: all but the weights' values. An
        exported graph and matrices that are as their file has them, of 4 bits or of 8, are like no
        other's.
        """
        if self.format is ModelFormat.OPENVINO_IR or self.weights is WeightPrecision.FILE:
            return self.model_id
        heads = f"{self.attention_heads}x{self.kv_heads}x{self.head_size}"
        rows = f"{self.layers}x{self.hidden_size}-{self.vocabulary_tokens}"
        chosen = f"{self.mixture.chosen}of{self.mixture.experts}" if self.mixture else ""
        words = self.quantisation, self.weights, self.precision, chosen, self.task
        held = "".join([f"-{word}" for word in words if word]) if any(words) else ""
        return f"{self.architecture}-{self.parameters}-{rows}-{heads}{held}"

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """KV cache bytes of one token over all layers: keys and values (C of LLM-Mesh eq. 2)."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


class Size(NamedTuple):
    """What an instance holds, in two books: its weights, those that it shares included, and its KV
    cache, with what else stays where its weights leave the device.
    """

    weights_bytes: int = 0
    kv_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    def most(self, other: "Size") -> "Size":
        """The larger one of each book."""
        weights_bytes = max(self.weights_bytes, other.weights_bytes)
        return Size(weights_bytes, max(self.kv_bytes, other.kv_bytes))

    def plus(self, other: "Size", sign: int = 1) -> "Size":
        """Both together, or what is left without the other where the sign is -1."""
        weights_bytes = self.weights_bytes + sign * other.weights_bytes
        return Size(weights_bytes, self.kv_bytes + sign * other.kv_bytes)


NOTHING = Size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What an instance of a model takes on a kind of node, as that node's engine states it."""

    weights_bytes: int
    """Weights, and buffers that come and go with them, without any KV cache."""
    kv_block_bytes: Count
    block_tokens: Count
    shared_bytes: int = 0
    """The part of the weights that all instances of the model with one context limit hold together,
    on a node whose engine shares weights: a further one does not take it.
    """
    context_token_bytes: int = 0
    """What each token of the context limit adds to the weights, and to what is shared of them: rope
    tables.
    """
    context_tokens: int = 0
    """The context limit that both are stated for."""
    stays_bytes: int = 0
    """What else an instance holds from its load to its unload, be its weights on the device or not:
    the context of its engine process.
    """

    def at_context(self, tokens: int) -> "Footprint":
        """The footprint of an instance with this context limit."""
        if not self.context_token_bytes:
            return self
        more_bytes = (tokens - self.context_tokens) * self.context_token_bytes
        return replace(
            self,
            weights_bytes=self.weights_bytes + more_bytes,
            shared_bytes=self.shared_bytes and self.shared_bytes + more_bytes,
            context_tokens=tokens,
        )

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def size(self, kv_blocks: int) -> Size:
        return Size(self.weights_bytes, self.stays_bytes + kv_blocks * self.kv_block_bytes)

    def kv_blocks(self, size: Size) -> int:
        """KV blocks of an instance of this size."""
        return max(size.kv_bytes - self.stays_bytes, 0) // self.kv_block_bytes

    def instance_bytes(self, kv_blocks: int) -> int:
        return self.size(kv_blocks).bytes
