"""What crosses the socket between the agent and an engine process, in both directions.

The agent sends a `Call` and waits; the process answers with as many `Progressed` as it likes, after
each of which the agent waits anew, and then one `Answer` or one `Failure`. Both ends are the same
code on the same machine, so values are pickled. Before: `remote` in the agent. After: `process` in
the engine's process, and back.
"""

from dataclasses import dataclass
from enum import StrEnum

from mesh.domain.steps import InstanceMemory


class Verb(StrEnum):
    PREPARE = "prepare"
    LOAD = "load"
    SUBMIT = "submit"
    ABORT = "abort"
    STEP = "step"
    MEASURE = "measure"
    RESIZE = "resize"
    KEEP = "keep"
    TELL = "tell"
    RESERVE = "reserve"
    SLEEP = "sleep"
    WAKE = "wake"
    END = "end"


@dataclass(frozen=True, slots=True)
class Call:
    verb: Verb
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Progressed:
    phase: str
    share: float


@dataclass(frozen=True, slots=True)
class Answer:
    value: object
    books: InstanceMemory | None
    """None before the load."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`error` names a class of `mesh.domain.errors`. After a fatal failure the process ends."""

    error: str
    message: str
    hint: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """How engine processes compute, the same for all instances of an engine."""

    dtype: str
    """As vLLM names it."""
    block_tokens: int
    elastic: bool
    """The KV cache's memory comes with use and goes without a copy."""
    movable: bool
    """Weights stay in tensors, which a sleep can take off the device."""
