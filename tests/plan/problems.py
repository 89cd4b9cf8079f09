"""Problems to plan: known models, and made-up ones with any number of operators."""

from dataclasses import replace

from mesh.domain.operators import OperatorTable, Phase, Role
from mesh.domain.profile import Grid
from mesh.plan.problem import Plan, Problem, Staffed, Station, slo_of
from mesh.sim.operators.tables import operator_table


def known(
    rate_per_s: float,
    tokens: int = 2048,
    model: str = "qwen2-7b",
    times: float = 2.0,
    phase: Phase = Phase.PREFILL,
) -> Problem:
    """Prompts, or contexts, of one length."""
    table = operator_table(model, phase)
    slo_s = slo_of(table, (tokens,), times)
    return Problem(table=table, rate_per_s=rate_per_s, lengths=(tokens,), slo_s=slo_s)


def whole_load(problem: Problem) -> float:
    """Seconds of whole devices that requests take in a second, in the batch with the least."""
    return min(map(problem.load, problem.whole))


def staffed(*stations: Station, replicas: int, batch: int = 1) -> Plan:
    """Each station with so many replicas that have such batches."""
    choices = [next(each for each in of if each.batch == batch) for of in stations]
    return tuple(Staffed(replicas=replicas, choice=each) for each in choices)


def made_up(seconds: list[float], rate_per_s: float, slo_s: float) -> Problem:
    """The first operators of a model take `seconds` for a prompt and a twentieth more for each
    further one of a batch; the others next to nothing.
    """
    problem = known(rate_per_s)
    table = problem.table
    each = iter(seconds)

    def grid() -> Grid:
        first = next(each, 1e-7)
        return Grid(rows=(2048, 4096), columns=(0,), seconds=((first,), (first * 1.05,)))

    order = sorted(table.operators, key=lambda of: of.role in (Role.ATTENTION, Role.HEAD))
    operators = tuple(replace(of, repeats=1, prefill=grid()) for of in order)
    changed: OperatorTable = replace(table, operators=operators)
    return replace(problem, table=changed, slo_s=slo_s, batches=(1, 2))
