"""What turns text into tokens and back: the model's own files, plain enough to cross the wire."""

from enum import StrEnum

from mesh.domain.values import dataclass


class ToolFormat(StrEnum):
    """How a model calls a tool."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, amid text: Hermes, Qwen."""
    LLAMA3 = "llama3"
    """`{"name": …, "parameters": {…}}` as the whole answer, after `<|python_tag|>` or not."""
    NONE = "none"
    """It calls none, or in no way that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """How a model's makers recommend to draw its tokens; None: they say nothing of it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAssets:
    """A model's tokenizer and chat template. `tokenizer_json` is for the `tokenizers` library."""

    tokenizer_json: bytes
    chat_template: str | None = None
    tool_template: str | None = None
    """In place of `chat_template` where a chat has tools; `None`: that one serves for both."""
    bos_token: str | None = None
    eos_token: str | None = None
    special_tokens: str = ""
    """What templates know of further special tokens, by transformers' names: a JSON object."""
    add_bos: bool = False
    sampling: SamplingDefaults = SamplingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation. `role` is what the model's template knows: system, user, …"""

    role: str
    content: str
    name: str = ""
    """The name of the speaker, where several have one role; templates may leave it out."""
    tool_calls: str = ""
    """Calls of tools that an assistant has made: a JSON list, as templates take it."""
    tool_call_id: str = ""
    """The id of the call that this message answers."""
    reasoning_content: str = ""
    """What an assistant has thought aloud before it; templates may leave it out."""
