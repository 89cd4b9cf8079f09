"""Estimates: whose profile is taken for a model, and what becomes of it."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.references import REFERENCES
from mesh.compute.scaling import Target, _lengthened, best_profile, scaled
from mesh.domain.ids import ModelId
from mesh.domain.model import Mixture
from mesh.domain.operators import Role
from mesh.domain.profile import CoresTimes, Grid, OperatorTimes, Profile
from mesh.domain.reasons import DeviceKind, ProfileSource
from tests.support.profiles import MODEL

B7_XEON, B3_XEON, B7_A100, B3_A100, SMOL = REFERENCES


def target_of(profile: Profile) -> Target:
    """The model and device of a profile."""
    return Target(**{each.name: getattr(profile, each.name) for each in fields(Target)})


def close(got: Grid, wanted: Grid, rel: float = 1e-9) -> bool:
    return (got.rows, got.columns) == (wanted.rows, wanted.columns) and all(
        row == pytest.approx(other, rel=rel)
        for row, other in zip(got.seconds, wanted.seconds, strict=True)
    )


@pytest.mark.parametrize("profile", REFERENCES, ids=lambda p: f"{p.model_id} on {p.hardware}")
def test_scaled_to_itself_a_profile_keeps_its_times(profile: Profile) -> None:
    same = scaled(profile, target_of(profile))
    assert close(same.prefill, profile.prefill)
    assert close(same.decode, profile.decode)


def test_an_estimate_is_the_targets_and_says_what_it_came_from() -> None:
    target = replace(target_of(B3_XEON), model_id=ModelId("sha256-1"), fingerprint="cpu/x")
    estimate = scaled(SMOL, target)
    assert target_of(estimate) == target
    assert estimate.scaled_from == "SmolLM2-135M on 2-core x86-64 with AVX2"
    assert not estimate.measured
    assert estimate.measured_s == 0.0


def test_weights_tell_in_small_batches_and_parameters_in_large_ones() -> None:
    """Half the bytes of weights, say 8 instead of 16 bits."""
    target = target_of(B7_XEON)
    halved = scaled(B7_XEON, replace(target, weights_bytes=target.weights_bytes // 2))
    before = B7_XEON.decode
    assert halved.decode.at(1, 512) / before.at(1, 512) == pytest.approx(0.5, abs=0.02)
    assert halved.decode.at(64, 512) / before.at(64, 512) > 0.8
    assert halved.prefill.at(4096, 0) / B7_XEON.prefill.at(4096, 0) > 0.95


def test_kv_bytes_tell_along_the_context_alone() -> None:
    target = target_of(B7_XEON)
    doubled = scaled(B7_XEON, replace(target, kv_bytes_per_token=2 * target.kv_bytes_per_token))
    for batch in (1, 8, 32):
        before = B7_XEON.decode.at(batch, 3950) - B7_XEON.decode.at(batch, 1024)
        after = doubled.decode.at(batch, 3950) - doubled.decode.at(batch, 1024)
        assert after == pytest.approx(2 * before)
    assert close(doubled.prefill, B7_XEON.prefill)


def test_the_parts_of_a_linear_table_are_told_apart() -> None:
    """Weights of 10 ms, 1 ms of computation per request, 2 us of reads per KV token."""

    def linear(weights_s: float, request_s: float, token_s: float) -> Grid:
        rows, columns = (1, 8, 32), (512, 1024, 4096)
        seconds = tuple(
            tuple(weights_s + request_s * (row - 1) + token_s * row * column for column in columns)
            for row in rows
        )
        return Grid(rows=rows, columns=columns, seconds=seconds)

    source = replace(B7_A100, decode=linear(0.010, 0.001, 2e-6))
    target = target_of(source)
    estimate = scaled(
        source,
        replace(
            target,
            weights_bytes=2 * target.weights_bytes,
            parameters=3 * target.parameters,
            kv_bytes_per_token=5 * target.kv_bytes_per_token,
        ),
    )
    assert close(estimate.decode, linear(0.020, 0.003, 10e-6))


def test_half_the_cores_take_twice_the_time_on_a_cpu_alone() -> None:
    on_cpu = scaled(B7_XEON, replace(target_of(B7_XEON), cores=16))
    assert on_cpu.decode.at(8, 1024) == pytest.approx(2 * B7_XEON.decode.at(8, 1024))
    assert on_cpu.prefill.at(512, 0) == pytest.approx(2 * B7_XEON.prefill.at(512, 0))
    on_gpu = scaled(B7_A100, replace(target_of(B7_A100), cores=16))
    assert close(on_gpu.decode, B7_A100.decode)


@pytest.mark.parametrize(("source", "truth"), [(B7_XEON, B3_XEON), (B3_XEON, B7_XEON)])
def test_one_measured_model_of_a_device_predicts_another(source: Profile, truth: Profile) -> None:
    """To about a quarter at the sizes of everyday."""
    estimate = scaled(source, target_of(truth))
    for batch in (1, 8, 32):
        for context in (512, 1024, 2048):
            got = estimate.decode.at(batch, context) / truth.decode.at(batch, context)
            assert 0.7 < got < 1.3
    for tokens in (128, 1024, 4096):
        assert 0.7 < estimate.prefill.at(tokens, 0) / truth.prefill.at(tokens, 0) < 1.3


@given(st.sampled_from(REFERENCES), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 4096))
def test_a_larger_model_is_slower(source: Profile, batch: int, context: int, tokens: int) -> None:
    device = target_of(B7_A100 if source.device is DeviceKind.GPU else B7_XEON)
    large, small = (
        scaled(
            source,
            replace(
                device,
                parameters=model.parameters,
                weights_bytes=model.weights_bytes,
                kv_bytes_per_token=model.kv_bytes_per_token,
            ),
        )
        for model in (B7_XEON, B3_XEON)
    )
    assert small.decode.at(batch, context) < large.decode.at(batch, context)
    assert small.prefill.at(tokens, context) < large.prefill.at(tokens, context)


@given(
    *(st.sampled_from(REFERENCES), st.integers(1, 128), st.floats(0.01, 100.0)),
    *(st.floats(0.01, 100.0), st.floats(0.01, 100.0)),
)
def test_an_estimate_is_positive_and_ascends(
    source: Profile, cores: int, parameters: float, weights: float, kv: float
) -> None:
    target = replace(
        target_of(source),
        cores=cores,
        parameters=round(source.parameters * parameters),
        weights_bytes=round(source.weights_bytes * weights),
        kv_bytes_per_token=round(source.kv_bytes_per_token * kv),
    )
    estimate = scaled(source, target)
    for grid in (estimate.prefill, estimate.decode):
        assert grid.seconds[0][0] > 0
        assert all(list(row) == sorted(row) for row in grid.seconds)
        assert all(list(c) == sorted(c) for c in zip(*grid.seconds, strict=True))


def test_sizes_that_are_not_known_leave_times_as_they_are() -> None:
    target = replace(
        target_of(B7_XEON), cores=0, parameters=0, weights_bytes=0, kv_bytes_per_token=0
    )
    assert close(scaled(B7_XEON, target).decode, B7_XEON.decode)


# Mixtures of experts.


def measured_here(
    model_id: str,
    sizes: tuple[int, int, int],
    prefill_ms: dict[int, float],
    decode_ms: dict[int, float],
    mixture: Mixture | None = None,
) -> Profile:
    def grid(column: int, times_ms: dict[int, float]) -> Grid:
        seconds = tuple((ms / 1000,) for ms in times_ms.values())
        return Grid(rows=tuple(times_ms), columns=(column,), seconds=seconds)

    return Profile(
        model_id=ModelId(model_id),
        device=DeviceKind.CPU,
        fingerprint="cpu/here",
        hardware="2-core EPYC with VNNI",
        cores=2,
        parameters=sizes[0],
        weights_bytes=sizes[1],
        kv_bytes_per_token=sizes[2],
        prefill=grid(0, prefill_ms),
        decode=grid(256, decode_ms),
        mixture=mixture,
    )


# OpenVINO 2026.4 in i8: processor time over two cores, the least of six, on a machine that others
# used. The mixture has Qwen3-MoE's shape, 8 layers of 1024, and random weights.
DENSE = measured_here(
    "SmolLM2-135M",
    (134_515_008, 244_517_184, 23_040),
    {1: 7.11, 16: 12.57, 64: 30.24, 128: 61.34, 256: 129.4, 512: 288.27},
    {1: 7.11, 2: 7.81, 4: 9.3, 8: 13.39, 16: 23.68, 32: 40.87},
)
MIXED = measured_here(
    "8 of 64 experts",
    (658_262_016, 790_439_936, 8_192),
    {1: 5.21, 16: 36.67, 64: 124.77, 128: 248.42, 256: 510.53, 512: 1062.11},
    {1: 5.21, 2: 8.01, 4: 13.14, 8: 23.42, 16: 44.05, 32: 78.68},
    Mixture(experts=64, chosen=8, parameters=603_979_776),
)


def test_an_estimate_of_a_mixture_is_nearer_than_one_of_all_its_parameters() -> None:
    target = target_of(MIXED)
    estimate, of_all = (scaled(DENSE, t) for t in (target, replace(target, mixture=None)))
    for batch in MIXED.decode.rows:
        took_s = MIXED.decode.at(batch, 256)
        assert 0.8 < estimate.decode.at(batch, 256) / took_s < 1.3
        assert of_all.decode.at(batch, 256) / took_s > 2.0
    for tokens in MIXED.prefill.rows:
        assert 0.8 < estimate.prefill.at(tokens, 0) / MIXED.prefill.at(tokens, 0) < 1.5


def test_of_a_measured_mixture_a_model_without_experts_is_estimated() -> None:
    estimate = scaled(MIXED, target_of(DENSE))
    for batch in (1, 2, 4):
        assert 0.5 < estimate.decode.at(batch, 256) / DENSE.decode.at(batch, 256) < 2.0


def test_on_a_gpu_experts_pass_once_for_all_who_chose_them() -> None:
    """All of them as soon as there are many tokens; what is computed is the few's of each."""
    mixture = Mixture(experts=64, chosen=8, parameters=B7_A100.parameters * 9 // 10)
    dense, mixed = B7_A100, scaled(B7_A100, replace(target_of(B7_A100), mixture=mixture))
    ratios = [mixed.decode.at(batch, 512) / dense.decode.at(batch, 512) for batch in (1, 4, 8)]
    assert ratios == sorted(ratios)
    assert 0.2 < ratios[0] < 0.35
    read = mixed.prefill.at(64, 0) / dense.prefill.at(1, 0)
    assert read == pytest.approx(1.0, abs=0.05), "64 tokens leave none of 64 experts alone"
    assert 0.2 < mixed.prefill.at(4096, 0) / dense.prefill.at(4096, 0) < 0.35


def test_a_mixture_scaled_to_itself_keeps_its_times() -> None:
    same = scaled(MIXED, target_of(MIXED))
    for tokens in MIXED.prefill.rows:
        assert same.prefill.at(tokens, 0) == pytest.approx(MIXED.prefill.at(tokens, 0))
    for batch in MIXED.decode.rows:
        assert same.decode.at(batch, 256) == pytest.approx(MIXED.decode.at(batch, 256))


# Whose profile is taken.

HERE = replace(target_of(SMOL), model_id=ModelId("wanted"), fingerprint="cpu/here", cores=4)


def measured(
    model_id: str, fingerprint: str = "cpu/here", *, cores: int = 4, parameters: int = 10**8
) -> Profile:
    return replace(
        SMOL,
        model_id=ModelId(model_id),
        fingerprint=fingerprint,
        hardware=fingerprint,
        cores=cores,
        parameters=parameters,
    )


def test_the_measured_profile_itself_wins() -> None:
    own = measured("wanted")
    assert best_profile([measured("other"), own, measured("wanted", "cpu/there")], HERE) is own


def test_an_estimate_is_never_scaled_again() -> None:
    known = [replace(measured("wanted"), scaled_from="something"), measured("other", "cpu/there")]
    assert best_profile(known, HERE).scaled_from == "other on cpu/there"


def test_next_comes_the_nearest_model_on_the_same_device() -> None:
    """The nearest by ratio: 135M is nearer to 400M than to 30M."""
    known = [
        measured("small", parameters=30 * 10**6),
        measured("large", parameters=400 * 10**6),
        measured("wanted", "cpu/there"),
    ]
    assert best_profile(known, HERE).scaled_from == "large on cpu/here"


WIDTHS = MODEL.widths


def counted(model_id: str, *, parameters: int = 10**9) -> Profile:
    """All of its time goes into the head."""
    known = measured(model_id, parameters=parameters)
    head = OperatorTimes(name=Role.HEAD, prefill=known.prefill, decode=known.decode)
    return replace(known, operators=(head,), widths=WIDTHS)


def test_on_its_device_those_go_first_whose_operators_were_counted() -> None:
    """However near others are; of those counted the nearest."""
    known = [measured("near"), counted("far"), counted("farther", parameters=10**10)]
    assert WIDTHS is not None
    target = replace(HERE, widths=replace(WIDTHS, vocabulary_tokens=2 * WIDTHS.vocabulary_tokens))
    estimate = best_profile(known, target)
    assert (estimate.scaled_from, estimate.origin) == ("far on cpu/here", ProfileSource.OPERATORS)
    assert not estimate.measured
    assert estimate.decode.at(8, 128) == pytest.approx(2 * SMOL.decode.at(8, 128))
    own = measured("wanted")
    assert best_profile([*known, own], target) is own


@pytest.mark.parametrize(
    ("known", "target"),
    [
        (counted("far+i4"), replace(HERE, widths=WIDTHS)),
        (counted("far"), replace(HERE, model_id=ModelId("wanted+i4"), widths=WIDTHS)),
        (replace(counted("far"), fingerprint="cpu/there"), replace(HERE, widths=WIDTHS)),
        (replace(counted("far"), widths=None), replace(HERE, widths=WIDTHS)),
        (counted("far"), HERE),
    ],
    ids=["precision", "own precision", "device", "of an earlier version", "a mixture"],
)
def test_operators_that_say_nothing_of_it_are_left_alone(known: Profile, target: Target) -> None:
    estimate = best_profile([known, measured("near")], target)
    assert (estimate.scaled_from, estimate.origin) == ("near on cpu/here", ProfileSource.ESTIMATE)


def test_then_the_nearest_device_and_on_it_the_nearest_model() -> None:
    known = [
        measured("near", "cpu/8", cores=8),
        measured("far", "cpu/8", cores=8, parameters=10**9),
        measured("wanted", "cpu/32", cores=32),
    ]
    best = best_profile(known, replace(HERE, cores=10))
    assert best.scaled_from == "near on cpu/8"
    assert (best.model_id, best.fingerprint, best.cores) == ("wanted", "cpu/here", 10)


def test_what_was_counted_with_so_many_cores_goes_before_the_rule_of_cores() -> None:
    """With half of its cores, it was counted, the head takes three times as long, not twice."""
    (head,) = counted("many").operators
    slower = replace(
        head, prefill=_lengthened(head.prefill, 3.0), decode=_lengthened(head.decode, 3.0)
    )
    fewer = CoresTimes(cores=4, operators=(slower, slower))
    known = replace(counted("many"), cores=8, fingerprint="cpu/there", by_cores=(fewer,))
    for cores, times in ((8, 1), (4, 6), (3, 8)):
        target = replace(target_of(known), model_id=ModelId("wanted"), cores=cores)
        estimate = best_profile([known], replace(target, fingerprint="cpu/here"))
        assert estimate.scaled_from.startswith("many on")
        assert estimate.decode.at(8, 128) == pytest.approx(times * SMOL.decode.at(8, 128))


def test_another_kind_of_device_is_never_taken() -> None:
    on_gpu = replace(HERE, device=DeviceKind.GPU, fingerprint="gpu/0")
    known = [measured("wanted", "cpu/0")]
    assert best_profile(known, on_gpu).scaled_from == "Llama-3.2-3B on A100-80GB"


@pytest.mark.parametrize(
    ("model", "cores", "source"),
    [(SMOL, 2, SMOL), (B7_XEON, 2, SMOL), (B7_XEON, 48, B7_XEON), (SMOL, 48, B3_XEON)],
)
def test_references_serve_where_nothing_is(model: Profile, cores: int, source: Profile) -> None:
    target = replace(HERE, parameters=model.parameters, cores=cores)
    assert best_profile([], target).scaled_from == f"{source.model_id} on {source.hardware}"


def test_what_was_measured_in_the_cell_goes_before_an_equal_reference() -> None:
    known = [measured("b", "cpu/2", cores=2, parameters=SMOL.parameters)]
    assert best_profile(known, replace(HERE, cores=2)).scaled_from == "b on cpu/2"


def test_ties_do_not_depend_on_the_order() -> None:
    known = [measured(name, fingerprint) for name in "ba" for fingerprint in ("cpu/y", "cpu/x")]
    for order in (known, known[::-1]):
        assert best_profile(order, HERE).scaled_from == "a on cpu/x"
    here = [measured("b"), measured("a")]
    for order in (here, here[::-1]):
        assert best_profile(order, HERE).scaled_from == "a on cpu/here"
