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
from mesh_nodes.engines.philox import uniforms

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

_TEMPERATURE_MIN = 1e-4
"""Below it the most likely token is all but certain, and quotients leave f32."""
_NUCLEUS_FLOOR = 1e-4
"""Weights below this share of the largest are left out when top-p first looks: sorting the others
instead of a vocabulary saves milliseconds a row, and they hold all but very flat nuclei."""
_STRIDE = 256
"""Weights summed at once: a running total over a whole vocabulary cannot be vectorised."""


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
    """Token ids, one for each row of logits [rows, vocabulary] and its draw."""
    tokens: list[int] = logits.argmax(axis=1).tolist()
    for row, draw in enumerate(draws):
        if draw.seen is not None and draw.sampling.temperature <= 0.0:
            tokens[row] = int(_penalised(logits[row], draw).argmax())
    sampled = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0.0]
    if sampled:
        numbers = uniforms(
            [draws[row].seed for row in sampled], [draws[row].index for row in sampled]
        )
        for row, number in zip(sampled, numbers.tolist(), strict=True):
            tokens[row] = _sample(_penalised(logits[row], draws[row]), draws[row].sampling, number)
    return tokens


def _penalised(row: Floats, draw: Draw) -> Floats:
    """Repetition penalty (Keskar et al. 2019, CTRL, §4.1), divided into positive logits and
    multiplied into negative ones, as the field does it."""
    if draw.seen is None:
        return row
    row = row.copy()
    seen = np.flatnonzero(draw.seen)
    values, penalty = row[seen], draw.sampling.repetition_penalty
    row[seen] = np.where(values > 0, values / penalty, values * penalty)
    return row


def _sample(row: Floats, sampling: SamplingParams, number: float) -> int:
    candidates = None
    if 0 < sampling.top_k < row.size:
        candidates = _most_likely(row, sampling.top_k)
        row = row[candidates]
    weights = np.exp((row - row.max()) / np.float32(max(sampling.temperature, _TEMPERATURE_MIN)))
    if sampling.top_p < 1.0:
        nucleus = _nucleus(weights, sampling.top_p)
        weights = weights[nucleus]
        candidates = nucleus if candidates is None else candidates[nucleus]
    place = _pick(weights, number)
    return place if candidates is None else int(candidates[place])


def _most_likely(row: Floats, count: int) -> Indices:
    """Indices of the `count` largest, by index."""
    return np.sort(np.argpartition(row, row.size - count)[row.size - count :])


def _nucleus(weights: Floats, top_p: float) -> Indices:
    """The fewest most likely tokens whose weights reach the share top_p, and at least one
    (Holtzman et al. 2020, nucleus sampling). The largest weight is 1."""
    enough = max(top_p, 0.0) * float(weights.sum(dtype=np.float64))
    for floor in (_NUCLEUS_FLOOR, -1.0):
        likely = np.flatnonzero(weights > floor)
        top = likely[np.argsort(-weights[likely], kind="stable")]
        cumulative = np.cumsum(weights[top], dtype=np.float64)
        if cumulative[-1] >= enough:
            break
    return top[: int(np.searchsorted(cumulative, enough, side="left")) + 1]


def _pick(weights: Floats, number: float) -> int:
    """The place where the running total of the weights passes the share `number` of their sum;
    strides first, then within one."""
    sums = np.add.reduceat(weights, np.arange(0, weights.size, _STRIDE), dtype=np.float64)
    totals = np.cumsum(sums)
    target = number * totals[-1]
    stride = min(int(np.searchsorted(totals, target, side="right")), sums.size - 1)
    inner = weights[stride * _STRIDE : (stride + 1) * _STRIDE]
    running = np.cumsum(inner, dtype=np.float64) + (totals[stride] - sums[stride])
    place = min(int(np.searchsorted(running, target, side="right")), inner.size - 1)
    return stride * _STRIDE + place
