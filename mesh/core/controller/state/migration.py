"""A request on its way to another node, while it runs on where it is.

The request owns its tokens; its copy stands in the books of the target, with the place, the blocks
and the time that the request will need there. Owned by the controller core, like all entries.
Before: `requests.migration`, which decides. After: the request runs in the place of its copy.
"""

from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import MIGRATION, MigrationState, advance
from mesh.domain.values import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class Migration:
    request: RequestEntry
    copy: RequestEntry
    begun_s: float
    state: MigrationState = MigrationState.COMPUTING
    at_once: bool = False
    """Whether the target goes on as soon as it has computed what it was sent."""
    rounds: int = 1
    """Times that the target was sent tokens to compute."""

    drawn: int = 0
    """Times that the target told of tokens that it drew while its source did so, too."""

    source_drew_s: float | None = None
    """When its source drew its last token; None where the target has told of one since."""
    paused_s: float | None = None
    """The time since which the source is paused because the target is behind it; `None` while it is
    not.
    """

    @property
    def gap_tokens(self) -> int:
        """The tokens that the target was not sent and has not drawn by itself."""
        return len(self.request.output_tokens) - len(self.copy.output_tokens)

    def advance(self, to: MigrationState) -> None:
        self.state = advance(MIGRATION, self.state, to)

    def note_round(self) -> None:
        """The target is sent what came meanwhile."""
        self.advance(MigrationState.COMPUTING)
        self.rounds += 1

    def note_drawn(self) -> None:
        """The target has drawn what its source has drawn, too."""
        self.drawn, self.source_drew_s = self.drawn + 1, None

    def note_source_drew(self, now_s: float) -> None:
        """The source has told of a token."""
        self.source_drew_s = now_s

    def waits_since(self, at_s: float) -> bool:
        """Whether the source has been held since then, or before."""
        return self.paused_s is not None and self.paused_s <= at_s

    def note_paused(self, now_s: float | None) -> None:
        """The source is held; None: it goes on."""
        self.paused_s = now_s
