"""The LLM-Mesh paper's sample: the same mix of busy and rare functions at every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads.sampling import KEPT, Sample, load_for
from mesh_workloads.trace import Arrival, Trace


def counted(counts: list[int]) -> Trace:
    """A trace in which function f has counts[f] arrivals."""
    arrivals = tuple(
        Arrival(t_s=0.0, function=function, input_tokens=1, output_tokens=1)
        for function, count in enumerate(counts)
        for _ in range(count)
    )
    return Trace(name="t", arrivals=arrivals, duration_s=1.0)


def test_the_middle_of_every_stratum_is_taken() -> None:
    requests = {f"f{i}": 100 - i for i in range(10)} | {"idle": 0}
    assert Sample(strata=2, per_stratum=1).of(requests) == ("f2", "f7")
    assert Sample(strata=2, per_stratum=3).of(requests) == ("f1", "f2", "f3", "f6", "f7", "f8")


def test_functions_as_busy_as_each_other_are_ranked_by_label() -> None:
    requests = {"b": 1, "c": 1, "a": 1}
    assert Sample(strata=3, per_stratum=1).of(requests) == ("a", "b", "c")


@given(st.lists(st.integers(1, 50), min_size=128, max_size=300))
def test_a_sample_has_distinct_functions_busiest_stratum_first(counts: list[int]) -> None:
    requests = {str(i): n for i, n in enumerate(counts)}
    taken = Sample().of(requests)
    assert len(set(taken)) == len(taken) == 128
    ranked = [requests[label] for label in taken]
    assert ranked == sorted(ranked, reverse=True)


def test_too_few_functions_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"127 functions have requests.*need 128"):
        Sample().of({str(i): 1 for i in range(127)} | {"idle": 0})
    with pytest.raises(InvalidInput, match="both must be 1 or more"):
        Sample(strata=0)


def test_loads_have_the_same_share_of_every_stratum_and_contain_each_other() -> None:
    # 8 functions of each of 16 strata, with the stratum's count.
    trace = counted([64 - 4 * (function // 8) for function in range(128)])
    loads = {models: load_for(trace, models) for models in KEPT}
    for models, load in loads.items():
        assert load.name == f"t-{models}"
        functions = {a.function for a in load.arrivals}
        assert len(functions) == models
        assert len(load.arrivals) * 128 == len(trace.arrivals) * models
    assert {a.function for a in loads[32].arrivals} < {a.function for a in loads[64].arrivals}
    assert loads[128].arrivals == trace.arrivals


def test_other_loads_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no load for 16 models"):
        load_for(counted([1]), 16)
    with pytest.raises(InvalidInput, match="has a function 128"):
        load_for(counted([1] * 129), 32)
