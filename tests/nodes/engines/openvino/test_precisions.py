"""Which precisions are compared, and which of them is taken: clocks and errors made up."""

import random

import pytest

from mesh.domain.model import ComputePrecision, KvPrecision
from mesh_nodes.engines.openvino.precisions import (
    PLAIN,
    Precisions,
    Timed,
    candidates,
    choose,
    reason,
)

BF16 = Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.BF16)
BF16_U8 = Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.U8)
F16 = Precisions(compute=ComputePrecision.F16)
U8 = Precisions(kv=KvPrecision.U8)
ROUNDS = 5


def timed(
    precisions: Precisions, *seconds: float, error: float = 0.01, rounds: int = ROUNDS
) -> Timed:
    """The same in every round."""
    return Timed(precisions=precisions, rounds=(seconds,) * rounds if seconds else (), error=error)


def test_a_cpu_is_asked_only_for_what_it_has_and_only_for_pairs_that_the_plugin_takes() -> None:
    assert candidates([ComputePrecision.F32]) == (PLAIN,)
    every = candidates(list(ComputePrecision))
    assert every == (PLAIN, BF16, F16), "caches of 8 bits are nobody's default"
    assert all(each.on(list(ComputePrecision)) == each for each in every)


def test_what_is_given_is_not_asked() -> None:
    both = [ComputePrecision.F32, ComputePrecision.BF16]
    assert candidates(both, ComputePrecision.BF16) == (BF16,)
    assert candidates(both, None, KvPrecision.U8) == (U8, BF16_U8)
    assert candidates(both, ComputePrecision.F32, KvPrecision.F32) == (
        Precisions(kv=KvPrecision.F32),
    )
    assert candidates([ComputePrecision.F32], ComputePrecision.BF16) == ()
    assert candidates(both, ComputePrecision.F32, KvPrecision.BF16) == ()


@pytest.mark.parametrize("kv", list(KvPrecision))
@pytest.mark.parametrize("compute", list(ComputePrecision))
def test_a_cache_that_the_plugin_refuses_becomes_one_that_it_takes(
    compute: ComputePrecision, kv: KvPrecision
) -> None:
    pair = Precisions(compute=compute, kv=kv).on(list(ComputePrecision))
    assert candidates([compute], compute, pair.kv) == (pair,)


def test_what_a_cpu_lacks_it_computes_in_f32_with_a_cache_that_goes_with_that() -> None:
    plain = [ComputePrecision.F32]
    assert BF16.on(plain) == PLAIN
    f16 = Precisions(compute=ComputePrecision.F16, kv=KvPrecision.F32)
    assert f16.on(plain) == Precisions(kv=KvPrecision.F32)
    assert f16.on(list(ComputePrecision)) == Precisions(
        compute=ComputePrecision.F16, kv=KvPrecision.F16
    )


def test_the_quickest_is_taken() -> None:
    found = [timed(PLAIN, 1.0, 2.0), timed(BF16, 0.5, 1.9), timed(F16, 0.6, 1.0)]
    assert choose(found) == F16


def test_what_is_a_little_quicker_and_not_much_further_off_is_taken() -> None:
    other = timed(BF16, 0.85, 0.9, error=0.0149)
    assert choose([timed(PLAIN, 1.0, 1.0), other]) == BF16


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (timed(BF16, 0.2, 0.2, error=0.0151), "its logits are further off"),
        (timed(BF16, 0.2, 0.2, error=float("nan")), "its logits are no numbers"),
        (timed(BF16, error=1.0), "it was not timed"),
        (timed(BF16, 0.91, 0.92), "clocks differ by as much"),
        (timed(BF16, 1.4, 0.3), "prefills gain, decodes pay"),
    ],
)
def test_what_is_known_to_serve_stays(other: Timed, why: str) -> None:
    assert choose([timed(PLAIN, 1.0, 1.0), other]) == PLAIN, why


def test_without_the_plain_ones_the_first_is_what_is_known() -> None:
    assert choose([timed(BF16_U8, 1.0), timed(U8, 0.99)]) == BF16_U8
    assert choose([timed(BF16_U8, 1.0), timed(U8, 0.5)]) == U8


@pytest.mark.parametrize("odd", range(ROUNDS))
def test_one_round_without_the_gain_is_enough_to_stay(odd: int) -> None:
    """A gain that one of five rounds does not show is not clear of the noise."""
    quick, slow = (0.5, 0.5), (0.95, 0.95)
    rounds = tuple(slow if number == odd else quick for number in range(ROUNDS))
    other = Timed(precisions=BF16, rounds=rounds, error=0.01)
    known = timed(PLAIN, 1.0, 1.0)
    assert choose([known, other]) == PLAIN
    said = reason([known, other])
    assert "took 0.50 times as long (0.50 to 0.95 in 5 rounds): it must take at most 0.90" in said


@pytest.mark.parametrize("seed", range(8))
def test_fresh_cells_on_one_noisy_machine_choose_alike(seed: int) -> None:
    """Candidates of the same or nearly the same speed, times that noise lengthens by up to half:
    the case in which four cells of one machine had chosen three precisions."""
    draw = random.Random(seed)

    def noisy(precisions: Precisions, speed: float) -> Timed:
        rounds = tuple(
            tuple(speed * draw.uniform(1.0, 1.5) for _ in range(4)) for _ in range(ROUNDS)
        )
        return Timed(precisions=precisions, rounds=rounds, error=0.01)

    assert choose([noisy(PLAIN, 1.0), noisy(BF16, 0.96), noisy(F16, 1.0)]) == PLAIN
    assert choose([noisy(PLAIN, 1.0), noisy(BF16, 0.4), noisy(F16, 1.0)]) == BF16
