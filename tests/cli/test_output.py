"""The printer: alignment, errors in two lines, structured forms, terminals and pipes."""

import io
import json
import sys
from math import inf, nan
from operator import itemgetter

import pytest
import yaml

from mesh.cli import output
from mesh.cli.output import Format, number, text_columns, word
from mesh.cli.progress import progress
from mesh.domain.errors import InvalidInput, MeshError, Refused, Unavailable
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.invocation import Accepted
from mesh.domain.lifecycle import NodeState
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.domain.views import CellStatus, NodeSnapshot
from mesh.report.plain import Plain, plain


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


def test_a_table_is_aligned_has_no_trailing_space_and_is_never_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_an_error_is_exactly_two_lines_whatever_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_text_cannot_steer_a_terminal_but_reaches_a_pipe_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = on_terminal(monkeypatch)
    output.text("a\x1b[2J\tü")
    assert terminal.getvalue() == "a\\x1b[2J\tü\n"
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    output.text("a\x1b[2J\tü", end="")
    assert pipe.getvalue() == "a\x1b[2J\tü"


STATUS = CellStatus(
    version="1",
    uptime_s=2.5,
    nodes_ready=1,
    nodes=2,
    deployments=0,
    instances=0,
    queued=0,
    running=0,
    served=7,
    refused=((RefusalReason.QUEUE_FULL, 3),),
    state_path="/ü",
)


def test_json_and_yaml_carry_the_domains_field_names(capsys: pytest.CaptureFixture[str]) -> None:
    output.structured(plain(STATUS), Format.JSON)
    from_json = json.loads(capsys.readouterr().out)
    output.structured(plain(STATUS), Format.YAML)
    assert yaml.safe_load(capsys.readouterr().out) == from_json
    assert from_json["refused"] == {"queue_full": 3}
    assert from_json["state_path"] == "/ü"
    assert list(from_json)[:2] == ["version", "uptime_s"]


def test_json_keeps_numbers_on_one_line_and_strings_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value: Plain = {"ids": [1, -2, 3.5], "text": "[\n1,\n2]", "none": [], "mixed": [1, "a"]}
    output.structured(value, Format.JSON)
    shown = capsys.readouterr().out
    assert json.loads(shown) == value
    assert '  "ids": [1, -2, 3.5],\n' in shown


def test_enums_and_tuples_become_text_and_lists() -> None:
    node = NodeSnapshot(
        node_id=NodeId("n"),
        state=NodeState.READY,
        device=DeviceKind.CPU,
        hardware="h",
        cores=2,
        engine="e",
        memory_bytes=1,
        base_bytes=0,
        promised_bytes=0,
        tracked_bytes=0,
        rss_bytes=0,
        unaccounted_bytes=0,
        operations=(),
        silent_s=0.0,
        instances=(),
    )
    value = plain((node,))
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


def test_progress_that_is_only_for_terminals_says_nothing_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
