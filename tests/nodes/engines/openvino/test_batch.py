"""Plans keep the budget, the order of submission and the sizes that the plugin likes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.ids import RequestId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import Prefill
from mesh.memory.kv_blocks import KvBlocks
from mesh_loader.encoders import Pooling
from mesh_nodes.engines.openvino.batch import padded, plan
from mesh_nodes.engines.openvino.footprint import BATCH_MAX
from mesh_nodes.engines.openvino.paged_attention import BLOCK_TOKENS
from mesh_nodes.engines.openvino.sequence import Sequence
from mesh_nodes.engines.pooling import Pool
from tests.nodes.engines.openvino.pools import pool_of
from tests.nodes.engines.serving import request


def waiting(name: str, tokens: int) -> Sequence:
    item = request(name, [1] * tokens)
    return Sequence(item, context_tokens_max=4096, vocabulary_tokens=97)


def text(name: str, tokens: int) -> Sequence:
    """One of an encoder."""
    pool = Pool(pooling=Pooling.MEAN, normalised=True, scores=False, whole=True)
    item = request(name, [1] * tokens)
    return Sequence(item, context_tokens_max=513, vocabulary_tokens=97, pool=pool)


def decoding(name: str, pool: KvBlocks) -> Sequence:
    sequence = waiting(name, 31)
    sequence.reserve(31, pool)
    sequence.computed, sequence.decoding = 31, True
    sequence.append(1)
    sequence.computed = 31
    return sequence


@given(
    decodes=st.integers(0, 20),
    prompts=st.lists(st.integers(1, 700), max_size=6),
    budget=st.integers(0, 600),
    blocks=st.integers(20, 60),
)
def test_any_plan_keeps_its_promises(
    decodes: int, prompts: list[int], budget: int, blocks: int
) -> None:
    pool = pool_of(blocks)
    running = [decoding(f"d{n}", pool) for n in range(decodes)]
    new = [waiting(f"p{n}", tokens) for n, tokens in enumerate(prompts)]
    planned = plan([*running, *new], budget, pool)
    assert [work.tokens for work in planned.work[:decodes]] == [1] * decodes
    chunks = planned.work[decodes:]
    assert [work.sequence for work in chunks] == new[: len(chunks)], "in order, none left out"
    assert sum(work.tokens for work in chunks) <= budget
    assert all(work.yields for work in chunks[:-1]), "only the last is a part of its prompt"
    assert pool.used <= blocks
    for work in chunks:
        assert work.sequence.table(work.tokens).size == -(-work.tokens // BLOCK_TOKENS)
    if new and budget:
        assert chunks or planned.starved
    assert set(planned.starved) <= set(new)


@pytest.mark.parametrize(("budget", "tokens"), [(256, 251), (512, 507), (120, 120), (16, 16)])
def test_a_long_chunk_is_cut_so_that_nothing_needs_padding(budget: int, tokens: int) -> None:
    """5 decodes and a chunk of 251 make 256; short chunks are given the whole budget."""
    pool = pool_of(100)
    running = [decoding(f"d{n}", pool) for n in range(5)]
    planned = plan([*running, waiting("p", 2000), waiting("q", 50)], budget, pool)
    assert [work.tokens for work in planned.work[5:]] == [tokens]
    if budget >= 128:
        assert padded(5 + tokens) == 5 + tokens


def test_a_chunk_is_not_cut_to_next_to_nothing() -> None:
    """Sizes lie 256 apart above 4096: a cut may leave no more than half of the chunk."""
    pool = pool_of(1000)
    prompts = [waiting(f"p{n}", 100) for n in range(41)]
    planned = plan([*prompts, waiting("long", 2000)], 4100 + 150, pool)
    assert planned.work[-1].tokens == 150


def test_prompts_that_are_asked_about_take_no_more_rows_of_logits_than_a_batch() -> None:
    pool = pool_of(1000)
    running = [decoding(f"d{n}", pool) for n in range(20)]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    asked = [
        Sequence(
            replace(request(name, [1] * 80), sampling=sampling),
            context_tokens_max=4096,
            vocabulary_tokens=97,
        )
        for name in ("p", "q")
    ]
    planned = plan([*running, *asked], 1000, pool)
    assert [work.tokens for work in planned.work[20:]] == [80, BATCH_MAX - 22 - 80]
    rows = sum(work.prompt_rows + work.yields for work in planned.work)
    assert rows <= BATCH_MAX


SHARES = tuple((RequestId(name), tokens) for name, tokens in (("a", 1), ("b", 9), ("c", 9)))


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(512, [500, 9]), (100, [500]), (SHARES, [500]), (600, [500, 9, 9])],
)
def test_a_text_beyond_the_budget_is_computed_alone(budget: Prefill, tokens: list[int]) -> None:
    planned = plan([text("a", 500), text("b", 9), text("c", 9)], budget, pool_of(60))
    assert [work.tokens for work in planned.work] == tokens
