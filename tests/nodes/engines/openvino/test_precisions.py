"""Which precisions are compared, and which of them is taken: clocks and errors made up."""

import pytest

from mesh.domain.model import ComputePrecision, KvPrecision
from mesh_nodes.engines.openvino.precisions import (
    PLAIN,
    Precisions,
    Timed,
    candidates,
    choose,
)

BF16 = Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.BF16)
BF16_U8 = Precisions(compute=ComputePrecision.BF16, kv=KvPrecision.U8)
U8 = Precisions(kv=KvPrecision.U8)


def timed(precisions: Precisions, *seconds: float, error: float = 0.01) -> Timed:
    return Timed(precisions=precisions, seconds=seconds, error=error)


def test_a_cpu_is_asked_only_for_what_it_has_and_only_for_pairs_that_the_plugin_takes() -> None:
    assert candidates([ComputePrecision.F32]) == (PLAIN, U8)
    every = candidates(list(ComputePrecision))
    assert every[0] == PLAIN, "what others are compared with comes first"
    assert {BF16, BF16_U8} <= set(every)
    assert all(each.on(list(ComputePrecision)) == each for each in every)


def test_what_is_given_is_not_asked() -> None:
    both = [ComputePrecision.F32, ComputePrecision.BF16]
    assert candidates(both, ComputePrecision.BF16) == (BF16, BF16_U8)
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
    found = [timed(PLAIN, 1.0, 2.0), timed(BF16, 0.5, 1.9), timed(BF16_U8, 0.6, 1.0)]
    assert choose(found) == BF16_U8


def test_what_is_a_little_quicker_and_not_much_further_off_is_taken() -> None:
    other = timed(BF16, 0.95, 0.98, error=0.0149)
    assert choose([timed(PLAIN, 1.0, 1.0), other]) == BF16


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (timed(BF16, 0.2, 0.2, error=0.0151), "its logits are further off"),
        (timed(BF16, 0.2, 0.2, error=float("nan")), "its logits are no numbers"),
        (timed(BF16, error=1.0), "it was not timed"),
        (timed(BF16, 0.97, 0.98), "clocks differ by as much"),
        (timed(BF16, 1.4, 0.3), "prefills gain, decodes pay"),
    ],
)
def test_what_is_known_to_serve_stays(other: Timed, why: str) -> None:
    assert choose([timed(PLAIN, 1.0, 1.0), other]) == PLAIN, why


def test_without_the_plain_ones_the_first_is_what_is_known() -> None:
    assert choose([timed(BF16, 1.0), timed(BF16_U8, 0.99)]) == BF16
    assert choose([timed(BF16, 1.0), timed(BF16_U8, 0.5)]) == BF16_U8
