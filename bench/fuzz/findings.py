"""What fuzzing found: how many cases were asked, and which answers nobody documented."""

from dataclasses import dataclass, field

SHOWN_MAX = 20
CHARS_MAX = 400
CALL_S_MAX = 30.0
"""A call that has not ended by then hangs. The deployment's context ends an answer long before."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What fuzzing found about one protocol, or about files. `outcomes`: calls by how they
    ended.
    """

    cases: int = 0
    hangs: int = 0
    undocumented: int = 0
    shown: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    def ended(self, outcome: str) -> None:
        self.cases += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def hung(self, what: str) -> None:
        self.hangs += 1
        self._show(f"hang: {what}")

    def unexpected(self, what: str) -> None:
        self.undocumented += 1
        self._show(f"undocumented: {what}")

    def _show(self, line: str) -> None:
        if len(self.shown) < SHOWN_MAX:
            self.shown.append(line[:CHARS_MAX])
