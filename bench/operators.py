"""What operators take of iterations, by the counters of the OpenVINO engine.

The demo model and two made-up shapes are measured one after the other. Each is counted as `mesh
profile NAME --operators` counts it; then whole iterations are timed without counters. In the mean,
`operator_sum_error` is how far operators and rest are off an iteration of a size between those that
were counted, and `mixed_error` how far predictions from these are off prompts beside decodes.
`rest_share` is the share that no operator explains, and `counter_cost` how much longer an iteration
takes when it is counted. Each shape is estimated from each of the others as if it had never been
measured: operator by operator (`estimate_error_operators`), and by bytes and shape, which is the
rule where nothing was counted (`estimate_error_today`). `joules_per_token` is that of an output
token in batches of 1, 8 and 16; where no counter can be read, `joules_reason` says why.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import permutations
from pathlib import Path
from statistics import mean, median

from bench.demo_model import stored_model
from bench.driving import INSTANCE, LoadedModel, profile_of
from bench.harness import Report, Table, show_status
from bench.weights import LLAMA_1B, model_of_zeros
from mesh.compute.operators import OperatorSurvey, iteration_s
from mesh.compute.scaling import Target, best_profile, scaled
from mesh.compute.survey import undisturbed_s
from mesh.compute.times import Times
from mesh.domain.ids import ModelId
from mesh.domain.profile import REST, IterationShape, OperatorTimes, Profile
from mesh_loader.store import StoredModel
from mesh_nodes.energy import energy_counter
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

BOUNDS = {"context_tokens_max": 1536, "batch_max": 16, "kv_tokens": 16 * 1056}
CHUNK_TOKENS, QUICK_CHUNK_TOKENS = 512, 32
MEMORY_BYTES = 2**40
"""The engine is told that it has so much: what there really is counts beside it."""
ROUNDS, COST_ROUNDS = 5, 15


def _prompt(tokens: int, past: int = 0) -> IterationShape:
    return IterationShape(prefill_tokens=tokens, prefill_past_tokens=past)


def _decode(batch: int, context: int, tokens: int = 0, past: int = 0) -> IterationShape:
    """With so many tokens of a prompt beside it."""
    return replace(_prompt(tokens, past), decode_batch=batch, decode_context_tokens=context)


BEFORE = _decode(2, 64)
"""Prompts are timed behind an iteration of another size, decodes behind their like."""
BETWEEN = (
    *(_prompt(tokens, 256) for tokens in (3, 20, 80)),
    *map(_prompt, (20, 40, 80, 160, 320, 448)),
    *(_decode(batch, 300) for batch in (1, 4, 7, 12)),
    _decode(6, 800),
)
"""Sizes that were not counted themselves."""
MIXED = tuple(_decode(4, 300, *of) for of in ((20, 0), (20, 256), (128, 0), (448, 0)))
MIXED += tuple(_decode(12, 300, *of) for of in ((20, 0), (128, 256)))
COSTS = (_decode(1, 128), _decode(8, 128), _prompt(32))
POWERED = tuple(_decode(batch, 512) for batch in (1, 8, 16))
POWERED_S = 10.0
"""For so long each is computed over and over."""


WIDTHS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
MADE_UP = {
    "wide": LLAMA_1B | dict(zip(WIDTHS, (1024, 2816, 8, 16, 4, 32000), strict=True)),
    "deep": LLAMA_1B | dict(zip(WIDTHS, (384, 1024, 40, 6, 2, 16384), strict=True)),
}
"""123 and 69 million parameters; the demo model has 135, in 30 layers 576 wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One shape, as it was measured."""

    profile: Profile
    shapes: tuple[IterationShape, ...]
    sum_errors: Mapping[IterationShape, float]
    """By what share operators and rest are off the whole, for each of BETWEEN, and predictions from
    these for each of MIXED.
    """
    costs: tuple[float, ...]
    joules: tuple[float | None, ...]
    """Joules of an output token, for each of POWERED."""
    why_no_joules: str

    def error(self, sizes: Sequence[IterationShape]) -> float:
        """In the mean over these."""
        return mean(abs(off) for shape, off in self.sum_errors.items() if shape in sizes)

    @property
    def rest_share(self) -> float:
        """In the mean over the sizes that were counted."""
        (rest,) = (each for each in self.profile.operators if each.name == REST)
        return mean(_at(rest, shape) / _at(self.profile, shape) for shape in self.shapes)


def _at(times: OperatorTimes | Profile, shape: IterationShape) -> float:
    return iteration_s(times.prefill, times.decode, shape)


def _count(name: str, stored: StoredModel, chunk_tokens: int) -> Counted:
    engine = OpenVinoEngine()
    engine.bound_memory(MEMORY_BYTES)
    model = LoadedModel(engine, stored, **BOUNDS)
    survey = OperatorSurvey(
        **BOUNDS,
        prefill_tokens_max=chunk_tokens,
        expected_s=lambda s: (
            s.prefill_tokens + s.decode_batch * (1 + s.decode_context_tokens / 1e3)
        ),
    )
    shapes: dict[IterationShape, None] = {}
    while (shape := survey.next_shape()) is not None:
        show_status(f"{name}: count, {100 * survey.share:.0f} %")
        shapes[shape] = None
        counted = engine.count_operators(INSTANCE, shape)
        survey.note(counted.elapsed_s, counted.operators)
    between = [s for s in (*BETWEEN, *MIXED) if s.prefill_tokens <= chunk_tokens]
    taken = _taken(name, engine, [*shapes, *between])
    prefill, decode = survey.grids(taken.__getitem__)
    inner = read_architecture(stored.path).intermediate_size
    info = replace(stored.info, model_id=ModelId(name), intermediate_size=inner)
    profile = replace(
        profile_of(info, model.footprint.at_context(0), prefill, decode),
        operators=survey.operators(prefill, decode),
        widths=info.widths,
    )
    mixed, errors = Times(profile), {}
    for s in between:
        summed_s = sum(_at(each, s) for each in profile.operators)
        errors[s] = (mixed.iteration_s(s) if s in MIXED else summed_s) / taken[s] - 1.0
    costs = [_cost(engine, shape) for shape in COSTS]
    joules, why = _joules(engine)
    engine.close()
    return Counted(
        profile=profile,
        shapes=tuple(shapes),
        sum_errors=errors,
        costs=tuple(costs),
        joules=joules,
        why_no_joules=why,
    )


def _joules(engine: OpenVinoEngine) -> tuple[tuple[float | None, ...], str]:
    """Joules of an output token in each of POWERED, by the counter of the packages: of all that
    runs there, idle power included. `None` where it cannot be read, and why.
    """
    counter, found = energy_counter(None), list[float | None]()
    for shape in POWERED:
        before, tokens = counter(), 0
        end_s = time.monotonic() + POWERED_S
        while before.joules is not None and time.monotonic() < end_s:
            engine.measure(INSTANCE, shape)
            tokens += shape.decode_batch
        after = counter()
        if before.joules is None or after.joules is None:
            return (None,) * len(POWERED), before.reason or after.reason
        found.append(round((after.joules - before.joules) / tokens, 4))
    return tuple(found), ""


def _taken(
    name: str, engine: OpenVinoEngine, shapes: Sequence[IterationShape]
) -> Mapping[IterationShape, float]:
    """Seconds of whole iterations, without counters. Each comes once in a round: a machine that
    others share may be a third slower a minute later.
    """
    times_s: dict[IterationShape, list[float]] = {shape: [] for shape in shapes}
    for number in range(ROUNDS):
        for shape, taken_s in times_s.items():
            show_status(f"{name}: time whole iterations, {100 * number // ROUNDS} %")
            engine.measure(INSTANCE, BEFORE if shape.prefill_tokens else shape)
            taken_s.append(engine.measure(INSTANCE, shape))
    return {shape: undisturbed_s(taken_s) for shape, taken_s in times_s.items()}


def _cost(engine: OpenVinoEngine, shape: IterationShape) -> float:
    """By how much a counted iteration takes longer: the median over pairs of neighbours."""
    calls: list[Callable[[], float]] = [
        lambda: engine.measure(INSTANCE, shape),
        lambda: engine.count_operators(INSTANCE, shape).elapsed_s,
    ]
    ratios = []
    for number in range(COST_ROUNDS):
        # Each model has seen another size before. They take turns at being the first.
        order = calls[:: 1 if number % 2 else -1]
        times_s = dict(zip(order, [call() for call in calls + order][2:], strict=True))
        ratios.append(times_s[calls[1]] / times_s[calls[0]])
    return median(ratios) - 1.0


def run(*, quick: bool = False) -> Report:
    counted: dict[str, Counted] = {}
    chunk_tokens = QUICK_CHUNK_TOKENS if quick else CHUNK_TOKENS
    with ExitStack() as stack:
        models = {"demo": stored_model()}
        for name, config in MADE_UP.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            models[name] = model_of_zeros(folder, config)
        for name, stored in models.items():
            counted[name] = _count(name, stored, chunk_tokens)
    estimates = []
    for known, other in permutations(counted, 2):
        theirs, ours = counted[known].profile, counted[other].profile
        target = Target(**{each.name: getattr(ours, each.name) for each in fields(Target)})
        rule, operators = (
            mean(abs(_at(each, s) / _at(ours, s) - 1.0) for s in counted[other].shapes)
            for each in (scaled(theirs, target), best_profile([theirs], target))
        )
        estimates.append((f"{other} from {known}", rule, operators))
    return Report(
        figures={
            "operator_sum_error": round(mean(c.error(BETWEEN) for c in counted.values()), 4),
            "mixed_error": round(mean(c.error(MIXED) for c in counted.values()), 4),
            "rest_share": round(max(c.rest_share for c in counted.values()), 4),
            "counter_cost": round(max(median(c.costs) for c in counted.values()), 4),
            "estimate_error_operators": round(mean(e[2] for e in estimates), 4),
            "estimate_error_today": round(mean(e[1] for e in estimates), 4),
            "joules_per_token": {name: each.joules for name, each in counted.items()},
            "joules_reason": counted["demo"].why_no_joules,
        },
        shown=(
            Table(
                headings=("%", "between sizes off by", "rest", "counters"),
                rows=[
                    (
                        *(name, f"{100 * each.error(BETWEEN):.1f}", f"{100 * each.rest_share:.1f}"),
                        ", ".join(f"{100 * cost:+.1f}" for cost in each.costs),
                    )
                    for name, each in counted.items()
                ],
                title="what was counted",
            ),
            Table(
                headings=("operators and rest, off by %", *counted),
                rows=[
                    (_words(s), *(f"{100 * each.sum_errors[s]:+.1f}" for each in counted.values()))
                    for s in counted["demo"].sum_errors
                ],
                title="sizes between those that were counted",
            ),
            Table(
                headings=("estimated, off by %", "by bytes and shape", "by operators"),
                rows=[(name, *(f"{100 * one:.1f}" for one in off)) for name, *off in estimates],
                title="estimates of a shape that was never measured",
            ),
        ),
        targets={
            "operator_sum_error": "<= 0.03",
            "rest_share": "<= 0.1",
            "estimate_error_operators": "<= 0.1",
        },
    )


def _words(s: IterationShape) -> str:
    decode = f"{s.decode_batch} at {s.decode_context_tokens}" if s.decode_batch else ""
    past = f" behind {s.prefill_past_tokens}" if s.prefill_past_tokens else ""
    prompt = f"prompt of {s.prefill_tokens}{past}" if s.prefill_tokens else ""
    return " beside ".join(filter(None, (prompt, decode)))
