"""Chooses the next token of every row of a batch from its logits.

Greedy rows cost one argmax. Sampled rows take, in this order, the repetition penalty, temperature,
top-k and top-p, and then one uniform number that depends on the request's seed and the token's
index alone. All engines that compute here draw with it, once per iteration, so that a request
continues alike wherever it goes on.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest
from mesh_nodes.engines.partial_selection import Columns, nucleus_pick, pick
from mesh_nodes.engines.philox import uniforms

Floats = npt.NDArray[np.float32]

_TEMPERATURE_MIN = 1e-4
"""Below it the most likely token is all but certain, and quotients leave f32."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose one token: parameters, the request's seed, and the token's output index."""

    sampling: SamplingParams
    seed: int
    index: int
    seen: npt.NDArray[np.bool_] | None
    """Prompt and output tokens so far, [vocabulary]; None when no penalty looks at them."""


def seed_of(request: EngineRequest) -> int:
    """The request's own seed, or one that its id gives, so that a resumed request keeps it."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def choose(logits: Floats, draws: list[Draw]) -> list[int]:
    """Token ids, one for each row of logits [rows, vocabulary] and its draw. Penalties are written
    into the logits.
    """
    for row, draw in enumerate(draws):
        _penalise(logits[row], draw)
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


def _penalise(row: Floats, draw: Draw) -> None:
    """Repetition penalty (Keskar et al. 2019, CTRL, §4.1), divided into positive logits and
    multiplied into negative ones, as the field does it."""
    if draw.seen is not None:
        seen = np.flatnonzero(draw.seen)
        values, penalty = row[seen], draw.sampling.repetition_penalty
        row[seen] = np.where(values > 0, values / penalty, values * penalty)


def _sample(columns: Columns, rows: list[int], draws: list[Draw]) -> list[int]:
    """Rows whose whole vocabulary is drawn from go together; the others one by one."""
    whole = [row for row in rows if _keeps_all(draws[row].sampling, columns.vocabulary)]
    seeds, indices = [draws[row].seed for row in rows], [draws[row].index for row in rows]
    numbers = dict(zip(rows, uniforms(seeds, indices, 1)[:, 0].tolist(), strict=True))
    drawn = {
        row: _sample_some(columns, row, draws[row].sampling, numbers[row])
        for row in set(rows) - set(whole)
    }
    if whole:
        temperatures = [_temperature(draws[row].sampling) for row in whole]
        seeds, indices = [draws[row].seed for row in whole], [draws[row].index for row in whole]
        drawn |= zip(whole, columns.draw(whole, temperatures, seeds, indices), strict=True)
    return [drawn[row] for row in rows]


def _keeps_all(sampling: SamplingParams, vocabulary: int) -> bool:
    return sampling.top_p >= 1.0 and not 0 < sampling.top_k < vocabulary


def _temperature(sampling: SamplingParams) -> float:
    return max(sampling.temperature, _TEMPERATURE_MIN)


def _sample_some(columns: Columns, row: int, sampling: SamplingParams, number: float) -> int:
    """Top-k leaves few tokens to take exponentials of; top-p alone needs the sum of all."""
    tokens = None
    if 0 < sampling.top_k < columns.vocabulary:
        tokens = columns.top(row, sampling.top_k)
        logits = columns.logits[row, tokens] - columns.largest[row]
        weights = np.exp(logits / np.float32(_temperature(sampling)))
    else:
        weights = columns.weights(row, _temperature(sampling))
    if sampling.top_p < 1.0:
        place = nucleus_pick(weights, sampling.top_p, number)
    else:
        place = pick(weights, number)
    return place if tokens is None else int(tokens[place])
