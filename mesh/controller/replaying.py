"""The last minute of a deployment's calls, asked again of it or of another one, and how it went.

The calls come at the same distances, with prompts and answers of the same lengths. Their words are
others, for nobody keeps those. Before: `mesh.http.operating`. After: the gateway, by which all
calls go, and the book of calls, which knows how they ended.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import field
from itertools import count
from math import inf
from statistics import fmean

from mesh.controller.gateway import Gateway
from mesh.controller.lookup import find_deployment
from mesh.domain.access import NOBODY, TenantName
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.errors import DeadlineExceeded, InvalidInput, MeshError, NotFound, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Invocation, TokenPrompt
from mesh.domain.slo import SLO_TOKENS_PER_S_MAX, Slo
from mesh.domain.values import dataclass, replace
from mesh.report.calls import CallBook, CallEnd
from mesh.report.cell_report import cell_report
from mesh.wire.access import caller

MINUTE_S = 60.0
REPLAY_S_MAX = 300.0
"""From the first call to the last answer."""
REPLAYS_MAX = 4
"""At most so many tenants replay at a time."""
DRAWN_AHEAD_S = 1.0
"""A prompt is drawn so long before its call is due: 128 thousand tokens take 10 ms of a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    after_s: float
    prompt_tokens: int
    output_tokens: int
    slo: Slo | None
    """The class of the call, or its own limits; `None` where it named neither."""


@dataclass(slots=True, kw_only=True)
class _Answers:
    ends: list[CallEnd] = field(default_factory=list)
    """How the calls ended that were taken."""
    refused: str = ""
    """Why the first of the others was not taken."""


class Replaying:
    """A tenant runs one replay at a time, and so do operators: two would lengthen each other's
    calls.
    """

    def __init__(self, gateway: Gateway, book: CallBook) -> None:
        self._gateway = gateway
        self._book = book
        self._numbers = count(1)
        self._running: set[TenantName] = set()

    async def replay(self, name: DeploymentName, of: DeploymentName) -> str:
        """Ask `name` for what `of` was asked for, and say how many calls met the SLO. Raises
        NotFound, InvalidInput for a deployment that generates no text, Unavailable while another
        replay of the tenant's runs, or too many of others, and DeadlineExceeded.
        """
        spec = find_deployment(of, self._gateway.deployed()).spec
        deployment = self._gateway.deployment(name)
        if deployment.spec.task is not None:
            raise InvalidInput(
                f"{name!r} has task {deployment.spec.task}; only deployments that generate text "
                "are replayed",
                hint="name a deployment without spec.task",
            )
        asked, whole = self._minute(spec)
        tenant = caller().tenant
        if tenant in self._running:
            raise Unavailable("another replay is running", hint="wait for its end")
        others = len(self._running - {NOBODY})
        if tenant != NOBODY and others >= REPLAYS_MAX:
            raise Unavailable(
                f"{others} replays of other tenants are running; {REPLAYS_MAX} is the limit",
                hint="wait for the end of one",
            )
        self._running.add(tenant)
        try:
            async with asyncio.timeout(REPLAY_S_MAX):
                answers = await self._ask(deployment, asked)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(asked)} calls were not answered within {REPLAY_S_MAX:.0f} s"
            ) from None
        finally:
            self._running.discard(tenant)
        told = _told(of, name, len(asked), answers)
        if whole:
            return told
        return f"{told}; earlier calls of that minute are not remembered any more"

    def _minute(self, of: DeploymentSpec) -> tuple[Sequence[_Asked], bool]:
        """The calls that came within the minute before the last of them did, and whether all of
        these are remembered. Raises NotFound.
        """
        stories = self._book.stories
        calls = [
            call for call in (*stories, *self._book.open.values()) if call.deployment == of.name
        ]
        if not calls:
            raise NotFound(
                f"no call to {of.name!r} is remembered",
                hint="the calls of five minutes are remembered",
            )
        from_s = max(call.arrived_s for call in calls) - MINUTE_S
        shown = sorted(
            (call for call in calls if call.arrived_s >= from_s), key=lambda call: call.arrived_s
        )
        full = len(stories) == stories.maxlen
        whole = not full or (stories[0].ended_s or 0.0) < from_s
        usual = round(fmean([call.output_tokens for call in shown if call.output_tokens] or [1]))
        return [
            _Asked(
                after_s=call.arrived_s - shown[0].arrived_s,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.output_tokens or usual,
                slo=None if call.slo == of.slo else call.slo,
            )
            for call in shown
        ], whole

    async def _ask(self, deployment: Deployment, asked: Sequence[_Asked]) -> _Answers:
        answers = _Answers()
        salt = f"replay {next(self._numbers)}"
        now_s = asyncio.get_running_loop().time
        begin_s = now_s() + DRAWN_AHEAD_S

        async def one(number: int, call: _Asked) -> None:
            await asyncio.sleep(call.after_s)
            invocation = await asyncio.to_thread(_invocation, deployment, call, f"{salt}-{number}")
            await asyncio.sleep(begin_s + call.after_s - now_s())
            story = None
            try:
                async with self._gateway.call(invocation) as made:
                    # At once: on a busy cell the book forgets it before its answer is read.
                    story = self._book.find(made.request_id)
                    async for _ in made:
                        pass
            except MeshError as error:  # the story has how it ended, if it was taken
                if story is None:
                    answers.refused = answers.refused or error.message
            if story is not None and story.ended_s is not None:
                answers.ends.append(story.ended())

        async with asyncio.TaskGroup() as calls:
            for number, call in enumerate(asked):
                calls.create_task(one(number, call))
        return answers


def _invocation(deployment: Deployment, call: _Asked, salt: str) -> Invocation:
    """It shares what it computes with no other call: its own words would be in no cache either."""
    spec, draw = deployment.spec, random.Random(salt)
    prompt_tokens = min(call.prompt_tokens, max(deployment.context_tokens_max - 1, 1))
    token_ids = draw.choices(range(deployment.model.vocabulary_tokens), k=prompt_tokens)
    asked = Invocation(
        deployment=spec.name,
        prompt=TokenPrompt(token_ids=tuple(token_ids)),
        max_tokens=min(call.output_tokens, max(deployment.context_tokens_max - prompt_tokens, 1)),
        ignore_eos=True,
        cache_salt=salt,
    )
    slo = call.slo
    if slo is None:
        return asked
    if slo.name:
        known = any(slo.name == one.name for one in spec.classes)
        return replace(asked, slo_class=slo.name) if known else asked
    # A call that brings its own TTFT has it for any length of prompt.
    own_ttft = slo.ttft_tokens_per_s == SLO_TOKENS_PER_S_MAX
    return replace(asked, slo_ttft_s=slo.ttft_s if own_ttft else None, slo_tpot_s=slo.tpot_s)


def _told(of: DeploymentName, name: DeploymentName, calls: int, answers: _Answers) -> str:
    """What came of the calls, in words; those that were not taken at all have missed the SLO."""
    ends = answers.ends
    whole = cell_report(str(name), ends, from_s=-inf, until_s=inf).calls[0]
    refused = dict(whole.refused)
    if calls > len(ends):
        refused["not taken"] = calls - len(ends)
    why = ", ".join(f"{reason} {count}" for reason, count in refused.items())
    if answers.refused:
        why += f" ({answers.refused})"
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
