"""Hypothesis strategies for whatever crosses the wire, derived from the types of its fields."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import inf
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from mesh.domain.messages import NodeHello, ResizeKv
from mesh.domain.model import Footprint, Mixture, Widths
from mesh.domain.profile import Grid, Profile
from mesh.domain.slo import SLO_S_MAX, Slo
from mesh.domain.steps import LoadRate, LoadTier
from mesh.domain.views import CellStatus, DeploymentSnapshot, NodeSnapshot

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**63 - 1), max_size=5).map(tuple)
IDS = st.text(min_size=1, max_size=20)
SECONDS = st.floats(0, 1e9, allow_nan=False)
ABOVE_0 = st.floats(1e-6, 1e4, allow_nan=False)
HEADROOMS = st.floats(-1e9, 1e9, allow_nan=False)

# By the name of the field, where the type alone allows more than the message holds.
BY_NAME: Mapping[str, st.SearchStrategy[Any]] = {
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "max_tokens": st.integers(1, 2**31 - 1),
    "min_tokens": st.integers(0, 2**31 - 1),
    "token_ids": TOKENS,
    "prompt_tokens": TOKENS,
    "output_tokens": TOKENS,
    "stop_token_ids": TOKENS,
    "prompt_token_ids": TOKENS,
    "block_tokens": st.integers(1, 2**32 - 1),
    "batch_max": st.integers(1, 2**32 - 1),
    "kv_block_bytes": st.integers(1, 2**64 - 1),
    "run_id": IDS,
    "ttft_s": ABOVE_0,
    "ttft_tokens_per_s": ABOVE_0,
    "tpot_s": ABOVE_0,
    "parameters": U64,
    "served": U64,
    "kv_bytes_per_token": U64,
    "correction": ABOVE_0,
    "bytes_per_s": ABOVE_0,
    "kv_bytes_per_s": ABOVE_0,
    "correction_planned": ABOVE_0,
    "load_slowdown": ABOVE_0,
    "busy_load_factor": ABOVE_0,
    "headroom_least_s": HEADROOMS,
    "headroom_p50_s": HEADROOMS,
    "unaccounted_bytes": st.integers(-(2**63), 2**63 - 1),
    "tensor_parallel": st.integers(1, 2**32 - 1),
    "cells": st.integers(1, 2**32 - 1),
    "chosen": st.integers(1, 2**32 - 1),
    "tensor_parallel_max": st.integers(1, 2**32 - 1),
    "here": st.floats(0, 1),
    "swaps_to": st.floats(0, 1),
    "resident_share": st.floats(0, 1),
    "needed_in_s": HEADROOMS | st.just(inf),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type: a dataclass, an enum, a union or a tuple of such, or a plain one."""
    supertype = getattr(kind, "__supertype__", None)
    if supertype is not None:
        return IDS
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of([values(member) for member in get_args(kind)])
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[-1] is not Ellipsis:
            return st.tuples(*map(values, parts))
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    if kind is Grid:
        return grids()
    if is_dataclass(kind) and isinstance(kind, type):
        return _built(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: U32,
        float: SECONDS,
        str: st.text(max_size=30),
        bytes: st.binary(max_size=30),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[kind]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Ascending sizes, and seconds for each pair of them."""
    rows = draw(st.sets(st.integers(1, 2**32 - 1), min_size=1, max_size=4))
    columns = draw(st.sets(U32, min_size=1, max_size=4))
    row = st.tuples(*[st.floats(1e-6, 1e3)] * len(columns))
    seconds = draw(st.tuples(*[row] * len(rows)))
    return Grid(rows=tuple(sorted(rows)), columns=tuple(sorted(columns)), seconds=seconds)


def _built(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    parts = {f.name: _field(kind, f.name, hints[f.name]) for f in fields(kind)}
    built = st.fixed_dictionaries(parts)
    if kind is NodeHello:
        built = built.map(_with_base_below_limit)
    if kind is Slo:
        endless = {"tpot_s": SLO_S_MAX}
        built = built.map(lambda given: given | (endless if given["best_effort"] else {}))
    if kind is Mixture:
        built = built.map(lambda given: given | {"experts": max(given["experts"], given["chosen"])})
    return built.map(lambda given: kind(**given))


def _with_base_below_limit(hello: dict[str, Any]) -> dict[str, Any]:
    base_bytes, memory_bytes = sorted((hello["base_bytes"], hello["memory_bytes"]))
    return {**hello, "base_bytes": base_bytes, "memory_bytes": memory_bytes}


def _field(owner: type, name: str, kind: Any) -> st.SearchStrategy[Any]:
    if owner is CellStatus and name == "refused":
        reason = get_args(get_args(kind)[0])[0]
        counts = st.dictionaries(st.sampled_from(reason), U64, max_size=4)
        return counts.map(lambda given: tuple(sorted(given.items())))
    if owner in (DeploymentSnapshot, NodeSnapshot) and name == "footprints":
        keys = IDS | st.just("phase")  # a name may be that of another field
        stated = st.dictionaries(keys, values(Footprint), max_size=3)
        return stated.map(lambda given: tuple(sorted(given.items())))
    if owner is NodeHello and name == "load_rates":
        rates = st.dictionaries(st.sampled_from(LoadTier), values(LoadRate), max_size=2)
        return rates.map(lambda given: tuple(sorted(given.items())))
    if name == "context_tokens_max":
        some = st.integers(1, 2**32 - 1)
        return st.none() | some if type(None) in get_args(kind) else some
    if owner is Profile and name in ("cores", "parameters", "weights_bytes"):
        return st.integers(1, 2**32 - 1)
    if owner is Widths or (owner is ResizeKv and name == "kv_blocks"):
        return st.integers(1, 2**32 - 1)
    if name == "output_tokens" and kind is int:
        return U32
    if name == "prompt_tokens" and kind is int:
        return U32
    if name in BY_NAME:
        given = BY_NAME[name]
        return st.none() | given if type(None) in get_args(kind) else given
    if name.endswith("_bytes") and kind is int:
        return U64
    return values(kind)
