"""What crosses the socket between the agent and an engine process, in both directions.

The agent sends a `Call` and waits; the process answers with as many `Progressed` as it likes, after
each of which the agent waits anew, and then one `Answer` or one `Failure`. Both ends are the same
code on the same machine, so values are pickled. Before: `remote` in the agent. After: `process` in
the engine's process, and back.
"""

from enum import StrEnum

from mesh.domain.steps import InstanceMemory
from mesh.domain.values import dataclass


class Verb(StrEnum):
    PREPARE = "prepare"
    LOAD = "load"
    SUBMIT = "submit"
    ABORT = "abort"
    STEP = "step"
    MEASURE = "measure"
    COUNT = "count"
    RESIZE = "resize"
    KEEP = "keep"
    TELL = "tell"
    FILL = "fill"
    SLEEP = "sleep"
    WAKE = "wake"
    SWAP = "swap"
    MOVED = "moved"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What parameters are as vLLM has them after loading; by it a process knows its own in what
    another has left.
    """

    tensors: tuple[tuple[str, str], ...]
    """Names, and of each the element, shape, strides and place in its storage."""
    sizes_bytes: tuple[int, ...]
    """The sizes of the storages that the parameters are views of, in the order in which these stand
    in the range.
    """
    beside: tuple[tuple[str, str], ...]
    """What else the load has changed in the model's modules, and to what: by that, whether
    parameters are all that there is to restore.
    """


WHOLE = b"is whole"
"""The last bytes of a range from when all of it is there: so the agent sees, whatever becomes of
the process that has filled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A part of the host's pool: storages one after the other, and `WHOLE` at its end."""

    offset: int
    size_bytes: int
    layout: Layout
    whole: bool
    """All of it is there. Else it is for the process that gets this to fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a sleep would take of the host's memory: parameters by their layout, and the rest."""

    layout: Layout
    beside_bytes: int


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
