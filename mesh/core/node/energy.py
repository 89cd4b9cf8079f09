"""What the node takes: joules from one heartbeat to the next, and whose time its iterations were.

The joules of an interval are a counter's, or reckoned by the watts that the node was given. Those
of the time in which it computed are told once the iterations have ended that they were for, so that
they go with the seconds which those report. Before: the node core. After: heartbeats and reports of
tokens, by which the controller's books share the joules out.
"""

from collections.abc import Sequence
from math import inf

from mesh.compute.times import Times
from mesh.domain.energy import Energy, EnergyReading, EnergySource, Power
from mesh.domain.steps import StepResult
from mesh.domain.values import dataclass

UNREAD = EnergyReading()


@dataclass(slots=True, kw_only=True, eq=False)
class EnergyMeter:
    """`power`: the watts that count where no counter can be read."""

    power: Power | None = None
    _reading: EnergyReading = UNREAD
    """What the counter said at the last heartbeat."""
    _beat_s: float | None = None
    _computed_s: float = 0.0
    """The seconds of all turns by then."""
    _idle_watts: float = inf
    """By the counter, in the last interval without an iteration or a load. Until there was one, an
    interval's joules are divided by time.
    """
    _open_j: float = 0.0
    """The joules of the turn that was under way; `_open_s` are its seconds until then."""
    _open_s: float = 0.0

    @property
    def meters(self) -> bool:
        """Whether joules are known, for which the seconds of iterations are reported."""
        return self.power is not None or self._reading.joules is not None

    def beat(
        self, reading: EnergyReading, now_s: float, *, computed_s: float, turn_s: float, loads: bool
    ) -> Energy | None:
        """What has been taken since the heartbeat before; `None` where nobody asked for it.
        `turn_s` are the seconds so far of the turn under way, `computed_s` those of all turns.
        """
        elapsed_s = 0.0 if self._beat_s is None else now_s - self._beat_s
        busy_s = computed_s - self._computed_s
        before, self._reading = self._reading, reading
        self._beat_s, self._computed_s = now_s, computed_s
        if elapsed_s <= 0.0:
            return Energy(reason=reading.reason) if reading.reason else None
        if reading.joules is not None and before.joules is not None:
            source, taken_j = reading.source, max(reading.joules - before.joules, 0.0)
            if not busy_s and not loads:
                self._idle_watts = taken_j / elapsed_s
            idle_watts = self._idle_watts
        elif self.power is not None:
            source, taken_j = EnergySource.WATTS, self.power.joules(elapsed_s, busy_s)
            idle_watts = self.power.idle_watts
        else:
            self._open_j = self._open_s = 0.0
            return Energy(reason=reading.reason) if reading.reason else None
        idle_j = min(idle_watts, taken_j / elapsed_s) * (elapsed_s - busy_s) if busy_s else taken_j
        self._open_j += taken_j - idle_j
        self._open_s += busy_s
        ended_s = max(self._open_s - turn_s, 0.0)
        ended_j = self._open_j * ended_s / self._open_s if ended_s else 0.0
        self._open_j -= ended_j
        self._open_s -= ended_s
        return Energy(source=source, idle_j=idle_j, busy_j=ended_j, busy_s=ended_s)


def shares(
    elapsed_s: float,
    times: Times,
    result: StepResult,
    prompts: Sequence[int],
    chunks: Sequence[int],
) -> tuple[float, ...]:
    """The seconds of an iteration that went to each request of it: first to those that got a token,
    for which `prompts` says how many of their prompt's tokens it computed, then to those that have
    more of theirs to compute. What went to requests that are gone is nobody's.

    Decodes and prompt tokens get what they are predicted to take, in proportion; each decode the
    same, and each token of a prompt.
    """
    batch, prompt_s = result.decode_batch, 0.0
    if result.prefill_tokens:
        shape = result.shape
        decode_s = times.decode_s(batch, shape.decode_context_tokens) if batch else 0.0
        prompt_s = elapsed_s * (1.0 - decode_s / times.iteration_s(shape))
    else:
        # What was left of them was in the cache.
        prompts = [0] * len(prompts)
    tokens = max(result.prefill_tokens, sum(prompts) + sum(chunks), 1)
    decodes = max(batch, sum(not count for count in prompts), 1)
    each_s, token_s = (elapsed_s - prompt_s) / decodes, prompt_s / tokens
    of_outputs = [count * token_s if count else each_s for count in prompts]
    return (*of_outputs, *(count * token_s for count in chunks))
