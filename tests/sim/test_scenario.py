"""Scenario files: what one makes, what it may not say, and the workloads that it names."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, MeshError, NotFound
from mesh.domain.limits import CellLimits
from mesh.sim.cluster import Arrival
from mesh.sim.content import Said, tokens_of
from mesh.sim.scenario import NOT_0, Scenario, arrivals, fitted, plan, read_scenario, trace_of
from mesh.sim.workload import TraceFile, arrivals_of
from mesh_workloads.generating import LLM_MESH
from mesh_workloads.sampling import functions_of
from mesh_workloads.trace import Arrival as Traced
from mesh_workloads.trace import Trace, Turn
from tests.sim.scenarios import SMALL, scenario


def test_a_file_becomes_nodes_and_deployments(tmp_path: Path) -> None:
    made = plan(scenario(tmp_path))
    assert [node.hello.node_id for node in made.nodes] == ["cpu", "gpu-1", "gpu-2"]
    names = [deployment.spec.name for deployment in made.deployments]
    assert names == ["chat-1", "chat-2", "chat-3", "small"]
    assert made.deployments[3].context_tokens_max == 4096
    assert made.nodes[0].hello.memory_bytes == 64 << 30


def test_arrivals_follow_from_the_seed_and_keep_to_their_bounds(tmp_path: Path) -> None:
    read = replace(scenario(tmp_path), seed=5)
    drawn = list(arrivals(read))
    assert drawn == list(arrivals(read))
    assert drawn != list(arrivals(replace(read, seed=6)))
    assert all(0 < a.at_s <= 10 and 16 <= a.input_tokens <= 600 for a in drawn)
    assert [a.at_s for a in drawn] == sorted(a.at_s for a in drawn)
    long = replace(read, workload=replace(read.workload, duration_s=2000.0))
    assert 3700 < sum(1 for _ in arrivals(long)) < 4300


@pytest.mark.parametrize(
    ("was", "now", "named"),
    [
        ("seed = 3", "sead = 3", "sead"),
        ("seed = 3", "slo_ttfts_s = [0.3]", "there is none"),
        ("seed = 3", 'slo_mix = "0.1:1"\nslo_ttfts_s = [0.0]', "slo_ttfts_s is 0"),
        ("memory_gib = 64", "", "memory_gib"),
        ("memory_gib = 64", "memory_gib = -1", "above 0"),
        ('device = "cpu"', 'device = "tpu"', "tpu"),
        ("count = 3", "count = 0", "count is 0"),
        ('name = "small"', 'name = "chat-1"', "differ"),
        ("[16, 600]", "[600, 16]", "600"),
        ("requests_per_s = 2.0", "requests_per_s = 0", "above 0"),
        ('"llama-2-7b"', '"gpt-9"', "gpt-9"),
        ("[workload]", "[workload", "TOML"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, was: str, now: str, named: str) -> None:
    assert was in SMALL
    with pytest.raises(MeshError, match=named):
        plan(scenario(tmp_path, SMALL.replace(was, now, 1)))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_scenario(tmp_path / "absent.toml")


def test_refusals_of_a_file_are_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        scenario(tmp_path, "nodes = 1")


FAULTS = "[faults]\nper_minute = { crash = 1 }\nuntil_s = "


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("count = 3", "count = 4.5", "deployments[0].count: 4.5 is not a whole number"),
        ("count = 3", 'count = "3"', "deployments[0].count: '3' is not a whole number"),
        ("memory_gib = 64", "memory_gib = true", "nodes[0].memory_gib: True is not a number"),
        ("memory_gib = 64", "", "nodes[0].memory_gib: it is missing"),
        ('model = "llama-2-7b"', "model = 7", "deployments[0].model: 7 is not text"),
        ('device = "cpu"', 'device = "tpu"', "nodes[0].device: 'tpu' is none of cpu, gpu"),
        ("seed = 3", "sead = 3", "there is no sead here; did you mean seed?"),
        ("[workload]", "[workload]\nspeed = 2", "workload: there is no speed here; there are dur"),
        ("seed = 3", FAULTS + '9\nvary = "false"', "faults.vary: 'false' is not true or false"),
    ],
)
def test_a_value_of_another_kind_is_refused(tmp_path: Path, was: str, now: str, said: str) -> None:
    assert was in SMALL
    text = SMALL.replace(was, now, 1)
    if FAULTS in now:  # a table ends where the next one begins
        text = SMALL + now
    with pytest.raises(InvalidInput) as raised:
        scenario(tmp_path, text)
    assert f"small.toml: {said}" in raised.value.message
    assert "docs/simulator.md" in raised.value.hint


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[limits]\nbatch_max = 0", "limits: batch_max is 0; it must be above 0"),
        ("[limits]\nlease_check_s = 0.0", "limits: lease_check_s is 0"),
        ("[limits]\nparked_s_max = -1", "limits: parked_s_max is -1; it must be 0 or more"),
        (FAULTS + "inf", "until_s is inf; it must be above 0 and at most 86400"),
    ],
)
def test_what_would_not_end_or_not_begin_is_refused(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        scenario(tmp_path, SMALL + more)


def test_limits_that_must_not_be_0_are_limits_of_a_cell() -> None:
    made = asdict(CellLimits())
    assert set(made) >= NOT_0
    assert all(made[name] != 0 for name in NOT_0)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("memory_gib = 64", "memory_gib = inf", "memory_gib is inf"),
        ("memory_gib = 64", "memory_gib = 64\ncosts = { load_s = inf }", "load_s is inf"),
        ("memory_gib = 64", "memory_gib = 64\nprocesses = 50", "beside its processes is -11"),
        ("seed = 3", "output_tokens_max = 0", "output_tokens_max is 0; it must be above 0"),
        ("memory_gib = 64", "memory_gib = 64\ncosts = { factor = inf }", "factor is inf"),
        ("seed = 3", "link_delay_s = inf", "link_delay_s is inf"),
        ("seed = 3", "seed = -3", "seed is -3; it must be 0 or more"),
    ],
)
def test_what_must_be_finite_is(tmp_path: Path, was: str, now: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        scenario(tmp_path, SMALL.replace(was, now, 1))


def test_a_whole_number_does_where_any_number_does_and_what_may_be_0_is(tmp_path: Path) -> None:
    read = scenario(tmp_path, SMALL + "[limits]\nparked_s_max = 0\nevictions_max = 0")
    assert (read.limits.parked_s_max, read.limits.evictions_max) == (0.0, 0)
    assert isinstance(read.limits.parked_s_max, float)


def test_a_file_that_cannot_be_read_is_not_found_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"absent.toml: no such file") as raised:
        read_scenario(tmp_path / "absent.toml")
    assert "workloads/" in raised.value.hint
    with pytest.raises(NotFound, match="is a directory"):
        read_scenario(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"bytes.toml is no TOML"):
        read_scenario(tmp_path / "bytes.toml")


HEADER = "t_s,function,input_tokens,output_tokens\n"


def trace(*calls: tuple[float, int, int, int]) -> Trace:
    made = (Traced(t_s=t, function=f, input_tokens=i, output_tokens=o) for t, f, i, o in calls)
    return Trace(name="made", arrivals=tuple(made), duration_s=10.0)


def asked(folder: Path, workload: str) -> Scenario:
    """SMALL with another workload."""
    return scenario(folder, SMALL[: SMALL.index("[workload]")] + "[workload]\n" + workload)


def test_function_i_is_the_ith_deployment() -> None:
    made = arrivals_of(trace((0.5, 2, 7, 8), (1.0, 0, 5, 6)), ["a", "b", "c"])
    assert list(made) == [Arrival(0.5, "c", 7, 8), Arrival(1.0, "a", 5, 6)]


def test_a_load_cut_from_a_larger_one_is_called_in_the_order_of_its_numbers() -> None:
    cut = trace((0.5, 9, 1, 1), (1.0, 8, 1, 1), (2.0, 120, 1, 1), (3.0, 9, 1, 1))
    made = list(arrivals_of(cut, ["a", "b", "c"]))
    assert [arrival.deployment for arrival in made] == ["b", "a", "c", "b"]


def test_functions_that_nobody_calls_keep_their_deployments() -> None:
    names = [f"f-{n}" for n in range(32)]
    cut = trace((0.5, 9, 1, 1), (1.0, 121, 1, 1))
    made = list(arrivals_of(cut, names, functions=functions_of(32)))
    assert [arrival.deployment for arrival in made] == ["f-3", "f-31"]


def test_more_functions_than_deployments_are_refused_before_the_first_arrival() -> None:
    with pytest.raises(InvalidInput, match="calls 3 functions; there are 2"):
        arrivals_of(trace((0.5, 9, 1, 1), (1.0, 8, 1, 1), (2.0, 7, 1, 1)), ["a", "b"])


def test_requests_are_cut_to_their_contexts_only_when_that_is_asked() -> None:
    long = trace((0.5, 0, 5000, 100), (1.0, 0, 10, 9000), (2.0, 0, 60, 40), (3.0, 1, 5000, 100))
    kept = arrivals_of(long, ["a", "b"])
    assert [(a.input_tokens, a.output_tokens) for a in kept][:2] == [(5000, 100), (10, 9000)]
    cut = arrivals_of(long, ["a", "b"], contexts={"a": 1000, "b": 8000})
    assert [(a.input_tokens, a.output_tokens) for a in cut] == [
        *((900, 100), (1, 999), (60, 40), (5000, 100)),
    ]


def test_a_serverless_workload_follows_from_its_preset_and_the_seed(tmp_path: Path) -> None:
    read = asked(tmp_path, 'kind = "serverless"')
    drawn = list(arrivals(read))
    assert drawn == list(arrivals(read))
    assert drawn != list(arrivals(replace(read, seed=4)))
    names = [arrival.deployment for arrival in drawn]
    assert set(names) == {"chat-1", "chat-2", "chat-3", "small"}
    assert names.count("chat-1") > names.count("small"), "the first is the busiest"
    assert drawn[-1].at_s > 1000
    expected = LLM_MESH.rate_per_s * 4 / 128 * 1800
    assert 0.4 * expected < len(drawn) < 2 * expected


def test_a_serverless_workload_has_the_parameters_of_the_generator(tmp_path: Path) -> None:
    parameters = """
kind = "serverless"
duration_s = 500
rate_per_s = 4
rates = { exponent = 0 }
process = { dispersion = 1 }
diurnal = { swing = 0.5, period_s = 500 }
lengths = "azure-code"
context_tokens_max = 2000
"""
    drawn = list(arrivals(asked(tmp_path, parameters)))
    assert 1800 < len(drawn) < 2200
    assert all(a.input_tokens + a.output_tokens <= 2000 for a in drawn)
    assert sum(a.output_tokens for a in drawn) / len(drawn) < 60, "those of code are short"
    early = sum(a.at_s < 250 for a in drawn)
    assert early > 1.5 * (len(drawn) - early), "the rate swings"


def test_a_trace_lies_beside_its_scenario_and_may_be_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "calls.csv").write_text(HEADER + "1,0,5,6\n2,3,7,8\n3,1,9,1\n9,0,2,2\n")
    read = asked(tmp_path, 'kind = "trace"\nfile = "calls.csv"\nstart_s = 1.5\nduration_s = 5')
    assert list(arrivals(read)) == [Arrival(0.5, "small", 7, 8), Arrival(1.5, "chat-2", 9, 1)]


def test_a_trace_is_cut_to_contexts_that_its_scenario_names(tmp_path: Path) -> None:
    (tmp_path / "calls.csv").write_text(HEADER + "1,3,5000,96\n2,0,5000,96\n")
    text = 'kind = "trace"\nfile = "calls.csv"\n'
    assert [a.input_tokens for a in arrivals(asked(tmp_path, text))] == [5000, 5000]
    clipped = arrivals(asked(tmp_path, text + "clip_tokens = true"))
    assert [a.input_tokens for a in clipped] == [4000, 4000], "a 7B model holds 4096 as well"


def test_one_group_of_deployments_follows_the_trace(tmp_path: Path) -> None:
    (tmp_path / "calls.csv").write_text(HEADER + "1,0,5,6\n2,9,7,8\n3,8,1,1\n4,120,1,1\n")
    whole = asked(tmp_path, 'kind = "trace"\nfile = "calls.csv"')
    one = replace(whole, deployments=whole.deployments[:1])
    made = trace_of(one)
    assert made is not None
    assert fitted(one, made).deployments[0].count == 121
    assert fitted(whole, made) is whole, "which of two groups should grow, nobody knows"
    assert isinstance(one.workload, TraceFile)
    sampled = replace(one, workload=replace(one.workload, functions=32))
    made = trace_of(sampled)
    assert made is not None
    fit = fitted(sampled, made)
    assert fit.deployments[0].count == 32
    assert [a.deployment for a in arrivals(fit, made)] == ["chat-1", "chat-4", "chat-3", "chat-31"]


def test_files_that_do_not_number_their_functions_are_sampled(tmp_path: Path) -> None:
    lines = [f"a,f{n},{10 * n + k + 1}.0,0.5\n" for n in range(140) for k in range(1 + n % 3)]
    (tmp_path / "calls.csv").write_text("app,func,end_timestamp,duration\n" + "".join(lines))
    read = asked(tmp_path, 'kind = "trace"\nfile = "calls.csv"\nfunctions = 32')
    made = trace_of(read)
    assert made is not None
    assert {arrival.function for arrival in made.arrivals} == set(functions_of(32))
    assert all(a.input_tokens + a.output_tokens <= 4096 for a in made.arrivals)


@pytest.mark.parametrize(
    ("workload", "named"),
    [
        ('kind = "best"', "poisson, serverless, trace, conversations"),
        ('kind = "serverless"\nrequests_per_s = 2', "requests_per_s"),
        ('kind = "serverless"\nrates = { exponent = 1, sigma = 1 }', "rates"),
        ('kind = "serverless"\nrates = { exponent = 11 }', "exponent is 11"),
        ('kind = "serverless"\nprocess = { duty = 2, on_s = 1 }', "duty is 2"),
        ('kind = "serverless"\nduration_s = -1', "duration_s is -1"),
        ('kind = "serverless"\nlengths = "poems"', "azure-conversation"),
        ('kind = "serverless"\ncontext_tokens_max = 1', "2 or more"),
        ('kind = "trace"', "file"),
        ('kind = "trace"\nfile = "absent.csv"', "absent.csv"),
        ('kind = "trace"\nfile = "calls.csv"\nfunctions = 33', "33 models"),
        ('kind = "trace"\nfile = "calls.csv"\nstart_s = -1', "start_s is -1"),
        ('kind = "trace"\nfile = "calls.csv"\nduration_s = 0', "duration_s is 0"),
        ('kind = "trace"\nfile = "calls.csv"', "5 functions; there are 4"),
    ],
)
def test_a_wrong_workload_is_refused(tmp_path: Path, workload: str, named: str) -> None:
    calls = "".join(f"{n},{n},1,1\n" for n in range(5))
    (tmp_path / "calls.csv").write_text(HEADER + calls)
    with pytest.raises(MeshError, match=named):
        arrivals(asked(tmp_path, workload))


def test_prompts_of_the_same_blocks_begin_with_the_same_tokens() -> None:
    made = Trace(
        name="made",
        duration_s=10.0,
        arrivals=(
            Traced(t_s=0.0, function=0, input_tokens=700, output_tokens=1, blocks=(7, 8)),
            Traced(t_s=1.0, function=0, input_tokens=600, output_tokens=1, blocks=(7, 9)),
            Traced(t_s=2.0, function=0, input_tokens=5, output_tokens=1),
        ),
    )
    one, other, plain = arrivals_of(made, ["a"])
    first, second = (tokens_of(a.content, a.input_tokens, own=1) for a in (one, other))
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512]
    assert first[512] != second[512]
    assert plain.content == ()


TALKING = Path(__file__).parents[2] / "workloads" / "fault_conversations.toml"


def turn(conversation: int, left: int) -> Turn:
    return Turn(conversation=conversation, left=left, system_tokens=10)


def test_a_prompt_goes_on_with_the_answer_that_an_engine_gave_and_a_question_of_its_own() -> None:
    said = Said()
    first = said.prompt(turn(1, 1), 0, 15, own=1)
    said.answer(turn(1, 1), first, (7, 8))
    second = said.prompt(turn(1, 0), 0, 20, own=2)
    assert second[:17] == (*first, 7, 8)
    assert len(second) == 20
    assert not set(second[17:]) & set(first)


def test_conversations_of_a_function_share_how_they_begin_and_nothing_else() -> None:
    said = Said()
    one, other, apart = (
        said.prompt(turn(n, 0), function, 15, own=n) for n, function in ((1, 0), (2, 0), (3, 1))
    )
    assert one[:10] == other[:10] != apart[:10]
    assert not set(one[10:]) & set(other[10:])


def test_what_is_over_is_forgotten() -> None:
    said = Said()
    first = said.prompt(turn(1, 0), 0, 15, own=1)
    said.answer(turn(1, 0), first, (7,))
    assert said.prompt(turn(1, 0), 0, 15, own=1) == first


def test_a_workload_that_tells_how_prompts_begin_takes_no_other_beginnings(tmp_path: Path) -> None:
    written = tmp_path / "both.toml"
    written.write_text("beginnings = 3\n" + TALKING.read_text())
    with pytest.raises(InvalidInput, match="tells itself what its prompts begin with"):
        arrivals(read_scenario(written))
