"""A profile scaled to a model of other widths, operator by operator.

The operators of one model were counted; what each takes in another model goes with the sizes that
it has in both. All of them together tell how much longer the other's iterations take than those of
the profile, at each size that was counted. Before: `mesh.compute.operators`, which counts.
After: `mesh.compute.scaling`, which estimates so where it can.
"""

from collections.abc import Mapping

from mesh.compute.tables import monotone
from mesh.domain.model import Widths
from mesh.domain.operators import OUTSIDE_LAYERS, Role
from mesh.domain.profile import REST, Grid, Profile
from mesh.domain.values import dataclass, replace

PRODUCTS = frozenset((Role.QKV, Role.OUTPUT, Role.GATE_UP, Role.DOWN, Role.HEAD))
"""Their times go with their weights alone. What a product takes besides (OpenVINO: 4 to 7 us, where
one row takes 40 ps a weight) made estimates no better when it was fitted.
"""


def by_operators(profile: Profile, widths: Widths) -> tuple[Grid, Grid]:
    """Prefill and decode of a model with these widths, from the profile of another one on the same
    device, which has operators and its own widths.

    Each time is the profile's, times what the operators come to with these widths, over what they
    come to with its own. So it has in it what iterations have told of the profile since, and for
    the profile's own widths it is the profile's.
    """
    assert profile.widths is not None, "who counts operators knows whose they are"
    theirs, ours = _numbers(profile.widths), _numbers(widths)
    scale = _Scale(
        layers=widths.layers / profile.widths.layers,
        numbers={name: ours[name] / theirs[name] for name in ours},
        least_s={
            each.name: 0.0 if each.name in PRODUCTS else each.prefill.seconds[0][0]
            for each in profile.operators
        },
    )
    prefill = scale.ratios({each.name: each.prefill for each in profile.operators})
    decode = scale.ratios({each.name: each.decode for each in profile.operators})
    return _stretched(profile.prefill, prefill), _stretched(profile.decode, decode)


def _stretched(grid: Grid, ratios: Grid) -> Grid:
    """Beyond the sizes that were counted, the last ratio holds."""
    rows = [min(row, ratios.rows[-1]) for row in grid.rows]
    columns = [min(column, ratios.columns[-1]) for column in grid.columns]
    seconds = [
        [value * ratios.at(row, column) for column, value in zip(columns, values, strict=True)]
        for row, values in zip(rows, grid.seconds, strict=True)
    ]
    return replace(grid, seconds=monotone(seconds))


def _numbers(w: Widths) -> Mapping[str, int]:
    """What each operator's time grows with from one row to the next: the weights of products, the
    numbers of a row of all else, all layers together.
    """
    queries, keys = w.attention_heads * w.head_size, w.kv_heads * w.head_size
    of_a_layer: Mapping[str, int] = {
        Role.NORM: w.hidden_size,
        Role.QKV: w.hidden_size * (queries + 2 * keys),
        Role.ROPE: queries + keys,
        Role.KV_WRITE: 2 * keys,
        Role.ATTENTION: queries,
        Role.OUTPUT: queries * w.hidden_size,
        Role.RESIDUAL: w.hidden_size,
        Role.GATE_UP: 2 * w.hidden_size * w.intermediate_size,
        Role.ACTIVATION: w.intermediate_size,
        Role.DOWN: w.hidden_size * w.intermediate_size,
        REST: w.hidden_size,
    }
    return {
        **{name: w.layers * numbers for name, numbers in of_a_layer.items()},
        Role.EMBEDDING: w.hidden_size,
        Role.HEAD: w.hidden_size * w.vocabulary_tokens,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """From the operators of one model to another's."""

    layers: float
    """How many times as many they are."""
    numbers: Mapping[str, float]
    """The same of what each operator's time grows with."""
    least_s: Mapping[str, float]
    """The part of each operator's time that goes with the layers: what it takes of one token behind
    nothing.
    """

    def ratios(self, counted: Mapping[str, Grid]) -> Grid:
        """By how much longer the other's iterations take, at each size that was counted."""
        sizes = next(iter(counted.values()))
        ratios = [
            tuple(
                self._ratio({n: grid.at(row, column) for n, grid in counted.items()})
                for column in sizes.columns
            )
            for row in sizes.rows
        ]
        return replace(sizes, seconds=tuple(ratios))

    def _ratio(self, seconds: Mapping[str, float]) -> float:
        """That of an iteration of which each operator takes so long."""
        scaled_s = 0.0
        for name, taken_s in seconds.items():
            least_s = min(self.least_s[name], taken_s)
            scaled_s += least_s * (1.0 if name in OUTSIDE_LAYERS else self.layers)
            scaled_s += (taken_s - least_s) * self.numbers.get(name, self.numbers[REST])
        return scaled_s / sum(seconds.values())
