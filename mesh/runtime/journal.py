"""The journal: every decision of a core, one JSON line each, enough to decide it all again.

A line holds the time, the event and the actions. `replay` feeds the events to a fresh core and
compares what it decides, so that any incident can be looked at again, step by step. The first line
says what is needed to build that core. Of prompts and answers a journal holds the numbers of their
tokens, and of prompts digests of their blocks: nothing else of them is decided by.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from cattrs import BaseValidationError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.preconf.json import JsonConverter, make_converter
from cattrs.strategies import configure_tagged_union

from mesh.domain.actions import ControllerAction, NodeAction
from mesh.domain.deployment import Deployment, DeploymentSpec, Scaling
from mesh.domain.energy import Power
from mesh.domain.errors import InvalidInput, StorageError, system_errors
from mesh.domain.events import ControllerEvent, ControllerTimer, InvokeRequested, ScaleRequested
from mesh.domain.front import AskCell, FrontAction, FrontEvent
from mesh.domain.grammar import Grammar
from mesh.domain.history import OutputHistory
from mesh.domain.ids import CellName, DeploymentName
from mesh.domain.invocation import InvocationEvent, Tokens
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import (
    ContinueRequest,
    Heartbeat,
    NodeCommand,
    NodeHello,
    NodeReport,
    OfferKv,
    TokensReport,
)
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.node_events import HeartbeatDue, NodeEvent
from mesh.domain.node_rule import NodeRule
from mesh.domain.profile import Profile
from mesh.domain.request import (
    KvSource,
    Request,
    RequestOrder,
    RequestTokens,
    Resumed,
    SamplingParams,
)
from mesh.domain.revision import Revisions
from mesh.domain.slo import Slo
from mesh.domain.steps import EngineRequest
from mesh.domain.values import dataclass
from mesh.runtime.host import Core

CONTROLLER_FORMAT, NODE_FORMAT = 7, 8
READ = {"controller": (6, 7), "node": (8,)}
"""Formats; 6 holds the tokens themselves, and before 8 whole weights are swapped."""
_JOURNALS = "`mesh sim`, `mesh controller` and `mesh node` write one with --journal FILE"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStart:
    """What a controller core was built from."""

    format: int = CONTROLLER_FORMAT
    version: str
    epoch: int
    policy: str
    limits: CellLimits
    deployments: tuple[Deployment, ...]
    profiles: tuple[Profile, ...] = ()
    histories: Mapping[DeploymentName, OutputHistory] = field(default_factory=dict)
    revisions: Mapping[DeploymentName, Revisions] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """What a node core was built from."""

    format: int = NODE_FORMAT
    version: str
    limits: NodeLimits
    policy: str = ""
    """Whose turn rule it has beside the built-in ones: a FILE.py."""
    power: Power | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontStart:
    """What the core of a front was built from."""

    format: int = CONTROLLER_FORMAT
    version: str
    cells: tuple[CellName, ...]


JournalHeader = ControllerStart | NodeStart | FrontStart
Event = ControllerEvent | NodeEvent | FrontEvent
Action = ControllerAction | NodeAction | FrontAction
_UNIONS: tuple[Any, ...] = (
    NodeCommand,
    NodeReport,
    ControllerTimer,
    InvocationEvent,
    Event,
    Action,
    JournalHeader,
)
_EVENT, _ACTION, _START = _UNIONS[4:]


def _tokens(written: int | list[int], _: object) -> tuple[int, ...]:
    return (0,) * written if isinstance(written, int) else tuple(written)


_NUMBER = override(unstruct_hook=len, struct_hook=_tokens)
_WHETHER = override(unstruct_hook=lambda salt: None if salt is None else "")
_NOTHING = override(unstruct_hook=lambda said: said[:0])
_NAMED = override(unstruct_hook=lambda ticket: ticket if "/" in ticket else "")
"""The controller's core names tickets REQUEST/ATTEMPT; those that open something have no slash."""
_UNSAID = override(omit_if_default=True)
_PAUSED = override(rename="held")
"""Its name in formats 6 and 7."""
_SAID: Mapping[type[Any], Mapping[str, Any]] = {
    Grammar: {"text": _NOTHING},
    SamplingParams: {"stop": _NOTHING, "stop_token_ids": _NOTHING, "logit_bias": _NOTHING},
    KvSource: {"ticket": _NAMED},
    OfferKv: {"ticket": _NAMED},
    Request: {
        "prompt_tokens": _NUMBER,
        "cache_salt": _WHETHER,
        "keyed": _UNSAID,
        "asked_digest": _UNSAID,
    },
    Resumed: {"output_tokens": _NUMBER, "queue_age_s": _UNSAID},
    AskCell: {"output_tokens": _NUMBER},
    Tokens: {
        "token_ids": _NUMBER,
        "text": _NOTHING,
        "logprobs": _NOTHING,
        "prompt_token_ids": _NOTHING,
        "prompt_logprobs": _NOTHING,
        "embedding": _NOTHING,
    },
    RequestOrder: {"output_tokens": _NUMBER, "paused": _PAUSED},
    EngineRequest: {
        "prompt_tokens": _NUMBER,
        "output_tokens": _NUMBER,
        "cache_salt": _WHETHER,
        "paused": _PAUSED,
    },
    ContinueRequest: {"token_ids": _NUMBER, "paused": _PAUSED},
    RequestTokens: {
        "token_ids": _NUMBER,
        "text": _NOTHING,
        "logprobs": _NOTHING,
        "prompt_logprobs": _NOTHING,
        "embedding": _NOTHING,
    },
}
"""Fields that hold what callers said or were answered, and what is written of each; what holds
another comes after it.
"""

_LATER: Mapping[type[Any], Sequence[str]] = {
    NodeRule: ("adopted",),
    NodeHello: ("requests",),
    InvokeRequested: ("resumed",),
    Footprint: ("shared_bytes", "context_token_bytes", "context_tokens"),
    TokensReport: ("busy_s",),
    Heartbeat: ("energy",),
    HeartbeatDue: ("energy",),
}
"""Fields that are written only where they say anything, of what holds some of the above."""

_CLASSES: Mapping[type[Any], Sequence[str]] = {
    Slo: ("name", "price", "best_effort"),
    Scaling: ("plan",),
    DeploymentSpec: ("classes", "class_default", "cells"),
    OutputHistory: ("classes",),
    ScaleRequested: ("revision",),
    ModelInfo: ("intermediate_size",),
    Profile: ("widths",),
}


@cache
def _converter() -> JsonConverter:
    """The converter of journals. It is made when one is first written or read, because that takes a
    tenth of a second.
    """
    converter = make_converter()
    # What classes have, and what models share, is written only where there is any.
    unsaid: Any = _UNSAID
    for kind, names in _CLASSES.items():
        hook = make_dict_unstructure_fn(kind, converter, **dict.fromkeys(names, unsaid))
        converter.register_unstructure_hook(kind, hook)
    for kind, fields in _SAID.items():
        converter.register_unstructure_hook(
            kind, make_dict_unstructure_fn(kind, converter, **fields)
        )
        converter.register_structure_hook(kind, make_dict_structure_fn(kind, converter, **fields))
    for kind, names in _LATER.items():
        hook = make_dict_unstructure_fn(kind, converter, **dict.fromkeys(names, unsaid))
        converter.register_unstructure_hook(kind, hook)
    for union in _UNIONS:
        configure_tagged_union(union, converter)
    return converter


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One line of a journal."""

    now_s: float
    event: Event
    actions: tuple[Action, ...]


def decision_fields(decision: Decision) -> Any:
    """A decision as the line of a journal holds it."""
    return _line(decision.now_s, decision.event, decision.actions)


def decided_s(line: Any) -> float:
    """The time of a journal's line. Raises ValueError, KeyError or TypeError where it has none."""
    now_s = float(line["now_s"])
    if not math.isfinite(now_s):
        raise ValueError(f"{now_s} is no time")
    return now_s


def _line(now_s: float, event: object, actions: Sequence[object]) -> Any:
    return {
        "now_s": now_s,
        "event": _converter().unstructure(event, _EVENT),
        "actions": [_converter().unstructure(action, _ACTION) for action in actions],
    }


class Journal:
    """Appends decisions to a file; a host's recorder. Lines are flushed as they are written.

    When the disk is full the journal ends there, with a warning: serving goes on without it.
    """

    def __init__(self, file: TextIO, start: JournalHeader) -> None:
        self._file = file
        self._broken = False
        self._write(_converter().unstructure(start, _START))

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if self._broken:
            return
        try:
            self._write(_line(now_s, event, actions))
        except OSError as error:
            self._broken = True
            log.warning("the journal ends here, it cannot be written: %s", error.strerror)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


def _private(path: str, flags: int) -> int:
    """It holds who was called when, and by what name: its owner's alone."""
    return os.open(path, flags, 0o600)


def open_journal(path: Path, start: JournalHeader) -> Journal:
    """A new journal at `path`. Raises StorageError when it cannot be written."""
    hint = "give --journal a file that you may write"
    with system_errors(StorageError, f"cannot write the journal {path}", hint):
        file = open(path, "w", encoding="utf-8", opener=_private)  # noqa: SIM115
        return Journal(file, start)


def read_journal(path: Path) -> tuple[JournalHeader, Iterator[Decision]]:
    """The start and the decisions of a journal. A torn last line is what a kill leaves: it ends
    the journal. Raises InvalidInput for anything else that is no journal.
    """
    try:
        with path.open("rb") as lines:
            start: JournalHeader = _converter().structure(json.loads(lines.readline()), _START)
    except OSError as error:
        raise InvalidInput(
            f"cannot read the journal {path}: {error.strerror}", hint=_JOURNALS
        ) from error
    except Exception as error:
        raise InvalidInput(
            f"{path} is no journal of this version of mesh", hint=_JOURNALS
        ) from error
    core = "node" if isinstance(start, NodeStart) else "controller"
    if start.format not in READ[core]:
        read = " and ".join(map(str, READ[core]))
        raise InvalidInput(
            f"{path} has {core} journal format {start.format}; this version of mesh reads {read}",
            hint=f"replay it with mesh {start.version}, which wrote it",
        )
    return start, _decisions(path)


def _decisions(path: Path) -> Iterator[Decision]:
    with path.open("rb") as lines:
        lines.readline()
        for number, line in enumerate(lines, start=2):
            if not line.endswith(b"\n"):
                return
            try:
                raw = json.loads(line)
                yield Decision(
                    now_s=decided_s(raw),
                    event=_converter().structure(raw["event"], _EVENT),
                    actions=tuple(_converter().structure(a, _ACTION) for a in raw["actions"]),
                )
            except (ValueError, KeyError, TypeError, BaseValidationError) as error:
                raise InvalidInput(
                    f"{path}:{number} is no decision",
                    hint="the lines before it are: cut the journal there and replay them",
                ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first decision that came out otherwise."""

    number: int
    decision: Decision
    actions: tuple[Action, ...]


def replay(core: Core[Any, Any], decisions: Iterator[Decision]) -> Divergence | None:
    """Decide everything again; None when all came out as recorded."""
    for number, decision in enumerate(decisions, start=1):
        actions = tuple(core.handle(decision.event, decision.now_s))
        if actions != decision.actions:
            return Divergence(number=number, decision=decision, actions=actions)
    return None
