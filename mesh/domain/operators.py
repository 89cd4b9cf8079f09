"""Operators: what the parts of an iteration cost, below the iteration.

A table holds, for each operator of a model on a group of devices, seconds over rows and context,
what a share of the device makes of them, and bytes. Where it comes from and how far it may be off
is part of it. Before: `mesh.sim.operators.tables`, which holds the tables that ship with mesh.
After: `mesh.plan`, which plans with them, and `mesh.sim.operators`, which executes plans.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum, unique
from itertools import pairwise

from mesh.domain.energy import Power
from mesh.domain.errors import InvalidInput
from mesh.domain.profile import Grid
from mesh.domain.values import dataclass


@unique
class Phase(StrEnum):
    """What an iteration computes: whole prompts, or one token of each sequence of a batch."""

    PREFILL = "prefill"
    DECODE = "decode"


@unique
class Role(StrEnum):
    """What an operator does in its layer, in the order in which an iteration computes them."""

    EMBEDDING = "embedding"
    NORM = "norm"
    QKV = "qkv"
    ROPE = "rope"
    KV_WRITE = "kv_write"
    ATTENTION = "attention"
    OUTPUT = "output"
    RESIDUAL = "residual"
    GATE = "gate"
    EXPERTS = "experts"
    SHARED_EXPERT = "shared_expert"
    GATE_UP = "gate_up"
    ACTIVATION = "activation"
    DOWN = "down"
    HEAD = "head"


OUTSIDE_LAYERS = (Role.EMBEDDING, Role.HEAD)
"""The operators that an iteration computes once, not in each layer."""
DENSE = frozenset(Role) - {Role.GATE, Role.EXPERTS, Role.SHARED_EXPERT}
MIXTURE = frozenset(Role) - {Role.GATE_UP, Role.DOWN, Role.SHARED_EXPERT}
"""The operators that a table must have; a mixture may have a shared expert in addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of all layers.

    `prefill` has rows of tokens, `decode` rows of sequences and columns of context tokens; both are
    seconds of one layer on the whole device. Attention's rows of `prefill` are the tokens of one
    prompt: prompts attend to themselves alone.
    """

    role: Role
    repeats: int
    """How often an iteration computes it."""
    prefill: Grid
    decode: Grid
    weights_bytes: int
    """The weights of all layers, on each device of the group."""
    transient_bytes_per_row: int
    """Its input and output in one layer."""
    kv_bytes_per_token: int
    """KV cache of all layers; 0 but for attention."""
    output_bytes_per_row: int
    """What it hands to the next operator in one layer."""

    def __post_init__(self) -> None:
        for phase, grid in ((Phase.PREFILL, self.prefill), (Phase.DECODE, self.decode)):
            values = [value for row in grid.seconds for value in row]
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise InvalidInput(
                    f"operator {self.role}: {phase} has seconds that are no finite numbers above 0",
                    hint="measure it again, or leave its rows out",
                )

    def seconds(self, phase: Phase, lengths: Sequence[int]) -> float:
        """Seconds, of all layers, for prompts of these lengths at once, or for a token each of
        sequences with such contexts.
        """
        if phase is Phase.DECODE:
            each = self.decode.at(len(lengths), sum(lengths) / len(lengths))
        elif self.role is Role.ATTENTION:
            each = sum(self.prefill.at(length, 0) for length in lengths)
        elif self.role is Role.HEAD:
            each = self.decode.at(len(lengths), 0)
        else:
            each = self.prefill.at(sum(lengths), 0)
        return each * self.repeats

    def rows(self, phase: Phase, lengths: Sequence[int]) -> int:
        """The rows that it computes of them: the head has one for each sequence."""
        one_each = phase is Phase.DECODE or self.role is Role.HEAD
        return len(lengths) if one_each else sum(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCurve:
    """How much longer an iteration takes on a share of a device: `ratios[i]` times as long with the
    share `shares[i]` of its processors. Shares ascend and end with 1, ratios do not rise.
    """

    shares: tuple[float, ...]
    ratios: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(0 < a < b for a, b in pairwise(self.shares))
        falling = all(a >= b >= 1 for a, b in pairwise(self.ratios))
        if not (rising and falling and self.shares[-1] == self.ratios[-1] == 1):
            raise InvalidInput(
                f"a curve of shares has shares {self.shares} and ratios {self.ratios}; shares must "
                "ascend to 1, and ratios fall to 1"
            )

    def ratio(self, share: float) -> float:
        """How many times as long an iteration takes on this share, which is above 0 and at most 1.
        Below the first point that is inversely proportional to it.
        """
        shares, ratios = self.shares, self.ratios
        if share <= shares[0]:
            return ratios[0] * shares[0] / share
        high = bisect_left(shares, min(share, 1.0))
        part = (share - shares[high - 1]) / (shares[high] - shares[high - 1])
        return ratios[high - 1] + (ratios[high] - ratios[high - 1]) * min(part, 1.0)

    def yields(self, most: int) -> tuple[float, ...]:
        """Seconds of work, at full speed, that a device does in a second while 0, 1, … `most` share
        it alike. More never yield less: who shares may take turns instead.
        """
        found = [0.0]
        for sharers in range(1, most + 1):
            found.append(max(found[-1], sharers / self.ratio(1 / sharers)))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """One device of a group: its memory, its links to the others, its power."""

    name: str
    memory_bytes: int
    """What weights, KV cache and activations may take."""
    link_bytes_per_s: float
    link_latency_s: float
    power: Power
    """It is busy while it computes in the phase in question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTable:
    """The operators of one model on a group of `devices` like `device`, and how sharing lengthens.

    Raises InvalidInput for operators that are missing, there twice, or of no model.
    """

    model: str
    layers: int
    devices: int
    """The number of devices over which each operator is split (tensor parallelism)."""
    device: DeviceClass
    phase: Phase
    curves: tuple[tuple[int, ShareCurve], ...]
    """What sharing costs, from a size of iterations on: tokens, or sequences when decoding."""
    operators: tuple[Operator, ...]
    source: str
    error: float
    """By how much seconds may be off, as a share of them."""

    def __post_init__(self) -> None:
        check_roles(self.model, [each.role for each in self.operators])
        if self.weights_bytes > self.device.memory_bytes:
            raise InvalidInput(
                f"{self.model} has {self.weights_bytes / 1e9:.1f} GB of weights for each of "
                f"{self.devices} devices, which have {self.device.memory_bytes / 1e9:.1f} GB",
                hint="divide it over more devices",
            )

    @property
    def weights_bytes(self) -> int:
        """The weights on each device of the group."""
        return sum(each.weights_bytes for each in self.operators)

    def curve(self, size: float) -> ShareCurve:
        """The curve of iterations of so many tokens, or sequences when decoding."""
        return next((at for least, at in reversed(self.curves) if least <= size), self.curves[0][1])

    def seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of a whole iteration, unloaded."""
        return sum(each.seconds(self.phase, lengths) for each in self.operators)


def check_roles(model: str, roles: Sequence[str]) -> None:
    """Raise InvalidInput unless these are the operators of a dense model, or of a mixture, each
    once.
    """
    mixture = Role.EXPERTS in roles
    wanted = MIXTURE if mixture else DENSE
    known = [role for role in Role if role in wanted or (mixture and role is Role.SHARED_EXPERT)]
    if unknown := [role for role in roles if role not in known]:
        kind = "mixture of experts" if mixture else "dense model"
        raise InvalidInput(
            f"{model}: a {kind} has no operator {str(unknown[0])!r}",
            hint=f"known are {', '.join(known)}",
        )
    if twice := [role for number, role in enumerate(roles) if role in roles[:number]]:
        raise InvalidInput(
            f"{model}: the table has {twice[0]} twice",
            hint="leave out one of its columns",
        )
    if missing := [role for role in known if role in wanted and role not in roles]:
        raise InvalidInput(
            f"{model}: the table lacks {', '.join(missing)}",
            hint="an iteration cannot be summed without them",
        )
