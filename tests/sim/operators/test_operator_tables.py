"""Tables of operators: they sum to known iterations, and wrong ones are refused."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import Operator, Phase, Role, ShareCurve, check_roles
from mesh.domain.profile import Grid
from mesh.sim.operators import tables
from mesh.sim.operators.tables import DEVICES, FittedTimes, operator_table, read_operators

WEIGHTS_GB = {"qwen2-7b": 15.23, "llama-3.1-8b": 16.06, "mixtral-8x7b": 93.41, "qwen2-72b": 145.4}
H100_DECODES = ((1, 6.465), (16, 7.052), (64, 8.326))
"""Sequences, and milliseconds of an iteration as a CUDA graph (`scripts/gpu/operators.py`)."""
H100_DIVIDED = {
    2: {Role.GATE_UP: (0.0529, 0.3492), Role.DOWN: (0.0290, 0.1898)},
    4: {Role.GATE_UP: (0.0288, 0.1929), Role.DOWN: (0.0173, 0.0977)},
    8: {Role.GATE_UP: (0.0154, 0.0947), Role.DOWN: (0.0087, 0.0514)},
}
"""By devices, milliseconds of Qwen2-7B's products with 16 and 2,048 rows, from the same run."""


def prompts_s(operator: Operator, *lengths: int) -> float:
    return operator.seconds(Phase.PREFILL, lengths)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "expected"), WEIGHTS_GB.items())
def test_weights_are_those_of_the_model(model: str, expected: float, device: str) -> None:
    table = operator_table(model, Phase.PREFILL, device=device)
    assert table.devices * table.weights_bytes / 1e9 == pytest.approx(expected, rel=0.01)


def test_an_iteration_is_the_sum_of_its_operators() -> None:
    """Llama-3.1-8B on an A100: a prompt of 2,048 tokens takes 172 ms, of which MLPs 61 %."""
    table = operator_table("llama-3.1-8b", Phase.PREFILL)
    total_s = table.seconds((2048,))
    assert total_s == pytest.approx(0.172, rel=0.01)
    inner = [of for of in table.operators if of.role in (Role.GATE_UP, Role.DOWN)]
    assert sum(prompts_s(of, 2048) for of in inner) / total_s == pytest.approx(0.61, abs=0.01)
    assert table.seconds((1024, 1024)) < total_s, "prompts attend to themselves alone"
    decode = operator_table("llama-3.1-8b", Phase.DECODE)
    assert decode.seconds((4096,) * 16) > decode.seconds((512,) * 16)
    assert decode.seconds((512,) * 16) == pytest.approx(0.0118, rel=0.05)


@pytest.mark.parametrize(
    ("phase", "sequences", "context", "iteration_ms"),
    [("prefill", 1, 2048, 50.8), *(("decode", n, 512, ms) for n, ms in H100_DECODES)],
)
def test_an_h100s_operators_sum_to_its_measured_iterations(
    phase: str, sequences: int, context: int, iteration_ms: float
) -> None:
    """The 8B shape; the iterations turned no positions and had their activation in two kernels."""
    table = operator_table("llama-3.1-8b", Phase(phase), 1, "h100")
    summed_s = table.seconds((context,) * sequences)
    assert summed_s == pytest.approx(iteration_ms / 1e3, rel=0.05)
    assert table.error >= 0.05


@pytest.mark.parametrize("devices", H100_DIVIDED)
def test_an_h100s_products_shrink_over_a_group_as_measured(devices: int) -> None:
    """Qwen2-7B's gate and up, and its second product, by 16 and by 2,048 rows."""
    table = operator_table("qwen2-7b", Phase.DECODE, devices, "h100")
    fit = tables._file("h100")["fit"]
    for of in table.operators:
        for rows, took_ms in zip((16, 2048), H100_DIVIDED[devices].get(of.role, ()), strict=False):
            reduced_s = 0.0
            if of.role is Role.DOWN:
                moved = rows * 3584 * 2 / fit["all_reduce_bytes_per_s"]
                reduced_s = fit["all_reduce_s"] + moved
            assert of.decode.at(rows, 0) - reduced_s == pytest.approx(took_ms / 1e3, rel=0.15)


def test_fits_come_near_what_was_measured() -> None:
    """The products of Llama-3.1-8B by its shape alone, beside vidur's measurement of them."""
    file = tables._file("a100")
    raw = file["models"]["llama-3.1-8b"]
    fits = FittedTimes(shape=tables._shape(raw), fit=file["fit"], devices=1)
    for role in (Role.QKV, Role.OUTPUT, Role.GATE_UP, Role.DOWN):
        measured = dict(zip(file["tokens"], raw["milliseconds"][role], strict=True))
        for tokens in (16, 512, 4096):
            near_s = measured[tokens] / 1e3
            assert fits.fitted(role, tokens, 1) == pytest.approx(near_s, rel=0.45), role


def test_what_is_like_another_models_takes_as_long_for_as_many_numbers() -> None:
    ours, theirs = (operator_table(f"qwen2-{of}b", Phase.PREFILL) for of in ("0.5", "7"))
    for small, large in zip(ours.operators, theirs.operators, strict=True):
        if small.role in (Role.NORM, Role.RESIDUAL, Role.ROPE):
            alike_s = prompts_s(large, 512) * ours.layers / theirs.layers
            assert prompts_s(small, 2048) == pytest.approx(alike_s)


def test_an_operator_over_several_devices_shrinks_but_for_what_it_exchanges() -> None:
    alone = {of.role: of for of in operator_table("qwen2-7b", Phase.PREFILL).operators}
    two = {of.role: of for of in operator_table("qwen2-7b", Phase.PREFILL, 2).operators}
    for role in (Role.QKV, Role.GATE_UP, Role.ATTENTION):
        ratio = prompts_s(two[role], 2048) / prompts_s(alone[role], 2048)
        assert 0.45 < ratio < 0.6, role
    assert prompts_s(two[Role.NORM], 2048) == prompts_s(alone[Role.NORM], 2048)
    assert prompts_s(two[Role.DOWN], 64) > 0.5 * prompts_s(alone[Role.DOWN], 64)
    assert 2 * two[Role.GATE_UP].weights_bytes == alone[Role.GATE_UP].weights_bytes


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"qwen2-7b": 1, "qwen2-57b-a14b": 2, "qwen2-72b": 4}
    assert needed == {model: operator_table(model, Phase.DECODE).devices for model in needed}
    with pytest.raises(InvalidInput, match=r"145\.4 GB of weights for each of 1 devices"):
        operator_table("qwen2-72b", Phase.PREFILL, 1)
    file = _file()
    file["device"]["memory_bytes"] = 10e9
    monkeypatch.setattr(tables, "_file", lambda device: file)
    with pytest.raises(InvalidInput, match="takes more than 80% of the memory of 8 a100"):
        operator_table.__wrapped__("qwen2-72b", Phase.PREFILL)


def _file() -> Any:
    return deepcopy(tables._file("a100"))


def test_a_table_with_unknown_or_missing_operators_is_refused() -> None:
    file = _file()
    raw = file["models"]["qwen2-7b"]
    raw["milliseconds"]["softmax"] = raw["milliseconds"]["qkv"]
    with pytest.raises(InvalidInput, match="no operator 'softmax'"):
        read_operators("m", raw, file, 1)
    del raw["milliseconds"]["softmax"], raw["milliseconds"]["down"]
    with pytest.raises(InvalidInput, match="the table lacks down"):
        read_operators("m", raw, file, 1)
    raw = file["models"]["qwen2-0.5b"]
    raw["fitted"].remove("down")
    with pytest.raises(InvalidInput, match="the table lacks down"):
        read_operators("m", raw, file, 1)
    with pytest.raises(InvalidInput, match="a mixture of experts has no operator 'gate_up'"):
        check_roles("m", list(Role))


@pytest.mark.parametrize("derived", [{"fitted": ["qkv"]}, {"like": {"llama-3.1-8b": ["qkv"]}}])
def test_a_column_that_comes_twice_is_refused(derived: dict[str, Any]) -> None:
    """What is derived would take the place of what was measured, without a word."""
    file = _file()
    raw = file["models"]["qwen2-7b"] | derived
    with pytest.raises(InvalidInput, match="m: the table has qkv twice"):
        read_operators("m", raw, file, 1)


def test_times_that_are_no_times_are_refused() -> None:
    file = _file()
    raw = file["models"]["qwen2-7b"]
    for wrong in (float("nan"), float("inf"), 0.0, -1.0):
        raw["milliseconds"]["qkv"][3] = wrong
        with pytest.raises(InvalidInput, match="operator qkv"):
            read_operators("m", raw, file, 1)
    raw["milliseconds"]["qkv"] = [1.0]
    with pytest.raises(InvalidInput, match="qkv has 1 times for 13 sizes"):
        read_operators("m", raw, file, 1)


def test_sharing_yields_what_was_measured_and_never_less_with_more() -> None:
    """The curve is that of the size: tokens of prompts, sequences of decodes. Two prefills of
    Llama-7B at half the processors of an A100 take 1.64 times as long each: 1.22 together.
    """
    for device, phase, size, two in (
        ("a100", Phase.PREFILL, 2048, 1.2165),
        ("a100", Phase.DECODE, 16, 1.7606),
        ("a100", Phase.DECODE, 127, 1.7606),
        ("a100", Phase.DECODE, 128, 1.4503),
        ("h100", Phase.PREFILL, 1024, 1.192),
    ):
        curve = operator_table("qwen2-7b", phase, device=device).curve(size)
        yields = curve.yields(8)
        assert yields[:3] == pytest.approx((0, 1, two), rel=1e-3)
        assert list(yields) == sorted(yields)
        least = curve.shares[0]
        assert curve.ratio(least / 2) == pytest.approx(2 * curve.ratio(least))
    assert curve.ratio(0.849) == pytest.approx(1.357), "on 112 of 132 processors"
    with pytest.raises(InvalidInput, match="shares must ascend"):
        ShareCurve(shares=(0.5, 1.0), ratios=(0.9, 1.0))


def test_a_prompts_rows_are_its_tokens_but_for_the_head() -> None:
    table = operator_table("qwen2-7b", Phase.PREFILL)
    head = next(of for of in table.operators if of.role is Role.HEAD)
    assert prompts_s(head, 2048) == prompts_s(head, 64) == head.seconds(Phase.DECODE, (1,))
    assert head.rows(Phase.PREFILL, (2048, 2048)) == 2
    grid = Grid(rows=(1,), columns=(0,), seconds=((1.0,),))
    assert prompts_s(replace(head, decode=grid), 2048, 5) == 2.0
