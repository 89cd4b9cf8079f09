"""The trial of precisions as a node makes it, on layers of the benchmark's model: what each takes,
how far its logits are off, and its share of the roofline.

Before: the prepared model. After: the engine is measured in what was chosen, and `report`.
"""

from dataclasses import dataclass

from bench.engine.roofline import Roofline, measured
from bench.engine.workload import THREADS
from bench.printing import show_table
from mesh.domain.errors import EngineError
from mesh_nodes.engines.openvino.architecture import Architecture
from mesh_nodes.engines.openvino.precision_choice import tried
from mesh_nodes.engines.openvino.precision_trial import SHAPES, cut
from mesh_nodes.engines.openvino.precisions import Precisions, Timed, choose
from mesh_nodes.engines.openvino.trial_wish import TrialWish

NAMES = ("decode 1", "decode 8", "prefill 128", "prefill 128 past 1024")
"""The names of SHAPES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    architecture: Architecture
    """The architecture of the layers that were computed."""
    timed: tuple[Timed, ...]
    roofline: Roofline

    @classmethod
    def of(cls, architecture: Architecture) -> "Trial":
        """Raises EngineError."""
        try:
            timed = tried(TrialWish(architecture=architecture, threads=THREADS))
        except (OSError, ValueError) as error:
            raise EngineError(f"precisions cannot be compared: {error}") from error
        return cls(architecture=cut(architecture), timed=timed, roofline=measured(THREADS))

    @property
    def chosen(self) -> Precisions:
        return choose(self.timed)

    def shares(self, timed: Timed) -> list[float]:
        """What each iteration could have taken over what it took."""
        return [
            self.roofline.least_s(self.architecture, shape, timed.precisions) / taken_s
            for shape, taken_s in zip(SHAPES, timed.seconds, strict=True)
        ]

    def figures(self) -> dict[str, object]:
        return {
            "chosen": str(self.chosen),
            "candidates": {
                str(each.precisions): {
                    "ms": [round(1000 * seconds, 3) for seconds in each.seconds],
                    "roofline_share": [round(share, 3) for share in self.shares(each)],
                }
                for each in self.timed
                if each.seconds
            },
        }


def print_trial(trial: Trial) -> None:
    rows = []
    for each in trial.timed:
        pairs = zip(each.seconds, trial.shares(each), strict=True) if each.seconds else ()
        cells = [f"{1000 * seconds:.2f} ({100 * share:.0f} %)" for seconds, share in pairs]
        mark = " *" if each.precisions == trial.chosen else ""
        cells = cells or ["too far off", *[""] * (len(NAMES) - 1)]
        rows.append((f"{each.precisions}{mark}", f"{each.error:.4f}", *cells))
    show_table(
        ("precision", "error", *NAMES),
        rows,
        title=f"ms of {trial.architecture.layers} layers (share of the roofline); * chosen; memory "
        f"{trial.roofline.bytes_per_s / 1e9:.1f} GB/s",
        words=1,
    )
