"""Estimates for what was not measured: the nearest measured profile, scaled.

Comes before a model's first load, and serves until `mesh profile` or the node's correction know
better. Where operators of a model have been counted on the device, its profile is scaled by these
(`operator_scaling`), elsewhere by bytes and shape: the references' 3B and 7B from each other, up to
batches of 32, within 30 % on the CPU, but within a factor of 2.1 on the GPU, where small iterations
do not take the time of their bytes. From one device to another it can be off by multiples, since
cores say nothing of instruction sets.
"""

from collections.abc import Iterable
from itertools import accumulate, repeat, takewhile
from math import log
from operator import mul

from mesh.compute.operator_scaling import by_operators
from mesh.compute.references import REFERENCES
from mesh.compute.tables import monotone
from mesh.domain.ids import ModelId
from mesh.domain.model import Mixture, Widths, variant
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind, ProfileSource
from mesh.domain.values import dataclass, replace


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
    mixture: Mixture | None = None
    shape: str = ""
    widths: Widths | None = None


def best_profile(known: Iterable[Profile], target: Target) -> Profile:
    """The target's own measured profile; else that of a model of its shape on its device, the best
    known one; else the nearest in parameters among those measured on its device, scaled, of which
    those go first whose operators were counted in its precision; else the nearest among all of its
    kind of device and the built-in references, in cores first and in parameters then, scaled; one
    that was counted with some of its node's cores counts with these, too. Ties go to what was
    measured in this cell, then to the lesser ids.
    """
    measured = sorted(
        (profile for profile in known if profile.measured),
        key=lambda profile: (profile.model_id, profile.fingerprint),
    )
    here = [profile for profile in measured if profile.fingerprint == target.fingerprint]
    for profile in here:
        if profile.model_id == target.model_id:
            return profile
    alike = [profile for profile in here if profile.shape and profile.shape == target.shape]
    if alike:
        return max(alike, key=lambda profile: profile.source.rank).taken_for(target.model_id)
    if target.widths is not None:
        counted = [profile for profile in here if _operators_serve(profile, target)]
        if counted:
            nearest = min(counted, key=lambda profile: _parameters_apart(profile, target))
            prefill, decode = by_operators(nearest, target.widths)
            estimate = _estimate(nearest, target, prefill, decode)
            return replace(estimate, source=ProfileSource.OPERATORS)
    if here:
        return scaled(min(here, key=lambda profile: _parameters_apart(profile, target)), target)
    counted_so = [each for profile in measured for each in _with_some_cores(profile)]
    every = (*measured, *counted_so, *REFERENCES)
    kind = [profile for profile in every if profile.device is target.device]
    nearest = min(
        kind,
        key=lambda profile: (_cores_apart(profile, target), _parameters_apart(profile, target)),
    )
    return scaled(nearest, target)


def _with_some_cores(profile: Profile) -> Iterable[Profile]:
    """What it would be on nodes of so many cores, by what operators and rest came to with them."""
    for each in profile.by_cores:
        prefill, decode = each.prefill, each.decode
        yield replace(profile, cores=each.cores, prefill=prefill, decode=decode)


def _operators_serve(profile: Profile, target: Target) -> bool:
    alike = variant(profile.model_id) == variant(target.model_id)
    return bool(alike and profile.operators and profile.widths)


def scaled(profile: Profile, target: Target) -> Profile:
    """An estimate for the target by bytes and shape.

    A row's time has two parts, the one without context and the growth along the context axis. Of
    the first, what the least row takes is the pass of the weights through memory and scales with
    their bytes; what larger rows add to that is computation and scales with the parameters. The
    second scales with the KV bytes of a token. On CPUs all of it goes inversely with the cores:

        t'(n, c) = (w * t(1, 0) + p * (t(n, 0) - t(1, 0)) + k * (t(n, c) - t(n, 0))) / cores

    with w, p, k and cores the target's weights, parameters, KV bytes and cores over the profile's.

    Of a mixture t(1, 0) is multiplied by the share of the weights that n tokens have pass, over
    that of one, and p counts the parameters that are computed with beside. On GPUs experts pass
    once for all tokens that chose them; engines for CPUs (OpenVINO without AMX) have each token's
    pass by themselves, so that their computation is in that.
    """
    faster = _ratio(target.cores, profile.cores) if target.device is DeviceKind.CPU else 1.0
    weights = _ratio(target.weights_bytes, profile.weights_bytes) / faster
    parameters = _ratio(_computed(target), _computed(profile)) / faster
    kv = _ratio(target.kv_bytes_per_token, profile.kv_bytes_per_token) / faster

    def grid(of: Grid) -> Grid:
        rows = _with_powers_of_two(of) if target.mixture else of
        passing = [(_passing(profile, n), _passing(target, n)) for n in rows.rows]
        return _scaled_grid(rows, passing, weights, parameters, kv)

    return _estimate(profile, target, grid(profile.prefill), grid(profile.decode))


def _estimate(profile: Profile, target: Target, prefill: Grid, decode: Grid) -> Profile:
    return Profile(
        model_id=target.model_id,
        device=target.device,
        fingerprint=target.fingerprint,
        hardware=target.hardware,
        cores=target.cores,
        parameters=target.parameters,
        weights_bytes=target.weights_bytes,
        kv_bytes_per_token=target.kv_bytes_per_token,
        prefill=prefill,
        decode=decode,
        mixture=target.mixture,
        shape=target.shape,
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


def _scaled_grid(
    grid: Grid, passing: list[tuple[float, float]], weights: float, parameters: float, kv: float
) -> Grid:
    """Scales a table. `passing` has, for each row, the shares of the weights that an iteration
    reads: of the profile's model and of the target.
    """
    without_context = _without_context(grid)
    all_s = without_context[0] / passing[0][0]
    """The time of a pass over all of the profile's weights."""
    seconds = []
    for row, alone, (theirs, ours) in zip(grid.seconds, without_context, passing, strict=True):
        passing_s = min(all_s * theirs, alone)
        scaled_s = weights * passing_s * ours / theirs + parameters * (alone - passing_s)
        seconds.append([scaled_s + kv * (value - alone) for value in row])
    return Grid(rows=grid.rows, columns=grid.columns, seconds=monotone(seconds))


def _with_powers_of_two(grid: Grid) -> Grid:
    """Rows between, where there are few: how many experts are read does not grow evenly."""
    doubled = accumulate(repeat(2), mul, initial=grid.rows[0])
    rows = sorted({*grid.rows, *takewhile(lambda row: row < grid.rows[-1], doubled)})
    seconds = tuple(tuple(grid.at(row, column) for column in grid.columns) for row in rows)
    return replace(grid, rows=tuple(rows), seconds=seconds)


def _passing(model: Profile | Target, tokens: int) -> float:
    """The weights that pass in an iteration of so many tokens, over all that the model has."""
    mixture, share = model.mixture, _experts_share(model)
    if mixture is None:
        return 1.0
    if model.device is DeviceKind.CPU:
        return 1.0 - share + share * tokens * mixture.chosen / mixture.experts
    return 1.0 - share * mixture.unread(tokens)


def _computed(model: Profile | Target) -> float:
    """The parameters that one token is computed with beside the pass of weights."""
    if model.device is DeviceKind.CPU:
        return model.parameters * (1.0 - _experts_share(model))
    return model.parameters * _passing(model, 1)


def _experts_share(model: Profile | Target) -> float:
    """The share of the parameters that belong to experts."""
    if model.mixture is None or not model.parameters:
        return 0.0
    return min(model.mixture.parameters / model.parameters, 1.0)


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
    """By those that one token multiplies."""
    theirs = profile.parameters * _passing(profile, 1)
    return abs(log(_ratio(theirs, target.parameters * _passing(target, 1))))


def _cores_apart(profile: Profile, target: Target) -> float:
    if target.device is not DeviceKind.CPU:
        return 0.0
    return abs(log(_ratio(profile.cores, target.cores)))
