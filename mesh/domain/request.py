"""A request: one invocation of a deployment, from its prompt tokens to its last token."""

from dataclasses import field

from mesh.domain.grammar import Grammar
from mesh.domain.ids import DeploymentName, NodeId, RequestId
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import PACE, Slo
from mesh.domain.values import dataclass

ATTEMPTS_EACH = 1 << 10
"""Each leader numbers the attempts of a request with a key within so many numbers that are its own:
what nodes say of attempts of earlier leaders is of no attempt of this one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """What is added to a token's logit each time that a token is chosen."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy; the other fields then do not matter,
    but for the biases, the penalties, the limits, the stops and the log-probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    """Tokens below this share of the likeliest one's probability are left out; 0: none is."""
    seed: int | None = None
    """The seed; where it is `None`, the gateway draws one, so that a request that moves between
    nodes continues alike.
    """
    repetition_penalty: float = 1.0
    """The repetition penalty of CTRL (Keskar et al. 2019), over prompt and output; 1 means none."""
    presence_penalty: float = 0.0
    """This is subtracted from the logit of every token that the output already has; a number below
    0 is so added.
    """
    frequency_penalty: float = 0.0
    """The same for each time that the output has it."""
    logit_bias: tuple[TokenBias, ...] = ()
    """It has a token once at most."""
    max_tokens: int = 256
    min_tokens: int = 0
    """No stop ends the output before it has so many tokens."""
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Stop strings; the output ends before the first that appears."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output as the model's own do, and also where those are ignored."""
    logprobs: int | None = None
    """For each output token, its own log-probability is told, and those of this many likeliest
    tokens.
    """
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first, with the first output: such a prompt is
    computed whole, whatever of it is cached.
    """
    grammar: Grammar | None = None
    """The grammar that the answer keeps to; `None` allows anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One invocation as the controller admits it."""

    request_id: RequestId
    deployment: DeploymentName
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None
    """Requests of its deployment with the same one share what they compute of a common beginning;
    None: it shares nothing."""
    digests: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The digests of the keys of its prompt's full blocks. There is one entry for each block size
    (in tokens) that its deployment has; see `mesh.memory.block_keys`. Nodes do without.
    """
    answers: int = 1
    """How many answers its call wants of its prompt; it is the first of them, and the others come
    right after it. It is admitted only where all of them have a place. Nodes do without.
    """
    first: RequestId | None = None
    """The request of the same prompt that computes it for this one, too; `None` where it computes
    its own.
    """

    keyed: bool = False
    """Whether its client may ask for it again, by a key that its id is made of: its node computes
    on while no controller is there.
    """
    asked_digest: str = ""
    """A digest of its prompt and its sampling, where it is keyed: two requests under one key ask
    for the same where this is the same.
    """

    @property
    def counted_prompt_tokens(self) -> int:
        """Those that it is counted with: the prompt of several answers counts once."""
        return len(self.prompt_tokens) if self.first is None else 0

    @property
    def call(self) -> RequestId:
        """The id that all answers of its call have in common: that of the first one."""
        return self.first or self.request_id

    @property
    def is_one_of_several(self) -> bool:
        """Whether its call wants several answers of one prompt."""
        return self.answers > 1 or self.first is not None

    @property
    def tokens_max(self) -> int:
        """Prompt and output tokens together, at most."""
        return len(self.prompt_tokens) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a client has of an answer whose controller it has lost."""

    output_tokens: tuple[int, ...] = ()
    age_s: float = 0.0
    """Since it asked first."""
    accepted: bool = False
    """An earlier controller may have accepted it: it is served, late or not."""
    queue_age_s: float | None = None
    """So much of its age counts in the queue; `None`: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """Where the KV blocks of a request's first tokens are, which its node fetches in place of
    computing them. What cannot be fetched is computed.
    """

    node_id: NodeId
    address: str
    """At which the node hands KV blocks out (`NodeHello.kv_address`)."""
    attempt: int
    """The submission of the request to that node."""
    ticket: str
    """It is shown to the node, which was told of it (`messages.OfferKv`) and honours it for
    at most four connections, within 30 s.
    """
    blocks: int
    """How many, from the request's first one on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOrder:
    """A request on its way to a node. `age_s` is how long ago it arrived: time itself never
    crosses the wire. `attempt` tells the answers of this submission from those of earlier ones.
    """

    request: Request
    attempt: int
    output_tokens: tuple[int, ...] = ()
    """Tokens that the client already has; the node continues after them."""
    slo: Slo
    age_s: float
    due_in_s: float
    """Seconds until its next token is due; negative if it was."""
    pace_share: float = PACE.share
    """The share of the TPOT SLO with which its tokens are planned."""
    slack_s: float = 0.0
    """See `Pace.slack_s`."""
    paused: bool = False
    """It is only computed ahead: it yields no token until ContinueRequest lets it go."""
    cached_tokens: int = 0
    """How many of its tokens the node is believed to have computed already, or to fetch."""
    kv: KvSource | None = None
    """From where it is to fetch KV blocks; only one that is `paused` does."""

    @property
    def tries(self) -> int:
        """How often its controller has submitted it, this time included."""
        return self.attempt % ATTEMPTS_EACH


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities as the model gives them: before temperature, penalties
    and limits.
    """

    logprob: float
    """The log-probability of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and theirs, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTokens:
    """New output of one request. `first_index` is the output index of `token_ids[0]`.

    `text` holds whole characters only, and not yet what could be the start of a stop string.
    `logprobs` has one of each token, where they were asked for.
    """

    request_id: RequestId
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str = ""
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    """How many of its tokens others had computed; it comes with the first output of an attempt."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the prompt's tokens but the first, where they were asked for, with the first output
    of the request.
    """
    embedding: tuple[float, ...] = ()
    """What a deployment with a task computed of the prompt, in place of text. It comes with the one
    output of the request, whose token means nothing.
    """
