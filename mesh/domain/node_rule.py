"""What a node runs by itself between two commands, by name and numbers.

The controller's policy says it, within the cell's bounds, and nodes are told when they join. Shadow
validation rolls the same rule forward, with the same numbers.
"""

from math import inf
from typing import Self

from mesh.domain.checks import CONTEXT_TOKENS_MAX
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import RequestId
from mesh.domain.limits import PREFILL_TOKENS_MAX, TURN_S_MAX, CellLimits
from mesh.domain.values import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleName:
    """A turn rule as nodes are told it: code never crosses the link."""

    name: str = "headroom"
    parameters: tuple[tuple[str, float], ...] = ()
    digest: str = ""
    """The digest of the policy file that has it; empty for a rule that every node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A request in the hello that goes on. The controller has its tokens before `next_index`."""

    request_id: RequestId
    attempt: int
    next_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRule:
    turn: RuleName = RuleName()
    """Whose turn it is. A policy's `rule` says it; what its `node_rule` has here does not count."""
    overestimate: float = 1.1
    """Iterations are reckoned to take so many times as long as predicted (LLM-Mesh §5.3)."""
    chunk_tokens_max: int = CONTEXT_TOKENS_MAX
    """Prompt tokens of one iteration, where the cell's bound is not the smaller one."""
    turn_s_max: float = inf
    """Decodes of an instance that take no longer together are one turn, the same."""
    swap_bytes: int = 0
    """What weights on the device and KV caches may take together on a node whose turn rule swaps:
    what the KV caches leave is its pool of weights. The controller says it; 0: nothing is swapped.
    """
    adopted: tuple[Adopted, ...] = ()
    """The requests of the hello that go on; the others end there."""

    def within(self, limits: CellLimits) -> Self:
        """The rule as the nodes of a cell are told it."""
        return replace(
            self,
            chunk_tokens_max=min(self.chunk_tokens_max, limits.prefill_tokens_max),
            turn_s_max=min(self.turn_s_max, limits.turn_s_max),
        )

    def check(self) -> None:
        """Raises InvalidInput where a number cannot be meant."""
        for name, value, least in (
            ("overestimate", self.overestimate, 0.5),
            ("chunk_tokens_max", self.chunk_tokens_max, 1),
            ("turn_s_max", self.turn_s_max, 0.0),
        ):
            if not value >= least:
                raise InvalidInput(f"node_rule.{name} is {value}; it must be at least {least}")


DEFAULT_RULE = NodeRule()
CELL_RULE = NodeRule(chunk_tokens_max=PREFILL_TOKENS_MAX, turn_s_max=TURN_S_MAX)
"""The rule of a cell that has the default settings."""
