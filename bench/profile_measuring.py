"""What is predicted and then measured: prompts of every length, batches of every size."""

import os
import random
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from statistics import median
from typing import TypeVar

from bench import driving
from bench.demo_model import stored_model
from mesh.compute.learned_correction import LearnedCorrection
from mesh.compute.refining import Refinement
from mesh.compute.survey import Survey
from mesh.compute.times import Times
from mesh.core.node.priming import to_prime
from mesh.domain.ids import RequestId
from mesh.domain.limits import PREFILL_TOKENS_MAX, NodeLimits
from mesh.domain.profile import IterationShape, Profile
from mesh.domain.steps import StepResult
from mesh_nodes.engines.openvino.engine import OpenVinoEngine

BATCH_MAX = 32
PROMPT_TOKENS_MAX = 1800
CONTEXT_TOKENS = (32, 1024)
"""Mean contexts of a batch."""
MIXED = (0.25, 1.75)
"""Contexts of one batch, over their mean."""
NOISY_CONTEXT_TOKENS = (32, 384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Requests with contexts of these lengths are computed once; then batches of them decode, the
    largest first: filling the cache anew for each batch would take most of the time.
    """

    context_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    """Descending; the first is of all requests."""


def prompts(draw: random.Random, count: int) -> list[int]:
    """Lengths in tokens, as many short as long ones (log-uniform)."""
    return [round(exp(draw.uniform(0.0, log(PROMPT_TOKENS_MAX)))) for _ in range(count)]


def sweeps(draw: random.Random, batches: int, count: int) -> list[Sweep]:
    """So many batches of random sizes in so many sweeps, whose mean contexts cover the range."""
    least, most = CONTEXT_TOKENS
    found = []
    for number in range(count):
        mean = least + (most - least) * (number + draw.random()) / count
        share = batches * (number + 1) // count - batches * number // count
        sizes = sorted((draw.randint(1, BATCH_MAX) for _ in range(share)), reverse=True)
        contexts = tuple(round(mean * draw.uniform(*MIXED)) for _ in range(max(sizes, default=0)))
        found.append(Sweep(context_tokens=contexts, batches=tuple(sizes)))
    return found


TOLERANCE = 0.15
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One, or several as one. `at_s` is when it ended."""

    at_s: float
    measured_s: float
    predicted_s: float
    """By the profile alone, as it was surveyed."""
    refined_s: float
    """By the profile as iterations have refined it."""
    corrected_s: float
    """By that, and the factor."""

    @property
    def deviation(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1.0)

    @property
    def deviation_refined(self) -> float:
        return abs(self.refined_s / self.measured_s - 1.0)

    @property
    def deviation_corrected(self) -> float:
        return abs(self.corrected_s / self.measured_s - 1.0)


class Predictions:
    """The predictions for one instance."""

    def __init__(self, profile: Profile) -> None:
        self._surveyed = self._times = Times(profile)
        self._refinement = Refinement(profile)
        self._correction = LearnedCorrection()

    def note(self, result: StepResult, now_s: float) -> Iteration:
        """An iteration has just ended. It is predicted first, then learned from."""
        shape, measured_s = result.shape, result.elapsed_s
        refined_s = self._times.iteration_s(shape)
        factor = self._correction.factor(now_s - measured_s)
        self._refinement.note(shape, measured_s, factor)
        self._correction.observe(measured_s, refined_s, now_s, shape)
        refined = self._refinement.refined(now_s)
        if refined is not None:
            was, self._times = self._times, Times(refined)
            self._correction.refined(was, self._times)
            self._refinement = Refinement(refined)
        return Iteration(
            at_s=now_s,
            measured_s=measured_s,
            predicted_s=self._surveyed.iteration_s(shape),
            refined_s=refined_s,
            corrected_s=refined_s * factor,
        )


def as_one(
    iterations: Sequence[Iteration], pick: Callable[[Iterator[float]], float] = sum
) -> Iteration:
    """All of them as one: their sums, or a typical one by their medians, where alike iterations may
    have met a stall.
    """
    return Iteration(
        at_s=iterations[-1].at_s,
        measured_s=pick(i.measured_s for i in iterations),
        predicted_s=pick(i.predicted_s for i in iterations),
        refined_s=pick(i.refined_s for i in iterations),
        corrected_s=pick(i.corrected_s for i in iterations),
    )


def right_after_s(iterations: Sequence[Iteration], change_s: float) -> float | None:
    """Seconds from a change until corrected predictions are right again: the median of those in the
    second that follows is off by TOLERANCE at most. None if that never comes.
    """
    ends_s = [iteration.at_s for iteration in iterations]
    for start in range(bisect_left(ends_s, change_s), len(iterations)):
        end = bisect_left(ends_s, ends_s[start] + WINDOW_S)
        if end == len(iterations):
            return None
        if median(i.deviation_corrected for i in iterations[start:end]) <= TOLERANCE:
            return ends_s[start] - change_s
    return None


BUSY_S, NEIGHBOUR_CALM_S = 3.0, 4.0


@contextmanager
def noisy_neighbour() -> Iterator[None]:
    """One process for each core that this one may use."""
    busy = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(busy) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextmanager
def neighbours_in_turns() -> Iterator[None]:
    """They come for BUSY_S, go for NEIGHBOUR_CALM_S, and come again."""
    over = threading.Event()

    def turns() -> None:
        while not over.wait(NEIGHBOUR_CALM_S):
            with noisy_neighbour():
                over.wait(BUSY_S)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


LOADED_CONTEXT_TOKENS = 2048
KV_TOKENS = 49_152
"""Enough for the largest batch of the longest mean context."""


class PrimedModel:
    """Owns the engine; `close` it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._model = driving.LoadedModel(
            OpenVinoEngine(),
            stored_model(),
            kv_tokens=KV_TOKENS,
            context_tokens_max=LOADED_CONTEXT_TOKENS,
            batch_max=BATCH_MAX,
        )
        self.info, self.footprint = self._model.stored.info, self._model.footprint
        self.close = self._model.close
        for shape in to_prime(
            batch_max=BATCH_MAX,
            context_tokens_max=LOADED_CONTEXT_TOKENS,
            tokens_max=NodeLimits().primed_tokens_max,
        ):
            self.measure(shape)
        self.running: list[RequestId] = []

    def measure(self, shape: IterationShape) -> float:
        return self._model.engine.measure(driving.INSTANCE, shape)

    def submit(self, prompt_tokens: int, max_tokens: int = LOADED_CONTEXT_TOKENS) -> None:
        """A request of random tokens; it goes on until `max_tokens`, or until it is dropped."""
        vocabulary = self.info.vocabulary_tokens
        tokens = (
            self._random.randrange(vocabulary // 100, vocabulary) for _ in range(prompt_tokens)
        )
        self.running.append(self._model.submit(tokens, max_tokens))

    def step(self) -> StepResult:
        result = self._model.step(PREFILL_TOKENS_MAX)
        for output in result.outputs:
            if output.finish is not None:
                self.running.remove(output.request_id)
        return result

    def shrink(self, batch: int) -> None:
        """Drop requests at random until so many are left."""
        while len(self.running) > batch:
            dropped = self.running.pop(self._random.randrange(len(self.running)))
            self._model.engine.abort(driving.INSTANCE, dropped)

    def grow(self, contexts: Sequence[int]) -> None:
        """Submit prompts of these lengths; see `step`."""
        for tokens in contexts:
            self.submit(tokens)


REFERENCE = IterationShape(prefill_tokens=64)
BEFORE_IT = IterationShape(decode_batch=1, decode_context_tokens=64)
"""A survey times prefills that follow an iteration of another size; so does this."""
AGREEMENT = 0.08
"""How near the reference must be to its profile: the machine may be quicker than it was, too."""
REPEATS = 3
"""The reference is timed so often; the median counts."""
PAUSE_S = 0.5
"""Before a workload is measured again."""
BUDGET_S = 300.0
"""For measuring again; then workloads count as they come."""

T = TypeVar("T")


class Quiet:
    """`measure` gives the seconds of one iteration, `reference_s` is what REFERENCE takes by the
    profile.
    """

    def __init__(self, measure: Callable[[IterationShape], float], reference_s: float) -> None:
        self._measure = measure
        self._expected_s = reference_s
        self._spent_s = 0.0
        self.first_tries: int = 0
        self.disturbed_first: int = 0
        """Workloads that were disturbed at the first try."""
        self.disturbed: int = 0
        """Workloads that count though the machine was not quiet: the budget was spent."""

    def undisturbed(self, workload: Callable[[], T]) -> tuple[T, T]:
        """The workload's first outcome, and that of the first quiet time."""
        first, quiet = self._once(workload)
        outcome, first_end_s = first, time.perf_counter()
        self.first_tries += 1
        self.disturbed_first += not quiet
        while not quiet and self._spent_s + time.perf_counter() - first_end_s < BUDGET_S:
            time.sleep(PAUSE_S)
            outcome, quiet = self._once(workload)
        self.disturbed += not quiet
        self._spent_s += time.perf_counter() - first_end_s
        return first, outcome

    def _once(self, workload: Callable[[], T]) -> tuple[T, bool]:
        before = self._as_surveyed()
        outcome = workload()
        return outcome, self._as_surveyed() and before

    def _as_surveyed(self) -> bool:
        times_s = []
        for _ in range(REPEATS):
            self._measure(BEFORE_IT)
            times_s.append(self._measure(REFERENCE))
        return abs(median(times_s) / self._expected_s - 1.0) <= AGREEMENT


DECODES = 10
"""The decodes of each batch that are timed on a quiet machine."""
LOAD_BATCH_S = 1.0
"""For each batch of a load."""
CALM_S = 3.0
"""Before the neighbour comes."""
RECOVERY_S = 12.0
"""After it has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    profile: Profile
    shapes: int
    took_s: float


@dataclass(slots=True, kw_only=True)
class Workloads:
    """Each as it came first, and as it came when the machine was quiet."""

    first: list[Iteration] = field(default_factory=list)
    quiet: list[Iteration] = field(default_factory=list)

    def add(self, first: Iteration, quiet: Iteration) -> None:
        self.first.append(first)
        self.quiet.append(quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noisy:
    """Work beside a neighbour: workload by workload, and how soon the correction knew."""

    workloads: list[Iteration]
    noticed_s: float | None
    recovered_s: float | None


class Measuring:
    """One loaded model; `note` is told how far each phase has come."""

    def __init__(
        self, model: PrimedModel, draw: random.Random, note: Callable[[str], None]
    ) -> None:
        self._model = model
        self._draw = draw
        self._note = note

    def survey(self) -> Surveyed:
        survey = Survey(
            context_tokens_max=LOADED_CONTEXT_TOKENS,
            batch_max=BATCH_MAX,
            kv_tokens=KV_TOKENS,
            prefill_tokens_max=PREFILL_TOKENS_MAX,
        )
        start_s = time.perf_counter()
        shapes: set[IterationShape] = set()
        while (shape := survey.next_shape()) is not None:
            shapes.add(shape)
            survey.note(self._model.measure(shape))
            self._note(f"survey: {100 * survey.share:.0f} %")
        took_s = time.perf_counter() - start_s
        prefill, decode = survey.grids()
        profile = replace(
            driving.profile_of(self._model.info, self._model.footprint, prefill, decode),
            measured_s=survey.measured_s,
        )
        return Surveyed(profile=profile, shapes=len(shapes), took_s=took_s)

    def load(self, predictions: Predictions, seconds: float) -> None:
        """Batches of all sizes come and go, by which the profile is refined; nothing counts yet."""
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            self._note(f"load: {until_s - time.perf_counter():.0f} s left")
            self._batch(predictions, [], self._draw.randint(1, BATCH_MAX))
            self._decode_for(predictions, [], LOAD_BATCH_S)
        self._model.shrink(0)

    def prefills(self, predictions: Predictions, lengths: list[int], quiet: Quiet) -> Workloads:
        """Each prompt by itself, all of its chunks as one."""
        found = Workloads()

        def prompt(tokens: int) -> Iteration:
            self._model.submit(tokens, max_tokens=1)
            chunks = []
            while self._model.running:
                chunks.append(self._step(predictions))
            return as_one(chunks)

        for number, tokens in enumerate(lengths):
            self._note(f"prefill: {number + 1} of {len(lengths)}")
            found.add(*quiet.undisturbed(partial(prompt, tokens)))
        return found

    def decodes(self, predictions: Predictions, sweeps: list[Sweep], quiet: Quiet) -> Workloads:
        """Each batch, a typical iteration of it."""
        found = Workloads()

        def batch_of_them() -> Iteration:
            self._step(predictions)  # follows an iteration of another size
            return as_one([self._step(predictions) for _ in range(DECODES)], median)

        for sweep in sweeps:
            self._model.grow(sweep.context_tokens)
            self._finish_prompts(predictions)
            for batch in sweep.batches:
                total = sum(len(s.batches) for s in sweeps)
                self._note(f"decode: {len(found.quiet) + 1} of {total}")
                self._model.shrink(batch)
                found.add(*quiet.undisturbed(batch_of_them))
            self._model.shrink(0)
        return found

    def noisy(self, predictions: Predictions, count: int, workload_s: float) -> Noisy:
        """Decodes without a pause: quiet, beside the neighbour, quiet again."""
        history: list[Iteration] = []
        workloads = []
        self._batch(predictions, history, BATCH_MAX // 4)
        self._decode_for(predictions, history, CALM_S)
        with ExitStack() as stack:
            stack.enter_context(noisy_neighbour())
            came_s = time.perf_counter()
            for number in range(count):
                self._note(f"beside a neighbour: {number + 1} of {count}")
                if number:
                    self._batch(predictions, history, self._draw.randint(1, BATCH_MAX))
                workloads.append(as_one(self._decode_for(predictions, history, workload_s)))
            self._batch(predictions, history, BATCH_MAX // 4)
            self._decode_for(predictions, history, workload_s)
        left_s = time.perf_counter()
        self._note("after the neighbour")
        self._decode_for(predictions, history, RECOVERY_S)
        self._model.shrink(0)
        return Noisy(
            workloads=workloads,
            noticed_s=right_after_s([i for i in history if i.at_s <= left_s], came_s),
            recovered_s=right_after_s(history, left_s),
        )

    def _batch(self, predictions: Predictions, history: list[Iteration], batch: int) -> None:
        """Go on with so many requests: drop some, or compute the prompts of some more."""
        missing = range(batch - len(self._model.running))
        self._model.grow([self._draw.randint(*NOISY_CONTEXT_TOKENS) for _ in missing])
        history += self._finish_prompts(predictions)
        self._model.shrink(batch)

    def _decode_for(
        self, predictions: Predictions, history: list[Iteration], seconds: float
    ) -> list[Iteration]:
        until_s = time.perf_counter() + seconds
        found = []
        while time.perf_counter() < until_s and self._model.running:
            found.append(self._step(predictions))
        history += found
        return found

    def _finish_prompts(self, predictions: Predictions) -> list[Iteration]:
        found = []
        left = True
        while left and self._model.running:
            result = self._model.step()
            found.append(predictions.note(result, time.perf_counter()))
            left = bool(result.prefill_left)
        return found

    def _step(self, predictions: Predictions) -> Iteration:
        return predictions.note(self._model.step(), time.perf_counter())
