"""Cost models that stand for a machine in the tests of surveys, and the noise of a shared one."""

from collections.abc import Callable
from random import Random

from mesh.compute.survey import Survey
from mesh.domain.profile import IterationShape

Cost = Callable[[IterationShape], float]


def machine_s(shape: IterationShape) -> float:
    """The time of an iteration on a machine with a 135M model on two cores: weights once, work per
    token, reads of the KV.
    """
    if shape.decode_batch:
        kv_tokens = shape.decode_batch * shape.decode_context_tokens
        return 8.5e-3 + 0.5e-3 * shape.decode_batch + 1.2e-6 * kv_tokens
    tokens = shape.prefill_tokens
    pairs = tokens * (shape.prefill_past_tokens + tokens / 2)
    return 8.5e-3 + 0.5e-3 * tokens + 0.35e-6 * pairs


def noisy(cost: Cost, random: Random, *, spread: float = 0.05, stalls: float = 0.02) -> Cost:
    """With deviations of this relative standard deviation; a few take three times as long."""

    def measured_s(shape: IterationShape) -> float:
        slowdown = 3.0 if random.random() < stalls else 1.0
        return cost(shape) * random.gauss(1.0, spread) * slowdown

    return measured_s


def demo_survey() -> Survey:
    """The survey of the demo model as `mesh up` loads it."""
    return Survey(context_tokens_max=2048, batch_max=32, kv_tokens=16384, prefill_tokens_max=256)


def run(survey: Survey, cost: Cost) -> list[IterationShape]:
    """Measure everything; the shapes in the order in which they were asked for."""
    asked = []
    while (shape := survey.next_shape()) is not None:
        asked.append(shape)
        survey.note(cost(shape))
    return asked
