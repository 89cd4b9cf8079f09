"""`mesh bench polyserve`: PolyServe and its baselines on virtual H200 (§5.2 to §5.4).

docs/policy-polyserve.md says what the figures mean.
"""

from collections.abc import Mapping
from typing import Any

import click

from mesh.cli import output
from mesh.cli.options import format_option, jobs_option
from mesh.cli.output import Format, text_columns
from mesh.cli.progress import progress
from mesh.domain.errors import InvalidInput, MeshError
from mesh.evaluation.polyserve import (
    BASELINES,
    COST_PERCENTS,
    EITHER,
    OWN,
    REFUSES_NOBODY,
    SERVERS,
    TOGETHER,
    WORKLOADS,
    Figure,
    FigureJob,
    Found,
    Load,
    Optimum,
    Servers,
    cost_record,
    kind_of,
    optimum,
    record,
    record_of_loads,
)
from mesh.evaluation.runs import Failed, run_all
from mesh.runtime.policies import policy_of

QUICK_S, USUAL_S = 10.0, 60.0
QUICK_STEP = 5


@click.command()
@click.option("--workloads", metavar="NAMES", help=f"Of {', '.join(WORKLOADS)}; default: all.")
@click.option(
    "--policies",
    metavar="NAMES",
    help="Default: both of PolyServe, mesh-slo, and their baselines.",
)
@click.option("--no-refusal", is_flag=True, help="Of the default ones, those that refuse nobody.")
@click.option(
    "--figure",
    type=click.Choice([figure.value for figure in Figure]),
    default=Figure.GOODPUT.value,
    show_default=True,
    help="Goodput; with classes that swap their shares halfway; with tables that are 20 % too low, "
    "and too high, and the lengths of another workload, and transfers at 12 GB/s; servers taken "
    "of an unlimited pool.",
)
@click.option(
    "--quick",
    is_flag=True,
    help=f"Goodput to {QUICK_STEP} %, of {QUICK_S:g} s; else 1 %, {USUAL_S:g} s.",
)
@click.option(
    "--servers",
    type=click.IntRange(min=1, max=1024),
    default=SERVERS,
    show_default=True,
    help="Of one H200 each.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of the load."
)
@jobs_option("Searches")
@format_option
def polyserve(
    workloads: str | None,
    policies: str | None,
    no_refusal: bool,
    figure: str,
    quick: bool,
    servers: int,
    seed: int,
    jobs: int,
    form: Format,
) -> None:
    """The goodput of PolyServe, mesh-slo and their baselines, on virtual H200.

    The largest share of the optimal rate at which 90 % of the requests, and of each TPOT class,
    have every token in time.
    """
    names = _names(workloads) or tuple(WORKLOADS)
    ending = REFUSES_NOBODY if no_refusal else ""
    usual = [*OWN.values(), *BASELINES[EITHER]]
    chosen = _names(policies) or tuple(name + ending for name in usual)
    for name in chosen:
        policy_of(name)
    if unknown := [name for name in names if name not in WORKLOADS]:
        hint = f"workloads: {', '.join(WORKLOADS)}"
        raise InvalidInput(f"there is no workload {unknown[0]!r}", hint=hint)
    counted_s, step = (QUICK_S, QUICK_STEP) if quick else (USUAL_S, 1)
    looked_for = Figure(figure)
    loads = {
        load: of
        for name in names
        for of, load in looked_for.loads(
            Load(workload=name, servers=servers, counted_s=counted_s, seed=seed)
        ).items()
    }
    # Costs are compared at the same rates.
    kinds = {of: TOGETHER if looked_for is Figure.COST else kind_of(of) for of in chosen}
    optima = {
        (load.workload, kind): optimum(load, kind)
        for load in {load.workload: load for load in loads}.values()
        for kind in dict.fromkeys(kinds.values())
    }
    planned = [
        FigureJob(
            policy=policy,
            load=load,
            rate_per_s=optima[load.workload, kinds[policy]].drawn_per_s,
            figure=looked_for,
            step=step,
        )
        for load in loads
        for policy in chosen
    ]
    with progress("polyserve") as show:
        ends = run_all(planned, jobs, show)
    found: dict[str, dict[str, dict[str, Any]]] = {
        of: {name: {} for name in names} for of in loads.values()
    }
    failed = [end for end in ends if isinstance(end, Failed)]
    for end in ends:
        if not isinstance(end, Failed):
            found[loads[end.job.load]][end.job.load.workload][end.job.policy] = end.run
    if looked_for is Figure.COST:
        _show_servers(found[""], form)
    else:
        _show(looked_for, optima, found, form)
    if failed:
        whys = "; ".join(f"{end.job.name}: {end.why}" for end in failed)
        raise MeshError(f"{len(failed)} of {len(ends)} searches failed: {whys}")


def _show_servers(found: Mapping[str, Mapping[str, Servers]], form: Format) -> None:
    if form is not Format.TABLE:
        output.structured(cost_record(found), form)
        return
    headers = ("workload", "policy", *(f"servers at {of} %" for of in COST_PERCENTS))
    rows = [
        (name, policy, *("-" if n is None else f"{n:.1f}" for n in servers.values()))
        for name, policies in found.items()
        for policy, servers in policies.items()
    ]
    output.table(text_columns(headers, 2), rows)


def _show(
    figure: Figure,
    optima: Mapping[tuple[str, str], Optimum],
    found: Mapping[str, Found],
    form: Format,
) -> None:
    """`found` is by the names of loads."""
    if form is not Format.TABLE:
        one = figure is Figure.GOODPUT
        told = record(optima, found[""]) if one else record_of_loads(figure, optima, found)
        output.structured(told, form)
        return
    headers = (
        *("workload", "policy", "load", "goodput, %", "of each class, %"),
        *("met at 120 %, %", "setting"),
    )
    rows = [
        (
            *(name, policy, of or "usual", str(one.percent), str(one.percent_each_class)),
            *(
                f"{100 * one.overload_share:.0f}",
                "-" if one.setting is None else f"{one.setting:g}",
            ),
        )
        for of, by_workload in found.items()
        for name, policies_found in by_workload.items()
        for policy, one in policies_found.items()
    ]
    output.table(text_columns(headers, 2), rows)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))
