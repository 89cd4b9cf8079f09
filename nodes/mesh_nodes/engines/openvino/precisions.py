"""In which precisions a node computes and keeps its KV caches: what there is, and which is taken.

Pure. `precision_trial` measures what `candidates` names, `choose` decides, `reason` says why;
`precision_choice` keeps it. Tokens depend on both precisions, so no choice may depend on noise: the
elements of KV caches follow from the compute precision, and that changes for a clear gain only.
Prefill and decode share one: a graph that was compiled twice would hold its weights twice.
"""

from collections.abc import Container, Iterable, Sequence
from math import isfinite, prod
from statistics import median

from mesh.domain.model import ComputePrecision, KvPrecision
from mesh.domain.values import dataclass

ERROR_RATIO_MAX = 1.5
"""A candidate's error over that of what is known to serve, f32 with activations rounded to 8 bits.
bf16 has 1.33 to 1.35 times that, and next to the same perplexity (SmolLM2-135M: 1.020 times that
of f16's weights, beside 1.018).
"""
GAIN_MIN = 0.1
"""By which a candidate has to be quicker than what is known to serve, in every round of the trial.
The means of rounds differ by up to 0.05 on a quiet machine and by more on a busy one, where what is
known to serve therefore stays.
"""
LOSS_MAX = 0.05
"""By which it may be slower in one kind of the iterations that are timed, in the median round."""
_KV = {
    ComputePrecision.F32: (KvPrecision.F16, KvPrecision.U8, KvPrecision.F32),
    ComputePrecision.BF16: (KvPrecision.BF16, KvPrecision.U8),
    ComputePrecision.F16: (KvPrecision.F16, KvPrecision.U8),
}
"""What the plugin's attention takes. The first is the default; others are used when asked for."""


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
    """The error of the logits: the root mean square, over the spread of the exact ones."""
    rounds: tuple[tuple[float, ...], ...] = ()
    """Seconds of each kind of iteration (decodes and prefills, the same of all candidates), in each
    round. All candidates are timed in turn in a round, so that those of one round compare. There
    are none where the error was too large, or where there was nothing to compare.
    """

    @property
    def seconds(self) -> tuple[float, ...]:
        """The shortest of each kind of iteration."""
        return tuple(min(kind) for kind in zip(*self.rounds, strict=True))


def candidates(
    capable: Iterable[ComputePrecision],
    compute: ComputePrecision | None = None,
    kv: KvPrecision | None = None,
) -> tuple[Precisions, ...]:
    """What to choose from on a CPU that can multiply in `capable`: one for each compute precision.
    What is given is not asked, and the elements of KV caches are never chosen by time.
    """
    computes = [each for each in ComputePrecision if compute is None or each is compute]
    found = [(each, kv or _KV[each][0]) for each in computes if each in capable]
    return tuple(Precisions(compute=each, kv=cache) for each, cache in found if cache in _KV[each])


def choose(timed: Sequence[Timed]) -> Precisions:
    """The quickest in the median round of those that `objection` has nothing against; what is known
    to serve where there is none. `timed` is not empty.
    """
    known = known_of(timed)
    good = [each for each in timed if each is not known and not objection(each, known)]
    return min(
        good,
        key=lambda each: (median(round_ratios(each, known)), str(each.precisions)),
        default=known,
    ).precisions


def objection(timed: Timed, known: Timed) -> str:
    """Why a candidate is not taken in place of what is known to serve; empty where it is better."""
    if not isfinite(timed.error):
        return "it gave logits that are no numbers"
    if not passes(timed.error, known.error) or not timed.rounds:
        return f"its logits are off by {timed.error:.3f}, and by {known.error:.3f} in the other"
    found = round_ratios(timed, known)
    if max(found) > 1 - GAIN_MIN:
        return f"it must take at most {1 - GAIN_MIN:.2f} times as long in every round"
    if max(kind_ratios(timed, known)) > 1 + LOSS_MAX:
        return f"one kind of iteration takes {max(kind_ratios(timed, known)):.2f} times as long"
    return ""


def reason(timed: Sequence[Timed]) -> str:
    """Why `choose` takes what it takes, with each candidate's times and their spread."""
    known = known_of(timed)
    said = []
    for each in timed:
        if each is known:
            continue
        took = ""
        if each.rounds:
            found = round_ratios(each, known)
            took = (
                f" took {median(found):.2f} times as long ({min(found):.2f} to {max(found):.2f} in "
                f"{len(found)} rounds)"
            )
        against = objection(each, known)
        said.append(f"{each.precisions}{took}" + (f": {against}" if against else ""))
    return f"compared with {known.precisions}: " + "; ".join(said)


def passes(error: float, known_error: float) -> bool:
    return error <= ERROR_RATIO_MAX * known_error


def known_of(timed: Sequence[Timed]) -> Timed:
    """What the others are compared with: the plain precisions, or the first where these are not
    among them.
    """
    return next((each for each in timed if each.precisions == PLAIN), timed[0])


def round_ratios(timed: Timed, known: Timed) -> list[float]:
    """For each round, the time over that of the known candidate: the geometric mean over the kinds
    of iterations.
    """
    return [
        float(prod(found) ** (1 / len(found))) for found in zip(*_ratios(timed, known), strict=True)
    ]


def kind_ratios(timed: Timed, known: Timed) -> list[float]:
    """For each kind of iteration, the time over that of the known candidate, in the median
    round.
    """
    return [median(found) for found in _ratios(timed, known)]


def _ratios(timed: Timed, known: Timed) -> list[list[float]]:
    """By kind of iteration, then by round."""
    rounds = zip(timed.rounds, known.rounds, strict=True)
    found = [[o / t for o, t in zip(ours, theirs, strict=True)] for ours, theirs in rounds]
    return [list(kind) for kind in zip(*found, strict=True)]
