"""From a trace and what is asked of it to calls: when, to which deployment, how long.

Pure and of no protocol: whoever sends the calls (`mesh replay`, locust's users, the simulator) gets
the same ones for the same trace, parameters and deployments. Before: `reading` or `generating`.
After: `prompts`, which makes each call's prompt, and a sender.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.domain.errors import InvalidInput, NotFound
from mesh_workloads.mapping import HASH, POPULARITY, by_hash, by_popularity, by_table
from mesh_workloads.scaling import Scale
from mesh_workloads.trace import TOKENS_MAX, Trace

CALLS_MAX = 1_000_000
"""The most calls of a replay: their results stay in memory to its end, some kilobytes each."""
RUN_S_MAX = 24 * 3600.0
"""The longest replay; the last call's own limit comes on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, due `at_s` seconds after the replay's start."""

    number: int
    """From 0, in the order of `at_s`; it seeds the prompt."""
    at_s: float
    deployment: str
    function: str
    """Its label."""
    input_tokens: int
    output_tokens: int
    """Exactly so many where the plan forces them, at most so many otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What is asked of a trace; its window is `Asked`'s, when it is read."""

    scale: Scale = field(default_factory=Scale)
    mapping: str | Mapping[str, str] = HASH
    """`hash`, `popularity`, or a table from labels to deployments."""
    deployments: tuple[str, ...] = ()
    """In the order of their popularity; none for all that there are, by name."""
    forced: bool = True
    """Answers have exactly the trace's lengths; otherwise they end where the model ends them, at
    the trace's length at the latest.
    """
    output_tokens_max: int | None = None
    """Longer answers are cut to it before anything else; None for the trace's own lengths. Without
    `forced` it takes the trace's place.
    """
    clip: bool = True
    """Requests longer than a deployment's context are cut to it; otherwise only their answers are,
    and the cell refuses prompts that no context holds.
    """

    def __post_init__(self) -> None:
        if isinstance(self.mapping, str) and self.mapping not in (HASH, POPULARITY):
            raise InvalidInput(
                f"there is no mapping {self.mapping!r}",
                hint=f"{HASH}, {POPULARITY}, or a table of functions and deployments",
            )
        most = self.output_tokens_max
        if most is not None and not 1 <= most <= TOKENS_MAX:
            raise InvalidInput(f"output_tokens_max is {most}; it must be from 1 to {TOKENS_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Calls in the order of their times."""

    name: str
    """The trace's."""
    calls: tuple[Call, ...] = field(repr=False)
    duration_s: float
    deployments: tuple[str, ...]
    """The deployments that may be called, whether or not any function has become them."""
    functions: int
    forced: bool
    too_long: int
    """Calls whose prompt and answer no context of their deployment holds."""
    clipped: bool
    """Those were cut to it, prompts and all."""
    left_out: int
    """Requests of the source without a prompt or an answer."""


def plan_replay(trace: Trace, asked: Replay, contexts: Mapping[str, int]) -> ReplayPlan:
    """`contexts` has the tokens that fit into each deployment's context, by its name.

    Raises InvalidInput for parameters that cannot be meant and for a replay that would be too long,
    NotFound for deployments that are not in `contexts`, all naming them.
    """
    deployments = _known(asked.deployments, contexts)
    scaled = _bounded(asked.scale.of(trace))
    to = _mapped(scaled, asked.mapping, deployments)
    labels = {function: scaled.label(function) for function in to}
    calls: list[Call] = []
    too_long = 0
    for number, arrival in enumerate(scaled.arrivals):
        name = to[arrival.function]
        lengths = arrival.input_tokens, _answer(arrival.output_tokens, asked)
        fitting = fitted(*lengths, contexts[name])
        too_long += fitting != lengths
        input_tokens, output_tokens = fitting
        if not asked.clip:
            input_tokens, output_tokens = lengths
            room_tokens = contexts[name] - input_tokens
            output_tokens = min(output_tokens, room_tokens) if room_tokens > 0 else output_tokens
        calls.append(
            Call(
                number=number,
                at_s=arrival.t_s,
                deployment=name,
                function=labels[arrival.function],
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )
        )
    return ReplayPlan(
        name=trace.name,
        calls=tuple(calls),
        duration_s=scaled.duration_s,
        deployments=deployments,
        functions=len(labels),
        forced=asked.forced,
        too_long=too_long,
        clipped=asked.clip,
        left_out=trace.left_out,
    )


def fitted(input_tokens: int, output_tokens: int, context_tokens: int) -> tuple[int, int]:
    """A request cut to a context of two tokens or more: its answer to one less than that, its
    prompt to what the answer leaves.
    """
    output_tokens = min(output_tokens, context_tokens - 1)
    return min(input_tokens, context_tokens - output_tokens), output_tokens


def _bounded(scaled: Trace) -> Trace:
    if len(scaled.arrivals) > CALLS_MAX:
        raise InvalidInput(
            f"the replay would send {len(scaled.arrivals)} calls; at most {CALLS_MAX}",
            hint="take a shorter window, or lower the rate scale",
        )
    if scaled.duration_s > RUN_S_MAX:
        raise InvalidInput(
            f"the replay would last {scaled.duration_s:.0f} s; at most {RUN_S_MAX:.0f}",
            hint="take a shorter window, or lower the time scale",
        )
    return scaled


def _known(asked: tuple[str, ...], contexts: Mapping[str, int]) -> tuple[str, ...]:
    unknown = [name for name in asked if name not in contexts]
    if unknown:
        raise NotFound(
            f"{len(unknown)} of the {len(asked)} deployments asked for are not in the cell: "
            + ", ".join(unknown),
            hint="`mesh get` lists those that are: " + (", ".join(sorted(contexts)) or "none"),
        )
    if len(set(asked)) < len(asked):
        raise InvalidInput(f"a deployment is asked for twice: {', '.join(asked)}")
    if not contexts:
        raise NotFound("the cell has no deployments", hint="deploy one: mesh deploy MODEL.yaml")
    return asked or tuple(sorted(contexts))


def _mapped(
    trace: Trace, mapping: str | Mapping[str, str], deployments: tuple[str, ...]
) -> dict[int, str]:
    match mapping:
        case str():
            by = by_hash if mapping == HASH else by_popularity
            return by(trace, deployments)
        case _:
            return by_table(trace, mapping, deployments)


def _answer(tokens: int, asked: Replay) -> int:
    if asked.output_tokens_max is None:
        return tokens
    return min(tokens, asked.output_tokens_max) if asked.forced else asked.output_tokens_max
