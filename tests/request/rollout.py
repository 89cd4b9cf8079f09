"""A second opinion on a schedule: request by request, step by step, as a node would compute it.

Nothing is summed up into run queues from one turn to the next: every request has a deadline of its
own, and each turn is asked for with run queues made afresh from the requests. Nobody ever ends; the
rollout stops once every request has had its tokens.
"""

from dataclasses import dataclass, field

from mesh.domain.slo import next_due_s
from mesh.domain.steps import PrefillBudget
from mesh.policy.rules.run_queues import RunQueue
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

    def misses(self) -> list[str]:
        """Tokens that come late on account of the newcomer; stops at the first."""
        self._finish_in_flight()
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
        grant = next_turn(
            self.node.rule,
            self._queues(now_s, self.grow),
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
            self._compute(instance, grant)
        self.tokens.clear()

    def _excuse(self) -> None:
        """Who could not be in time even if it computed at once."""
        for instance, queue in zip(
            self.node.instances, self._queues(self.now_s, False), strict=True
        ):
            for request in instance.requests:
                seconds = self._at_once_s(queue, request) if request.left else queue.decode_s
                seen_s = self.now_s + self._slowed_s(self.now_s, seconds) + self.node.margin_s
                if request.due_s < seen_s:
                    self.excused.add(id(request))
        if self.node.may_be_late:
            self.excused.add(id(self.node.newcomer))

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
        return all(
            self.tokens.get(id(request), 0) >= FURTHER_TOKENS
            for instance in self.node.instances
            for request in instance.requests
        )

    def _step(self) -> list[str]:
        turn = self._turn(self.now_s)
        if turn is None:
            assert self.node.joins_s is not None
            self.now_s = self.node.joins_s
            return []
        return self._carry_out(*turn)

    def _carry_out(self, instance: Instance, grant: Grant) -> list[str]:
        self.now_s += self._slowed_s(self.now_s, grant.seconds)
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
