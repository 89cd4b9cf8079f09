"""Plays conversations on a live cell: each turn has all that was said, the answers as they came.

A turn is sent at its planned time, but no earlier than the answer before has ended. Before:
`mesh_workloads.conversations`. After: `__main__`, which judges the answers.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Tokens
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer, Call, Invoke, heard, invoke_of, request_of
from mesh.wire.channel import dial
from mesh_workloads.trace import Arrival, Trace, Turn

TOKEN_IDS = range(1000, 40_000)
CALL_S_MAX = 60.0
LEAD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    call: Call
    answer: Answer


def play(address: str, name: DeploymentName, slo: Slo, trace: Trace, seed: str) -> list[Played]:
    """In the order of their sending. With another seed conversations have other tokens, but for
    what all of the trace's function begin with.
    """
    return asyncio.run(_play(address, name, slo, trace, seed))


def _talks(trace: Trace) -> Iterator[list[tuple[Turn, Arrival]]]:
    turns = [(a.turn, a) for a in trace.arrivals if a.turn is not None]
    turns.sort(key=lambda pair: (pair[0].conversation, pair[1].t_s))
    for _, talk in groupby(turns, key=lambda pair: pair[0].conversation):
        yield list(talk)


async def _play(
    address: str, name: DeploymentName, slo: Slo, trace: Trace, seed: str
) -> list[Played]:
    async with dial(address) as channel:
        invoke, start_s = invoke_of(channel), time.monotonic() + LEAD_S
        talks = [_talk(invoke, name, slo, talk, start_s, seed) for talk in _talks(trace)]
        played = [one for talk in await asyncio.gather(*talks) for one in talk]
    return sorted(played, key=lambda one: one.answer.sent_s)


async def _talk(
    invoke: Invoke,
    name: DeploymentName,
    slo: Slo,
    turns: Sequence[tuple[Turn, Arrival]],
    start_s: float,
    seed: str,
) -> list[Played]:
    played: list[Played] = []
    turn, first = turns[0]
    draw = random.Random(f"{seed}/{turn.conversation}")
    system = random.Random(f"system of {first.function}")
    said = system.choices(TOKEN_IDS, k=turn.system_tokens)
    for _, arrival in turns:
        await asyncio.sleep(max(start_s + arrival.t_s - time.monotonic(), 0.0))
        # What an answer lacks, where it was refused, is made up.
        missing = max(arrival.input_tokens - len(said), 0)
        prompt = (said + draw.choices(TOKEN_IDS, k=missing))[: arrival.input_tokens]
        sent_s = time.monotonic()
        call = Call(
            at_s=sent_s - start_s,
            deployment=name,
            slo=slo,
            prompt_tokens=tuple(prompt),
            output_tokens=arrival.output_tokens,
        )
        stream = invoke(request_of(call).SerializeToString(), timeout=CALL_S_MAX)
        answer, events = await heard(stream, sent_s)
        played.append(Played(call=call, answer=answer))
        tokens = [event.token_ids for _, event in events if isinstance(event, Tokens)]
        said = prompt + [token_id for ids in tokens for token_id in ids]
    return played
