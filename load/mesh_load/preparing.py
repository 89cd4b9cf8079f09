"""From the options to the run: the cell is asked what it has, the trace is read, calls are planned.

Only the master does it. Before: `options`. After: `master`, which gives the calls to workers.
"""

from dataclasses import dataclass

from mesh.cli.replay_options import asked_of, trace_asked
from mesh.evaluation.replay.cell import contexts_of, deployed, prompts_of
from mesh.wire.client import MeshClient
from mesh_load.options import Options
from mesh_load.share import Share
from mesh_workloads.replay_plan import ReplayPlan, plan_replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    plan: ReplayPlan
    share: Share
    """The share that holds all calls."""


def prepare(options: Options) -> Prepared:
    """Raises InvalidInput, NotFound and StorageError for what cannot be replayed, Unavailable when
    the cell does not answer.
    """
    asked = asked_of(options.given)
    with MeshClient(options.address) as client:
        found = deployed(client)
        trace = trace_asked(options.trace, options.given, max(len(asked.deployments or found), 1))
        plan = plan_replay(trace, asked, contexts_of(found))
        called = sorted({call.deployment for call in plan.calls})
        prompts = prompts_of(client, (found[name] for name in called), seed=options.given["seed"])
    share = Share(
        address=options.http or options.address,
        slos={name: found[name].spec.slo for name in called},
        sentences={name: each.sentences for name, each in prompts.items()},
        seed=options.given["seed"],
        forced=plan.forced,
        calls=plan.calls,
        calls_whole=len(plan.calls),
        http=options.http is not None,
    )
    return Prepared(plan=plan, share=share)
