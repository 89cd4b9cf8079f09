"""What policies share for servers of one model that compute prompts and decodes alike.

These are settings, and PolyServe's predictions of the pace with one request more and of its first
token. Nothing is promised: a policy asks for the predictions by itself, among its places. Before:
the views of a server and the times of its iterations. After: `polyserve`, `polyserve_baselines`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from mesh.compute.times import Times
from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Pace, Slo
from mesh.policy.default_answers import DefaultAnswers
from mesh.policy.interface import KvDemand, KvSize
from mesh.policy.partitions import kv_of_part
from mesh.policy.plans import Release
from mesh.policy.rules.chunked import CHUNKED
from mesh.policy.views import CellView, InstanceView, RequestView

AS_PREDICTED = NodeRule(overestimate=1.0)
STAYS_S = 3600.0
"""An idle instance is asked about again after this time."""
LEFT_TOKENS_LEAST = 16.0
"""What a request is expected to have left, however much longer than the mean its answer is."""
MeanOf = Callable[[str], float]
"""The mean length of the answers of an SLO class, by its name."""


@dataclass(frozen=True, kw_only=True)
class CoLocated(DefaultAnswers):
    """An instance has all memory of its server from its load to its end, and stays."""

    node_rule: NodeRule = AS_PREDICTED
    devices: tuple[DeviceKind, ...] = (DeviceKind.GPU,)
    promises: bool = False
    prefetches: bool = False
    pace_share: float = 0.97
    """The share of a TPOT SLO that iterations may take: the rest is for what predictions miss."""

    def pace(self, slo: Slo) -> Pace:
        """A token is due by arrival, TTFT and TPOT alone: whatever came early is credit (§3)."""
        return Pace(share=self.pace_share, slack_share=1e6)

    def kv(self, demand: KvDemand) -> KvSize:
        return kv_of_part(demand, parts=1)

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        return STAYS_S


def keeps_pace(
    request: RequestView,
    instance: InstanceView,
    cell: CellView,
    limit_s: float,
    *,
    at_peak: bool = True,
) -> bool:
    """Whether iterations take no longer than `limit_s` with the request among them, now and at the
    peak of all KV caches: each request grows to the mean length of its class's answers, and goes
    (§4.5).
    """
    times, made = cell.times(instance), cell.deployment(request.deployment)
    batch, tokens = instance.batch + 1, instance.tokens + request.tokens
    if made is None or times.decode_s(batch, tokens / batch) > limit_s:
        return False
    if not at_peak:
        return True
    growth, mean_of = cell.of_requests(instance, Growth), made.answer_tokens_of
    least, most = growth.bounds_with(request, mean_of)
    if times.decode_s(batch, least / batch) > limit_s:
        return False
    if times.decode_s(batch, most / batch) <= limit_s:
        return True
    return times.decode_s(batch, growth.peak_with(request, mean_of) / batch) <= limit_s


@dataclass(slots=True, eq=False)
class Seats:
    """A server in a forecast of requests that are about to come to it."""

    server: InstanceView
    label: str
    batch: int
    tokens: int
    times: Times
    peak: float | None = None
    """Tokens at the peak of its KV cache; `None` until somebody asks."""

    @classmethod
    def of(cls, server: InstanceView, cell: CellView) -> "Seats":
        """The server as it is."""
        return cls(server, server.label, server.batch, server.tokens, cell.times(server))

    def take(self, request: RequestView, cell: CellView, limit_s: float) -> bool:
        """The request comes to it, if iterations take no longer than `limit_s` then, as in
        `keeps_pace`; one that comes counts as if it ended at the peak.
        """
        made, batch, tokens = cell.deployment(request.deployment), self.batch + 1, request.tokens
        if made is None or batch > self.server.batch_max:
            return False
        if self.times.decode_s(batch, (self.tokens + tokens) / batch) > limit_s:
            return False
        if self.peak is None:
            self.peak = cell.of_requests(self.server, Growth).peak(made.answer_tokens_of)
        past = len(request.output_tokens) - made.answer_tokens_of(request.slo.name)
        peak = self.peak + _left_tokens(past) + request.tokens
        if self.times.decode_s(batch, peak / batch) > limit_s:
            return False
        self.batch, self.tokens, self.peak = batch, self.tokens + tokens, peak
        return True


class Growth:
    """The most tokens that the requests of a server hold at a time, where each grows to the mean
    length of its class's answers, and goes (§4.5). The sums are kept for one more request, wherever
    it comes in the order of what requests have left; while the requests stay, only other means
    change them.
    """

    def __init__(self, requests: Iterable[RequestView]) -> None:
        self._requests = sorted((of.slo.name, len(of.output_tokens), of.tokens) for of in requests)
        self._classes = list(dict.fromkeys(name for name, _, _ in self._requests))
        self._means: dict[str, float] | None = None
        self._past: list[float] = []
        """By how many tokens each is past its mean, who has most left first."""
        self._held: list[int] = []
        self._peaks: list[float] = []
        """The peak until so many have ended, and, with one more that goes before them, after."""
        self._later: list[float] = []

    def peak(self, mean_of: MeanOf) -> float:
        """Without any other request."""
        self._expect(mean_of)
        return self._peaks[-1]

    def peak_with(self, request: RequestView, mean_of: MeanOf) -> float:
        """With one request more."""
        self._expect(mean_of)
        return self._with(request, mean_of(request.slo.name))

    def bounds_with(self, request: RequestView, mean_of: MeanOf) -> tuple[float, float]:
        """Between what it is, by sums for other means: each answer that ends changes a mean a
        little, and the peak by no more than that for each request.
        """
        known = self._means or self._expect(mean_of)
        own = mean_of(request.slo.name)
        own_known = known.get(request.slo.name, own)
        offs = [0.0, own - own_known, *(mean_of(name) - mean for name, mean in known.items())]
        peak, count = self._with(request, own_known), len(self._held)
        return peak + count * min(offs), peak + count * max(offs)

    def _with(self, request: RequestView, mean: float) -> float:
        """The peak with one request more, which grows to `mean`."""
        past = len(request.output_tokens) - mean
        place = bisect_left(self._past, past)
        own = self._held[place] + request.tokens + (place + 1) * _left_tokens(past)
        return max(self._peaks[place], own, self._later[place] + request.tokens)

    def _expect(self, mean_of: MeanOf) -> dict[str, float]:
        """Bring the sums up to these means; returns them."""
        means = {name: mean_of(name) for name in self._classes}
        if means == self._means:
            return means
        self._means = means
        ordered = sorted((output - means[name], tokens) for name, output, tokens in self._requests)
        self._past = [past for past, _ in ordered]
        self._held = [0, *accumulate(tokens for _, tokens in ordered)]
        lefts = [_left_tokens(past) for past in self._past]
        # When one ends, all those before it are there still.
        ends = [
            held + n * left
            for n, (held, left) in enumerate(zip(self._held[1:], lefts, strict=True), 1)
        ]
        later = [end + left for end, left in zip(ends, lefts, strict=True)]
        self._peaks = [0.0, *accumulate(ends, max)]
        self._later = [*accumulate(reversed(later), max, initial=0.0)][::-1]
        return means


def _left_tokens(past: float) -> float:
    """What a request has left whose answer is past the mean length by so many tokens."""
    return max(-past, LEFT_TOKENS_LEAST)


def first_token_s(
    request: RequestView, instance: InstanceView, cell: CellView, limit_s: float
) -> float:
    """When its first token would come, were iterations to take `limit_s`: behind the iteration in
    flight (§4.6) and the prompts that are there, in chunks that can be kept while contexts grow
    (§4.7). The next iteration may last until somebody's token is due. Infinite where there is no
    room for any.
    """
    times, batch = cell.times(instance), instance.batch
    if not batch:
        return cell.now_s + alone_s(request.tokens, times)
    waiting = sum(of.prefill_left for of in cell.requests(instance))
    began_s, now_s = instance.node.iteration_started_s, cell.now_s
    takes_s = limit_s if waiting else times.decode_s(batch, instance.tokens / batch)
    free_s = now_s if began_s is None else max(began_s + takes_s, now_s)
    first_s = max(min(instance.next_due_s, request.due_s) - free_s, limit_s)
    left, past = request.tokens + waiting, request.tokens // 2
    decode_s = times.decode_s(batch, instance.tokens / batch + 1)
    at_first = times.chunk_tokens(first_s - decode_s, past, batch, left)
    if at_first == left:
        return free_s + decode_s + times.chunk_s(left, past, batch)
    left, iterations = left - at_first, 1
    for _ in range(2):
        decode_s = times.decode_s(batch, instance.tokens / batch + 1 + iterations)
        chunk = times.chunk_tokens(limit_s - decode_s, past, batch, left)
        if not chunk:
            return inf
        iterations = -(-left // chunk)
    return free_s + first_s + iterations * limit_s


def alone_s(tokens: int, times: Times) -> float:
    """Seconds in which a server without any other request computes a prompt."""
    most = CHUNKED.alone_tokens
    starts = range(0, tokens, most)
    return sum(times.prefill_s(min(tokens - past, most), past) for past in starts)


def batched_s(tokens: int, times: Times) -> float:
    """The same for so many tokens of short prompts."""
    whole, rest = divmod(tokens, CHUNKED.alone_tokens)
    rest_s = times.prefill_s(rest, 0) if rest else 0.0
    return whole * times.prefill_s(CHUNKED.alone_tokens, 0) + rest_s


def is_served_late(request: RequestView, policy: CoLocated, cell: CellView) -> bool:
    """Whether it is late already, and is served all the same."""
    return (request.accepted or not policy.refuses_late) and request.due_s < cell.now_s
