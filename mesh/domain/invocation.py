"""One invocation as its client sees it: what it asks for, and what it is told until its end.

The gateway turns an `Invocation` into a `Request` (prompt tokens, resolved sampling); the client
turns what comes back over the wire into the events below, in the order Waiting (any number),
Accepted, Waiting and Tokens (any number), Finished. An answer that ends otherwise raises an error
of the tree.
"""

from mesh.domain.errors import Cancelled, EngineError
from mesh.domain.grammar import Grammar
from mesh.domain.ids import DeploymentName, NodeId, RequestId
from mesh.domain.model import Task
from mesh.domain.reasons import FinishReason
from mesh.domain.request import TokenBias, TokenLogprobs
from mesh.domain.text import ChatMessage
from mesh.domain.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """The model continues this text as it is, without the chat template."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The model's chat template renders these messages into the prompt."""

    messages: tuple[ChatMessage, ...]
    template_kwargs: str = ""
    """Further names that the template knows, and their values: a JSON object."""
    tools: str = ""
    """Those that the answer may call: a JSON list, as templates take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Already tokenised."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """A query and a document that is to be scored by it."""

    query: str
    document: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FillPrompt:
    """The model writes what is between the two."""

    prefix: str
    suffix: str


Prompt = TextPrompt | ChatPrompt | TokenPrompt | PairPrompt | FillPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a client has of an answer."""

    next_index: int = 0
    """The first token that it lacks: there are so many `output_tokens`."""
    output_tokens: tuple[int, ...] = ()
    age_s: float = 0.0
    """Since it asked first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What a client asks for. None: the default of `SamplingParams`, or for `seed` a drawn one."""

    deployment: DeploymentName
    prompt: Prompt
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[TokenBias, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    """The grammar that the answer keeps to."""
    cache_salt: str = ""
    """Only requests with the same one share what they compute of a common beginning."""
    slo_ttft_s: float | None = None
    """Seconds to its first token, however long its prompt is; None: as its deployment's SLO."""
    slo_tpot_s: float | None = None
    """Seconds for each further token; None: as its deployment's SLO."""
    slo_class: str = ""
    """The name of one of its deployment's SLO classes; empty for the default one."""
    key: str = ""
    """Names this call alone, within its tenant: it can be asked for again by it. Empty: it cannot
    be.
    """
    resume: Resume | None = None
    """Where it goes on with an earlier call of the same key."""
    task: Task | None = None
    """What is asked for in place of text; its deployment must have the same task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request has its place, or will have it once an instance is loaded. The limits, in
    seconds, are those of its SLO: its own, or its deployment's.
    """

    request_id: RequestId
    prompt_tokens: int
    ttft_limit_s: float
    tpot_limit_s: float
    grace_s: float = 0.0
    """The seconds by which the first token may come after its limit because of a load; 0 means that
    it will be in time.
    """
    cached_prompt_tokens: int = 0
    """Those that are believed to be in the cache of its place."""
    slo_class: str = ""
    """The class of its SLO; empty where its deployment has none, or the limits are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The request is queued: what it waits for, and how far that is (0 to 1)."""

    phase: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New output. `first_index` is the output index of `token_ids[0]`; `text` may be empty;
    `logprobs` has one of each token, where they were asked for.
    """

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    """With the first output of an answer whose prompt's log-probabilities were asked for, and those
    of all of its tokens but the first.
    """
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] = ()
    """The result of a deployment with a task, in place of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer is complete. Times are the controller's: arrival to first token, and the mean
    between tokens from then on (0 with fewer than two tokens).
    """

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    grace_s: float = 0.0
    """The grace that was told with Accepted."""
    node_id: NodeId | None = None
    """The node that computed the last token; None when none was computed."""
    cached_prompt_tokens: int = 0
    """Those that were in the cache when the prompt was first computed."""


InvocationEvent = Accepted | Waiting | Tokens | Finished


def check_complete(finished: Finished) -> None:
    """Raise Cancelled or EngineError for an answer that ended before it was complete."""
    if finished.reason is FinishReason.CANCELLED:
        raise Cancelled(f"the request was cancelled after {finished.output_tokens} tokens")
    if finished.reason is FinishReason.FAILED:
        raise EngineError(
            f"the request failed after {finished.output_tokens} tokens",
            hint="`mesh logs` shows what happened",
        )
