"""What may be asked of a deployment: checks an invocation's numbers and fills in its defaults.

Before this, the codec has read the message; after it, the gateway tokenises the prompt. Every
InvalidInput names the field, what was given and what is allowed.
"""

import math
import random
from collections.abc import Callable, Sequence

from mesh.domain.checks import CACHE_SALT_CHARS_MAX, CONTEXT_TOKENS_MAX, NAME_CHARS_MAX
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput
from mesh.domain.invocation import (
    ChatPrompt,
    Invocation,
    PairPrompt,
    Resume,
    TextPrompt,
    TokenPrompt,
)
from mesh.domain.model import Task
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from mesh.domain.slo import SLO_S_MAX, SLO_TOKENS_PER_S_MAX, Slo
from mesh.domain.values import replace

STOPS_MAX = 16
STOP_CHARS_MAX = 256
CHAT_MESSAGES_MAX = 4096
LOGPROBS_MAX = 20
PROMPT_LOGPROBS_MAX = 65_536
"""They come in one message, of some 20 bytes each."""
PENALTY_MAX = 2.0
"""Presence and frequency, as with OpenAI."""
LOGIT_BIASES_MAX = 1024
BIAS_MAX = 100.0
"""As with OpenAI: this much forbids a token, or allows no other."""
STOP_TOKENS_MAX = 128
KEY_CHARS_MAX = 128
AGE_S_MAX = 86_400.0
"""No answer takes longer than a day."""
DEFAULT_TIERS = ("auto", "default", "flex", "priority", "scale")
"""OpenAI's tiers: they stand for the default class, where no class has such a name."""
_OF_TOKENS = ("logprobs", "prompt_logprobs", "logit_bias", "stop", "stop_token_ids", "grammar")
"""What is asked of an answer's tokens, and is None or empty where it is not."""
SEED_MAX = (1 << 63) - 1
TOP_K_MAX = (1 << 32) - 1
"""As much as a node can be told; no vocabulary is larger."""

_DEFAULTS = SamplingParams()


def check_invocation(asked: Invocation) -> None:
    """Raise InvalidInput when nothing can be generated from this."""
    _check_prompt(asked)
    _check_limits(asked)
    if asked.temperature is not None and not 0 <= asked.temperature < math.inf:
        raise _wrong("temperature", asked.temperature, "0 (greedy) or more, and finite")
    if asked.top_p is not None and not 0 < asked.top_p <= 1:
        raise _wrong("top_p", asked.top_p, "above 0 and at most 1")
    if asked.min_p is not None and not 0 <= asked.min_p <= 1:
        raise _wrong("min_p", asked.min_p, "from 0 (no limit) to 1")
    penalty = asked.repetition_penalty
    if penalty is not None and not 0 < penalty < math.inf:
        raise _wrong("repetition_penalty", penalty, "above 0 (1 is none), and finite")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(asked, name)
        if penalty is not None and not -PENALTY_MAX <= penalty <= PENALTY_MAX:
            raise _wrong(name, penalty, f"from -{PENALTY_MAX:g} to {PENALTY_MAX:g} (0 is none)")


def _check_prompt(asked: Invocation) -> None:
    match asked.prompt:
        case TextPrompt(text=""):
            raise InvalidInput(
                "the prompt is empty", hint="give it at least one character", field="prompt"
            )
        case ChatPrompt(messages=()):
            raise InvalidInput(
                "the chat has no messages", hint="give it at least one", field="messages"
            )
        case ChatPrompt(messages=messages):
            if len(messages) > CHAT_MESSAGES_MAX:
                raise InvalidInput(
                    f"the chat has {len(messages)} messages; at most {CHAT_MESSAGES_MAX} are taken",
                    field="messages",
                )
            if any(not message.role for message in messages):
                raise InvalidInput(
                    "a chat message has no role", hint="roles: system, user, …", field="messages"
                )
        case PairPrompt(query=""):
            raise InvalidInput(
                "the query is empty", hint="give it at least one character", field="query"
            )
        case TokenPrompt(token_ids=()):
            raise InvalidInput(
                "the prompt has no tokens", hint="give it at least one", field="prompt"
            )


def _check_limits(asked: Invocation) -> None:
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise _wrong("max_tokens", asked.max_tokens, "1 or more")
    most = CONTEXT_TOKENS_MAX if asked.max_tokens is None else asked.max_tokens
    if not 0 <= asked.min_tokens <= most:
        raise _wrong("min_tokens", asked.min_tokens, f"from 0 to max_tokens, {most}")
    for name, count_max in (("logit_bias", LOGIT_BIASES_MAX), ("stop_token_ids", STOP_TOKENS_MAX)):
        if len(getattr(asked, name)) > count_max:
            count = len(getattr(asked, name))
            raise InvalidInput(f"{name} has {count} tokens; at most {count_max}", field=name)
    if len({one.token_id for one in asked.logit_bias}) < len(asked.logit_bias):
        raise InvalidInput("logit_bias has a token twice", field="logit_bias")
    for one in asked.logit_bias:
        if not -BIAS_MAX <= one.bias <= BIAS_MAX:
            raise _wrong("logit_bias", one.bias, f"from -{BIAS_MAX:g} to {BIAS_MAX:g}")
    if asked.top_k is not None and not 0 <= asked.top_k <= TOP_K_MAX:
        raise _wrong("top_k", asked.top_k, f"from 0 (no limit) to {TOP_K_MAX}")
    for name in ("logprobs", "prompt_logprobs"):
        top = getattr(asked, name)
        if top is not None and not 0 <= top <= LOGPROBS_MAX:
            raise _wrong(name, top, f"from 0 to {LOGPROBS_MAX}")
    for name in ("slo_ttft_s", "slo_tpot_s"):
        seconds = getattr(asked, name)
        if seconds is not None and not 0 < seconds <= SLO_S_MAX:
            raise _wrong(name, seconds, f"above 0 and at most {SLO_S_MAX:g} s")
    if asked.seed is not None and not 0 <= asked.seed <= SEED_MAX:
        raise _wrong("seed", asked.seed, f"from 0 to {SEED_MAX}")
    for name in ("ignore_eos", "min_tokens", "stop_token_ids"):
        if asked.grammar is not None and getattr(asked, name):
            raise InvalidInput(
                f"{name}: an answer that keeps to a grammar ends where that does", field=name
            )
    if len(asked.key) > KEY_CHARS_MAX:
        raise _wrong("key", len(asked.key), f"at most {KEY_CHARS_MAX} long")
    if asked.resume is not None:
        _check_resume(asked, asked.resume)
    if len(asked.stop) > STOPS_MAX:
        raise InvalidInput(
            f"{len(asked.stop)} stop strings; at most {STOPS_MAX} are allowed", field="stop"
        )
    if len(asked.slo_class) > NAME_CHARS_MAX:
        raise _wrong("slo_class", len(asked.slo_class), f"at most {NAME_CHARS_MAX} long")
    if len(asked.cache_salt) > CACHE_SALT_CHARS_MAX:
        raise _wrong("cache_salt", len(asked.cache_salt), f"at most {CACHE_SALT_CHARS_MAX} long")
    for stop in asked.stop:
        if not 1 <= len(stop) <= STOP_CHARS_MAX:
            raise InvalidInput(
                f"a stop string has {len(stop)} characters; it must have 1 to {STOP_CHARS_MAX}",
                field="stop",
            )


def _check_resume(asked: Invocation, resume: Resume) -> None:
    if not asked.key:
        raise InvalidInput(
            "resume is given without the key of the call", hint="give its key", field="key"
        )
    count = len(resume.output_tokens)
    if resume.next_index != count:
        raise _wrong(
            "resume.next_index", resume.next_index, f"the number of output_tokens, {count}"
        )
    if not 0.0 <= resume.age_s <= AGE_S_MAX:
        raise _wrong("resume.age_s", resume.age_s, f"from 0 to {AGE_S_MAX:g} s")


def check_output(
    resume: Resume, sampling: SamplingParams, vocabulary_tokens: int, known: Sequence[int] | None
) -> None:
    """Raise InvalidInput for tokens that a client cannot have had: `known` are those of its request
    so far, `None` where nobody knows of it.
    """
    count = len(resume.output_tokens)
    if count > sampling.max_tokens:
        raise _wrong("resume.next_index", count, f"at most max_tokens, {sampling.max_tokens}")
    for index, token_id in enumerate(resume.output_tokens):
        if not 0 <= token_id < vocabulary_tokens:
            raise _wrong("resume.output_tokens", token_id, f"from 0 to {vocabulary_tokens - 1}")
        if known is not None and index < len(known) and known[index] != token_id:
            raise InvalidInput(
                f"resume.output_tokens: token {index} is {token_id}; the answer has {known[index]}",
                hint="give the tokens as they came, or another key",
                field="resume",
            )


def end_of(
    resume: Resume, sampling: SamplingParams, stop_token_ids: tuple[int, ...]
) -> FinishReason | None:
    """The end that an answer has with these tokens already, where its client did not hear of it:
    `stop_token_ids` are its model's. A stop string is found by its node.
    """
    tokens = resume.output_tokens
    ends = (*(() if sampling.ignore_eos else stop_token_ids), *sampling.stop_token_ids)
    if tokens and tokens[-1] in ends and len(tokens) >= sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None


def check_task(asked: Invocation, task: Task | None) -> None:
    """Raise InvalidInput where a deployment with this task is asked for something else, or for what
    only tokens of an answer have.
    """
    if asked.task is not task:
        raise wrong_task(asked.deployment, asked.task, task)
    pairs = isinstance(asked.prompt, PairPrompt)
    if pairs is not (task is Task.RERANK) and not isinstance(asked.prompt, TokenPrompt):
        given = "a query with a document" if pairs else "a text alone"
        raise InvalidInput(
            f"{asked.deployment!r} has task {task or 'text'}; the prompt is {given}",
            hint="task rerank, and no other one, takes a query with a document",
            field="prompt",
        )
    for name in _OF_TOKENS if task is not None else ():
        if getattr(asked, name) not in (None, ()):
            raise InvalidInput(
                f"{name}: {asked.deployment!r} has task {task}, whose answers have no tokens",
                hint="leave it out",
                field=name,
            )


def wrong_task(name: str, asked: Task | None, task: Task | None) -> InvalidInput:
    """The error for a call that asks for something else than its deployment computes."""
    ways = {None: "/v1/chat/completions", Task.EMBED: "/v1/embeddings", Task.RERANK: "/v1/rerank"}
    return InvalidInput(
        f"{name!r} has task {task or 'text'}; asked for was {asked or 'text'}",
        hint=f"ask it by {ways[task]}, or a deployment with another spec.task",
        field="model",
    )


def check_prompt_logprobs(asked: Invocation, prompt_tokens: int) -> None:
    """Raise InvalidInput where a prompt has more log-probabilities than an answer can carry."""
    if asked.prompt_logprobs is None:
        return
    told = prompt_tokens * (1 + asked.prompt_logprobs)
    if told > PROMPT_LOGPROBS_MAX:
        raise InvalidInput(
            f"prompt_logprobs: {prompt_tokens} tokens with {asked.prompt_logprobs} likeliest ones "
            f"each make {told} log-probabilities; {PROMPT_LOGPROBS_MAX} is the limit",
            hint="ask for fewer of the likeliest, or send a shorter prompt",
            field="prompt_logprobs",
        )


def check_token_ids(
    token_ids: tuple[int, ...],
    vocabulary_tokens: int,
    named: Callable[[int], bytes] = lambda token_id: b"",
) -> None:
    """Raise InvalidInput unless every id is one that the model has an embedding of. Tokenizers may
    have more of them, for images, say: `named` tells their texts.
    """
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_tokens:
            name = named(token_id).decode("utf-8", "replace")
            raise InvalidInput(
                f"token {position} of the prompt is {token_id}{f', {name!r}' * bool(name)}; "
                f"the model's ids are 0 to {vocabulary_tokens - 1}",
                hint="the tokenizer knows it, the model does not: leave it out" * bool(name),
                field="prompt",
            )


def check_named_tokens(asked: Invocation, vocabulary_tokens: int) -> None:
    """Raise InvalidInput for a bias or a stop of a token that the model does not have."""
    biased = [one.token_id for one in asked.logit_bias]
    for name, token_ids in (("logit_bias", biased), ("stop_token_ids", asked.stop_token_ids)):
        for token_id in token_ids:
            if not 0 <= token_id < vocabulary_tokens:
                raise _wrong(name, token_id, f"of the model's tokens, 0 to {vocabulary_tokens - 1}")


def slo_of(asked: Invocation, deployment: DeploymentSpec) -> Slo:
    """The SLO of a checked invocation: that of its class, or of its deployment; or its own, where
    what it leaves open is as that has it. Raises InvalidInput.
    """
    slo = next((one for one in deployment.classes if one.name == asked.slo_class), deployment.slo)
    if asked.slo_class not in (slo.name, "", *DEFAULT_TIERS):
        raise InvalidInput(
            f"{asked.deployment!r} has no SLO class {asked.slo_class!r}",
            hint=f"name one of {', '.join(one.name for one in deployment.classes)}"
            if deployment.classes
            else "name none: it has a single SLO",
            field="slo_class",
        )
    if asked.slo_ttft_s is None and asked.slo_tpot_s is None:
        return slo
    if slo.best_effort:
        raise InvalidInput(
            f"the class {slo.name!r} is best effort: it keeps no limits of a request's own",
            hint="name another class, or leave the limits out",
            field="slo_class",
        )
    slo = replace(slo, name="")
    if asked.slo_ttft_s is not None:
        any_length = SLO_TOKENS_PER_S_MAX
        slo = replace(slo, ttft_s=asked.slo_ttft_s, ttft_tokens_per_s=any_length)
    return slo if asked.slo_tpot_s is None else replace(slo, tpot_s=asked.slo_tpot_s)


def sampling_of(asked: Invocation, *, room_tokens: int, rng: random.Random) -> SamplingParams:
    """The sampling of a checked invocation. `room_tokens` is what the context leaves for output;
    a seed is drawn where none is given.
    """
    wanted = _DEFAULTS.max_tokens if asked.max_tokens is None else asked.max_tokens
    if asked.task is not None:
        wanted = 1  # stands for its vector
    return SamplingParams(
        temperature=_value_or(asked.temperature, _DEFAULTS.temperature),
        top_p=_value_or(asked.top_p, _DEFAULTS.top_p),
        top_k=_DEFAULTS.top_k if asked.top_k is None else asked.top_k,
        seed=rng.getrandbits(63) if asked.seed is None else asked.seed,
        min_p=_value_or(asked.min_p, _DEFAULTS.min_p),
        repetition_penalty=_value_or(asked.repetition_penalty, _DEFAULTS.repetition_penalty),
        presence_penalty=_value_or(asked.presence_penalty, _DEFAULTS.presence_penalty),
        frequency_penalty=_value_or(asked.frequency_penalty, _DEFAULTS.frequency_penalty),
        logit_bias=asked.logit_bias,
        max_tokens=min(wanted, max(1, room_tokens)),
        min_tokens=asked.min_tokens,
        ignore_eos=asked.ignore_eos,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        grammar=asked.grammar,
    )


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _wrong(field: str, given: float, allowed: str) -> InvalidInput:
    return InvalidInput(f"{field} is {given}; it must be {allowed}", field=field)
