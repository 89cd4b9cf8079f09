"""Lengths are drawn as the tables say, and the fitted tables have their traces' means."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads.lengths import Lengths, Quantiles
from mesh_workloads.published import AZURE_CODE, AZURE_CONVERSATION, PUBLISHED

DRAWS = 10_000
MEANS = {"azure-conversation": (1154.7, 211.1), "azure-code": (2047.8, 27.9)}
"""The means of the traces' lengths, in tokens."""


def test_a_quantile_of_the_table_is_exact_and_between_two_it_is_interpolated() -> None:
    table = Quantiles(shares=(0.0, 0.5, 1.0), tokens=(1, 100, 10_000))
    assert [table.at(share) for share in (0.0, 0.5, 1.0)] == [1, 100, 10_000]
    assert table.at(0.25) == 10
    assert table.at(0.75) == 1000


@given(st.sampled_from(sorted(PUBLISHED)), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_within_the_table(name: str, one: float, other: float) -> None:
    for table in (PUBLISHED[name].input, PUBLISHED[name].output):
        low, high = table.at(min(one, other)), table.at(max(one, other))
        assert table.tokens[0] <= low <= high <= table.tokens[-1]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_draws_have_the_table_s_quantiles_and_mean(name: str) -> None:
    lengths, draw = PUBLISHED[name], random.Random(7)
    drawn = [lengths.draw(draw) for _ in range(DRAWS)]
    for table, values in (
        (lengths.input, [i for i, _ in drawn]),
        (lengths.output, [o for _, o in drawn]),
    ):
        assert sum(values) / DRAWS == pytest.approx(table.mean(), rel=0.06)
        for share, tokens in zip(table.shares, table.tokens, strict=True):
            below = sum(v < tokens for v in values) / DRAWS
            upto = sum(v <= tokens for v in values) / DRAWS
            assert below - 0.015 <= share <= upto + 0.015


@pytest.mark.parametrize("name", sorted(MEANS))
def test_fitted_tables_have_the_means_of_their_traces(name: str) -> None:
    found = PUBLISHED[name].input.mean(), PUBLISHED[name].output.mean()
    assert found == pytest.approx(MEANS[name], rel=0.02)


def test_prompts_and_answers_are_independent() -> None:
    draw = random.Random(3)
    drawn = [AZURE_CODE.draw(draw) for _ in range(DRAWS)]
    long_prompts = [o for i, o in drawn if i > AZURE_CODE.input.at(0.5)]
    assert sum(long_prompts) / len(long_prompts) == pytest.approx(AZURE_CODE.output.mean(), rel=0.1)


def test_requests_fit_into_the_context() -> None:
    lengths = replace(AZURE_CONVERSATION, context_tokens_max=4096)
    draw = random.Random(1)
    drawn = [lengths.draw(draw) for _ in range(DRAWS)]
    assert max(i + o for i, o in drawn) <= 4096
    # The load of LLM-Mesh, which has no longer requests, has means of 867 and 220.
    assert sum(i for i, _ in drawn) / DRAWS == pytest.approx(867, rel=0.15)
    assert sum(o for _, o in drawn) / DRAWS == pytest.approx(220, rel=0.1)


def test_a_context_into_which_nothing_fits_is_refused() -> None:
    table = Quantiles(shares=(0.0, 1.0), tokens=(10, 20))
    lengths = Lengths(name="n", input=table, output=table, context_tokens_max=19)
    with pytest.raises(InvalidInput, match=r"lengths n: .* longer than a context of 19"):
        lengths.draw(random.Random(0))


@pytest.mark.parametrize(
    ("shares", "tokens"),
    [
        ((0.0, 1.0), (1,)),
        ((0.0,), (1,)),
        ((0.1, 1.0), (1, 2)),
        ((0.0, 0.9), (1, 2)),
        ((0.0, 0.5, 0.5, 1.0), (1, 2, 3, 4)),
        ((0.0, 1.0), (2, 1)),
        ((0.0, 1.0), (0, 1)),
        ((0.0, 1.0), (1, 1 << 30)),
    ],
)
def test_a_wrong_table_is_refused(shares: tuple[float, ...], tokens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput):
        Quantiles(shares=shares, tokens=tokens)
