"""Looks at a vocabulary's logits without sorting them or taking all their exponentials.

A row is laid out as columns of tokens that lie a fixed stride apart, and the largest logit of each
column is found once for a batch. That maximum bounds what the column weighs: enough to find the
top k, and to draw a token by rejection. `sampling` decides what is drawn; this knows how.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mesh_nodes.engines.philox import uniforms

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_COLUMNS = 2048
"""A row is laid out in this many columns: with a vocabulary of 128k, each has 64 tokens."""
_COLUMN_TOKENS_MIN = 8
"""With fewer in a column, looking at the columns first saves nothing."""
_EXACT_COLUMNS = 4
"""The heaviest columns of a row, of which the weight is summed instead of bounded: where few tokens
hold most of the weight, the bounds of their columns would reject most draws."""
_TRIALS = (8, 56)
"""Draws of a row that may be rejected, in two goes; then it takes all its exponentials."""
_SORTED_MAX = 4096
"""Up to this many tokens are simply sorted. When there are more, a sample says first which of them
need not be.
"""
_SAMPLE_TOKENS = 512
_SPARE_SHARES = ((0.85, 1.15), (0.5, 2.0))
"""The bounds of the search for a nucleus, as shares of the weight that it may lack. A sample of the
row says, within some per cent, below which weight that much is found. What lies between the bounds
is sorted; if the sample was wrong, the wider bounds are used.
"""
_EXPONENTS = (-20.0, 60.0)
"""Largest exponents with which weights neither leave f32 nor lose what matters."""


class Columns:
    """Column maxima of logits [rows, vocabulary], which it reads and never changes."""

    def __init__(self, logits: Floats) -> None:
        self.logits = logits
        self.vocabulary = logits.shape[1]
        self.width = min(_COLUMNS, max(1, self.vocabulary // _COLUMN_TOKENS_MIN))
        self.depth = self.vocabulary // self.width
        self._scratch: Floats | None = None

    @cached_property
    def largest(self) -> Floats:
        """The largest logit of each row. It comes from the column maxima where these were
        computed.
        """
        seen = self.maxima if "maxima" in self.__dict__ else self.logits
        return np.asarray(seen.max(axis=1))

    @cached_property
    def maxima(self) -> Floats:
        """The largest logit of each column, [rows, width]."""
        whole = self.depth * self.width
        parts = self.logits[:, :whole].reshape(-1, self.depth, self.width)
        maxima = np.asarray(parts.max(axis=1))
        rest = self.logits[:, whole:]
        np.maximum(maxima[:, : rest.shape[1]], rest, out=maxima[:, : rest.shape[1]])
        return maxima

    def at_least(self, row: int, floor: np.float32) -> Indices:
        """Tokens whose logit is no smaller, by id."""
        columns = np.flatnonzero(self.maxima[row] >= floor)
        if columns.size * 8 > self.width:
            return np.flatnonzero(self.logits[row] >= floor)
        tokens = self._tokens(columns)
        tokens = tokens[tokens < self.vocabulary]
        return np.sort(tokens[self.logits[row, tokens] >= floor])

    def top(self, row: int, count: int) -> Indices:
        """The `count` tokens of the largest logits, by id; of equals, those of lower ids."""
        if count >= self.vocabulary:
            return np.arange(self.vocabulary)
        values = self.maxima[row] if count <= self.width else self.logits[row]
        floor = np.partition(values, values.size - count)[values.size - count]
        tokens = self.at_least(row, floor)
        order = np.argsort(-self.logits[row, tokens], kind="stable")
        return np.sort(tokens[order[:count]])

    def draw(
        self, rows: list[int], temperatures: list[float], seeds: list[int], indices: list[int]
    ) -> list[int]:
        """A token for each of these rows, from exp(logit / temperature) as it is.

        By rejection (von Neumann 1951): a number falls into a column's bound; if it is within the
        weights of the column's tokens, it says which, else the next number is tried.
        """
        row = np.array(rows)
        scale = np.array([1.0 / t for t in temperatures], np.float32)
        running, bounds = self._bounds(row, scale)
        drawn: dict[int, int] = {}
        first = 0
        for trials in _TRIALS:
            left = np.array([n for n in range(row.size) if n not in drawn], np.intp)
            if not left.size:
                break
            numbers = uniforms(
                [seeds[n] for n in left], [indices[n] for n in left], trials, first=first
            )
            targets = numbers * running[left, -1:]
            found = [running[n].searchsorted(targets[at], "right") for at, n in enumerate(left)]
            places = np.minimum(np.array(found), self.width - 1)
            targets -= running[left[:, None], places] - bounds[left[:, None], places]
            weights = self._weights(row[left], places, scale[left])
            within = weights.cumsum(axis=2, dtype=np.float64)
            accepted = targets < within[:, :, -1]
            trial = accepted.argmax(axis=1)
            for at in np.flatnonzero(accepted.any(axis=1)).tolist():
                go = trial[at]
                deep = int(within[at, go].searchsorted(targets[at, go], side="right"))
                drawn[int(left[at])] = deep * self.width + int(places[at, go])
            first += trials
        for n in set(range(row.size)) - drawn.keys():
            number = uniforms([seeds[n]], [indices[n]], 1, first=first)[0, 0]
            drawn[n] = pick(self.weights(rows[n], temperatures[n]), number)
        return [drawn[n] for n in range(row.size)]

    def _bounds(self, row: Indices, scale: Floats) -> tuple[Doubles, Doubles]:
        """An upper bound of the weight of each column, and the running totals of these bounds:
        [rows, width] both.
        """
        maxima = self.maxima[row]
        heads = np.exp((maxima - self.largest[row, None]) * scale[:, None])
        bounds = heads.astype(np.float64) * self.depth
        rest = self.vocabulary - self.depth * self.width
        bounds[:, :rest] += heads[:, :rest]
        each = np.arange(row.size)
        for _ in range(min(_EXACT_COLUMNS, self.width)):
            column = heads.argmax(axis=1)
            heads[each, column] = -1.0
            weights = self._weights(row, column[:, None], scale)
            bounds[each, column] = weights[:, 0].sum(axis=1, dtype=np.float64)
        return bounds.cumsum(axis=1), bounds

    def weights(self, row: int, temperature: float) -> Floats:
        """exp of every logit over the temperature, up to a factor. Good until the next call."""
        if self._scratch is None:
            self._scratch = np.empty(self.vocabulary, np.float32)
        logits, weights, largest = self.logits[row], self._scratch, float(self.largest[row])
        if not _EXPONENTS[0] <= largest / temperature <= _EXPONENTS[1]:
            logits = np.subtract(logits, np.float32(largest), out=weights)
        if temperature != 1.0:
            logits = np.multiply(logits, np.float32(1.0 / temperature), out=weights)
        np.exp(logits, out=weights)
        return weights

    def _tokens(self, columns: Indices) -> Indices:
        """All tokens of the columns, [..., depth + 1]; the last may be beyond the vocabulary."""
        return columns[..., None] + np.arange(0, (self.depth + 1) * self.width, self.width)

    def _weights(self, rows: Indices, columns: Indices, scale: Floats) -> Floats:
        """The weights of the tokens in columns [rows, n]: [rows, n, depth + 1], 0 beyond the
        vocabulary.
        """
        tokens = self._tokens(columns)
        inside = tokens < self.vocabulary
        logits = self.logits[rows[:, None, None], np.where(inside, tokens, 0)]
        logits -= self.largest[rows, None, None]
        weights = np.exp(logits * scale[:, None, None])
        return np.asarray(np.where(inside, weights, np.float32(0)))


def pick(weights: Floats, number: float) -> int:
    """The place where a running total of the weights passes the share `number` of their sum."""
    width = min(_COLUMNS, weights.size)
    depth = weights.size // width
    sums = weights[: depth * width].reshape(depth, width).sum(axis=0, dtype=np.float32)
    sums[: weights.size - depth * width] += weights[depth * width :]
    running = np.cumsum(sums, dtype=np.float64)
    target = number * running[-1]
    column = min(int(np.searchsorted(running, target, side="right")), width - 1)
    inner = np.cumsum(weights[column::width], dtype=np.float64)
    target += float(sums[column]) - running[column]
    deep = min(int(np.searchsorted(inner, target, side="right")), inner.size - 1)
    return deep * width + column


def nucleus_pick(weights: Floats, top_p: float, number: float) -> int:
    """The same among the fewest largest weights that reach the share top_p of all, and at least one
    (Holtzman et al. 2020, nucleus sampling); of equals, those of lower places.
    """
    total = _sum(weights)
    enough = max(top_p, 0.0) * total
    for low, high in _bands(weights, total - enough):
        likely = np.flatnonzero(weights >= low)
        if likely.size > _SORTED_MAX and high == np.inf and low > 0:
            continue
        values = weights[likely]
        surely = values > high
        sure = float(values[surely].sum(dtype=np.float64))
        perhaps = np.flatnonzero(~surely)
        order = perhaps[np.argsort(-values[perhaps], kind="stable")]
        running = sure + values[order].cumsum(dtype=np.float64)
        if sure < enough <= (running[-1] if running.size else sure):
            break
    count = int(running.searchsorted(enough, side="left")) + 1
    surely[order[:count]] = True
    kept = np.flatnonzero(surely)
    return int(likely[kept[pick(values[kept], number)]])


def _bands(weights: Floats, spare: float) -> Iterator[tuple[float, float]]:
    """Weights between which a nucleus may end that lacks `spare`: likely ones first, then all."""
    # All below weigh no more than that. Few are above it where a model is sure of something.
    yield spare / weights.size, np.inf
    stride = weights.size // _SAMPLE_TOKENS
    if stride > 1:
        sample = np.sort(weights[::stride])
        running = sample.cumsum(dtype=np.float64) * stride
        for low, high in running.searchsorted(np.array(_SPARE_SHARES) * spare):
            # The last of the sample may be one of the few that weigh much: it stands for no others.
            at_most = float(sample[high]) if high < sample.size - 1 else np.inf
            yield float(sample[max(low - 1, 0)]), at_most
    yield -1.0, np.inf


def _sum(weights: Floats) -> float:
    width = min(_COLUMNS, weights.size)
    whole = weights.size // width * width
    sums = weights[:whole].reshape(-1, width).sum(axis=0)
    return float(sums.sum(dtype=np.float64) + weights[whole:].sum(dtype=np.float64))
