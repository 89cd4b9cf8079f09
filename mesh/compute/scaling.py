"""Estimates for what was not measured: the nearest measured profile, scaled by bytes and shape.

Comes before a model's first load, and serves until `mesh profile` or the node's correction know
better. Between models of one device it comes near: the references' 3B and 7B from each other, up to
batches of 32, within 30 % on the CPU, but within a factor of 2.1 on the GPU, where small iterations
do not take the time of their bytes. From one device to another it can be off by multiples, since
cores say nothing of instruction sets.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log

from mesh.compute.references import REFERENCES
from mesh.compute.tables import monotone
from mesh.domain.ids import ModelId
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model and the device that it is to run on."""

    model_id: ModelId
    device: DeviceKind
    fingerprint: str
    hardware: str
    cores: int
    parameters: int
    weights_bytes: int
    kv_bytes_per_token: int


def best_profile(known: Iterable[Profile], target: Target) -> Profile:
    """The target's own measured profile; else the nearest in parameters among those measured on its
    device, scaled; else the nearest among all of its kind of device and the built-in references,
    in cores first and in parameters then, scaled. Ties go to what was measured in this cell, then
    to the lesser ids.
    """
    measured = sorted(
        (profile for profile in known if profile.measured),
        key=lambda profile: (profile.model_id, profile.fingerprint),
    )
    here = [profile for profile in measured if profile.fingerprint == target.fingerprint]
    for profile in here:
        if profile.model_id == target.model_id:
            return profile
    if here:
        return scaled(min(here, key=lambda profile: _parameters_apart(profile, target)), target)
    alike = [profile for profile in (*measured, *REFERENCES) if profile.device is target.device]
    nearest = min(
        alike,
        key=lambda profile: (_cores_apart(profile, target), _parameters_apart(profile, target)),
    )
    return scaled(nearest, target)


def scaled(profile: Profile, target: Target) -> Profile:
    """An estimate for the target.

    A row's time has two parts, the one without context and the growth along the context axis. Of
    the first, what the least row takes is the pass of the weights through memory and scales with
    their bytes; what larger rows add to that is computation and scales with the parameters. The
    second scales with the KV bytes of a token. On CPUs all of it goes inversely with the cores:

        t'(n, c) = (w * t(1, 0) + p * (t(n, 0) - t(1, 0)) + k * (t(n, c) - t(n, 0))) / cores

    with w, p, k and cores the target's weights, parameters, KV bytes and cores over the profile's.
    """
    faster = _ratio(target.cores, profile.cores) if target.device is DeviceKind.CPU else 1.0
    weights = _ratio(target.weights_bytes, profile.weights_bytes) / faster
    parameters = _ratio(target.parameters, profile.parameters) / faster
    kv = _ratio(target.kv_bytes_per_token, profile.kv_bytes_per_token) / faster
    return Profile(
        model_id=target.model_id,
        device=target.device,
        fingerprint=target.fingerprint,
        hardware=target.hardware,
        cores=target.cores,
        parameters=target.parameters,
        weights_bytes=target.weights_bytes,
        kv_bytes_per_token=target.kv_bytes_per_token,
        prefill=_scaled_grid(profile.prefill, weights, parameters, kv),
        decode=_scaled_grid(profile.decode, weights, parameters, kv),
        scaled_from=f"{profile.model_id} on {profile.hardware}",
    )


def lengthened(profile: Profile, factor: float) -> Profile:
    """All of its times, so many times as long."""
    return replace(
        profile,
        prefill=_lengthened(profile.prefill, factor),
        decode=_lengthened(profile.decode, factor),
    )


def _lengthened(grid: Grid, factor: float) -> Grid:
    seconds = tuple(tuple(value * factor for value in row) for row in grid.seconds)
    return replace(grid, seconds=seconds)


def _scaled_grid(grid: Grid, weights: float, parameters: float, kv: float) -> Grid:
    without_context = _without_context(grid)
    least = without_context[0]
    seconds = [
        [weights * least + parameters * (alone - least) + kv * (value - alone) for value in row]
        for row, alone in zip(grid.seconds, without_context, strict=True)
    ]
    return Grid(rows=grid.rows, columns=grid.columns, seconds=monotone(seconds))


def _without_context(grid: Grid) -> list[float]:
    """Each row's time at context 0, on the line through its ends; ascending."""
    alone, least = [], 0.0
    for row in grid.seconds:
        first = row[0]
        if len(row) > 1:
            growth = (row[-1] - row[0]) / (grid.columns[-1] - grid.columns[0])
            first -= growth * grid.columns[0]
        least = min(max(first, least), row[0])
        alone.append(least)
    return alone


def _ratio(of: float, to: float) -> float:
    """1 where either is not known."""
    return of / to if of > 0 and to > 0 else 1.0


def _parameters_apart(profile: Profile, target: Target) -> float:
    return abs(log(_ratio(profile.parameters, target.parameters)))


def _cores_apart(profile: Profile, target: Target) -> float:
    if target.device is not DeviceKind.CPU:
        return 0.0
    return abs(log(_ratio(profile.cores, target.cores)))
