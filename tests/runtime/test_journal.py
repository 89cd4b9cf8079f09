"""The journal: what is written is read back the same, and replays."""

import errno
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.actions import DeliverTokens
from mesh.domain.errors import InvalidInput, StorageError
from mesh.domain.events import ControllerEvent, InvokeRequested, NodeDisconnected, NodeReported
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import LoadInstance, OfferKv, SubmitRequest, TokensReport
from mesh.domain.node_events import CommandReceived
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens, SamplingParams, TokenLogprobs
from mesh.runtime.journal import (
    CONTROLLER_FORMAT,
    ControllerStart,
    Decision,
    Journal,
    JournalHeader,
    NodeStart,
    decision_fields,
    open_journal,
    read_journal,
    replay,
)
from mesh.runtime.starting import controller_core
from tests.core.cells import FOOTPRINT, CellUnderTest, commands, deployment, hello, request
from tests.support.profiles import PROFILE

START = ControllerStart(
    version="test",
    epoch=1,
    policy="llm-mesh",
    limits=CellLimits(),
    deployments=(deployment(),),
    profiles=(PROFILE,),
    histories={DeploymentName("chat"): OutputHistory(mean_tokens=61.5, count=9)},
)


class JournalledCell(CellUnderTest):
    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.core = controller_core(START)
        self._journal = journal

    def tell(self, event: ControllerEvent):  # type: ignore[no-untyped-def]
        actions = super().tell(event)
        self._journal.record(self.now_s, event, actions)
        return actions


def write_incident(path: Path) -> None:
    """A load, two requests, a lost node, and a recovery on another."""
    journal = open_journal(path, START)
    cell = JournalledCell(journal)
    link, _ = cell.join()
    load = commands(cell.invoke(), LoadInstance)[0]
    cell.invoke(request("r2"))
    cell.loaded(link, load.instance_id)
    cell.tokens(link, "r1", [7, 8])
    other, _ = cell.join(hello("n2", run_id="run-2"))
    cell.now_s += 1.5
    again = commands(cell.tell(NodeDisconnected(link_id=link, reason="reset")), LoadInstance)[0]
    cell.loaded(other, again.instance_id)
    cell.tokens(other, "r1", [9], first=2, attempt=2, finish=FinishReason.STOP)
    journal.close()


def test_an_incident_replays_to_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "incident.jsonl"
    write_incident(path)
    start, decisions = read_journal(path)
    assert start == START
    assert isinstance(start, ControllerStart)
    assert replay(controller_core(start), decisions) is None


def test_a_core_that_decides_otherwise_is_caught_at_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "incident.jsonl"
    write_incident(path)
    _, decisions = read_journal(path)
    divergence = replay(controller_core(replace(START, limits=CellLimits(batch_max=1))), decisions)
    assert divergence is not None
    assert divergence.number == 2, "the load it asks for has another batch"


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    write_incident(tmp_path / "a")
    write_incident(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_torn_last_line_ends_the_journal_and_other_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "incident.jsonl"
    write_incident(path)
    whole = path.read_text()
    path.write_text(whole[:-20])
    kept = list(read_journal(path)[1])
    assert any(isinstance(a, DeliverTokens) for d in kept for a in d.actions)
    lines = whole.splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "{}\n", *lines[3:]]))
    with pytest.raises(InvalidInput, match=":4 is no decision"):
        list(read_journal(path)[1])
    for other in (b"hello\n", b"\xff\xfe\n"):
        path.write_bytes(other)
        with pytest.raises(InvalidInput, match="no journal"):
            read_journal(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"\xff\xfe",
        b'{"now_s":"then","event":{},"actions":[]}',
        b'{"now_s":1.0,"event":{"_type":"NoEvent"},"actions":[]}',
        b'{"now_s":1.0,"event":{"_type":"InvokeRequested"},"actions":[]}',
    ],
)
def test_a_line_that_is_no_decision_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    open_journal(path, START).close()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(InvalidInput, match=":2 is no decision") as raised:
        list(read_journal(path)[1])
    assert "cut the journal" in raised.value.hint


@pytest.mark.parametrize(
    ("left_out", "start"),
    [("profiles", replace(START, profiles=())), ("histories", replace(START, histories={}))],
)
def test_a_start_that_leaves_out_what_it_knew_is_read_as_one_that_knew_nothing(
    left_out: str, start: ControllerStart, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    open_journal(path, START).close()
    line = json.loads(path.read_text())
    del line[left_out]
    path.write_text(json.dumps(line) + "\n")
    assert read_journal(path)[0] == start


def write_talk(path: Path) -> None:
    """A call with all that a caller can say, which another node goes on with."""
    journal = open_journal(path, START)
    cell = JournalledCell(journal)
    link, _ = cell.join()
    said = SamplingParams(
        max_tokens=20,
        stop=("hush",),
        grammar=Grammar(kind=GrammarKind.REGEX, text="hush+"),
        logprobs=1,
    )
    prompt = (40414, 40424, 40434)
    asked = replace(request("r1"), prompt_tokens=prompt, sampling=said)
    load = commands(cell.tell(InvokeRequested(request=asked)), LoadInstance)[0]
    cell.loaded(link, load.instance_id)
    output = RequestTokens(
        request_id=asked.request_id,
        attempt=1,
        first_index=0,
        token_ids=(40444, 40454),
        text="hush",
        logprobs=(TokenLogprobs(logprob=-4.04, top=((40464, -4.04),)),) * 2,
    )
    report = TokensReport(instance_id=load.instance_id, outputs=(output,))
    cell.tell(NodeReported(link_id=link, report=report))
    other, _ = cell.join(hello("n2", run_id="run-2"))
    again = commands(cell.tell(NodeDisconnected(link_id=link, reason="reset")), LoadInstance)[0]
    (order,) = commands(cell.loaded(other, again.instance_id), SubmitRequest)
    assert order.order.output_tokens == (40444, 40454)
    journal.close()


def test_of_prompts_and_answers_it_holds_the_lengths_and_replays(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    write_talk(path)
    text = path.read_text()
    assert not re.search(r"404\d4|hush|4\.04", text)
    assert '"prompt_tokens":3' in text
    start, decisions = read_journal(path)
    assert isinstance(start, ControllerStart)
    assert replay(controller_core(start), decisions) is None


def test_a_journal_that_holds_the_tokens_replays(tmp_path: Path) -> None:
    """As format 6 has them."""
    path = tmp_path / "talk.jsonl"
    write_talk(path)
    text = path.read_text().replace('"format":7', '"format":6', 1)
    text = text.replace('"prompt_tokens":3', '"prompt_tokens":[5,6,7]')
    text = re.sub(r'"(token_ids|output_tokens)":2', r'"\1":[8,9]', text)
    text = text.replace('"output_tokens":0', '"output_tokens":[]')
    path.write_text(text)
    start, decisions = read_journal(path)
    kept = list(decisions)
    asked = [d.event for d in kept if isinstance(d.event, InvokeRequested)]
    assert asked[0].request.prompt_tokens == (5, 6, 7)
    assert isinstance(start, ControllerStart)
    assert replay(controller_core(start), iter(kept)) is None


def test_a_footprint_says_what_is_shared_where_anything_is(tmp_path: Path) -> None:
    """So journals of cells that share nothing are what they were before anything could be."""
    for shared_bytes in (0, 7):
        path = tmp_path / f"{shared_bytes}.jsonl"
        stated = replace(FOOTPRINT, shared_bytes=shared_bytes)
        made = replace(deployment(), footprints=(("scripted", stated),))
        start = replace(START, deployments=(made,))
        open_journal(path, start).close()
        assert ("shared_bytes" in path.read_text()) is bool(shared_bytes)
        assert read_journal(path)[0] == start


@pytest.mark.parametrize(
    "fields", [('"tier":"disk"',), ('"tensor_parallel":1', '"tensor_parallel_max":1')]
)
def test_a_journal_of_before_anything_slept_or_was_parallel_replays(
    fields: tuple[str, ...], tmp_path: Path
) -> None:
    """What it leaves out is the disk, and 1."""
    path = tmp_path / "incident.jsonl"
    write_incident(path)
    text = path.read_text()
    for field in fields:
        assert field in text
        text = text.replace("," + field, "")
        assert field not in text
    path.write_text(text)
    start, decisions = read_journal(path)
    assert start == START
    assert replay(controller_core(START), decisions) is None


@pytest.mark.parametrize(
    ("start", "core", "read"),
    [
        (replace(START, format=CONTROLLER_FORMAT + 1), "controller", "6 and 7"),
        (NodeStart(format=3, version="test", limits=NodeLimits()), "node", "8"),
        (NodeStart(format=7, version="test", limits=NodeLimits()), "node", "8"),
    ],
)
def test_a_journal_of_another_format_is_refused(
    start: JournalHeader, core: str, read: str, tmp_path: Path
) -> None:
    """In format 3 of a node's journal, a step has its tokens one by one, and not which attempt they
    are of; in 7 swaps say whether weights are there, not which share.
    """
    path = tmp_path / "journal"
    open_journal(path, start).close()
    words = f"{core} journal format {start.format}; this version of mesh reads {read}"
    with pytest.raises(InvalidInput, match=words) as raised:
        read_journal(path)
    assert raised.value.hint == "replay it with mesh test, which wrote it"


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write the journal"):
        open_journal(tmp_path / "missing" / "incident.jsonl", START)


class FillingDisk(io.StringIO):
    """Takes the first line, and has no room for more."""

    def flush(self) -> None:
        if self.getvalue().count("\n") > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_journal_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(FillingDisk(), START)
    journal.record(1.0, NodeDisconnected(link_id=1, reason="reset"), [])
    journal.record(2.0, NodeDisconnected(link_id=2, reason="reset"), [])
    assert [record.message for record in caplog.records] == [
        "the journal ends here, it cannot be written: No space left on device"
    ]


def test_no_ticket_that_opens_something_is_written() -> None:
    for ticket, written in (("5ec2e7" * 5, ""), ("r1/2", "r1/2")):
        offer = OfferKv(
            instance_id=InstanceId("i-1"),
            request_id=RequestId("r1"),
            attempt=1,
            to=NodeId("n2"),
            ticket=ticket,
            expires_s=30.0,
        )
        told = Decision(now_s=0.0, event=CommandReceived(command=offer), actions=(offer,))
        line = decision_fields(told)
        assert (line["event"]["command"]["ticket"], line["actions"][0]["ticket"]) == (written,) * 2
