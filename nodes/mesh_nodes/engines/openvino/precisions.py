"""In which precisions a node computes and keeps its KV caches: what there is, and which is best.

Pure. `precision_trial` measures what `candidates` names, `choose` decides; `precision_choice` keeps
it. Prefill and decode share one: a graph that was compiled twice would hold its weights twice.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from mesh.domain.model import ComputePrecision, KvPrecision

ERROR_RATIO_MAX = 1.5
"""A candidate's error over that of what is known to serve, f32 with activations rounded to 8 bits.
bf16 has 1.33 to 1.35 times that, and next to the same perplexity (SmolLM2-135M: 1.020 times that
of f16's weights, beside 1.018).
"""
GAIN_MIN = 0.03
"""By which a candidate has to be quicker than what is known to serve."""
LOSS_MAX = 0.05
"""By which it may be slower in one of the iterations that are timed."""
_KV = {
    ComputePrecision.F32: (KvPrecision.F16, KvPrecision.U8, KvPrecision.F32),
    ComputePrecision.BF16: (KvPrecision.BF16, KvPrecision.U8),
    ComputePrecision.F16: (KvPrecision.F16, KvPrecision.U8),
}
"""What the plugin's attention takes; the first in place of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    compute: ComputePrecision = ComputePrecision.F32
    kv: KvPrecision = KvPrecision.F16

    def __str__(self) -> str:
        return f"{self.compute}, KV {self.kv}"

    def on(self, capable: Container[ComputePrecision]) -> "Precisions":
        """What the plugin makes of it on a CPU that can multiply in `capable`: what it cannot is
        computed in f32, and attention in one precision takes not every cache.
        """
        compute = self.compute if self.compute in capable else ComputePrecision.F32
        known = _KV[compute]
        return Precisions(compute=compute, kv=self.kv if self.kv in known else known[0])


PLAIN = Precisions()
"""What is known to serve, and is taken where nothing could be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A candidate, and what was measured of it."""

    precisions: Precisions
    error: float
    """Of logits, root mean square over the spread of the exact ones."""
    seconds: tuple[float, ...] = ()
    """Of each kind of iteration, decodes and prefills, the same of all candidates; none where the
    error was too large."""


def candidates(
    capable: Iterable[ComputePrecision],
    compute: ComputePrecision | None = None,
    kv: KvPrecision | None = None,
) -> tuple[Precisions, ...]:
    """What to choose from on a CPU that can multiply in `capable`; what is given is not asked. f32
    caches are nobody's choice: they take twice the memory for nothing that a token shows.
    """
    computes = [each for each in ComputePrecision if compute is None or each is compute]
    found = [
        Precisions(compute=each, kv=cache)
        for each in computes
        if each in capable
        for cache in _KV[each]
        if cache is kv or (kv is None and cache is not KvPrecision.F32)
    ]
    return tuple(found)


def choose(timed: Sequence[Timed]) -> Precisions:
    """The quickest in the mean of what passes the bound on its error; what is known to serve unless
    it is beaten by more than clocks differ, and nowhere by much. `timed` is not empty.
    """
    known = known_of(timed)
    good = [
        each
        for each in timed
        if each.seconds
        and passes(each.error, known.error)
        and max(ratios(each, known)) <= 1 + LOSS_MAX
        and mean_ratio(each, known) < 1 - GAIN_MIN
    ]
    best = min(good, key=lambda t: (mean_ratio(t, known), str(t.precisions)), default=known)
    return best.precisions


def passes(error: float, known_error: float) -> bool:
    return error <= ERROR_RATIO_MAX * known_error


def known_of(timed: Sequence[Timed]) -> Timed:
    """What the others are compared with: the plain precisions, or the first where these are not
    among them.
    """
    return next((each for each in timed if each.precisions == PLAIN), timed[0])


def ratios(timed: Timed, known: Timed) -> list[float]:
    return [ours / theirs for ours, theirs in zip(timed.seconds, known.seconds, strict=True)]


def mean_ratio(timed: Timed, known: Timed) -> float:
    """Geometric, over the kinds of iterations."""
    return float(prod(ratios(timed, known)) ** (1 / len(timed.seconds)))
