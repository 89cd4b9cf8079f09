"""The last minute of a deployment's calls, asked again of it or of another one, and how it went.

The calls come at the same distances, with prompts and answers of the same lengths. Their words are
others, for nobody keeps those. Before: `mesh.http.operating`. After: the gateway, by which all
calls go, and the book of calls, which knows how they ended.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from statistics import fmean

from mesh.controller.gateway import Gateway
from mesh.controller.lookup import find_deployment
from mesh.domain.deployment import Deployment
from mesh.domain.errors import DeadlineExceeded, MeshError, NotFound, Unavailable
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.invocation import Invocation, TokenPrompt
from mesh.report.calls import CallBook, CallEnd
from mesh.report.cell_report import cell_report

MINUTE_S = 60.0
REPLAY_S_MAX = 300.0
"""From the first call to the last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    after_s: float
    prompt_tokens: int
    output_tokens: int


class Replaying:
    """One replay runs at a time: two would lengthen each other's calls."""

    def __init__(self, gateway: Gateway, book: CallBook) -> None:
        self._gateway = gateway
        self._book = book
        self._numbers = count(1)
        self._running = False

    async def replay(self, name: DeploymentName, of: DeploymentName) -> str:
        """Ask `name` for what `of` was asked for, and say how many calls met the SLO. Raises
        NotFound, Unavailable while another replay runs, and DeadlineExceeded.
        """
        find_deployment(of, self._gateway.snapshot())
        deployment, asked = self._gateway.deployment(name), self._minute(of)
        if self._running:
            raise Unavailable("another replay is running", hint="wait for its end")
        self._running = True
        try:
            async with asyncio.timeout(REPLAY_S_MAX):
                ids = await self._ask(deployment, asked)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(asked)} calls were not answered within {REPLAY_S_MAX:.0f} s"
            ) from None
        finally:
            self._running = False
        known = {one.request_id: one for one in self._book.stories}
        ends = [known[one].ended() for one in ids if one in known]
        return _told(of, name, len(asked), ends)

    def _minute(self, of: DeploymentName) -> Sequence[_Asked]:
        """The calls that came within the minute before the last of them did. Raises NotFound."""
        calls = [
            call
            for call in (*self._book.stories, *self._book.open.values())
            if call.deployment == of
        ]
        if not calls:
            raise NotFound(
                f"no call to {of!r} is remembered", hint="the calls of five minutes are remembered"
            )
        last_s = max(call.arrived_s for call in calls)
        shown = sorted(
            (call for call in calls if call.arrived_s >= last_s - MINUTE_S),
            key=lambda call: call.arrived_s,
        )
        usual = round(fmean([call.output_tokens for call in shown if call.output_tokens] or [1]))
        return [
            _Asked(
                after_s=call.arrived_s - shown[0].arrived_s,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.output_tokens or usual,
            )
            for call in shown
        ]

    async def _ask(self, deployment: Deployment, asked: Sequence[_Asked]) -> list[RequestId]:
        """The ids of those that were taken."""
        ids: list[RequestId] = []
        salt = f"replay {next(self._numbers)}"

        async def one(number: int, call: _Asked) -> None:
            await asyncio.sleep(call.after_s)
            invocation = _invocation(deployment, call, f"{salt}-{number}")
            with suppress(MeshError):  # the book has how it ended
                async with self._gateway.call(invocation) as made:
                    ids.append(made.request_id)
                    async for _ in made:
                        pass

        async with asyncio.TaskGroup() as calls:
            for number, call in enumerate(asked):
                calls.create_task(one(number, call))
        return ids


def _invocation(deployment: Deployment, call: _Asked, salt: str) -> Invocation:
    """It shares what it computes with no other call: its own words would be in no cache either."""
    vocabulary, draw = deployment.model.vocabulary_tokens, random.Random(salt)
    prompt_tokens = min(call.prompt_tokens, max(deployment.context_tokens_max - 1, 1))
    return Invocation(
        deployment=deployment.spec.name,
        prompt=TokenPrompt(
            token_ids=tuple(draw.randrange(vocabulary) for _ in range(prompt_tokens))
        ),
        max_tokens=min(call.output_tokens, max(deployment.context_tokens_max - prompt_tokens, 1)),
        ignore_eos=True,
        cache_salt=salt,
    )


def _told(of: DeploymentName, name: DeploymentName, calls: int, ends: Sequence[CallEnd]) -> str:
    """Calls that were not taken at all have missed it, too."""
    whole = cell_report(str(name), ends, from_s=-inf, until_s=inf).calls[0]
    refused = dict(whole.refused)
    if calls > len(ends):
        refused["not taken"] = calls - len(ends)
    why = ", ".join(f"{reason} {count}" for reason, count in refused.items())
    held = "the SLO held" if whole.met == calls else f"the SLO did not hold for {calls - whole.met}"
    times = [
        f"{title} p50 {seconds[50]:.3f} s, p95 {seconds[95]:.3f} s"
        for title, seconds in (("TTFT", whole.ttft_s), ("TPOT", whole.tpot_s))
        if seconds
    ]
    return "; ".join(
        [
            f"{whole.met} of {calls} calls as of {of!r} met the SLO of {name!r}: {held}",
            *times,
            *([f"refused: {why}"] if why else []),
        ]
    )
