"""KV blocks from one instance to another: the same tokens as without, and nothing that is wrong."""

from collections.abc import Callable, Generator
from dataclasses import replace

import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import RequestId
from mesh.domain.steps import KvChunk, KvHeader
from mesh.runtime.engine import EngineRequest
from mesh.runtime.kv_layout import checked_chunk, chunk_of
from tests.contract.conftest import LoadInstance
from tests.contract.driving import Driver, greedy

MOVES = RequestId("moves")
Exported = tuple[KvHeader, list[KvChunk]]


def ahead(prompt: tuple[int, ...], output: list[int], *, paused: bool) -> EngineRequest:
    return EngineRequest(
        request_id=MOVES,
        prompt_tokens=prompt,
        output_tokens=tuple(output),
        sampling=greedy(),
        paused=paused,
    )


@pytest.fixture
def source(driver: Driver) -> Driver:
    if not driver.engine.capabilities.kv_format:
        with pytest.raises(EngineError):
            driver.engine.export_kv(driver.instance_id, MOVES, 0, 1)
        pytest.skip("this engine moves no KV blocks")
    return driver


@pytest.fixture
def prompt(source: Driver) -> tuple[int, ...]:
    return tuple(range(3, 3 + 2 * source.block_tokens + 5))


@pytest.fixture
def output(source: Driver, prompt: tuple[int, ...]) -> list[int]:
    """Five tokens, and it goes on."""
    running = source.submit("moves", prompt)
    while len(running.tokens) < 5:
        source.step()
    return list(running.tokens)


@pytest.fixture
def exported(source: Driver, output: list[int]) -> Exported:
    header, chunks = source.engine.export_kv(source.instance_id, MOVES, 0, 2)
    return header, list(chunks)


def test_a_request_goes_on_elsewhere_as_if_it_had_never_moved(
    source: Driver,
    load: LoadInstance,
    prompt: tuple[int, ...],
    output: list[int],
    exported: Exported,
) -> None:
    header, chunks = exported
    target = load("i-2")
    engine, to = target.engine, target.instance_id
    came = imported(engine.import_kv(to, ahead(prompt, output, paused=True), header, chunks))
    assert came == 2 * source.block_tokens
    result = engine.step(to, 64)
    assert result.prefill_tokens == len(prompt) + len(output) - 1 - came, "the rest but its last"
    running = source.running[MOVES]
    while running.finish is None:
        source.step()
    engine.submit(to, ahead(prompt, output, paused=False))
    tokens = list(output)
    while len(tokens) < len(running.tokens):
        (yielded,) = engine.step(to, 64).outputs
        tokens += yielded.token_ids
    assert tokens == running.tokens
    target.check_books()


def test_a_transfer_goes_on_from_a_block_while_the_source_does(
    source: Driver, output: list[int], exported: Exported
) -> None:
    header, chunks = source.engine.export_kv(source.instance_id, MOVES, 1, 1)
    source.step()
    assert list(chunks) == exported[1][1:]
    assert (header.first_block, header.blocks) == (1, 1)


def test_what_is_not_computed_or_has_gone_is_not_exported(
    source: Driver, output: list[int]
) -> None:
    for first, blocks in ((0, 3), (3, 1), (-1, 1)):
        with pytest.raises(EngineError, match="whole KV blocks"):
            source.engine.export_kv(source.instance_id, MOVES, first, blocks)
    source.abort("moves")
    with pytest.raises(EngineError):
        source.engine.export_kv(source.instance_id, MOVES, 0, 1)


def imported(steps: Generator[None, None, int]) -> int:
    """The tokens that need not be computed, after all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return int(ended.value)


def test_what_is_torn_on_its_way_is_told_where_it_arrives(exported: Exported) -> None:
    header, (first, last) = exported
    changed = replace(last, pages=b"\x01" + last.pages[1:])
    for torn in (changed, replace(first, block=1)):
        with pytest.raises(EngineError, match="torn"):
            checked_chunk(header, torn, 1)


def test_other_calls_come_between_the_blocks_of_an_import(
    source: Driver,
    load: LoadInstance,
    prompt: tuple[int, ...],
    output: list[int],
    exported: Exported,
) -> None:
    target = load("i-2")
    request = ahead(prompt, output, paused=True)
    steps = target.engine.import_kv(target.instance_id, request, *exported)
    if next(steps, "ended") == "ended":
        pytest.skip("this engine imports all blocks at once")
    target.submit("other", prompt)
    (first,) = target.engine.step(target.instance_id, 128).outputs
    assert first.request_id == RequestId("other"), "the one that comes takes no part yet"
    target.engine.resize_kv(target.instance_id, target.books.kv_blocks + 3)
    assert imported(steps) == 2 * source.block_tokens
    target.engine.submit(target.instance_id, replace(request, paused=False))
    result = target.engine.step(target.instance_id, 128)
    (yielded,) = [one for one in result.outputs if one.request_id == MOVES]
    source.step()
    assert yielded.token_ids[0] == source.running[MOVES].tokens[5]


def test_an_import_that_is_given_up_leaves_nothing(
    load: LoadInstance, prompt: tuple[int, ...], output: list[int], exported: Exported
) -> None:
    target = load("i-2")
    request = ahead(prompt, output, paused=True)
    for give_up in ("closed", "aborted"):
        steps = target.engine.import_kv(target.instance_id, request, *exported)
        if next(steps, "ended") == "ended":
            pytest.skip("this engine imports all blocks at once")
        assert target.books.kv_blocks_used == 2
        if give_up == "aborted":
            target.engine.abort(target.instance_id, MOVES)
            with pytest.raises(EngineError):
                next(steps)
        steps.close()
        assert target.books.kv_blocks_used == 0


WRONG: dict[str, Callable[[KvHeader, list[KvChunk]], Exported]] = {
    "cut": lambda header, chunks: (header, [replace(chunks[0], pages=chunks[0].pages[:-1])]),
    "reordered": lambda header, chunks: (header, chunks[::-1]),
    "fewer": lambda header, chunks: (header, chunks[:1]),
    "more": lambda header, chunks: (header, [*chunks, chunk_of(2, chunks[0].pages)]),
    "too long": lambda header, chunks: (
        replace(header, blocks=3),
        [*chunks, chunk_of(2, chunks[0].pages)],
    ),
    "not from the first": lambda header, chunks: (
        replace(header, first_block=1, blocks=1),
        chunks[1:],
    ),
    "another model's": lambda header, chunks: (
        replace(header, model_id=type(header.model_id)("other")),
        chunks,
    ),
    "another layout's": lambda header, chunks: (replace(header, layout="f64"), chunks),
}


def test_what_is_wrong_is_refused_and_the_request_can_be_computed_there(
    source: Driver,
    load: LoadInstance,
    prompt: tuple[int, ...],
    output: list[int],
    exported: Exported,
) -> None:
    target = load("i-2")
    source.step()
    for name, made in WRONG.items():
        request = ahead(prompt, output, paused=True)
        with pytest.raises(EngineError):
            imported(target.engine.import_kv(target.instance_id, request, *made(*exported)))
        assert target.books.kv_blocks_used == 0, name
        again = target.submit("moves", prompt, output=output)
        target.step(128)
        assert again.tokens == source.running[MOVES].tokens[5:], name
        target.abort("moves")


def test_as_many_blocks_are_taken_as_are_free(
    source: Driver,
    load: LoadInstance,
    prompt: tuple[int, ...],
    output: list[int],
    exported: Exported,
) -> None:
    target = load("i-2", kv_blocks=1)
    request = ahead(prompt, output, paused=True)
    came = imported(target.engine.import_kv(target.instance_id, request, *exported))
    assert came == source.block_tokens
    target.engine.abort(target.instance_id, MOVES)
    assert target.books.kv_blocks_used == 0
