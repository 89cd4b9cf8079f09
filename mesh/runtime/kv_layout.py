"""KV blocks between two engines: one layout for all of them, and what is checked when they come in.

A request's blocks travel as a header and one chunk for each block, in order. An engine knows what
its pages mean; that they are of the same model and layout, whole, in order and no more than there
may be is checked here, the same for every engine. Before: `Engine.export_kv`. After:
`Engine.import_kv`.
"""

from collections.abc import Iterable, Iterator

import xxhash

from mesh.domain.errors import EngineError
from mesh.domain.ids import RequestId
from mesh.domain.steps import EngineRequest, KvChunk, KvHeader
from mesh.domain.values import replace


def chunk_of(block: int, pages: bytes) -> KvChunk:
    """The chunk of a block. Its digest tells changed bytes, and blocks in another's place."""
    return KvChunk(block=block, digest=_digest(block, pages), pages=pages)


def checked_chunk(header: KvHeader, chunk: KvChunk, position: int) -> KvChunk:
    """The chunk at a position of a transfer, from 0, where it arrives. Raises EngineError if it
    belongs to another block or its digest is wrong.
    """
    _check_place(header, chunk, position)
    if chunk.digest != _digest(chunk.block, chunk.pages):
        raise EngineError(f"KV block {chunk.block} came torn: its digest is another")
    return chunk


def checked_chunks(header: KvHeader, chunks: Iterable[KvChunk]) -> Iterator[bytes]:
    """The pages of each block that the header announces, whose digests `checked_chunk` has looked
    at. Raises EngineError where a chunk belongs to another block, or where they are more or fewer.
    """
    count = 0
    for count, chunk in enumerate(chunks, start=1):
        if count > header.blocks:
            raise EngineError(f"more KV blocks came than the {header.blocks} that were announced")
        _check_place(header, chunk, count - 1)
        yield chunk.pages
    if count < header.blocks:
        raise EngineError(f"{count} KV blocks came of {header.blocks}")


def check_header(header: KvHeader, own: KvHeader, request: EngineRequest) -> int:
    """How many tokens the blocks are of. `own`: as the importing instance would make it, of any
    range. Raises EngineError where the blocks are another model's, in another layout, do not begin
    with the request, or leave none of its tokens to compute.
    """
    if replace(header, first_block=own.first_block, blocks=own.blocks) != own:
        raise EngineError(
            f"KV blocks of {header.model_id} ({header.layout}, {header.block_bytes} bytes) do not "
            f"fit {own.model_id} ({own.layout}, {own.block_bytes} bytes)"
        )
    tokens = (header.first_block + header.blocks) * header.block_tokens
    given = len(request.prompt_tokens) + len(request.output_tokens)
    if header.first_block or tokens >= given:
        raise EngineError(
            f"KV blocks {header.first_block} to {header.first_block + header.blocks} do not fit "
            f"the {given} tokens of request {request.request_id}"
        )
    return tokens


def check_range(request_id: RequestId, first_block: int, blocks: int, computed_blocks: int) -> None:
    """Raises EngineError where not all of a range is computed."""
    if first_block < 0 or blocks < 0 or first_block + blocks > computed_blocks:
        raise EngineError(
            f"request {request_id} has {computed_blocks} whole KV blocks; {first_block} to "
            f"{first_block + blocks} were wanted"
        )


def _check_place(header: KvHeader, chunk: KvChunk, position: int) -> None:
    block = header.first_block + position
    if chunk.block != block:
        raise EngineError(f"KV block {block} was due, and {chunk.block} came")
    if len(chunk.pages) != header.block_bytes:
        raise EngineError(f"KV block {block} has {len(chunk.pages)} bytes of {header.block_bytes}")


def _digest(block: int, pages: bytes) -> bytes:
    return xxhash.xxh3_128_digest(pages, seed=block)
