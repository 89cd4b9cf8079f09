"""Workloads of a scenario: Poisson arrivals, the serverless generator, conversations, or a file.

The last three are traces of `mesh_workloads`; `arrivals_of` hands their arrivals to deployments,
one after the other, without a copy. Before: `scenario`, whose [workload] is one of the kinds.
After: `cluster`, which invokes what arrives.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mesh.domain.errors import InvalidInput
from mesh.domain.values import dataclass
from mesh.sim.cluster import Arrival
from mesh_workloads.asked import Asked
from mesh_workloads.conversations import Conversations
from mesh_workloads.formats import PLAIN_CSV
from mesh_workloads.generating import LLM_MESH, Workload, generate
from mesh_workloads.lengths import Lengths
from mesh_workloads.processes import Diurnal, Process
from mesh_workloads.published import AZURE_CONVERSATION, PUBLISHED
from mesh_workloads.rates import Rates
from mesh_workloads.reading import read, recognise
from mesh_workloads.replay_plan import fitted
from mesh_workloads.sampling import Sample, functions_of, load_for
from mesh_workloads.trace import BLOCK_TOKENS, Trace

CONTEXT_TOKENS_MAX = 4096
"""The longest context of requests whose lengths are drawn, as in the LLM-Mesh testbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Arrivals of a Poisson process, for any deployment alike; lengths uniform, both ends in."""

    duration_s: float
    requests_per_s: float
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("duration_s", "requests_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"workload: {name} is {value:g}; it must be above 0")
        for least, most in (self.input_tokens, self.output_tokens):
            if not 1 <= least <= most:
                raise InvalidInput(
                    f"workload: lengths from {least} to {most} tokens cannot be meant"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Serverless:
    """What `mesh_workloads` generates, a function for each deployment; the first is the busiest.

    What is left out is as in its preset `LLM_MESH`.
    """

    duration_s: float = LLM_MESH.duration_s
    rate_per_s: float | None = None
    """The rate of all deployments; `None` stands for the preset's rate of as many."""
    rates: Rates = LLM_MESH.rates
    process: Process = LLM_MESH.process
    diurnal: Diurnal = LLM_MESH.diurnal
    lengths: str = AZURE_CONVERSATION.name
    context_tokens_max: int = CONTEXT_TOKENS_MAX
    """Prompt and answer together; longer ones are drawn again."""

    def __post_init__(self) -> None:
        published(self.lengths, self.context_tokens_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """What a file of any known format holds, or a part of it."""

    file: Path
    functions: int | None = None
    """32, 64 or 128: the loads of LLM-Mesh §8.1 (`mesh_workloads.sampling`); None for all."""
    start_s: float = 0.0
    duration_s: float | None = None
    """From `start_s`; None for the rest."""
    lengths: str = AZURE_CONVERSATION.name
    """The lengths of requests whose file has none."""
    context_tokens_max: int = CONTEXT_TOKENS_MAX
    """The context limit of lengths that are drawn; those of the file stay."""
    clip_tokens: bool = False
    """Cut requests that no context holds to what it does; otherwise they are refused."""

    def __post_init__(self) -> None:
        if self.functions is not None:
            functions_of(self.functions)
        self.asked(seed=0)

    def asked(self, *, seed: int) -> Asked:
        return Asked(
            start_s=self.start_s,
            duration_s=self.duration_s,
            lengths=published(self.lengths, self.context_tokens_max),
            seed=seed,
        )


WorkloadKind = Poisson | Serverless | TraceFile | Conversations
KINDS: Mapping[str, type[WorkloadKind]] = {
    "poisson": Poisson,
    "serverless": Serverless,
    "trace": TraceFile,
    "conversations": Conversations,
}


def published(name: str, context_tokens_max: int) -> Lengths:
    """Raises InvalidInput when there are no lengths of this name."""
    if name not in PUBLISHED:
        raise InvalidInput(f"there are no lengths {name!r}; there are {', '.join(PUBLISHED)}")
    if context_tokens_max < 2:
        raise InvalidInput(f"context_tokens_max is {context_tokens_max}; it must be 2 or more")
    return replace(PUBLISHED[name], context_tokens_max=context_tokens_max)


def drawn(work: Poisson, names: Sequence[str], seed: int) -> Iterator[Arrival]:
    """The same ones for the same seed."""
    rng = random.Random(seed)
    at_s = rng.expovariate(work.requests_per_s)
    while at_s <= work.duration_s:
        yield Arrival(
            at_s,
            rng.choice(names),
            rng.randint(*work.input_tokens),
            rng.randint(*work.output_tokens),
        )
        at_s += rng.expovariate(work.requests_per_s)


def generated(work: Serverless, functions: int, seed: int) -> Trace:
    """Raises InvalidInput for parameters out of bounds."""
    rate_per_s = LLM_MESH.rate_per_s * functions / LLM_MESH.functions
    made = Workload(
        name="serverless",
        functions=functions,
        rate_per_s=rate_per_s if work.rate_per_s is None else work.rate_per_s,
        duration_s=work.duration_s,
        rates=work.rates,
        process=work.process,
        diurnal=work.diurnal,
        lengths=published(work.lengths, work.context_tokens_max),
    )
    return generate(made, seed)


def from_file(work: TraceFile, seed: int) -> Trace:
    """`seed` is of lengths and moments that the file lacks. A plain file's functions are taken to
    be numbered as a sample's; of other files 128 are sampled before a load is cut from them.

    Raises InvalidInput, NotFound or StorageError as `mesh_workloads.reading.read` does.
    """
    asked = work.asked(seed=seed)
    if work.functions is None:
        return read(work.file, asked)
    if recognise(work.file) is not PLAIN_CSV:
        asked = replace(asked, sample=Sample())
    return load_for(read(work.file, asked), work.functions)


def arrivals_of(
    trace: Trace,
    names: Sequence[str],
    *,
    functions: Sequence[int] | None = None,
    contexts: Mapping[str, int] | None = None,
) -> Iterator[Arrival]:
    """The trace's arrivals for deployments: `functions[i]` is `names[i]`.

    Without `functions`, function i is `names[i]`; in a trace with higher numbers than there are
    names (a load that was cut from a larger one), the functions that are called are the names, in
    ascending order. An answer has exactly as many tokens as the trace says, unless the context is
    full before; a prompt that leaves no room in the context is refused by the cell. With `contexts`
    (tokens, by name) a request is cut to fit: its answer to one less than the context, its prompt
    to what the answer leaves.

    Raises InvalidInput when there are more functions than names.
    """
    if functions is None:
        called = sorted({arrival.function for arrival in trace.arrivals})
        beyond = called and called[-1] >= len(names)
        functions = called if beyond else range(len(names))
    if len(functions) > len(names):
        raise InvalidInput(
            f"trace {trace.name} calls {len(functions)} functions; there are {len(names)} "
            "deployments",
            hint="deploy more, or sample its functions: functions = 32, 64 or 128",
        )
    return _arrivals(trace, dict(zip(functions, names, strict=False)), contexts)


def _arrivals(
    trace: Trace, deployments: Mapping[int, str], contexts: Mapping[str, int] | None
) -> Iterator[Arrival]:
    for arrival in trace.arrivals:
        name = deployments[arrival.function]
        input_tokens, output_tokens = arrival.input_tokens, arrival.output_tokens
        if contexts is not None:
            input_tokens, output_tokens = fitted(input_tokens, output_tokens, contexts[name])
        content = tuple([(block, BLOCK_TOKENS) for block in arrival.blocks])
        yield Arrival(
            *(arrival.t_s, name, input_tokens, output_tokens), content=content, turn=arrival.turn
        )
