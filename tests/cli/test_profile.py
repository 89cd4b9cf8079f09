"""`mesh profile` beside a stand-in for the client: what it asks for, shows, draws and refuses."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, MeshError, NotFound, Unavailable
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.model import Task
from mesh.domain.profile import REST, CoresTimes, Grid, OperatorTimes
from mesh.domain.views import NodeSnapshot, ProfileView
from tests.cli.conftest import STEP_S, RunningCell
from tests.cli.running import Ran, mesh
from tests.cli.views import MODEL, NODE
from tests.support.profiles import profile

MEASURED = ProfileView(
    profile=replace(profile(fingerprint="epyc/2"), hardware="AMD EPYC, avx2"),
    nodes=(NodeId("cpu0"), NodeId("cpu1")),
)
ONE_COLUMN = Grid(rows=(1, 256), columns=(0,), seconds=((0.001,), (0.25,)))
SCALED = ProfileView(
    profile=replace(
        profile(fingerprint="xeon/8", scaled_from="sha256-feed on AMD EPYC", prefill=ONE_COLUMN),
        hardware="Xeon, amx",
        cores=8,
    ),
    nodes=(NodeId("cpu9"),),
)

COUNTED = replace(
    MEASURED,
    profile=replace(
        MEASURED.profile,
        operators=tuple(
            OperatorTimes(name=name, prefill=MEASURED.profile.prefill, decode=ONE_COLUMN)
            for name in ("attention", REST)
        ),
    ),
)
BY_CORES = replace(
    COUNTED,
    profile=replace(
        COUNTED.profile,
        by_cores=tuple(
            CoresTimes(cores=cores, operators=COUNTED.profile.operators) for cores in (1, 2)
        ),
    ),
)
OPERATORS = (
    "\n"
    "prefill_ms by operator\n"
    "OPERATOR   TOKENS_1  TOKENS_256\n"
    "attention      1.00       20.00\n"
    "rest           1.00       20.00\n"
    "\n"
    "decode_ms by operator\n"
    "OPERATOR   BATCH_1_AT_0  BATCH_256_AT_0\n"
    "attention          1.00          250.00\n"
    "rest               1.00          250.00\n"
)


@dataclass
class Client:
    """Knows some profiles and nodes; measuring adds `measures`, or fails."""

    known: list[ProfileView] = field(default_factory=list)
    measures: ProfileView | None = None
    failure: MeshError | None = None
    asked: list[tuple[NodeId | None, bool, tuple[int, ...]]] = field(default_factory=list)
    """On which node to measure, whether to count operators, and with how many cores."""

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def profiles(self, name: DeploymentName) -> tuple[ProfileView, ...]:
        if name == "nobody":
            raise NotFound("there is no deployment 'nobody'", hint="deployments: chat")
        return tuple(self.known)

    def nodes(self) -> tuple[NodeSnapshot, ...]:
        return tuple(replace(NODE, node_id=NodeId(name)) for name in ("cpu0", "cpu1", "cpu9"))

    def profile(
        self,
        name: DeploymentName,
        node_id: NodeId | None,
        progress: Callable[[str, float], None],
        *,
        operators: bool,
        cores: tuple[int, ...],
    ) -> str:
        self.asked.append((node_id, operators, cores))
        progress("loading", 0.0)
        progress("prefill of 256 tokens", 0.5)
        if self.failure is not None:
            raise self.failure
        if name == "nobody":
            raise NotFound("there is no deployment 'nobody'", hint="deployments: chat")
        if self.measures is not None:
            fingerprint = self.measures.profile.fingerprint
            others = [view for view in self.known if view.profile.fingerprint != fingerprint]
            self.known = [*others, self.measures]
        return "measured"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    one = Client()
    monkeypatch.setattr("mesh.cli.verbs.profile.MeshClient", lambda address: one)
    return one


def test_show_prints_two_tables_for_each_fingerprint(client: Client) -> None:
    client.known = [MEASURED, SCALED]
    ran = mesh("profile", "chat", "--show")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "hardware     AMD EPYC, avx2\n"
        "device       cpu\n"
        "cores        2\n"
        "fingerprint  epyc/2\n"
        "nodes        cpu0, cpu1\n"
        "model_id     sha256-0123456789abcdef\n"
        "times        measured: 8 points in 1.5 s\n"
        "\n"
        "prefill_ms\n"
        "PROMPT_TOKENS  PAST_0  PAST_256\n"
        "            1    1.00      1.10\n"
        "          256   20.00     30.00\n"
        "\n"
        "decode_ms\n"
        "BATCH  CONTEXT_32  CONTEXT_512\n"
        "    1        1.00         2.00\n"
        "   32        4.00         8.00\n"
        "\n"
        "hardware     Xeon, amx\n"
        "device       cpu\n"
        "cores        8\n"
        "fingerprint  xeon/8\n"
        "nodes        cpu9\n"
        "model_id     sha256-0123456789abcdef\n"
        "times        scaled from sha256-feed on AMD EPYC\n"
        "\n"
        "prefill_ms\n"
        "PROMPT_TOKENS  PAST_ANY\n"
        "            1      1.00\n"
        "          256    250.00\n"
        "\n"
        "decode_ms\n"
        "BATCH  CONTEXT_32  CONTEXT_512\n"
        "    1        1.00         2.00\n"
        "   32        4.00         8.00\n"
    )
    assert client.asked == []


def test_a_model_of_vectors_has_no_decodes_to_show(client: Client) -> None:
    model = replace(MODEL, model_id=MEASURED.profile.model_id).serving(Task.EMBED)
    of_vectors = replace(MEASURED.profile, model_id=model.model_id)
    client.known = [replace(MEASURED, profile=of_vectors)]
    ran = mesh("profile", "chat", "--show")
    assert ("prefill_ms" in ran.out, "decode_ms" in ran.out) == (True, False)


def test_operators_are_counted_and_shown_where_they_are_wanted(client: Client) -> None:
    client.measures = COUNTED
    ran = mesh("profile", "chat", "--operators")
    assert (ran.code, client.asked) == (0, [(None, True, ())])
    assert ran.out == OPERATORS
    assert mesh("profile", "chat", "--operators", "--show").out.endswith(OPERATORS)
    assert "OPERATOR" not in mesh("profile", "chat", "--show").out
    (shown,) = json.loads(mesh("profile", "chat", "--show", "-o", "json").out)
    assert [each["name"] for each in shown["profile"]["operators"]] == ["attention", "rest"]


def test_operators_are_counted_and_shown_by_cores(client: Client) -> None:
    client.measures = BY_CORES
    ran = mesh("profile", "chat", "--operators", "--cores", "2,1,1")
    assert (ran.code, client.asked) == (0, [(None, True, (1, 2))])
    one_core = OPERATORS.replace("by operator", "by operator, 1 core")
    assert ran.out == OPERATORS + one_core + one_core.replace("1 core", "2 cores")
    client.measures = COUNTED
    ran = mesh("profile", "chat", "--operators", "--cores", "1")
    assert "its node has counted no operators" in ran.err


@pytest.mark.parametrize("wrong", [("--cores", "1"), ("--operators", "--cores", "one")])
def test_cores_are_numbers_and_for_operators_alone(wrong: tuple[str, ...], client: Client) -> None:
    assert mesh("profile", "chat", *wrong).code == 2
    assert client.asked == []


def test_operators_that_nobody_has_counted_are_two_lines(client: Client) -> None:
    client.known = [MEASURED]
    ran = mesh("profile", "chat", "--operators", "--show")
    assert ran.error_lines == (
        "no operators of chat have been counted",
        "run `mesh profile chat --operators`",
    )
    client.measures = MEASURED
    ran = mesh("profile", "chat", "--operators")
    assert ran.err.splitlines()[-2:] == [
        "error: chat was measured, but its node has counted no operators",
        "hint: run controller and nodes of one version",
    ]


def test_show_for_a_node_prints_only_what_holds_there(client: Client) -> None:
    client.known = [MEASURED, SCALED]
    shown = mesh("profile", "chat", "--show", "--node", "cpu9").out
    assert "fingerprint  xeon/8\n" in shown
    assert "epyc" not in shown
    one = json.loads(mesh("profile", "chat", "--show", "--node", "cpu1", "-o", "json").out)
    assert one["profile"]["fingerprint"] == "epyc/2"


def test_show_as_json_carries_the_profiles_themselves(client: Client) -> None:
    client.known = [MEASURED, SCALED]
    first, second = json.loads(mesh("profile", "chat", "--show", "-o", "json").out)
    assert first["nodes"] == ["cpu0", "cpu1"]
    assert first["profile"]["prefill"]["rows"] == [1, 256]
    assert first["profile"]["prefill"]["seconds"] == [[0.001, 0.0011], [0.02, 0.03]]
    assert second["profile"]["scaled_from"] == "sha256-feed on AMD EPYC"


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("chat",), "no profile of chat is known", "run `mesh profile chat`"),
        (
            ("chat", "--node", "cpu0"),
            "no profile of chat is known on node cpu0",
            "run `mesh profile chat --node cpu0`",
        ),
        (("chat", "--node", "gone"), "there is no node 'gone'", "`mesh nodes` lists nodes"),
        (("nobody",), "there is no deployment 'nobody'", "deployments: chat"),
    ],
)
def test_nothing_to_show_is_two_lines(
    arguments: tuple[str, ...], error: str, hint: str, client: Client
) -> None:
    ran = mesh("profile", *arguments, "--show")
    assert (ran.code, ran.out) == (1, "")
    assert ran.error_lines == (error, hint)


def test_measuring_shows_how_far_it_is_and_then_what_was_measured(client: Client) -> None:
    client.known, client.measures = [SCALED], MEASURED
    ran = mesh("profile", "chat")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.splitlines() == [
        "chat: loading",
        "chat: prefill of 256 tokens",
        "chat: measured: 8 points in 1.5 s, on AMD EPYC, avx2",
        "chat: kept under fingerprint epyc/2; holds for cpu0, cpu1",
    ]
    assert client.asked == [(None, False, ())]


def test_measuring_again_tells_of_the_new_profile_among_measured_ones(client: Client) -> None:
    elsewhere = ProfileView(profile=profile(fingerprint="arm/4"), nodes=(NodeId("cpu9"),))
    before = replace(MEASURED, profile=replace(MEASURED.profile, measured_s=9.0))
    client.known, client.measures = [before, elsewhere], MEASURED
    ran = mesh("profile", "chat", "-o", "json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert (told["profile"]["fingerprint"], told["profile"]["measured_s"]) == ("epyc/2", 1.5)


def test_measuring_on_a_node_asks_for_that_node(client: Client) -> None:
    client.known, client.measures = [SCALED], MEASURED
    assert mesh("profile", "chat", "--node", "cpu1").code == 0
    assert client.asked == [("cpu1", False, ())]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Unavailable("node cpu0 is being profiled", hint="wait"), 1),
        (InvalidInput("x", hint="y"), 2),
    ],
)
def test_a_failed_measurement_is_an_error(failure: MeshError, code: int, client: Client) -> None:
    client.failure = failure
    ran = mesh("profile", "chat")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.splitlines()[-2:] == [f"error: {failure.message}", f"hint: {failure.hint}"]


MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "PDF": b"%PDF"}


@pytest.mark.parametrize("suffix", MAGIC)
def test_a_plot_is_of_what_is_known_already(suffix: str, client: Client, tmp_path: Path) -> None:
    client.known = [MEASURED, SCALED]
    path = tmp_path / f"times.{suffix}"
    ran = mesh("profile", "chat", "--plot", str(path))
    assert ran.code == 0, ran.err
    assert ran.err == f"chat: drawn in {path}\n"
    assert ran.out == mesh("profile", "chat", "--show").out
    assert path.read_bytes().startswith(MAGIC[suffix])
    assert client.asked == []


def test_plot_draws_what_was_just_measured_when_measuring_is_asked_for(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[ProfileView, ...]] = []
    draw = "mesh.cli.profile_plot.draw"
    monkeypatch.setattr(draw, lambda name, views, path, **_: drawn.append(views))
    client.known, client.measures = [SCALED], MEASURED
    ran = mesh("profile", "chat", "--measure", "--plot", str(tmp_path / "times.png"))
    assert ran.code == 0, ran.err
    assert client.asked == [(None, False, ())]
    assert drawn == [(MEASURED,)]


def test_the_title_names_model_and_hardware() -> None:
    from mesh.cli import profile_plot  # matplotlib takes half a second of each worker

    assert profile_plot.title("chat", MEASURED) == (
        "chat, 0.1 M parameters (sha256-0123456789abcdef)\n"
        "AMD EPYC, avx2, 2 cores, measured: 8 points in 1.5 s"
    )


def test_a_picture_has_lines_and_units(client: Client, tmp_path: Path) -> None:
    """Read back from the SVG, in which matplotlib notes each text beside its glyphs."""
    client.known = [MEASURED]
    path = tmp_path / "times.svg"
    assert mesh("profile", "chat", "--plot", str(path)).code == 0
    drawn = path.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    for text in ("prompt tokens", "past tokens", "mean context tokens", "time (ms)", "512"):
        assert f"<!-- {text} -->" in drawn
    assert "by operator" not in drawn
    client.known = [BY_CORES]
    assert mesh("profile", "chat", "--operators", "--plot", str(path)).code == 0
    drawn = path.read_text(encoding="utf-8")
    for text in ("prefill by operator, past 0", "attention", "rest", "cores"):
        assert f"<!-- {text} -->" in drawn
    embeds = replace(MEASURED.profile, model_id=MODEL.serving(Task.EMBED).model_id)
    client.known = [replace(MEASURED, profile=embeds)]
    assert mesh("profile", "embed", "--plot", str(path)).code == 0
    drawn = path.read_text(encoding="utf-8")
    assert "<!-- past tokens -->" in drawn
    assert "mean context tokens" not in drawn, "it has no decodes"


def test_plot_without_matplotlib_says_what_to_install_before_it_measures(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = mesh("profile", "chat", "--measure", "--plot", str(tmp_path / "times.png"))
    assert ran.code == 1
    assert ran.error_lines == (
        "--plot needs matplotlib, which is not installed",
        "pip install 'mesh-serve[plot]'",
    )
    assert client.asked == []


def test_a_picture_that_cannot_be_written_is_two_lines(client: Client, tmp_path: Path) -> None:
    client.known = [MEASURED]
    (tmp_path / "taken.png").mkdir()
    ran: Ran = mesh("profile", "chat", "--plot", str(tmp_path / "taken.png"))
    assert ran.code == 1
    assert "taken.png" in ran.error_lines[0]


@pytest.fixture(scope="module")
def measured(cell: RunningCell) -> Iterator[Ran]:
    """What measuring said, in a real cell. Few sizes, so it is soon done; a TTFT SLO below an
    iteration's time.
    """
    lines = ("context_tokens_max: 32", "slo: {ttft_s: 0.002, ttft_tokens_per_s: 1000000}")
    assert cell.mesh("deploy", "-", stdin=cell.manifest("measured", *lines)).code == 0
    yield cell.mesh("profile", "measured", "--node", "cpu0")
    cell.mesh("delete", "measured")


def test_a_real_cell_measures_keeps_and_shows(cell: RunningCell, measured: Ran) -> None:
    assert measured.code == 0, measured.err
    assert measured.err.splitlines()[-1].endswith("holds for cpu0")
    (view,) = json.loads(cell.mesh("profile", "measured", "--show", "-o", "json").out)
    assert view["nodes"] == ["cpu0"]
    assert view["profile"]["scaled_from"] == ""
    assert view["profile"]["decode"]["seconds"][0][0] >= float(STEP_S)
    shown = cell.mesh("profile", "measured", "--show", "--node", "cpu0")
    assert f"fingerprint  {view['profile']['fingerprint']}\n" in shown.out
    assert "no node 'gone'" in cell.mesh("profile", "measured", "--node", "gone").err
    assert "no deployment 'nobody'" in cell.mesh("profile", "nobody").err


def test_what_cannot_be_in_time_is_refused_in_two_lines(cell: RunningCell, measured: Ran) -> None:
    ran = cell.mesh("invoke", "measured", "--raw", "hi", "--max-tokens", "1")
    assert (ran.code, ran.out) == (1, "")
    assert ran.error_lines[1].startswith("no node is quick enough")
    assert "first_token_late" in cell.mesh("status").out
