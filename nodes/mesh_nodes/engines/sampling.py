"""Chooses the next token of every row of a batch from its logits.

Greedy rows cost one argmax. Sampled rows take, in this order, the biases, the penalties, the
grammar, temperature, min-p, top-k and top-p, and then uniform numbers that depend on the request's
seed and the token's index alone. All engines that compute here draw with it, once per iteration,
and all that it knows follows from a request's tokens, so that it continues alike wherever it goes
on.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mesh.domain.request import SamplingParams, TokenLogprobs
from mesh.domain.steps import EngineRequest
from mesh.domain.values import dataclass
from mesh_nodes.engines.grammars import Constraint
from mesh_nodes.engines.partial_selection import Columns, nucleus_pick, pick
from mesh_nodes.engines.philox import uniforms

Floats = npt.NDArray[np.float32]

_TEMPERATURE_MIN = 1e-4
"""Below it the most likely token is all but certain, and quotients leave f32."""
_FACTORS = (1e-30, 1e30)
"""Beyond these, what logits are multiplied by or divided by is 0 or infinite in f32, and what that
makes of a logit that a grammar has left out is no number.
"""


class Past:
    """A request's tokens so far, as penalties see them."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int], vocabulary: int) -> None:
        self.seen = np.zeros(vocabulary, np.bool_)
        """In prompt or output."""
        self.counts = np.zeros(vocabulary, np.int32)
        """In the output."""
        self.seen[list(prompt)] = True
        self.add(output)

    def add(self, output: Sequence[int]) -> None:
        tokens = list(output)
        self.seen[tokens] = True
        np.add.at(self.counts, tokens, 1)


def past_of(request: EngineRequest, vocabulary: int) -> Past | None:
    if not is_penalised(request.sampling):
        return None
    return Past(request.prompt_tokens, request.output_tokens, vocabulary)


def is_biased(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or sampling.min_tokens > 0


def is_penalised(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose one token: parameters, the request's seed, and the token's output index."""

    sampling: SamplingParams
    seed: int
    index: int
    past: Past | None
    """None when no penalty looks at it."""
    constraint: Constraint | None = None
    """None when it may be any token."""
    end_ids: tuple[int, ...] = ()
    """The tokens that would end the request."""


def seed_of(request: EngineRequest) -> int:
    """The request's own seed, or one that its id gives, so that a resumed request keeps it."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def choose_telling(
    logits: Floats, draws: list[Draw]
) -> list[tuple[int, tuple[TokenLogprobs, ...]]]:
    """The same with the log-probabilities of each row that asks for them."""
    asking = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    before = {row: logits[row].copy() for row in asking}
    tokens = choose(logits, draws)
    return [
        (token, (logprobs_of(before[row], token, draws[row].sampling.logprobs or 0),))
        if row in before
        else (token, ())
        for row, token in enumerate(tokens)
    ]


def logprobs_of(row: Floats, token: int, top: int) -> TokenLogprobs:
    """The log-probability of a token by logits [vocabulary], and those of the `top` likeliest."""
    largest = row.max()
    total = float(largest) + math.log(np.exp(row - largest).sum(dtype=np.float64))
    top = min(top, row.size)
    likely = np.argpartition(row, row.size - top)[row.size - top :] if top else np.zeros(0, int)
    likely = likely[np.lexsort((likely, -row[likely]))]
    return TokenLogprobs(
        logprob=min(float(row[token]) - total, 0.0),
        top=tuple((int(place), min(float(row[place]) - total, 0.0)) for place in likely),
    )


def choose(logits: Floats, draws: list[Draw]) -> list[int]:
    """Token ids, one for each row of logits [rows, vocabulary] and its draw. Biases, penalties
    and grammars are written into the logits.
    """
    for row, draw in enumerate(draws):
        _bias(logits[row], draw)
        _penalise(logits[row], draw)
        if draw.constraint is not None:
            draw.constraint.restrict(logits[row])
    sampled = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0.0]
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.temperature <= 0.0]
    tokens = [0] * len(draws)
    for row in greedy:
        tokens[row] = int(logits[row].argmax())
    if sampled:
        columns = Columns(logits)
        for row, token in zip(sampled, _sample(columns, sampled, draws), strict=True):
            tokens[row] = token
    return tokens


def _bias(row: Floats, draw: Draw) -> None:
    """Add the request's own biases, and leave out what would end it too early."""
    for one in draw.sampling.logit_bias:
        row[one.token_id] += one.bias
    if draw.index < draw.sampling.min_tokens:
        row[[token_id for token_id in draw.end_ids if token_id < row.size]] = -np.inf


def _penalise(row: Floats, draw: Draw) -> None:
    """Repetition penalty (Keskar et al. 2019, CTRL, §4.1), divided into positive logits and
    multiplied into negative ones, as the field does it; then those that the output has earned."""
    if draw.past is None:
        return
    sampling = draw.sampling
    if sampling.repetition_penalty != 1.0:
        seen = np.flatnonzero(draw.past.seen)
        values = row[seen]
        penalty = min(max(sampling.repetition_penalty, _FACTORS[0]), _FACTORS[1])
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        given = np.flatnonzero(draw.past.counts)
        often = draw.past.counts[given].astype(np.float32)
        row[given] -= sampling.presence_penalty + sampling.frequency_penalty * often


def _sample(columns: Columns, rows: list[int], draws: list[Draw]) -> list[int]:
    """Rows whose whole vocabulary is drawn from go together; the others one by one."""
    whole = [row for row in rows if _keeps_all(draws[row].sampling, columns.vocabulary)]
    some = [row for row in rows if row not in whole]
    drawn: dict[int, int] = {}
    if some:
        seeds, indices = [draws[row].seed for row in some], [draws[row].index for row in some]
        numbers = uniforms(seeds, indices, 1)[:, 0].tolist()
        for row, number in zip(some, numbers, strict=True):
            drawn[row] = _sample_some(columns, row, draws[row].sampling, number)
    if whole:
        temperatures = [_temperature(draws[row].sampling) for row in whole]
        seeds, indices = [draws[row].seed for row in whole], [draws[row].index for row in whole]
        drawn |= zip(whole, columns.draw(whole, temperatures, seeds, indices), strict=True)
    return [drawn[row] for row in rows]


def _keeps_all(sampling: SamplingParams, vocabulary: int) -> bool:
    return sampling.top_p >= 1.0 and sampling.min_p <= 0.0 and not 0 < sampling.top_k < vocabulary


def _temperature(sampling: SamplingParams) -> float:
    return min(max(sampling.temperature, _TEMPERATURE_MIN), _FACTORS[1])


def _sample_some(columns: Columns, row: int, sampling: SamplingParams, number: float) -> int:
    """Top-k and min-p leave few tokens to take exponentials of; top-p alone takes all."""
    tokens, temperature = None, _temperature(sampling)
    if 0 < sampling.top_k < columns.vocabulary:
        tokens = columns.top(row, sampling.top_k)
    elif sampling.min_p > 0.0:
        # A little lower, for what rounding does; weights decide.
        floor = columns.largest[row] + temperature * (math.log(sampling.min_p) - 1e-3)
        tokens = columns.at_least(row, np.float32(floor))
    if tokens is None:
        weights = columns.weights(row, temperature)
    else:
        logits = columns.logits[row, tokens] - columns.largest[row]
        weights = np.exp(logits / np.float32(temperature))
        likely = weights >= min(sampling.min_p, 1.0)
        tokens, weights = tokens[likely], weights[likely]
    if sampling.top_p < 1.0:
        place = nucleus_pick(weights, sampling.top_p, number)
    else:
        place = pick(weights, number)
    return place if tokens is None else int(tokens[place])
