"""A profile scaled to a model of other widths, operator by operator.

The operators of one model were counted; what each takes in another model goes with the sizes that
it has in both. All of them together tell how much longer the other's iterations take than those of
the profile, at each size that was counted. Before: `mesh.compute.operators`, which counts.
After: `mesh.compute.scaling`, which estimates so where it can.
"""

from collections.abc import Callable, Mapping

from mesh.compute.tables import monotone
from mesh.domain.model import Widths
from mesh.domain.operators import OUTSIDE_LAYERS, Role
from mesh.domain.profile import REST, Grid, Profile
from mesh.domain.values import replace

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
    layers = widths.layers / profile.widths.layers
    # What each takes of one token behind nothing: that part of its time goes with the layers.
    alone_s = {
        each.name: 0.0 if each.name in PRODUCTS else each.prefill.seconds[0][0]
        for each in profile.operators
    }

    def ratio(seconds: Mapping[str, float]) -> float:
        """By how much longer the other's iteration takes, of which each operator takes so long."""
        scaled_s = 0.0
        for name, taken_s in seconds.items():
            least_s, of = min(alone_s[name], taken_s), name if name in ours else REST
            scaled_s += least_s * (1.0 if name in OUTSIDE_LAYERS else layers)
            scaled_s += (taken_s - least_s) * ours[of] / theirs[of]
        return scaled_s / sum(seconds.values())

    prefill = {each.name: each.prefill for each in profile.operators}
    decode = {each.name: each.decode for each in profile.operators}
    return _stretched(profile.prefill, prefill, ratio), _stretched(profile.decode, decode, ratio)


def _stretched(
    grid: Grid, counted: Mapping[str, Grid], ratio: Callable[[Mapping[str, float]], float]
) -> Grid:
    """The grid times the ratios of the sizes that were counted; beyond these the last one holds."""
    sizes = next(iter(counted.values()))
    ratios = replace(
        sizes,
        seconds=tuple(
            tuple(
                ratio({name: of.at(row, column) for name, of in counted.items()})
                for column in sizes.columns
            )
            for row in sizes.rows
        ),
    )
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
