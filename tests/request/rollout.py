"""A second opinion on a schedule: request by request, step by step, as a node would compute it.

Nothing is summed up into run queues from one turn to the next: every request has a deadline of its
own, and each turn is asked for with run queues made afresh from the requests. Nobody ever ends; the
rollout stops once every request has had its tokens, or, where weights are swapped and not all fit,
once those of all could have come since the last prompt was computed.
"""

from dataclasses import dataclass, field
from math import inf

from mesh.domain.ids import InstanceId
from mesh.domain.slo import next_due_s
from mesh.domain.steps import PrefillBudget
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.swapping import SwapRule, Weights
from mesh.policy.rules.turns import Grant, next_turn, note_turn
from mesh.request.shadow import LOOKAHEAD_TOKENS
from tests.request.schedules import Instance, Node, Request

FURTHER_TOKENS = 64
STEPS_MAX = 20_000


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """Consumes its node. `grow`: contexts grow token by token, up to what validation looks ahead;
    else they count as so long from the start.
    """

    node: Node
    grow: bool = False
    now_s: float = 0.0
    tokens: dict[int, int] = field(default_factory=dict)
    """How many tokens each request got since the rollout began, by identity."""
    excused: set[int] = field(default_factory=set)
    """Who is late for other reasons than the newcomer."""
    joined: bool = False
    calm_s: float = 0.0
    """When a prompt was last computed."""

    def misses(self) -> list[str]:
        """Tokens that come late on account of the newcomer; stops at the first."""
        self._finish_in_flight()
        self.calm_s = self.now_s
        for index, request in self.node.joining:
            self.node.instances[index].requests.append(request)
        self._excuse()
        for _ in range(STEPS_MAX):
            self._join()
            if self.joined and self._enough():
                return []
            late = self._step()
            if late:
                return late
        raise AssertionError("the rollout does not end")

    def _queues(self, now_s: float, grow: bool) -> list[RunQueue]:
        """As they are now, with the growth that validation counts on from the start."""
        queues = []
        for instance in self.node.instances:
            queue = instance.queue(now_s, 0 if grow else LOOKAHEAD_TOKENS)
            if grow:
                running = [request for request in instance.requests if not request.left]
                for request in running:
                    queue.context_tokens += min(self.tokens.get(id(request), 0), LOOKAHEAD_TOKENS)
                queue.predict()
            queues.append(queue)
        return queues

    def turn(self) -> tuple[Instance, Grant] | None:
        """Compute the next iteration, whoever it makes late."""
        turn = self._turn(self.now_s)
        if turn is not None:
            self._carry_out(*turn)
        return turn

    def _turn(self, now_s: float) -> tuple[Instance, Grant] | None:
        queues = zip(self.node.instances, self._queues(now_s, self.grow), strict=True)
        grant = next_turn(
            self.node.rule,
            [queue for instance, queue in queues if self._computes(instance)],
            now_s,
            prefill_tokens_max=self.node.tokens_max,
            turn_s_max=self.node.turn_s_max,
        )
        if grant is None:
            return None
        note_turn(grant)
        by_name = {instance.name: instance for instance in self.node.instances}
        for queue in (*grant.passed, grant.queue):
            by_name[queue.instance_id].passed = queue.passed
        return by_name[grant.queue.instance_id], grant

    def _computes(self, instance: Instance) -> bool:
        moving = self.node.moving
        still = moving is None or moving.instance_id != instance.name
        return instance.share == 1.0 and still

    def _swap_until(self, end_s: float, stepping: Instance | None) -> None:
        """End the swaps that do so until then, each followed by the next."""
        node = self.node
        while node.moving is not None and node.moved_s <= end_s:
            node.of(node.moving).share, node.moving = node.moving.share, None
            self._decide_swap(node.moved_s, stepping)

    def _decide_swap(self, now_s: float, stepping: Instance | None = None) -> None:
        node = self.node
        if node.room is None or node.moving is not None:
            return
        assert isinstance(node.rule, SwapRule)
        weights = [
            Weights(
                instance_id=InstanceId(each.name),
                weights_bytes=each.weights,
                share=each.share,
                due_s=min([request.due_s for request in each.requests], default=inf),
                may_go=each is not stepping,
            )
            for each in node.instances
        ]
        node.moving = node.rule.swap(weights, node.free())
        if node.moving is not None:
            node.moved_s = now_s + node.swap_s(node.moving)

    def _slowed_s(self, start_s: float, seconds: float) -> float:
        return seconds * (self.node.slowdown if start_s < self.node.slow_until_s else 1.0)

    def _finish_in_flight(self) -> None:
        node = self.node
        self.now_s = node.now_s
        turn = None if node.started_s is None else self._turn(node.started_s)
        if turn is not None and node.started_s is not None:
            instance, grant = turn
            seconds = self._slowed_s(node.started_s, grant.seconds)
            self.now_s = max(node.now_s, node.started_s + seconds)
            self._swap_until(self.now_s, instance)
            self._compute(instance, grant)
        self.tokens.clear()

    def _excuse(self) -> None:
        """Who could not be in time even if it computed at once."""
        there_s = self._arrivals_s()
        for instance, queue in zip(
            self.node.instances, self._queues(self.now_s, False), strict=True
        ):
            start_s = there_s[instance.name]
            for request in instance.requests:
                seconds = self._at_once_s(queue, request) if request.left else queue.decode_s
                seen_s = start_s + self._slowed_s(start_s, seconds) + self.node.margin_s
                if request.due_s < seen_s:
                    self.excused.add(id(request))
        if self.node.may_be_late:
            self.excused.add(id(self.node.newcomer))

    def _arrivals_s(self) -> dict[str, float]:
        """When the weights of each would be there, were they copied by their deadlines."""
        node = self.node
        free_s = self.now_s if node.moving is None else max(self.now_s, node.moved_s)
        there_s = {}
        dues_s = {i.name: min([r.due_s for r in i.requests], default=inf) for i in node.instances}
        for each in sorted(node.instances, key=lambda each: (dues_s[each.name], each.name)):
            if self._computes(each):
                there_s[each.name] = self.now_s
            else:
                moves = node.moving is not None and node.moving.instance_id == each.name
                share = node.moving.share if node.moving is not None and moves else each.share
                free_s += each.weights * (1.0 - share) * node.copy_s
                there_s[each.name] = free_s if share < 1.0 else node.moved_s
        return there_s

    def _at_once_s(self, queue: RunQueue, request: Request) -> float:
        """The time of its whole prompt, in the largest chunks."""
        seconds, left, past = 0.0, request.left, request.past
        while left:
            part = min(left, self.node.tokens_max)
            if queue.batch:
                seconds += queue.decode_s + queue.times.chunk_s(part, past, queue.batch)
            else:
                seconds += queue.times.prefill_s(part, past)
            left, past = left - part, past + part
        return seconds

    def _join(self) -> None:
        joins_s = self.node.now_s if self.node.joins_s is None else self.node.joins_s
        if not self.joined and self.now_s >= joins_s:
            self.node.instances[self.node.target].requests.append(self.node.newcomer)
            self.joined = True

    def _enough(self) -> bool:
        working = [instance for instance in self.node.instances if instance.requests]
        if any(request.left for instance in working for request in instance.requests):
            self.calm_s = self.now_s
        if not all(map(self._computes, working)):
            cycle_s = sum(each.weights * self.node.copy_s + self.node.away_s for each in working)
            return self.now_s - self.calm_s >= cycle_s
        return all(
            self.tokens.get(id(request), 0) >= FURTHER_TOKENS
            for instance in self.node.instances
            for request in instance.requests
        )

    def _step(self) -> list[str]:
        self._decide_swap(self.now_s)
        turn = self._turn(self.now_s)
        if turn is None:
            comes_s = inf if self.joined or self.node.joins_s is None else self.node.joins_s
            if self.node.moving is not None:
                comes_s = min(comes_s, self.node.moved_s)
                self._swap_until(comes_s, None)
            assert comes_s < inf, "something comes"
            self.now_s = max(self.now_s, comes_s)
            return []
        return self._carry_out(*turn)

    def _carry_out(self, instance: Instance, grant: Grant) -> list[str]:
        self.now_s += self._slowed_s(self.now_s, grant.seconds)
        self._swap_until(self.now_s, instance)
        return self._compute(instance, grant)

    def _compute(self, instance: Instance, grant: Grant) -> list[str]:
        """Give tokens to whom the turn has some for, at its end; who of them is late."""
        having = [
            request
            for request in instance.requests
            if not request.left and (grant.decode is None or request.name in grant.decode)
        ]
        budget = PrefillBudget(grant.prefill)
        for request in instance.requests:
            if request.left and budget.left:
                part = min(budget.tokens_of(request.name), request.left)
                request.left -= part
                request.past += part
                budget.spend(request.name, part)
                if not request.left:
                    having.append(request)
        late = []
        seen_s = self.now_s + self.node.margin_s
        for request in having * grant.iterations:
            if request.due_s < seen_s and id(request) not in self.excused:
                late.append(f"{instance.name}: due {request.due_s}, seen {seen_s}")
            pace_s = request.tpot_s or instance.tpot_s
            request.due_s = next_due_s(request.due_s, pace_s, self.now_s)
            self.tokens[id(request)] = self.tokens.get(id(request), 0) + 1
        return late
