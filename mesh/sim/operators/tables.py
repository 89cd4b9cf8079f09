"""Tables of operators that ship with mesh, one file a device, for groups of 1 to 8 of them.

What was measured or derived by tokens is read; attention, the embedding, and how an operator
shrinks when it is divided over devices follow from the model's shape by the fits of the file.
After: `mesh.plan`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any

from mesh.domain.energy import Power
from mesh.domain.errors import InvalidInput
from mesh.domain.operators import (
    OUTSIDE_LAYERS,
    DeviceClass,
    Operator,
    OperatorTable,
    Phase,
    Role,
    ShareCurve,
    check_roles,
)
from mesh.domain.profile import Grid
from mesh.domain.values import dataclass, replace

BYTES = 2
"""The size of a weight, of an activation, and of a number of the KV cache."""
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PROMPTS = tuple(sorted({round(2 ** (n / 4)) for n in range(69)}))
"""To 131,072 tokens: between two of them the square of the length is off by less than 1 %."""
DEVICES = ("a100", "h100")
"""The devices that there are files of."""
GROUPS = (1, 2, 4, 8)
"""The numbers of devices over which a model may be divided."""
WEIGHTS_MAX = 0.8
"""The share of a group's memory that weights may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a model, as its config.json has it. `experts` is 0 for a dense one."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    experts: int = 0
    active: int = 0
    shared_inner: int = 0

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    def kv(self, devices: int) -> int:
        """The width of keys, and of values, on each device; no head is divided."""
        return -(-self.kv_heads // devices) * self.head_size

    def product(self, role: Role, devices: int) -> tuple[int, int] | None:
        """The rows and columns of the weights of a product, on each of so many devices; `None` for
        what is no product of its own.
        """
        hidden, queries, inner = self.hidden, self.queries // devices, self.inner // devices
        products = {
            Role.QKV: (hidden, queries + 2 * self.kv(devices)),
            Role.OUTPUT: (queries, hidden),
            Role.HEAD: (hidden, self.vocabulary // devices),
        }
        if not self.experts:
            products |= {Role.GATE_UP: (hidden, 2 * inner), Role.DOWN: (inner, hidden)}
        return products.get(role)

    @property
    def activated(self) -> int:
        """The width of the activation, over all experts of a token."""
        return self.shared_inner + self.active * self.inner if self.experts else self.inner


@cache
def operator_table(
    model: str, phase: Phase, devices: int | None = None, device: str = DEVICES[0]
) -> OperatorTable:
    """The operators of a model on a group of so many devices of a kind; without `devices` on the
    smallest of GROUPS that holds the weights and leaves enough of their memory.

    Raises InvalidInput where the model does not fit the group, or the largest of them.
    """
    file = _file(device)
    raw, curves, of = file["models"][model], file["curves"], dict(file["device"])
    idle, busy = of.pop("idle_watts"), of.pop("busy_watts")[phase]
    of["memory_bytes"] = int(of["memory_bytes"])
    for group in GROUPS if devices is None else (devices,):
        operators = read_operators(model, raw, file, group)
        weights_bytes = sum(each.weights_bytes for each in operators)
        if devices is not None or weights_bytes <= WEIGHTS_MAX * of["memory_bytes"]:
            break
    else:
        raise InvalidInput(
            f"{model} takes more than {WEIGHTS_MAX:.0%} of the memory of {GROUPS[-1]} {device}"
        )
    return OperatorTable(
        model=model,
        layers=raw["layers"],
        devices=group,
        device=DeviceClass(power=Power(idle_watts=idle, busy_watts=busy), **of),
        phase=phase,
        curves=tuple(
            (int(size), ShareCurve(shares=tuple(curves["shares"]), ratios=tuple(ratios)))
            for size, ratios in sorted(curves[phase].items(), key=lambda item: int(item[0]))
        ),
        operators=operators,
        source=file["source"],
        error=raw["error"],
    )


@cache
def _file(device: str) -> Any:
    text = resources.files("mesh.sim.operators").joinpath(f"{device}.json").read_text("utf-8")
    return json.loads(text)


def read_operators(
    model: str, raw: Mapping[str, Any], file: Mapping[str, Any], devices: int
) -> tuple[Operator, ...]:
    """The operators of one model of a file in the form of `a100.json`, whose `fit` may lack what a
    product and a prompt's attention take at the least. Raises InvalidInput for what no model has.
    """
    tokens, columns = tuple(file["tokens"]), dict(raw.get("milliseconds", {}))
    derived = (*raw.get("fitted", ()), *chain(*raw.get("like", {}).values()))
    check_roles(model, [Role.EMBEDDING, Role.ATTENTION, *columns, *derived])
    for role, column in columns.items():
        if len(column) != len(tokens):
            raise InvalidInput(f"{model}: {role} has {len(column)} times for {len(tokens)} sizes")
    times = FittedTimes(shape=_shape(raw), fit=file["fit"], devices=devices)
    columns |= _derived(times, raw, file["models"], tokens)
    return tuple(
        times.operator(role, tokens, columns.get(role))
        for role in Role
        if role in (Role.EMBEDDING, Role.ATTENTION, *columns)
    )


def _derived(
    times: "FittedTimes", raw: Mapping[str, Any], models: Mapping[str, Any], tokens: tuple[int, ...]
) -> dict[Role, list[float]]:
    """Milliseconds of the columns that are `fitted`, and of those that are `like` another model's
    at as many rows as are as wide together; with the digits that a file has.
    """
    found = {
        role: [1e3 * times.fitted(role, rows, 1) for rows in tokens]
        for role in map(Role, raw.get("fitted", ()))
    }
    for other, roles in raw.get("like", {}).items():
        theirs = replace(times, shape=_shape(models[other]))
        for role in map(Role, roles):
            column = tuple((ms,) for ms in models[other]["milliseconds"][role])
            grid = Grid(rows=tokens, columns=(0,), seconds=column)
            wider = times.widths(role)[1] / theirs.widths(role)[1]
            found[role] = [grid.at(rows * wider, 0) for rows in tokens]
    return {role: [float(f"{ms:.5g}") for ms in column] for role, column in found.items()}


def _shape(raw: Mapping[str, Any]) -> Shape:
    return Shape(**{key: raw[key] for key in Shape.__slots__ if key in raw})


Fit = Mapping[str, float]
"""The numbers of the formulas below, which were fitted to what was measured."""


def product_s(fit: Fit, read_bytes: float, operations: float) -> float:
    """Seconds of a matrix product. A file may lack its least time."""
    return fit.get("product_s", 0.0) + _combined(fit, read_bytes, operations)


def _combined(fit: Fit, read_bytes: float, operations: float) -> float:
    power = fit["power"]
    terms = (read_bytes / fit["bytes_per_s"], operations / fit["operations_per_s"])
    return float(sum(term**power for term in terms) ** (1 / power))


def experts_s(fit: Fit, read_bytes: float, operations: float) -> float:
    """Seconds of the experts' products, which reach a share of a product's rates."""
    read_bytes /= fit["expert_bytes_share"]
    return _combined(fit, read_bytes, operations / fit["expert_operations_share"])


def moved_s(fit: Fit, moved_bytes: float, _: float = 0.0) -> float:
    """Seconds of a kernel that moves so many bytes, whatever it computes."""
    return fit["launch_s"] + moved_bytes / fit["copy_bytes_per_s"]


def prompt_s(fit: Fit, tokens: float, width: float) -> float:
    """Seconds of a prompt's attention by the width of its queries."""
    linear = fit["attention_s_per_token"] * tokens * width / fit["attention_width"]
    linear += fit.get("attention_s", 0.0)
    return linear + 2 * tokens**2 * width / fit["attention_operations_per_s"]


def decode_s(fit: Fit, batch: float, read_bytes: float) -> float:
    """Seconds of a decode's attention, of which each sequence reads so much of its KV cache."""
    each = math.hypot(fit["decode_s_per_sequence"], read_bytes / fit["decode_bytes_per_s"])
    return fit["decode_s"] + batch * each


_UNDIVIDED = (Role.EMBEDDING, Role.NORM, Role.RESIDUAL, Role.GATE)
"""The operators that each device of a group computes for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTimes:
    """The fits of a file, for one shape on so many devices."""

    shape: Shape
    fit: Fit
    devices: int

    def operator(
        self, role: Role, tokens: tuple[int, ...], given: Sequence[float] | None
    ) -> Operator:
        """An operator by its column of milliseconds, or by the fits where there is none."""
        shape = self.shape
        kv_bytes = 2 * BYTES * shape.kv(self.devices) if role is Role.ATTENTION else 0
        if role is Role.ATTENTION:
            fit, width = self.fit, shape.queries / self.devices
            column = tuple((prompt_s(fit, n, width),) for n in PROMPTS)
            prefill = Grid(rows=PROMPTS, columns=(0,), seconds=column)
            seconds = [[decode_s(fit, n, kv_bytes * of) for of in CONTEXTS] for n in tokens]
            decode = Grid(rows=tokens, columns=CONTEXTS, seconds=tuple(map(tuple, seconds)))
        else:
            known: Sequence[float | None] = given or (None,) * len(tokens)
            column = tuple((self._seconds(role, *of),) for of in zip(tokens, known, strict=True))
            prefill = decode = Grid(rows=tokens, columns=(0,), seconds=column)
        inputs, outputs = self.widths(role)
        parts = 1 if role in _UNDIVIDED else self.devices
        return Operator(
            role=role,
            repeats=1 if role in OUTSIDE_LAYERS else shape.layers,
            prefill=prefill,
            decode=decode,
            weights_bytes=BYTES * self._weights(role),
            transient_bytes_per_row=BYTES * (inputs + outputs) // parts,
            kv_bytes_per_token=shape.layers * kv_bytes,
            output_bytes_per_row=BYTES * outputs,
        )

    def _seconds(self, role: Role, rows: int, given_ms: float | None) -> float:
        """Seconds of a layer. What is given of one device shrinks over several as the fit does."""
        alone, divided = (self.fitted(role, rows, devices) for devices in (1, self.devices))
        reduced = 0.0
        if self.devices > 1 and role in (Role.OUTPUT, Role.DOWN, Role.EXPERTS):
            fit = self.fit
            reduced = fit["all_reduce_s"]
            reduced += rows * self.shape.hidden * BYTES / fit["all_reduce_bytes_per_s"]
        return (divided if given_ms is None else given_ms / 1e3 * divided / alone) + reduced

    def fitted(self, role: Role, rows: int, devices: int) -> float:
        """Seconds by the fits alone; without a formula they go with the elements of each device."""
        shape, hidden = self.shape, self.shape.hidden
        if (sizes := shape.product(role, devices)) is not None:
            return self._product_s(rows, *sizes)
        match role:
            case Role.GATE:
                return self.fit["launch_s"] + self._product_s(rows, hidden, shape.experts)
            case Role.SHARED_EXPERT:
                inner = shape.shared_inner // devices
                up_s = self._product_s(rows, hidden, 2 * inner)
                return up_s + self._product_s(rows, inner, hidden)
            case Role.EXPERTS:
                met = shape.experts * (1 - (1 - shape.active / shape.experts) ** rows)
                size = 3 * hidden * shape.inner / devices
                operations = 2 * rows * shape.active * size
                return experts_s(self.fit, BYTES * met * size, operations)
            case Role.EMBEDDING | Role.KV_WRITE:
                width = hidden if role is Role.EMBEDDING else 2 * shape.kv(devices)
                return moved_s(self.fit, BYTES * rows * width)
            case _:
                return 1.0 / (devices if role in (Role.ROPE, Role.ACTIVATION) else 1)

    def _product_s(self, rows: int, inner: int, columns: int) -> float:
        read_bytes = BYTES * (rows * inner + inner * columns + rows * columns)
        return product_s(self.fit, read_bytes, 2 * rows * inner * columns)

    def _weights(self, role: Role) -> int:
        """The weights of all layers, on each device."""
        shape, devices, hidden = self.shape, self.devices, self.shape.hidden
        if (sizes := shape.product(role, devices)) is not None:
            return math.prod(sizes) * (1 if role is Role.HEAD else shape.layers)
        of = {
            Role.EMBEDDING: shape.vocabulary * hidden // devices,
            Role.NORM: 2 * hidden * shape.layers,
            Role.GATE: hidden * shape.experts * shape.layers,
            Role.SHARED_EXPERT: 3 * hidden * shape.shared_inner // devices * shape.layers,
            Role.EXPERTS: 3 * hidden * shape.inner * shape.experts // devices * shape.layers,
        }
        return of.get(role, 0)

    def widths(self, role: Role) -> tuple[int, int]:
        """The numbers of a row that an operator takes and gives."""
        shape, hidden, queries = self.shape, self.shape.hidden, self.shape.queries
        both = queries + 2 * shape.kv(1)
        others = {
            Role.ROPE: (both, both),
            Role.KV_WRITE: (both, both),
            Role.ATTENTION: (both, queries),
            Role.GATE: (hidden, hidden + shape.experts),
            Role.ACTIVATION: (2 * shape.activated, shape.activated),
        }
        return shape.product(role, 1) or others.get(role, (hidden, hidden))
