"""What has been refused, so that nothing is tried in vain again, and why each request waits.

A refusal holds until the version of its node changes (`NodeEntry.version`), which counts the times
that it may have got less to compute or more memory, or until time has passed:

- An instance that has no time for a request has none for one that is no shorter and of whose call
  no fewer answers are wanted. One whose requests would be delayed is asked again after
  DELAYS_HOLD_S, by one that is due later than by that, and at each retry of those who wait: of a
  burst, one call is validated in that time and not each.
- A node that has no time for an instance for a request, or no memory, has none. If memory was
  lacking, a later version is asked again only if it has enough, for NEEDS_HOLD_S.

FIRST_TOKEN_LATE is never kept: it says nothing about requests that are due later. Each refusal is
kept by the instance or the request that it is of, and goes with it. Before: `requests.search` asks
before it validates.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from mesh.domain.reasons import Verdict
from mesh.domain.values import dataclass
from mesh.policy.plans import Shortage

if TYPE_CHECKING:
    from mesh.core.controller.state.node import NodeEntry
    from mesh.core.controller.state.request import RequestEntry

NEEDS_HOLD_S = 1.0
"""What an instance for a request needs is worked out anew after so long: answers of its deployment
that end meanwhile change what is expected of the next.
"""
DELAYS_HOLD_S = 0.025
"""For so long a request that would delay others stands for those that come after it."""
DELAYING_KEPT = 4
"""As many requests as an event tries in vain one after the other."""


class StartRefusal(NamedTuple):
    """What a node said to an instance for a request."""

    version: int
    verdict: Verdict | None = None
    """Why it has no time; `None` where it has no room."""
    needed_bytes: int = 0
    """The least instance, where memory was lacking."""
    at_s: float = 0.0
    """When that was worked out."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRefusals:
    verdict: Verdict | None = None
    """Why the last node that was tried could not compute it in time, on an instance or on one to be
    loaded for it. None: none was tried.
    """
    last: Verdict | None = None
    """The latest `verdict` that there was: it stays when the request is tried again."""
    message: str = ""
    """What the policy said where that is a reason of its own."""
    short_of_memory: bool = False
    """Whether an instance that it was last tried on had no room for its KV cache."""
    in_time_as_predicted: bool = False
    """Whether its first token would be in time on one of them, if iterations took no longer than
    predicted.
    """
    starts: dict[int, StartRefusal] = field(default_factory=dict)
    """What nodes said of an instance for it, by the link of the node: one that comes back is
    another.
    """

    def try_again(self) -> Verdict | None:
        """It is about to be tried: nothing has refused it yet. Returns what had before."""
        before, self.verdict = self.verdict, None
        self.short_of_memory = self.in_time_as_predicted = False
        return before

    def note_no_room(self) -> None:
        """An instance has no memory for it."""
        self.short_of_memory = True

    def note_in_time_as_predicted(self) -> None:
        """A node may turn out to compute it in time."""
        self.in_time_as_predicted = True

    def note(self, answer: Verdict | Shortage) -> None:
        """A node cannot compute it in time, or the policy would not have it there."""
        self.verdict = self.last = answer if isinstance(answer, Verdict) else Verdict.POLICY
        self.message = "" if isinstance(answer, Verdict) else answer.message

    def keep(self, before: Verdict | None) -> None:
        """Not everything was tried: what was said before holds, unless something was said now."""
        self.verdict = self.verdict or before

    def worth_starting_on(
        self,
        nodes: Iterable["NodeEntry"],
        now_s: float,
        obtainable_bytes: Callable[["NodeEntry"], int],
    ) -> list["NodeEntry"]:
        """Nodes that are not known to have no room or no time for an instance for it."""
        worth, starts = [], self.starts
        for node in nodes:
            known = starts.get(node.link_id)
            if known is None:
                worth.append(node)
            elif known.version == node.version:
                if known.verdict is not None:
                    self.note(known.verdict)
            elif (
                known.needed_bytes
                and now_s - known.at_s <= NEEDS_HOLD_S
                and known.needed_bytes > obtainable_bytes(node)
            ):
                self.note_no_start(node, known.needed_bytes, known.at_s)
            else:
                worth.append(node)
        return worth

    def forget_starts(self) -> None:
        """It has a place."""
        self.starts.clear()

    def note_no_start(self, node: "NodeEntry", needed_bytes: int = 0, at_s: float = 0.0) -> None:
        """The node has no room for an instance for it. One that lacks memory even when it is empty
        is asked in each version: if all are such, nobody needs to wait.
        """
        if needed_bytes > node.capacity_bytes:
            needed_bytes = 0
        self.starts[node.link_id] = StartRefusal(
            version=node.version, needed_bytes=needed_bytes, at_s=at_s
        )

    def note_start(self, node: "NodeEntry", verdict: Verdict) -> None:
        """The node had room for an instance for it, but perhaps no time. TPOT_EXCEEDED holds for
        requests of any length; with another verdict the same request may be in time a little later.
        """
        if verdict is Verdict.TPOT_EXCEEDED:
            self.starts[node.link_id] = StartRefusal(version=node.version, verdict=verdict)
        else:
            self.starts.pop(node.link_id, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delaying:
    """What was refused with DELAYS_RUNNING."""

    version: int
    slo_class: str
    now_s: float
    due_s: float
    left: int
    """Tokens that were not in the cache."""
    answers: int
    as_predicted: bool
    """Whether it would be in time if iterations took no longer than predicted."""


@dataclass(slots=True, eq=False)
class InstanceRefusals:
    """What an instance has refused, under the SLOs of its deployment. Others say nothing of it."""

    _exceeded: tuple[int, str, float, int] = (0, "", inf, 0)
    """The last TPOT_EXCEEDED: the version of the node, the class and tokens of the request, and the
    answers that its call wants.
    """
    _delaying: deque[Delaying] = field(default_factory=lambda: deque(maxlen=DELAYING_KEPT))
    """The last DELAYS_RUNNING: of a burst, some that are due later and some that are shorter."""
    exceeded: bool = False
    """Whether the last validation said TPOT_EXCEEDED. The next one then looks first at what its
    decodes take together, which is quicker and would be in vain elsewhere.
    """

    def why(
        self,
        version: int,
        now_s: float,
        request: "RequestEntry",
        left: int,
        *,
        new: bool = False,
        hold_s: float = DELAYS_HOLD_S,
    ) -> Verdict | None:
        """Why it refuses a request, if that is known without a validation: it has refused one that
        was no longer and wanted no more answers. `left` of its tokens are not in the cache there;
        `new`: it is asked as if it came now, so that one that is due before it says nothing.
        """
        if request.has_own_slo:
            return None
        of, answers = (version, request.slo.name), 1 + len(request.mates)
        *exceeded, tokens, least = self._exceeded
        if exceeded == [*of] and request.tokens >= tokens and answers >= least:
            return Verdict.TPOT_EXCEEDED
        for said in self._delaying:
            since_s, later_s = now_s - said.now_s, request.due_s - said.due_s
            holds = max(since_s, later_s) < hold_s or (not since_s and not new)
            alike = holds and (said.version, said.slo_class) == of
            if not alike or left < said.left or answers < said.answers:
                continue
            if said.as_predicted:
                request.refusals.note_in_time_as_predicted()
            return Verdict.DELAYS_RUNNING
        return None

    def note(
        self,
        version: int,
        now_s: float,
        request: "RequestEntry",
        left: int,
        verdict: Verdict,
        *,
        as_predicted: bool = False,
    ) -> None:
        """A validation has said this of the request, with so many of its tokens left to compute."""
        self.exceeded = verdict is Verdict.TPOT_EXCEEDED
        if request.has_own_slo:
            return
        of, answers = request.slo.name, 1 + len(request.mates)
        if verdict is Verdict.TPOT_EXCEEDED:
            self._exceeded = version, of, request.tokens, answers
        elif verdict is Verdict.DELAYS_RUNNING:
            said = Delaying(
                version=version,
                slo_class=of,
                now_s=now_s,
                due_s=request.due_s,
                left=left,
                answers=answers,
                as_predicted=as_predicted,
            )
            self._delaying.appendleft(said)
