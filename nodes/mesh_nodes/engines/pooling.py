"""From hidden states to the one vector that a request with a task ends with, in all engines.

An engine asks which rows of an iteration are needed, adds them up as they come, and has the vector
made of the sum. A decoder's text may come in chunks; an encoder's, each of whose tokens attends to
all others, is computed in one iteration. Before: an engine's batch, its instance. After: nothing.
"""

from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np

from mesh.domain.errors import TornModel
from mesh.domain.model import ENCODERS, ModelInfo, Task
from mesh.domain.values import dataclass
from mesh_loader.config_keys import CONFIG, NORMALISED, POOLING, check_config
from mesh_loader.encoders import Pooling
from mesh_loader.model_info import read_json
from mesh_nodes.engines.sampling import Floats


@dataclass(frozen=True, slots=True)
class Pool:
    """How one loaded model makes its vectors."""

    pooling: Pooling
    normalised: bool
    scores: bool
    whole: bool
    """A text is computed in one iteration."""

    def rows(self, begin: int, count: int, length: int) -> SequenceOf[int]:
        """Which of the next `count` tokens of a text of `length`, of which `begin` are computed,
        are needed.
        """
        match self.pooling:
            case Pooling.MEAN:
                return range(count)
            case Pooling.CLS:
                return range(0 if begin else 1)
            case Pooling.LAST:
                return range(count - 1, count) if begin + count == length else ()

    def vector(self, states: Floats, length: int) -> tuple[float, ...]:
        """The vector of a text of `length` tokens; `states` is the sum of those that it needs."""
        vector = states / length if self.pooling is Pooling.MEAN else states
        if self.scores:
            vector = 1.0 / (1.0 + np.exp(-vector))
        elif self.normalised:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return tuple(vector.tolist())


def pool_of(model: ModelInfo, model_path: Path) -> Pool | None:
    """How the model in this store folder is pooled; `None` where it generates text. Raises
    TornModel for a config.json that does not say it as importers write it.
    """
    if model.task is None:
        return None
    config = read_json(model_path / "config.json")
    check_config(config, "config.json", {key: CONFIG[key] for key in (POOLING, NORMALISED)})
    whole, scores = model.architecture in ENCODERS, model.task is Task.RERANK
    told = config.get(POOLING) or (Pooling.MEAN if whole else Pooling.LAST)
    if told not in tuple(Pooling):
        raise TornModel(f"config.json: {POOLING} is {told!r}, which is no pooling")
    return Pool(
        pooling=Pooling.CLS if scores else Pooling(told),
        normalised=config.get(NORMALISED) is not False,
        scores=scores,
        whole=whole,
    )
