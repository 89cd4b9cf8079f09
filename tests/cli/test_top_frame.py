"""One picture of `mesh top`: the parts of a node's memory add up, and the lines say all of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.verbs.top import BAR_CELLS, Picture, bar, fitting, frame
from mesh.domain.views import NodeSnapshot
from mesh.report.memory_parts import Part, parts
from tests.cli.views import CHAT_SMALL, FRESH, LOADING, NODE, PARKED, READY, STATUS

BUSY = replace(NODE, instances=(READY, LOADING, PARKED))
SIZES = st.integers(0, 2**40)


def sizes(node: NodeSnapshot) -> dict[str, int]:
    return {part.name: part.size_bytes for part in parts(node)}


def shown(*nodes: NodeSnapshot, trouble: str = "") -> list[str]:
    queued = replace(FRESH, queued=2)
    picture = Picture(status=STATUS, nodes=nodes, deployments=(CHAT_SMALL, queued))
    return [line.plain for line in frame(picture, "127.0.0.1:7070", trouble)]


def test_the_parts_of_a_node_add_up_to_its_limit() -> None:
    found = sizes(BUSY)
    assert sum(found.values()) == NODE.memory_bytes
    assert found["base"] == NODE.base_bytes
    assert found["weights"] == READY.weights_bytes + PARKED.weights_bytes
    assert found["KV"] == READY.kv_used_bytes
    assert found["idle"] == READY.kv_bytes + PARKED.kv_bytes - READY.kv_used_bytes


def test_what_is_cached_lies_in_the_size_in_force_and_beyond_it_in_what_is_free() -> None:
    """A parked instance has one block in force."""
    block_bytes = READY.kv_bytes // READY.kv_blocks
    some = replace(READY, kv_blocks_cached=10)
    found = sizes(replace(NODE, instances=(some,)))
    assert found["cached"] == 10 * block_bytes
    assert found["idle"] == READY.kv_bytes - READY.kv_used_bytes - 10 * block_bytes
    parked = replace(PARKED, kv_blocks=1, kv_bytes=block_bytes, kv_used_bytes=0)
    without = sizes(replace(NODE, instances=(parked,)))
    found = sizes(replace(NODE, instances=(replace(parked, kv_blocks_cached=10),)))
    assert (found["cached"], found["idle"]) == (10 * block_bytes, 0)
    assert found["free"] == without["free"] - 9 * block_bytes


def test_a_load_is_in_flight_until_it_is_done() -> None:
    """The larger of what is promised and what is tracked counts: a shrink has not given back yet
    what it promises to."""
    held = READY.weights_bytes + READY.kv_bytes
    node = replace(NODE, instances=(READY, LOADING), promised_bytes=held, tracked_bytes=held)
    assert sizes(node)["in flight"] == 0
    assert sizes(replace(node, promised_bytes=held + 7))["in flight"] == 7
    assert sizes(replace(node, tracked_bytes=held + 9))["in flight"] == 9


def test_a_node_that_holds_more_than_its_limit_has_nothing_free() -> None:
    found = sizes(replace(NODE, memory_bytes=NODE.base_bytes + 1))
    assert (found["free"], found["weights"]) == (0, READY.weights_bytes)


@given(st.lists(SIZES, min_size=6, max_size=6).filter(any))
def test_a_bar_is_as_wide_as_it_should_be_and_shows_whatever_there_is(given: list[int]) -> None:
    found = [Part(letter, "", letter, size) for letter, size in zip("BWKk>.", given, strict=True)]
    drawn = bar(found).plain
    assert len(drawn) == BAR_CELLS
    assert set(drawn) == {part.letter for part in found if part.size_bytes}


def test_a_bar_is_in_proportion() -> None:
    found = [Part("a", "", "a", 100), Part("b", "", "b", 0), Part("c", "", "c", 300)]
    assert bar(found, 8).plain == "aacccccc"
    assert bar([Part("a", "", "a", 0)], 8).plain == ""


def test_a_whole_picture_fits_into_100_columns() -> None:
    lines = shown(BUSY)
    assert "\n".join(lines) == (
        "mesh 1.2.3 at 127.0.0.1:7070: 1 of 2 nodes ready, 3 running, 3 queued, "
        "1234 served, 5 refused\n"
        "\n"
        "cpu0  ready  cpu, 2 cores, openvino, silent 0.4 s\n"
        f"  {'B' * 2}{'W' * 5}K{'k' * 6}>{'.' * 57}\n"
        "  B base 153  W weights 324  K KV 12.0  c cached 0.0  k idle 349  > in flight 27.9"
        "  . free 3231 MiB\n"
        "  limit 4096, promised 713, tracked 522, to promise 3231 MiB; RSS 858 MiB, "
        "unaccounted -1.9 MiB\n"
        "  INSTANCE      STATE    BATCH  QUEUED  HEADROOM_S  ITER_MS  CORRECTION  KV_USED_MIB"
        "  KV_HELD_MIB\n"
        "  chat-small-1  ready        3       1       -0.12    34.56        1.08         12.0"
        "        360.0\n"
        "  chat-small-2  loading      0       1           -    20.00        1.00          0.0"
        "          0.0\n"
        "  code-1        parked       0       0           -    34.56        1.08          0.0"
        "          0.7\n"
        "  OPERATION  INSTANCE      SIZE_MIB  STATE    NEEDED_IN_S\n"
        "  resize     chat-small-1     522.1  running        -0.50\n"
        "  load       chat-small-2     190.7  waiting            -\n"
        "\n"
        "queued without an instance: x 2"
    )
    assert max(map(len, lines)) <= 100


def test_what_is_not_known_yet_and_what_is_not_there_is_left_out() -> None:
    lines = shown(replace(NODE, instances=(), operations=(), rss_bytes=0), trouble="lost")
    assert lines[0] == "lost"
    assert lines[-3].endswith("; RSS not told yet")
    assert not [line for line in lines if "INSTANCE" in line]


def test_what_a_node_calls_itself_cannot_steer_the_terminal() -> None:
    assert any("\\x1b[2J" in line for line in shown(replace(NODE, engine="\x1b[2J")))
    assert not [line for line in shown(replace(NODE, engine="\x1b[2J")) if "\x1b" in line]


@pytest.mark.parametrize(("height", "last"), [(3, "… 2 more lines; `mesh top --once` shows all")])
def test_a_low_screen_says_what_it_leaves_out(height: int, last: str) -> None:
    picture = Picture(status=STATUS, nodes=(), deployments=(replace(FRESH, queued=1),))
    lines = frame(picture, "h:1", "lost")
    assert fitting(lines, len(lines)) == lines
    kept = fitting(lines, height)
    assert (len(kept), kept[0], kept[-1].plain) == (height, lines[0], last)
