"""In which precisions this node computes: as it was told, as it found before, or as it finds now.

Owns one small file for each kind of node under the node's home, by its fingerprint. A file that is
torn, missing, or of a release that measured otherwise is as good as none: the trial is made again.
Before: `choosing`, at the node's start. After: the engine. `precisions` decides, `precision_trial`
measures.
"""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openvino as ov

from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.values import dataclass, replace
from mesh_loader.bounded_child import run_bounded
from mesh_loader.locks import locked
from mesh_loader.store import ModelStore
from mesh_nodes.engines.openvino.architecture import Architecture, Rope, read_architecture
from mesh_nodes.engines.openvino.compilation import capable
from mesh_nodes.engines.openvino.precision_trial import (
    TrialJob,
    read_progress,
    read_timings,
    timings_json,
)
from mesh_nodes.engines.openvino.precisions import Precisions, Timed, candidates, choose, reason
from mesh_nodes.kept_json import keep_json

TRIAL_S_MAX = 60.0
"""It takes 7 s a precision on two cores without VNNI, up to four times that beside others."""
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
)
"""This shape is tried where the store has no model yet."""

Say = Callable[[str, float], None]
MEASURES = "measures precisions"
WAITS = "waits for another node, which measures precisions"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The precisions that a node serves in, and why, as `mesh describe` shows it."""

    precisions: Precisions
    why: str

    def __str__(self) -> str:
        return f"{self.precisions}: {self.why}"


def chosen(job: TrialJob, kept: Path, say: Say = lambda phase, share: None) -> Choice:
    """The precisions to serve in; where nothing can be measured, what is known to serve. `kept` is
    the file of what was found, replaced by what is found now, and `say` is called with what is done
    meanwhile and the share of it that is done.

    Raises InvalidInput when the CPU, or the plugin, cannot do what was asked for.
    """
    capable_of = capable(ov.Core())
    possible = candidates(capable_of, job.compute, job.kv)
    if not possible:
        can = ", ".join(sorted(capable_of))
        raise InvalidInput(
            f"--precision {job.compute or 'auto'} with --kv {job.kv or 'auto'} is nothing that "
            f"this CPU computes in: it can {can}",
            hint="leave out --kv, or both; caches are bf16 or u8 beside bf16, f16 or u8 beside f16",
        )
    if len(possible) == 1:
        settled = job.compute is not None
        why = "as asked for" if settled else "this CPU multiplies in nothing else"
        return Choice(precisions=possible[0], why=why)
    found = _read(kept, job) or _found(job, kept, say)
    if found is None:
        choice = Choice(
            precisions=possible[0], why="nothing could be measured, the node's log says why"
        )
    else:
        why = f"measured {found.measured_at} on {found.shape}: {reason(found.timed)}"
        choice = Choice(precisions=choose(found.timed), why=why)
    log.info("the node computes in %s", choice)
    return choice


def tried(job: TrialJob, say: Say = lambda phase, share: None) -> tuple[Timed, ...]:
    """Times the candidates in a process of its own. Raises OSError, or ValueError with the
    reason.
    """
    command = [sys.executable, "-m", _CHILD, job.to_json()]
    say(MEASURES, 0.0)

    def read(line: bytes) -> None:
        share = read_progress(line)
        if share is not None:
            say(MEASURES, share)

    ended = run_bounded(
        command, timeout_s=TRIAL_S_MAX, environment={}, on_wait=lambda: None, on_line=read
    )
    last = (ended.output.strip().splitlines() or ["it said nothing"])[-1]
    if ended.exit_code != 0:
        raise ValueError("its time was up" if ended.exit_code is None else last)
    try:
        return read_timings(json.loads(last))
    except (KeyError, TypeError) as error:
        raise ValueError(f"it said {last}") from error


def shape_of_store(store: ModelStore) -> Architecture:
    """The shape of the largest stored model, whose iterations are the longest."""
    try:
        for model in sorted(store.models(), key=lambda m: (-m.info.parameters, m.info.model_id)):
            if model.info.only_task is None:
                return plain(read_architecture(model.path))
    except (MeshError, OSError):
        log.debug("the store has no model to try precisions with", exc_info=True)
    return USUAL


def plain(architecture: Architecture) -> Architecture:
    """An architecture of the same sizes whose layers are all alike. A mixture becomes an MLP as
    wide as the experts that one token passes.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a trial has found, as the file keeps it."""

    measured_at: str
    """In UTC."""
    shape: str
    timed: Sequence[Timed]


def _found(job: TrialJob, kept: Path, say: Say) -> _Found | None:
    """By this node, or by another of the same kind that starts meanwhile: two that measured at once
    would measure each other."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        lock = kept.with_suffix(".lock")
        with locked(lock, wait_s=TRIAL_S_MAX, on_wait=lambda: say(WAITS, 0.0)):
            return _read(kept, job) or _tried(job, kept, say)
    except (OSError, Unavailable) as error:
        log.warning("precisions are not compared: %s", error)
        return None


def _tried(job: TrialJob, kept: Path, say: Say) -> _Found | None:
    shape = job.architecture
    try:
        found = _Found(
            measured_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            shape=f"layers of {shape.hidden_size} by {shape.intermediate_size}",
            timed=tried(job, say),
        )
        entry = {"measured_at": found.measured_at, "shape": found.shape}
        timed = json.loads(timings_json(found.timed))
        keep_json(kept, {**_content(kept), _key(job): {**entry, "timed": timed}})
    except (OSError, ValueError) as error:
        log.warning("precisions could not be compared on this machine: %s", error)
        return None
    return found


def _read(path: Path, job: TrialJob) -> _Found | None:
    """`None` also for what cannot be compared as it is now: other rounds, other candidates."""
    content = _content(path).get(_key(job))
    if content is None:
        return None
    try:
        timed = read_timings(content["timed"])
        found = _Found(
            measured_at=str(content["measured_at"]), shape=str(content["shape"]), timed=timed
        )
        choose(timed)  # It raises where rounds are missing.
        return found
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        log.info("what %s says of precisions is measured again: %s", path, error)
        return None


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _key(job: TrialJob) -> str:
    """What was settled before the trial."""
    return f"{job.compute or 'any'}-{job.kv or 'any'}"
