"""Nodes in plain numbers: instances and their requests, as run queues for the turn rule, as a
schedule for `mesh.request.shadow`, and for the reference in `tests.request.rollout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mesh.compute.times import Times
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.profile import Grid
from mesh.domain.reasons import Verdict
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.policy.rules.swapping import Swap, SwapRule
from mesh.policy.rules.turns import TurnRule
from mesh.request.pool import Held, Pool
from mesh.request.shadow import Newcomer, Schedule, validate
from tests.support.profiles import profile

TOKENS_MAX = 256


class Job(NamedTuple):
    """See `mesh.policy.rules.decode_capacity.Job`, with names for its parts."""

    due_s: float
    decode_s: float
    tpot_s: float


def times(
    *,
    decode_s: float = 0.1,
    decode_more_s: float = 0.0,
    context_token_s: float = 0.0,
    prefill_token_s: float = 0.001,
) -> Times:
    """A decode takes `decode_s` for one request, `decode_more_s` longer for each more, and
    `context_token_s` longer for each token of their mean context; every prompt token takes
    `prefill_token_s`, beside a decode or without.
    """
    one, many = decode_s, decode_s + 100 * decode_more_s
    long_s = 10_000 * context_token_s
    decode = Grid(
        rows=(1, 101),
        columns=(0, 10_000),
        seconds=((one, one + long_s), (many, many + long_s)),
    )
    prefill = Grid(rows=(0, 10_000), columns=(0,), seconds=((0.0,), (10_000 * prefill_token_s,)))
    return Times(profile(decode=decode, prefill=prefill))


TIMES = times()
"""A decode takes 0.1 s, every prompt token 1 ms."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """With `left` prompt tokens to compute it waits, without it runs."""

    due_s: float
    left: int = 0
    past: int = 10
    tpot_s: float = 0.0
    """Its pace; 0: that of its instance."""

    @property
    def name(self) -> RequestId:
        return RequestId(str(id(self)))


def a_prompt(left: int, due_s: float) -> Request:
    """A prompt of which nothing has been computed yet."""
    return Request(due_s=due_s, left=left, past=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Instance:
    name: str
    times: Times
    tpot_s: float = 1.0
    requests: list[Request] = field(default_factory=list)
    """In order of submission."""
    passed: int = 0
    weights: int = 1
    """Their size, in what `Node.room` counts."""
    share: float = 1.0
    """The share of them that is on the device."""

    def queue(self, now_s: float, lookahead_tokens: int = 0) -> RunQueue:
        """As its owner sees it now."""
        queue = RunQueue(
            instance_id=InstanceId(self.name),
            times=self.times,
            tpot_s=self.tpot_s,
            passed=self.passed,
        )
        for request in self.requests:
            if request.left:
                queue.prompts.append(prompt_of(request))
            else:
                queue.batch += 1
                queue.context_tokens += request.past
                queue.running.append(request.name)
                queue.add(request.due_s, now_s)
        paces_s = [request.tpot_s for request in self.requests if request.tpot_s]
        if paces_s:
            queue.tpot_s = min(self.tpot_s, *paces_s)
            running = [request for request in self.requests if not request.left]
            rows = [(r.name, r.due_s, r.past, r.tpot_s or self.tpot_s) for r in running]
            queue.divide(rows, now_s)
        queue.predict(lookahead_tokens)
        return queue


def instance(
    name: str,
    *due_s: float,
    times: Times,
    tpot_s: float = 1.0,
    prompts: Sequence[tuple[int, float]] = (),
    passed: int = 0,
) -> Instance:
    """One running request for each deadline, and prompts of so many tokens, due then."""
    running = [Request(due_s=due) for due in due_s]
    waiting = [a_prompt(left, due) for left, due in prompts]
    return Instance(
        name=name, times=times, tpot_s=tpot_s, requests=running + waiting, passed=passed
    )


def queue(
    name: str,
    *due_s: float,
    times: Times,
    tpot_s: float = 1.0,
    prompts: Sequence[tuple[int, float]] = (),
    passed: int = 0,
    now_s: float = 0.0,
) -> RunQueue:
    """The run queue of such an instance."""
    made = instance(name, *due_s, times=times, tpot_s=tpot_s, prompts=prompts, passed=passed)
    return made.queue(now_s)


def prompt_of(request: Request) -> Prompt:
    return Prompt(
        request_id=request.name,
        left=request.left,
        past=request.past,
        due_s=request.due_s,
        tpot_s=request.tpot_s,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A node and what comes to it. `target` is the index of the newcomer's instance."""

    instances: list[Instance]
    newcomer: Request
    target: int = -1
    now_s: float = 0.0
    tokens_max: int = TOKENS_MAX
    rule: TurnRule = HEADROOM
    turn_s_max: float = 0.0
    started_s: float | None = None
    joining: list[tuple[int, Request]] = field(default_factory=list)
    slowdown: float = 1.0
    slow_until_s: float = 0.0
    margin_s: float = 0.0
    joins_s: float | None = None
    may_be_late: bool = False
    room: int | None = None
    """For weights on the device, where they are swapped; `None` where they are not."""
    copy_s: float = 0.0
    """For each of the sizes that weights have, to the device."""
    away_s: float = 0.0
    grow_s: float = 0.0
    """For how long nothing computes when the newcomer joins: a KV cache grows for it."""
    grows: Sequence[tuple[float, float]] = ()
    """Other KV caches that grow: from when on, and for how long."""
    moving: Swap | None = None
    """The weights that are on their way until `moved_s`."""
    moved_s: float = 0.0

    def of(self, swap: Swap) -> Instance:
        return next(each for each in self.instances if each.name == swap.instance_id)

    def free(self) -> int:
        """What the weights that are on the device leave of the room."""
        assert self.room is not None
        return self.room - sum(round(each.weights * each.share) for each in self.instances)

    def swap_s(self, swap: Swap) -> float:
        of = self.of(swap)
        more = swap.share - of.share
        return max(more * of.weights * self.copy_s, -more * self.away_s)

    def pool(self) -> Pool | None:
        """Made afresh each time."""
        if self.room is None:
            return None
        assert isinstance(self.rule, SwapRule)
        held = {
            InstanceId(each.name): Held(
                weights_bytes=each.weights,
                copy_s=each.weights * self.copy_s,
                share=each.share,
            )
            for each in self.instances
        }
        pool = Pool(rule=self.rule, held=held, free_bytes=self.free(), away_s=self.away_s)
        if self.moving is not None:
            pool.begin(self.moving, self.now_s)
            pool.moved_s = self.moved_s
        return pool

    def schedule(self, *, target_known: bool = True) -> tuple[Schedule, Newcomer]:
        """What the controller would give to `validate`, made afresh each time."""
        queues = [instance.queue(self.now_s) for instance in self.instances]
        newcomer = Newcomer(
            queue=queues[self.target],
            prompt=prompt_of(self.newcomer),
            joins_s=self.now_s if self.joins_s is None else self.joins_s,
            may_be_late=self.may_be_late,
            grow_s=self.grow_s,
        )
        known = (
            queues if target_known else [queue for queue in queues if queue is not newcomer.queue]
        )
        schedule = Schedule(
            queues=known,
            now_s=self.now_s,
            prefill_tokens_max=self.tokens_max,
            rule=self.rule,
            turn_s_max=self.turn_s_max,
            started_s=self.started_s,
            joining=[(queues[index], prompt_of(request)) for index, request in self.joining],
            slowdown=self.slowdown,
            slow_until_s=self.slow_until_s,
            margin_s=self.margin_s,
            grows=self.grows,
            pool=self.pool(),
        )
        return schedule, newcomer

    def verdict(self) -> Verdict:
        return validate(*self.schedule())
