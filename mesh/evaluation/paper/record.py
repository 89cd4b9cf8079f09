"""The evaluation as one plain value: cell -> policy -> numbers, for `-o json`; pure.

Everything but `seconds` follows from the load and the code. Series by second are left out: they are
drawn. Before: `evaluation`. After: the command line.
"""

from mesh.evaluation.paper.evaluation import EvaluatedRun, Evaluation, ratio
from mesh.sim.refusals import RefusalCounts

Record = dict[str, object]


def record(made: Evaluation) -> Record:
    return {
        "workload": made.workload,
        "duration_s": made.duration_s,
        "cells": {
            cell: {run.policy: _of_run(run) for run in made.of_cell(cell)} for cell in made.cells
        },
    }


def _of_run(run: EvaluatedRun) -> Record:
    n, theirs = run.numbers, run.reference
    return {
        "requests": n.requests,
        "finished": n.finished,
        "met": n.met,
        "met_with_grace": n.met_with_grace,
        "met_every_token": n.met_every_token,
        "met_every_token_with_grace": n.met_every_token_with_grace,
        "cpu_nodes": round(n.cpu_nodes, 4),
        "gpu_nodes": round(n.gpu_nodes, 4),
        "cpu_nodes_busy": round(n.cpu_nodes_busy, 4),
        "gpu_nodes_busy": round(n.gpu_nodes_busy, 4),
        "loads": n.loads,
        "cold_requests": n.cold_requests,
        "refused": dict(n.refused),
        "decode_tokens_per_s": {device: round(rate, 2) for device, rate in n.decode_tokens_per_s},
        "ttft_percentiles_s": [round(s, 4) for s in n.ttft.seconds],
        "tpot_percentiles_s": [round(s, 4) for s in n.tpot.seconds],
        "started": n.ttft.count,
        "by_rank": n.by_rank,
        **({"by_class": n.by_class} if n.by_class else {}),
        "served_share_least": round(n.served.least, 4),
        "served_share_most": round(n.served.most, 4),
        "unfair_pairs": n.served.unfair_pairs,
        "energy": n.energy,
        "reference": {
            "met": theirs.met,
            "met_ratio": ratio(n.met, theirs.met),
            "gpu_nodes": theirs.gpu_nodes,
            "gpu_nodes_ratio": ratio(n.gpu_nodes_busy, theirs.gpu_nodes),
        },
        **({} if run.refusals is None else _of_refusals(run.refusals)),
        "seconds": round(run.seconds, 2),
    }


def _of_refusals(made: RefusalCounts) -> Record:
    return {
        "refused_beside_free_link": made.refused_beside_free_link,
        "refusal_reasons_drawn": made.reasons_drawn,
        "refusal_reasons_agree": made.refusal_reasons_agree,
    }
