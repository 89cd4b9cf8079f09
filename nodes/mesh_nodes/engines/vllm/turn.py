"""Plans one iteration: who computes how many tokens, and who would, had it KV blocks.

Decodes go first, one token each; then prompts in the order of their submission, as far as the
budget reaches. A request that finds no block starves and keeps those that it has: vLLM's own
scheduler would take them away and compute them again later, at times of its choosing. Before:
`instance`, which holds the sequences. After: `internals`, which has vLLM compute the plan.
"""

from collections.abc import Callable, Iterable
from dataclasses import field

from mesh.domain.ids import RequestId
from mesh.domain.reasons import FinishReason
from mesh.domain.request import TokenLogprobs
from mesh.domain.steps import Decode, EngineRequest, Prefill, PrefillBudget
from mesh.domain.values import dataclass
from mesh_nodes.engines.vllm.footprint import LOGIT_ROWS_MAX


@dataclass(slots=True)
class Sequence:
    """A running request: `length` tokens of prompt and output, `computed` of them in the cache."""

    request: EngineRequest
    key: str
    """What vLLM knows it by: never used twice, whatever ids requests come with."""
    length: int
    length_max: int
    told: list[TokenLogprobs]
    """The log-probabilities of the token that came last, where they were asked for."""
    computed: int = 0
    adopted: int = 0
    """How many of the computed tokens other requests have computed."""
    prompt_told: tuple[TokenLogprobs, ...] = ()
    """Those of the prompt's tokens, once it is computed, where they were asked for."""
    decoding: bool = False
    """Past its prefill: one token an iteration."""
    whole: bool = False
    """Its tokens are computed in one iteration."""

    @property
    def prompt_top(self) -> int | None:
        """So many likeliest tokens are told with each of the prompt; `None` tells of none."""
        request = self.request
        return None if request.output_tokens else request.sampling.prompt_logprobs

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return self.length - self.computed

    def append(self, token_id: int) -> FinishReason | None:
        """Take a new token; says why it is the last, if it is."""
        self.length += 1
        self.decoding = True
        if token_id in self.request.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.length_max else None


def sequence_of(
    request: EngineRequest,
    *,
    key: str,
    context_tokens_max: int,
    told: list[TokenLogprobs] | None = None,
    whole: bool = False,
) -> Sequence:
    prompt_tokens = len(request.prompt_tokens)
    return Sequence(
        request=request,
        key=key,
        length=prompt_tokens + len(request.output_tokens),
        told=[] if told is None else told,
        length_max=min(prompt_tokens + request.sampling.max_tokens, context_tokens_max),
        whole=whole,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence computes in this iteration."""

    sequence: Sequence
    tokens: int


@dataclass(slots=True)
class Plan:
    work: list[Work] = field(default_factory=list)
    starved: list[RequestId] = field(default_factory=list)


def plan(
    active: Iterable[Sequence],
    *,
    prefill: Prefill,
    prefill_tokens_max: int,
    decode: Decode = None,
    blocks_free: int,
    block_tokens: int,
    adopt: Callable[[Sequence, int], int],
) -> Plan:
    """Plan an iteration of no more than `prefill_tokens_max` prompt tokens, whatever is asked for.

    `active` is in the order of submission; `blocks_free` may still be taken. `adopt` has one that
    has computed nothing yet take what others have of it, within so many blocks that are free, and
    says how many it took.
    """
    sequences = list(active)
    result = Plan()
    for sequence in sequences:
        if sequence.decoding and (decode is None or sequence.request.request_id in decode):
            blocks_free -= _give(result, sequence, 1, blocks_free, block_tokens)
    budget, tokens_left = PrefillBudget(prefill), prefill_tokens_max
    for sequence in sequences:
        request_id = sequence.request.request_id
        most = min(budget.tokens_of(request_id), tokens_left)
        if not sequence.decoding and most > 0:
            # What is computed whole goes beyond the budget where it is the iteration's only text.
            beyond = sequence.whole and sequence.left > most
            if beyond and result.work:
                continue
            blocks_free -= adopt(sequence, blocks_free)
            wanted = sequence.left if beyond else min(most, sequence.left)
            if sequence.prompt_top is not None:
                wanted = min(wanted, LOGIT_ROWS_MAX)
            blocks_free -= _give(result, sequence, wanted, blocks_free, block_tokens)
            if result.work and result.work[-1].sequence is sequence:
                budget.spend(request_id, result.work[-1].tokens)
                tokens_left -= result.work[-1].tokens
                if beyond:
                    break
    return result


def _give(
    result: Plan, sequence: Sequence, wanted: int, blocks_free: int, block_tokens: int
) -> int:
    """Let it compute so many tokens, or as many as there are blocks for, unless it is whole; the
    blocks that it takes.

    It holds the blocks that its computed tokens fill, and no other.
    """
    held = -(-sequence.computed // block_tokens)
    missing = -(-(sequence.computed + wanted) // block_tokens) - held
    taken = min(missing, blocks_free)
    tokens = min(wanted, (held + taken) * block_tokens - sequence.computed)
    if tokens < (wanted if sequence.whole else 1):
        result.starved.append(sequence.request.request_id)
        return 0
    result.work.append(Work(sequence, tokens))
    return taken
