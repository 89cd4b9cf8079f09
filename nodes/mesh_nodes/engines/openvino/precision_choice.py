"""In which precisions this node computes: as it was told, as it found before, or as it finds now.

Owns one small file for each kind of node under the node's home, by its fingerprint. A torn or
missing file is as good as none: the trial is made again. Before: `choosing`, at the node's start.
After: the engine. `precisions` decides, `precision_trial` measures.
"""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openvino as ov

from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh_loader.bounded_child import run_bounded
from mesh_loader.locks import held
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino.architecture import Architecture, Rope, read_architecture
from mesh_nodes.engines.openvino.compilation import capable
from mesh_nodes.engines.openvino.precisions import (
    Precisions,
    Timed,
    candidates,
    choose,
    known_of,
    mean_ratio,
    passes,
)
from mesh_nodes.engines.openvino.trial_wish import TrialWish, heard, told
from mesh_nodes.kept_json import keep_json

TRIAL_S_MAX = 60.0
"""It takes 2 to 12 s on two cores."""
_CHILD = "mesh_nodes.engines.openvino.precision_trial"
USUAL = Architecture(
    kind="llama",
    layers=24,
    hidden_size=1024,
    intermediate_size=4096,
    attention_heads=16,
    kv_heads=8,
    head_size=64,
    vocabulary_tokens=32768,
    norm_epsilon=1e-5,
    rope=Rope(theta=10000.0),
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
"""Tried where the store has no model yet."""

log = logging.getLogger(__name__)


def chosen(wish: TrialWish, kept: Path) -> Precisions:
    """The precisions to serve in; `kept` is the file of what was found, replaced by what is found
    now. Where nothing can be measured, what is known to serve.

    Raises InvalidInput when the CPU, or the plugin, cannot do what was asked for.
    """
    capable_of = capable(ov.Core())
    possible = candidates(capable_of, wish.compute, wish.kv)
    if not possible:
        can = ", ".join(sorted(capable_of))
        raise InvalidInput(
            f"--precision {wish.compute or 'auto'} with --kv {wish.kv or 'auto'} is nothing that "
            f"this CPU computes in: it can {can}",
            hint="leave out --kv, or both; caches are bf16 or u8 beside bf16, f16 or u8 beside f16",
        )
    if len(possible) == 1:
        return possible[0]
    timed = _read(kept, wish) or _found(wish, kept)
    best = choose(timed) if timed else possible[0]
    log.info("the node computes in %s", best)
    return best


def tried(wish: TrialWish) -> tuple[Timed, ...]:
    """Measured in a process of its own. Raises OSError, or ValueError with the reason."""
    command = [sys.executable, "-m", _CHILD, wish.to_json()]
    ended = run_bounded(command, timeout_s=TRIAL_S_MAX, environment={}, on_wait=lambda: None)
    last = (ended.output.strip().splitlines() or ["it said nothing"])[-1]
    if ended.exit_code != 0:
        raise ValueError("its time was up" if ended.exit_code is None else last)
    try:
        return heard(json.loads(last))
    except (KeyError, TypeError) as error:
        raise ValueError(f"it said {last}") from error


def shape_of_store(store: ModelStore) -> Architecture:
    """Of the largest stored model, whose iterations are the longest."""
    try:
        for model in sorted(store.models(), key=lambda m: (-m.info.parameters, m.info.model_id)):
            return plain(read_architecture(model.path))
    except (MeshError, OSError):
        log.debug("the store has no model to try precisions with", exc_info=True)
    return USUAL


def plain(architecture: Architecture) -> Architecture:
    """Of the same sizes, all layers alike: of a mixture as wide as what one token takes."""
    experts, wide = architecture.experts, architecture.intermediate_size
    if experts is not None:
        wide = experts.chosen * experts.intermediate_size + experts.shared_intermediate_size
    return replace(
        architecture,
        intermediate_size=wide,
        rope=Rope(theta=architecture.rope.theta),
        local_rope=None,
        windows=(),
        experts=None,
    )


def _found(wish: TrialWish, kept: Path) -> tuple[Timed, ...]:
    """By this node, or by another of the same kind that starts meanwhile: two that measured at once
    would measure each other."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        lock = kept.with_suffix(".lock")
        with held(lock, wait_s=TRIAL_S_MAX, on_wait=lambda: None):
            return _read(kept, wish) or _tried(wish, kept)
    except (OSError, Unavailable) as error:
        log.warning("precisions are not compared: %s", error)
        return ()


def _tried(wish: TrialWish, kept: Path) -> tuple[Timed, ...]:
    try:
        timed = tried(wish)
        known = known_of(timed)
        for each in timed:
            ratio = f"{mean_ratio(each, known):.2f} x" if each.seconds else "not timed"
            log.info("%s: error %.3f, time %s", each.precisions, each.error, ratio)
        keep_json(kept, {**_content(kept), _key(wish): json.loads(told(timed))})
    except (OSError, ValueError) as error:
        log.warning("precisions could not be compared on this machine: %s", error)
        return ()
    return timed


def _read(path: Path, wish: TrialWish) -> tuple[Timed, ...]:
    try:
        found = _content(path).get(_key(wish))
        timed = () if found is None else heard(found)
        error = known_of(timed).error if timed else 0.0
        # What an earlier release found too far off it has not timed.
        whole = all(each.seconds or not passes(each.error, error) for each in timed)
        return timed if whole else ()
    except (KeyError, TypeError, ValueError) as error:
        log.warning("what %s says of precisions is not used: %s", path, error)
        return ()


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _key(wish: TrialWish) -> str:
    """What was settled before the trial."""
    return f"{wish.compute or 'any'}-{wish.kv or 'any'}"
