"""A request on its way to another node, while it runs on where it is.

The request owns its tokens; its copy stands in the books of the target, with the place, the blocks
and the time that the request will need there. Owned by the controller core, like all entries.
Before: `requests.migration`, which decides. After: the request runs in the place of its copy.
"""

from dataclasses import dataclass

from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import MIGRATION, MigrationState, advance


@dataclass(slots=True, kw_only=True, eq=False)
class Migration:
    request: RequestEntry
    copy: RequestEntry
    begun_s: float
    state: MigrationState = MigrationState.COMPUTING
    rounds: int = 1
    """Times that the target was sent tokens to compute."""

    @property
    def gap_tokens(self) -> int:
        """Generated since the target was last sent any."""
        return len(self.request.output_tokens) - len(self.copy.output_tokens)

    def advance(self, to: MigrationState) -> None:
        self.state = advance(MIGRATION, self.state, to)

    def note_round(self) -> None:
        """The target is sent what came meanwhile."""
        self.advance(MigrationState.COMPUTING)
        self.rounds += 1
