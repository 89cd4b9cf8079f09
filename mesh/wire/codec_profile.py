"""Profiles, the factors that correct them, and stalls: protobuf messages to domain values and back.

A profile is divided by and indexed with at every turn of a node and every placement of the
controller, so nothing malformed gets past here: InvalidInput says what is wrong with it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from google.protobuf.message import Message

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import ModelId
from mesh.domain.profile import Grid, Profile, Stalls
from mesh.domain.reasons import DeviceKind, ProfileSource
from mesh.v1 import profile_pb2 as pb
from mesh.wire.codec_model import mixture_from_wire, mixture_to_wire
from mesh.wire.malformed import Words, identifier, member, require

SIZES_MAX = 64
"""Rows, and columns, of a grid: sizes of powers of two never come to as many."""


def profile_to_wire(profile: Profile) -> pb.Profile:
    return pb.Profile(
        model_id=profile.model_id,
        device=profile.device,
        fingerprint=profile.fingerprint,
        hardware=profile.hardware,
        cores=profile.cores,
        parameters=profile.parameters,
        weights_bytes=profile.weights_bytes,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        prefill=grid_to_wire(profile.prefill),
        decode=grid_to_wire(profile.decode),
        scaled_from=profile.scaled_from,
        measured_s=profile.measured_s,
        mixture=mixture_to_wire(profile.mixture),
        source=profile.source,
        shape=profile.shape,
        measured_as=profile.measured_as,
    )


def profile_from_wire(message: pb.Profile, words: Words = member) -> Profile:
    require(message, "prefill", "decode")
    return Profile(
        model_id=ModelId(identifier(message.model_id, message, "model_id")),
        device=words(DeviceKind, message.device, message, "device"),
        fingerprint=message.fingerprint,
        hardware=message.hardware,
        cores=message.cores,
        parameters=message.parameters,
        weights_bytes=message.weights_bytes,
        kv_bytes_per_token=message.kv_bytes_per_token,
        prefill=grid_from_wire(message.prefill, "prefill"),
        decode=grid_from_wire(message.decode, "decode"),
        scaled_from=message.scaled_from,
        measured_s=_seconds(message.measured_s, "Profile.measured_s"),
        mixture=mixture_from_wire(message),
        source=words(ProfileSource, message.source or ProfileSource.SURVEY, message, "source"),
        shape=message.shape,
        measured_as=message.measured_as,
    )


def grid_to_wire(grid: Grid) -> pb.Grid:
    seconds = [value for row in grid.seconds for value in row]
    return pb.Grid(rows=grid.rows, columns=grid.columns, seconds=seconds)


def grid_from_wire(message: pb.Grid, name: str) -> Grid:
    """The grid that a profile has under this name."""
    rows, columns = tuple(message.rows), tuple(message.columns)
    _check_sizes(rows, f"{name}.rows", least=1)
    _check_sizes(columns, f"{name}.columns", least=0)
    wide, found = len(columns), len(message.seconds)
    if found != len(rows) * wide:
        raise InvalidInput(
            f"Profile.{name} has {found} seconds for {len(rows)} rows and {wide} columns; "
            f"it must have {len(rows) * wide}"
        )
    flat = tuple(_seconds(value, f"Profile.{name}.seconds") for value in message.seconds)
    if min(flat) <= 0.0:
        raise InvalidInput(f"Profile.{name} has an iteration of no time; each must take some")
    seconds = tuple(flat[first : first + wide] for first in range(0, found, wide))
    return Grid(rows=rows, columns=columns, seconds=seconds)


def factor_from_wire(value: float, message: Message, field: str) -> float:
    """A factor on iteration times; 1 for the 0 of a peer whose version knows none."""
    if not (math.isfinite(value) and value >= 0.0):
        raise InvalidInput(
            f"{message.DESCRIPTOR.name}.{field} is {value:g}; it must be above 0 and finite"
        )
    return value or 1.0


def share_from_wire(value: float, message: Message, field: str) -> float:
    """By what share something is off."""
    return _seconds(value, f"{message.DESCRIPTOR.name}.{field}")


def stalls_to_wire(stalls: Stalls) -> pb.Stalls:
    return pb.Stalls(count=stalls.count, longest_s=stalls.longest_s, ago_s=stalls.ago_s)


def stalls_from_wire(message: pb.Stalls) -> Stalls:
    return Stalls(
        count=message.count,
        longest_s=_seconds(message.longest_s, "Stalls.longest_s"),
        ago_s=_seconds(message.ago_s, "Stalls.ago_s"),
    )


def _check_sizes(sizes: Sequence[int], name: str, *, least: int) -> None:
    if not 1 <= len(sizes) <= SIZES_MAX:
        raise InvalidInput(f"Profile.{name} has {len(sizes)} sizes; it must have 1 to {SIZES_MAX}")
    if sizes[0] < least:
        raise InvalidInput(f"Profile.{name} begins with {sizes[0]}; it must be {least} or more")
    if any(size >= following for size, following in pairwise(sizes)):
        raise InvalidInput(f"Profile.{name} is {', '.join(map(str, sizes))}; it must ascend")


def _seconds(value: float, name: str) -> float:
    if not (math.isfinite(value) and value >= 0.0):
        raise InvalidInput(f"{name} has {value:g}; it must be 0 or more, and finite")
    return value
