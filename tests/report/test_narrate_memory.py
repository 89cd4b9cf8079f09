"""The story of KV caches: what is told, and what is not."""

from dataclasses import replace

import pytest

from mesh.domain.actions import SendCommand
from mesh.domain.events import KeepAliveExpired, NodeConnected, NodeReported
from mesh.domain.ids import InstanceId, ModelId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    InstanceGone,
    InstanceLoaded,
    KvResized,
    NodeCommand,
    NodeReport,
    ResizeKv,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.model import Footprint
from mesh.domain.views import CellLine
from mesh.report import narrate_memory
from mesh.report.narrate import Narrator
from tests.core.cells import hello, instance_report

ONE, OTHER = InstanceId("chat-1-1"), InstanceId("code-1-1")
FOOTPRINT = Footprint(weights_bytes=1, kv_block_bytes=1, block_tokens=32)


def reported(report: NodeReport) -> NodeReported:
    return NodeReported(link_id=1, report=report)


def sent(*commands: NodeCommand) -> list[SendCommand]:
    return [SendCommand(link_id=1, command=command) for command in commands]


def resize(instance_id: InstanceId, kv_blocks: int) -> list[SendCommand]:
    return sent(ResizeKv(instance_id=instance_id, kv_blocks=kv_blocks))


def texts(lines: list[CellLine]) -> list[str]:
    return [f"{line.kind} {line.subject}: {line.text}" for line in lines]


PARKED = f"instance {ONE}: parked: it keeps its weights, and hardly any KV cache"
RESUMED = f"instance {ONE}: resumed with 40 KV blocks"
IDLE = KeepAliveExpired(instance_id=ONE, idle_since_s=0.0)


def test_an_instance_is_parked_and_resumed_and_then_grows_without_a_word() -> None:
    story = Narrator()
    assert texts(story(IDLE, resize(ONE, 1))) == [PARKED]
    done = KvResized(instance_id=ONE, kv_blocks=1, elapsed_s=0.1)
    assert story(reported(done), []) == []
    assert texts(story(None, resize(ONE, 40))) == [RESUMED]
    assert story(None, resize(ONE, 60)) == []
    assert story(None, resize(ONE, 30)) == []


def test_what_was_parked_under_an_earlier_controller_is_resumed_too() -> None:
    story = Narrator()
    report = instance_report(
        instance_id=ONE,
        model_id=ModelId("m"),
        footprint=FOOTPRINT,
        kv_blocks=1,
        context_tokens_max=64,
        batch_max=4,
    )
    connected = NodeConnected(link_id=1, hello=replace(hello(), instances=(report,)))
    story(connected, [])
    assert texts(story(None, resize(ONE, 40))) == [RESUMED]


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (None, sent(UnloadInstance(instance_id=ONE))),
        (reported(InstanceGone(instance_id=ONE)), []),
    ],
)
def test_a_parked_instance_that_goes_is_forgotten(event: object, actions: list[object]) -> None:
    story = Narrator()
    story(IDLE, resize(ONE, 1))
    story(event, actions)
    assert story(None, resize(ONE, 40)) == []


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrate_memory, "PARKED_MAX", 1)
    story = Narrator()
    story(None, resize(OTHER, 1))
    story(None, resize(ONE, 1))
    assert story(None, resize(OTHER, 40)) == []
    assert texts(story(None, resize(ONE, 40))) == [RESUMED]


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (InstanceGone(instance_id=OTHER), [f"once {OTHER} was gone"]),
        (KvResized(instance_id=OTHER, kv_blocks=2, elapsed_s=0.1), [f"once {OTHER} was resized"]),
        (KvResized(instance_id=ONE, kv_blocks=2, elapsed_s=0.1), []),
        (
            InstanceLoaded(instance_id=OTHER, footprint=FOOTPRINT, kv_blocks=2, elapsed_s=0.1),
            [],
        ),
    ],
)
def test_a_resize_that_waited_says_for_which(report: NodeReport, told: list[str]) -> None:
    lines = texts(Narrator()(reported(report), resize(ONE, 60)))
    assert [line for line in lines if "resize " in line] == [
        f"instance {ONE}: resize to 60 KV blocks, {after}" for after in told
    ]


def test_a_failed_resize_says_what_is_in_force() -> None:
    failed = KvResized(
        instance_id=ONE, kv_blocks=8, elapsed_s=0.1, error="OutOfMemory", message="no pages"
    )
    assert texts(Narrator()(reported(failed), [])) == [
        f"instance {ONE}: resize failed: no pages; its KV cache has 8 blocks"
    ]


ABORT = AbortRequest(request_id=RequestId("r2"), attempt=1)


@pytest.mark.parametrize(
    ("starved", "told"),
    [
        ((RequestId("r1"),), [f"request r2: evicted from {ONE}, which had no KV blocks left"]),
        ((), []),
    ],
)
def test_an_eviction_names_its_instance_and_another_abort_is_none(
    starved: tuple[RequestId, ...], told: list[str]
) -> None:
    tokens = TokensReport(instance_id=ONE, outputs=(), starved=starved)
    assert texts(Narrator()(reported(tokens), sent(ABORT))) == told


def test_starving_alone_is_not_told() -> None:
    tokens = TokensReport(instance_id=ONE, outputs=(), starved=(RequestId("r1"),))
    assert Narrator()(reported(tokens), resize(ONE, 60)) == []


def test_the_story_keeps_the_order_of_what_was_decided() -> None:
    story = Narrator()
    story(IDLE, resize(ONE, 1))
    gone = reported(InstanceGone(instance_id=OTHER, message="crashed"))
    actions = [*resize(ONE, 40), *sent(UnloadInstance(instance_id=OTHER))]
    assert texts(story(gone, actions)) == [
        f"instance {OTHER}: gone: crashed",
        RESUMED,
        f"instance {OTHER}: unload",
    ]
