"""`mesh bench polyserve`: the goodput of PolyServe and its baselines on virtual H200 (§5.2).

docs/policy-polyserve.md says what the figures mean.
"""

import os
from collections.abc import Mapping

import click

from mesh.cli import output
from mesh.cli.options import format_option
from mesh.cli.output import Format, text_columns
from mesh.cli.progress import progress
from mesh.domain.errors import InvalidInput, MeshError
from mesh.domain.values import replace
from mesh.evaluation.polyserve import (
    BASELINES,
    EITHER,
    OWN,
    REFUSES_NOBODY,
    SERVERS,
    SLOW_KV_LINK_BYTES_PER_S,
    TABLES_OFF,
    WORKLOADS,
    Found,
    Goodput,
    GoodputJob,
    Load,
    Optimum,
    kind_of,
    optimum,
    record,
    robust_record,
)
from mesh.evaluation.runs import JOBS_MAX, Failed, run_all
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
    "--robust",
    is_flag=True,
    help="With tables that are 20 % too low, and too high, and transfers at 12 GB/s.",
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
@click.option(
    "--jobs",
    type=click.IntRange(min=1, max=JOBS_MAX),
    default=lambda: min(os.cpu_count() or 1, JOBS_MAX),
    show_default="the machine's cores",
    help="Searches at a time.",
)
@format_option
def polyserve(
    workloads: str | None,
    policies: str | None,
    no_refusal: bool,
    robust: bool,
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
    usual_loads = [
        Load(workload=name, servers=servers, counted_s=counted_s, seed=seed) for name in names
    ]
    kinds = dict.fromkeys(kind_of(policy) for policy in chosen)
    optima = {(of.workload, kind): optimum(of, kind) for of in usual_loads for kind in kinds}
    loads = usual_loads
    if robust:
        loads = [
            replace(of, tables=tables, kv_link_bytes_per_s=SLOW_KV_LINK_BYTES_PER_S)
            for tables in TABLES_OFF
            for of in usual_loads
        ]
    planned = [
        GoodputJob(
            policy=policy,
            load=load,
            rate_per_s=optima[load.workload, kind_of(policy)].drawn_per_s,
            step=step,
        )
        for load in loads
        for policy in chosen
    ]
    with progress("polyserve") as show:
        ends = run_all(planned, jobs, show)
    found = {of.tables: {name: dict[str, Goodput]() for name in names} for of in loads}
    failed = [end for end in ends if isinstance(end, Failed)]
    for end in ends:
        if not isinstance(end, Failed):
            found[end.job.load.tables][end.job.load.workload][end.job.policy] = end.run
    _show(optima, found, form)
    if failed:
        whys = "; ".join(f"{end.job.name}: {end.why}" for end in failed)
        raise MeshError(f"{len(failed)} of {len(ends)} searches failed: {whys}")


def _show(
    optima: Mapping[tuple[str, str], Optimum],
    found: Mapping[float, Found],
    form: Format,
) -> None:
    """`found` is by what tables say over what iterations take."""
    if form is not Format.TABLE:
        told = record(optima, found[1.0]) if 1.0 in found else robust_record(optima, found)
        output.structured(told, form)
        return
    headers = (
        *("workload", "policy", "tables", "goodput, %", "of each class, %"),
        *("met at 120 %, %", "setting"),
    )
    rows = [
        (
            *(name, policy, f"{tables:g}", str(one.percent), str(one.percent_each_class)),
            *(
                f"{100 * one.overload_share:.0f}",
                "-" if one.setting is None else f"{one.setting:g}",
            ),
        )
        for tables, by_workload in found.items()
        for name, policies_found in by_workload.items()
        for policy, one in policies_found.items()
    ]
    output.table(text_columns(headers, 2), rows)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))
