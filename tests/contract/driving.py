"""Drives one instance of an engine under test, and checks every answer against the contract.

What must hold after any step is checked here, in `Driver.step`, so that each test of the suite and
each random walk checks all of it; the tests themselves only make things happen.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.profile import IterationShape
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams, TokenLogprobs
from mesh.domain.steps import Decode, Prefill, PrefixChange
from mesh.runtime.engine import Engine, EngineRequest, InstanceMemory, LoadOrder, StepResult

STEPS_MAX = 2000
"""Steps after which a run that should have ended counts as hanging."""


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def no_progress(phase: str, share: float) -> None:
    """For loads whose progress nobody watches."""


def note_prefixes(told: set[int], change: PrefixChange | None) -> None:
    """What comes is new, and what goes was there."""
    if change is not None:
        assert told.isdisjoint(change.came)
        assert told.issuperset(change.went)
        told.update(change.came)
        told.difference_update(change.went)


@dataclass(slots=True)
class Running:
    """What the test knows of a request: from the contract alone, not from the engine."""

    request: EngineRequest
    left: int
    """Prompt tokens still to compute, those of earlier output with them."""
    found: int = 0
    """Tokens that were in the cache when it was submitted."""
    adopted: int = 0
    """Tokens that it has not computed itself."""
    tokens: list[int] = field(default_factory=list)
    """New output, without the output that the request came with."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None

    @property
    def total(self) -> int:
        request = self.request
        return len(request.prompt_tokens) + len(request.output_tokens) + len(self.tokens)

    @property
    def decoding(self) -> bool:
        return bool(self.tokens)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values the cache must hold: all but the newest."""
        return self.total - (1 if self.decoding else self.left)


class Driver:
    """One loaded instance. Names of requests are unique for as long as the driver lives."""

    def __init__(self, engine: Engine, order: LoadOrder, *, spare_blocks: int = 0) -> None:
        self.engine = engine
        self.order = order
        self.instance_id: InstanceId = order.instance_id
        self.loaded = engine.load(order, no_progress)
        self.block_tokens = self.loaded.footprint.block_tokens
        self._spare_blocks = spare_blocks
        self.running: dict[RequestId, Running] = {}
        """In the order of submission."""
        self.ended: dict[RequestId, Running] = {}
        self.resident = not order.swapped
        self.check_books()

    @property
    def books(self) -> InstanceMemory:
        """The instance's own line in the engine's books."""
        (line,) = [m for m in self.engine.memory() if m.instance_id == self.instance_id]
        return line

    def submit(
        self,
        name: str,
        prompt: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        output: Iterable[int] = (),
        stop_ids: tuple[int, ...] = (),
        salt: str | None = None,
    ) -> Running:
        request = EngineRequest(
            request_id=RequestId(name),
            attempt=1 + len(self.ended),
            prompt_tokens=tuple(prompt),
            output_tokens=tuple(output),
            sampling=sampling or greedy(),
            stop_token_ids=stop_ids,
            cache_salt=salt,
        )
        found = self.engine.submit(self.instance_id, request)
        given = len(request.prompt_tokens) + len(request.output_tokens)
        assert 0 <= found < given
        self.running[request.request_id] = running = Running(request, given - found, found)
        return running

    def abort(self, name: str) -> None:
        self.engine.abort(self.instance_id, RequestId(name))
        self.running.pop(RequestId(name), None)
        self.check_books()

    def resize(self, kv_blocks: int) -> int:
        resized = self.engine.resize_kv(self.instance_id, kv_blocks)
        assert resized.kv_blocks == self.books.kv_blocks
        assert resized.elapsed_s >= 0
        self.check_books()
        return resized.kv_blocks

    def swap(self, share: float) -> None:
        """Nothing but the weights goes or comes, and pages of blocks that rest."""
        before = replace(self.books, weights_bytes=0, kv_held_bytes=0)
        self.engine.swap(self.instance_id, share)
        self.resident = share == 1.0
        assert replace(self.books, weights_bytes=0, kv_held_bytes=0) == before
        self.check_books()

    def step(self, prefill: Prefill = 64, decode: Decode = None) -> StepResult:
        result = self.engine.step(self.instance_id, prefill, decode=decode)
        self._check_progress(result, prefill)
        decodes = [
            r
            for request_id, r in self.running.items()
            if r.decoding and (decode is None or request_id in decode)
        ]
        attended = {r.request.request_id: r.total for r in decodes}
        yielding = [output.request_id for output in result.outputs]
        decoded = [request_id for request_id in yielding if request_id in attended]
        assert result.decode_batch == len(decoded)
        assert result.context_tokens == sum(attended[request_id] for request_id in decoded)
        for starving in result.starved:
            assert starving in self.running
            assert starving not in yielding
        self._take(result)
        assert result.kv_blocks_used == self.books.kv_blocks_used
        assert result.elapsed_s >= 0
        self.check_books()
        return result

    def finish(self, *, prefill_tokens_max: int = 64) -> None:
        """Step until every request has ended."""
        for _ in range(STEPS_MAX):
            if not self.running:
                return
            self.step(prefill_tokens_max)
        raise AssertionError(f"{list(self.running)} have not ended after {STEPS_MAX} steps")

    def run(
        self,
        name: str,
        prompt: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        output: Iterable[int] = (),
    ) -> list[int]:
        """The new tokens of one request, with whatever else is running."""
        running = self.submit(name, prompt, sampling, output=output)
        self.finish()
        return running.tokens

    def measure(self, **shape: int) -> float:
        """One iteration of this shape leaves the books as they were; but the memory that it put
        under free blocks may stay.
        """
        before = self._books_but_held()
        try:
            elapsed_s = self.engine.measure(self.instance_id, IterationShape(**shape))
        finally:
            assert self._books_but_held() == before
            self.check_books()
        assert elapsed_s > 0
        return elapsed_s

    def check_books(self) -> None:
        """Blocks in use are those that the running requests' computed tokens fill."""
        books = self.books
        needed = sum(-(-r.computed // self.block_tokens) for r in self.running.values())
        most = needed + self._spare_blocks * len(self.running)
        assert books.kv_blocks_used <= most
        assert self._shares() or needed <= books.kv_blocks_used
        assert books.kv_blocks_cached >= 0
        assert books.kv_blocks_used <= books.kv_blocks
        stated = self.loaded.footprint
        spared_bytes = stated.instance_bytes(0) - books.weights_bytes
        if self.resident:
            assert spared_bytes in (0, stated.shared_bytes), "of weights that others have"
        else:
            assert 0 < spared_bytes <= stated.weights_bytes
        assert books.kv_block_bytes == self.loaded.footprint.kv_block_bytes
        assert books.kv_used_bytes == books.kv_blocks_used * books.kv_block_bytes
        kept_blocks = books.kv_blocks_used + books.kv_blocks_cached
        assert books.kv_held_bytes >= kept_blocks * books.kv_block_bytes

    def _shares(self) -> bool:
        """Whether requests may have blocks that others computed."""
        return any(r.request.cache_salt is not None for r in self.running.values())

    def _books_but_held(self) -> list[InstanceMemory]:
        return [replace(line, kv_held_bytes=0) for line in self.engine.memory()]

    def _check_progress(self, result: StepResult, prefill: Prefill) -> None:
        """Prefill keeps to its budget, and what is left of it is said truthfully."""
        left = dict(result.prefill_left)
        if isinstance(prefill, int):
            assert 0 <= result.prefill_tokens <= max(prefill, 0)
        else:
            most = dict(prefill)
            for request_id, running in self.running.items():
                if not running.decoding:
                    computed = running.left - left.get(request_id, 0)
                    assert computed <= most.get(request_id, 0)
        waiting = [i for i, r in self.running.items() if not r.decoding]
        assert len(left) == len(result.prefill_left)
        assert set(left) <= set(waiting)
        assert all(0 < count <= self.running[i].left for i, count in left.items())
        computed = sum(self.running[i].left - left.get(i, 0) for i in waiting)
        if self._shares():
            assert (computed - result.prefill_tokens) % self.block_tokens == 0
            assert 0 <= result.prefill_tokens <= computed
        else:
            assert result.prefill_tokens == computed
        past = sum(
            (self.running[i].left - left.get(i, 0)) * self.running[i].computed for i in waiting
        )
        assert self._shares() or result.prefill_past_tokens == round(past / max(computed, 1))
        completed = {i for i in waiting if i not in left}
        assert completed == {o.request_id for o in result.outputs} & set(waiting)
        for request_id, count in left.items():
            self.running[request_id].left = count

    def _take(self, result: StepResult) -> None:
        """Each request has at most one new token, numbered without a gap, none after its end."""
        assert len({output.request_id for output in result.outputs}) == len(result.outputs)
        for output in result.outputs:
            running = self.running[output.request_id]
            assert output.attempt == running.request.attempt
            assert output.first_index == len(running.request.output_tokens) + len(running.tokens)
            (token_id,) = output.token_ids
            assert 0 <= token_id < self.order.model.vocabulary_tokens
            running.left = 0
            running.adopted += output.cached_tokens
            running.tokens.append(token_id)
            running.logprobs += output.logprobs
            assert not output.prompt_logprobs or not output.first_index
            running.prompt_logprobs += output.prompt_logprobs
            running.finish = output.finish
            if output.finish is not None:
                self.ended[output.request_id] = self.running.pop(output.request_id)
