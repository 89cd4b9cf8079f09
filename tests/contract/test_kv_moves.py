"""KV blocks from one instance to another: the same tokens as without, and nothing that is wrong."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Move:
    """A request with five tokens that goes on, its two whole blocks, and what loads a target."""

    source: Driver
    prompt: tuple[int, ...]
    output: list[int]
    exported: Exported
    load: LoadInstance

    def ahead(self, *, paused: bool = True) -> EngineRequest:
        return EngineRequest(
            request_id=MOVES,
            prompt_tokens=self.prompt,
            output_tokens=tuple(self.output),
            sampling=greedy(),
            paused=paused,
        )

    def into(self, target: Driver, exported: Exported | None = None) -> Generator[None, None, int]:
        """The steps of an import there."""
        header, chunks = exported or self.exported
        return target.engine.import_kv(target.instance_id, self.ahead(), header, chunks)


@pytest.fixture
def source(driver: Driver) -> Driver:
    if not driver.engine.capabilities.kv_format:
        with pytest.raises(EngineError):
            driver.engine.export_kv(driver.instance_id, MOVES, 0, 1)
        pytest.skip("this engine moves no KV blocks")
    return driver


@pytest.fixture
def move(source: Driver, load: LoadInstance) -> Move:
    prompt = tuple(range(3, 3 + 2 * source.block_tokens + 5))
    running = source.submit("moves", prompt)
    while len(running.tokens) < 5:
        source.step()
    header, chunks = source.engine.export_kv(source.instance_id, MOVES, 0, 2)
    return Move(source, prompt, list(running.tokens), (header, list(chunks)), load)


def test_a_request_goes_on_elsewhere_as_if_it_had_never_moved(move: Move) -> None:
    target, source = move.load("i-2"), move.source
    engine, to = target.engine, target.instance_id
    came = imported(move.into(target))
    assert came == 2 * source.block_tokens
    rest = len(move.prompt) + len(move.output) - came
    assert engine.step(to, 64).prefill_tokens == rest - 1, "all but its last"
    running = source.running[MOVES]
    while running.finish is None:
        source.step()
    engine.submit(to, move.ahead(paused=False))
    tokens = list(move.output)
    while len(tokens) < len(running.tokens):
        (yielded,) = engine.step(to, 64).outputs
        tokens += yielded.token_ids
    assert tokens == running.tokens
    target.check_books()


def test_a_transfer_goes_on_from_a_block_while_the_source_does(move: Move) -> None:
    source = move.source
    header, chunks = source.engine.export_kv(source.instance_id, MOVES, 1, 1)
    source.step()
    assert list(chunks) == move.exported[1][1:]
    assert (header.first_block, header.blocks) == (1, 1)


def test_what_is_not_computed_or_has_gone_is_not_exported(move: Move) -> None:
    source = move.source
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


def test_what_is_torn_on_its_way_is_told_where_it_arrives(move: Move) -> None:
    header, (first, last) = move.exported
    changed = replace(last, pages=b"\x01" + last.pages[1:])
    for torn in (changed, replace(first, block=1)):
        with pytest.raises(EngineError, match="torn"):
            checked_chunk(header, torn, 1)


def test_other_calls_come_between_the_blocks_of_an_import(move: Move) -> None:
    target, source = move.load("i-2"), move.source
    steps = move.into(target)
    if next(steps, "ended") == "ended":
        pytest.skip("this engine imports all blocks at once")
    target.submit("other", move.prompt)
    (first,) = target.engine.step(target.instance_id, 128).outputs
    assert first.request_id == RequestId("other"), "the one that comes takes no part yet"
    target.engine.resize_kv(target.instance_id, target.books.kv_blocks + 3)
    assert imported(steps) == 2 * source.block_tokens
    target.engine.submit(target.instance_id, move.ahead(paused=False))
    result = target.engine.step(target.instance_id, 128)
    (yielded,) = [one for one in result.outputs if one.request_id == MOVES]
    source.step()
    assert yielded.token_ids[0] == source.running[MOVES].tokens[5]


def test_an_import_that_is_given_up_leaves_nothing(move: Move) -> None:
    target = move.load("i-2")
    for give_up in ("closed", "aborted"):
        steps = move.into(target)
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


def test_what_is_wrong_is_refused_and_the_request_can_be_computed_there(move: Move) -> None:
    target, source = move.load("i-2"), move.source
    source.step()
    for name, made in WRONG.items():
        with pytest.raises(EngineError):
            imported(move.into(target, made(*move.exported)))
        assert target.books.kv_blocks_used == 0, name
        again = target.submit("moves", move.prompt, output=move.output)
        target.step(128)
        assert again.tokens == source.running[MOVES].tokens[5:], name
        target.abort("moves")


def test_as_many_blocks_are_taken_as_are_free(move: Move) -> None:
    target = move.load("i-2", kv_blocks=1)
    assert imported(move.into(target)) == move.source.block_tokens
    target.engine.abort(target.instance_id, MOVES)
    assert target.books.kv_blocks_used == 0
