"""What the controller core knows of a request: its deadlines, where it runs, why it waits.

Owned by the controller core, like all entries; see `state.cell`, which gives it to the others.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mesh.domain.lifecycle import RequestState
from mesh.domain.request import Request
from mesh.domain.slo import Slo
from mesh.request.shadow import Verdict

if TYPE_CHECKING:
    from mesh.core.controller.state.cell import InstanceEntry


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    original: Request
    """As its client sent it."""
    slo: Slo
    arrival_s: float
    state: RequestState = RequestState.QUEUED
    queued_at_s: float = 0.0
    attempt: int = 0
    """Submissions to nodes so far."""
    output_tokens: list[int] = field(default_factory=list)
    instance: "InstanceEntry | None" = None
    required_blocks: int = 0
    """KV blocks that it is expected to need where it runs (LLM-Mesh eq. 2)."""
    evictions: int = 0
    grace_s: float = 0.0
    due_s: float = 0.0
    """When its next token is due, while it runs."""
    submitted_s: float = 0.0
    prefill_left: int = 0
    """Tokens that its node has still to compute before its next one."""
    refused: Verdict | None = None
    """Why the last node that was asked could not compute it in time, on an instance or on one to be
    loaded for it. None: none was asked.
    """
    held_up: Verdict | None = None
    """Why it waits: the first verdict other than FIRST_TOKEN_LATE, if there was one. Whoever waits
    for another reason gets that verdict, too, in the end.
    """
    latest_start_s: float | None = None
    """Its first token would be late if it began after this. None: not worked out yet."""
    short_of_memory: bool = False
    """Whether an instance that it was last tried on had no room for its KV cache."""
    overtaken: int = 0
    """Later requests that were placed on a node that could not compute this one in time."""
    tokens: int = field(init=False)
    """Of prompt and output."""

    def __post_init__(self) -> None:
        self.tokens = len(self.original.prompt_tokens) + len(self.output_tokens)

    def turn_down(self, verdict: Verdict) -> None:
        """A node cannot compute it in time."""
        self.refused = verdict
        if self.held_up in (None, Verdict.FIRST_TOKEN_LATE):
            self.held_up = verdict
