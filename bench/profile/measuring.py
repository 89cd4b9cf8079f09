"""The phases of the benchmark, one after the other.

A survey, as a node makes one; then real work beside its predictions: prompts and batches on a quiet
machine, and batches beside a noisy neighbour that comes and goes.
"""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from bench.profile.loaded import CONTEXT_TOKENS, KV_TOKENS, PrimedModel
from bench.profile.neighbour import noisy_neighbour
from bench.profile.predicting import Iteration, Predictions, right_after_s, typical, whole
from bench.profile.quiet import Quiet
from bench.profile.workloads import BATCH_MAX, NOISY_CONTEXT_TOKENS, Sweep, noisy_batches
from mesh.compute.survey import Survey
from mesh.domain.limits import PREFILL_TOKENS_MAX
from mesh.domain.profile import IterationShape, Profile
from mesh.domain.reasons import DeviceKind

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
            context_tokens_max=CONTEXT_TOKENS,
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
        footprint, info = self._model.footprint, self._model.info
        profile = Profile(
            model_id=info.model_id,
            device=DeviceKind.CPU,
            fingerprint="here",
            hardware="here",
            cores=0,
            parameters=info.parameters,
            mixture=info.mixture,
            weights_bytes=footprint.weights_bytes,
            kv_bytes_per_token=footprint.kv_block_bytes // footprint.block_tokens,
            prefill=prefill,
            decode=decode,
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
            return whole(chunks)

        for number, tokens in enumerate(lengths):
            self._note(f"prefill: {number + 1} of {len(lengths)}")
            found.add(*quiet.undisturbed(partial(prompt, tokens)))
        return found

    def decodes(self, predictions: Predictions, sweeps: list[Sweep], quiet: Quiet) -> Workloads:
        """Each batch, a typical iteration of it."""
        found = Workloads()

        def batch_of_them() -> Iteration:
            self._step(predictions)  # follows an iteration of another size
            return typical([self._step(predictions) for _ in range(DECODES)])

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
            for number, batch in enumerate(noisy_batches(self._draw, count)):
                self._note(f"beside a neighbour: {number + 1} of {count}")
                if number:
                    self._batch(predictions, history, batch)
                workloads.append(whole(self._decode_for(predictions, history, workload_s)))
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
