"""A plan keeps to budget and blocks, in the order of submission, and takes nothing from anyone."""

from mesh.domain.ids import RequestId
from mesh.domain.reasons import FinishReason
from mesh.domain.request import SamplingParams
from mesh.domain.steps import Decode, EngineRequest, Prefill
from mesh_nodes.engines.vllm.turn import Plan, Sequence, plan, sequence_of

BLOCK = 4


def request(name: str, prompt: int, **sampling: object) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_tokens=tuple(range(prompt)),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        stop_token_ids=(9,),
    )


def sequence(
    name: str, prompt: int, *, computed: int = 0, decoding: bool = False, whole: bool = False
) -> Sequence:
    made = sequence_of(request(name, prompt), key=name, context_tokens_max=64, whole=whole)
    made.computed, made.decoding = computed, decoding
    return made


def planned(
    *active: Sequence,
    budget: Prefill = 100,
    free: int = 100,
    shared: int = 0,
    decode: Decode = None,
) -> Plan:
    """`shared`: tokens of whoever has computed nothing yet that others have, in as many blocks."""

    def adopt(sequence: Sequence, blocks_free: int) -> int:
        if sequence.computed:
            return 0
        blocks = min(shared // BLOCK, blocks_free)
        sequence.adopted = sequence.computed = blocks * BLOCK
        return blocks

    return plan(
        active,
        prefill=budget,
        prefill_tokens_max=1000,
        decode=decode,
        blocks_free=free,
        block_tokens=BLOCK,
        adopt=adopt,
    )


def tokens(result: Plan) -> dict[str, int]:
    return {work.sequence.key: work.tokens for work in result.work}


def test_decodes_come_before_prompts_whatever_the_order() -> None:
    result = planned(sequence("p", 10), sequence("d", 5, computed=4, decoding=True), budget=6)
    assert list(tokens(result).items()) == [("d", 1), ("p", 6)]


def test_only_those_that_are_named_compute_and_a_share_is_nobody_elses() -> None:
    named = planned(
        *(sequence(name, 5, computed=4, decoding=True) for name in "de"),
        *(sequence(name, 10) for name in "pqr"),
        budget=((RequestId("q"), 12), (RequestId("r"), 3)),
        decode=(RequestId("e"),),
    )
    assert tokens(named) == {"e": 1, "q": 10, "r": 3}


def test_what_one_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    result = planned(sequence("a", 3), sequence("b", 5), sequence("c", 5), budget=6)
    assert tokens(result) == {"a": 3, "b": 3}


def test_a_prompt_computes_as_much_as_there_are_blocks_for() -> None:
    result = planned(sequence("a", 10), free=2)
    assert (tokens(result), result.starved) == ({"a": 2 * BLOCK}, [])


def test_who_finds_no_block_starves_and_who_needs_none_goes_on() -> None:
    full = sequence("full", BLOCK + 1, computed=BLOCK, decoding=True)
    within = sequence("within", 3, computed=2, decoding=True)
    result = planned(full, within, sequence("new", 2), free=0)
    assert tokens(result) == {"within": 1}
    assert result.starved == ["full", "new"]


def test_a_starved_prompt_leaves_the_budget_to_one_that_fits_in_its_own_block() -> None:
    result = planned(sequence("new", 6), sequence("begun", 4, computed=2), budget=3, free=0)
    assert tokens(result) == {"begun": 2}
    assert result.starved == ["new"]


def test_without_a_budget_no_prompt_is_planned_nor_starved() -> None:
    assert planned(sequence("p", 3), budget=0, free=0) == Plan()


def test_what_others_have_computed_costs_blocks_and_no_budget() -> None:
    first, second = sequence("a", 10), sequence("b", 10)
    result = planned(first, second, budget=4, free=5, shared=2 * BLOCK)
    assert tokens(result) == {"a": 2}
    assert (first.adopted, first.left) == (2 * BLOCK, 2)
    assert result.starved == ["b"], "its two blocks are had, and there is no third"


def test_a_stop_token_ends_before_a_limit_does() -> None:
    stopping = sequence_of(request("r", 3, max_tokens=1), key="r", context_tokens_max=64)
    assert stopping.append(9) is FinishReason.STOP
    ignoring = sequence_of(
        request("r", 3, max_tokens=2, ignore_eos=True), key="r", context_tokens_max=64
    )
    assert [ignoring.append(9), ignoring.append(9)] == [None, FinishReason.LENGTH]


def test_a_full_context_ends_a_request() -> None:
    full = sequence_of(request("r", 3), key="r", context_tokens_max=4)
    assert full.append(1) is FinishReason.LENGTH


def test_a_text_is_computed_whole_and_beyond_the_budget_only_by_itself() -> None:
    a, b, c = (
        sequence(name, prompt, whole=True) for name, prompt in (("a", 5), ("b", 9), ("c", 3))
    )
    assert tokens(planned(a, b, c, budget=8)) == {"a": 5, "c": 3}
    assert tokens(planned(b, c, budget=8)) == {"b": 9}
    lacking = planned(b, c, budget=8, free=2)
    assert (tokens(lacking), lacking.starved) == ({"c": 3}, ["b"])
