"""Who of those that called from zero was told what, and whether it held."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.late_starts import (
    HEADINGS,
    OUTPUT_TOKENS,
    SLO,
    Scene,
    drawn_calls,
    figures,
    row,
    targets,
)
from mesh.domain.steps import LoadTier
from mesh.domain.views import InstanceSnapshot
from mesh.evaluation.judging import judge
from mesh.evaluation.load_client import Answer
from tests.cli.views import READY

ON_TIME = Answer(ended_s=1.9, tokens_s=(1.5,) * OUTPUT_TOKENS, finishes=1)
LATE = replace(ON_TIME, ended_s=3.2, tokens_s=(3.2,) * OUTPUT_TOKENS, grace_s=1.0)
"""By 1.2 s, where 1 s was told."""
REFUSED = Answer(ended_s=0.1, tokens_s=(), refused="memory_full")


def scene(*answers: Answer, loads: tuple[InstanceSnapshot, ...] = ()) -> Scene:
    judged = judge(drawn_calls(len(answers), 1), answers)
    return Scene(name="made up", judged=judged, loads=loads)


def test_each_deployment_is_called_once() -> None:
    calls = drawn_calls(20, 1)
    assert len({call.deployment for call in calls}) == 20
    assert {call.slo for call in calls} == {SLO}


def test_figures_are_lists_by_scene() -> None:
    early = replace(LATE, tokens_s=(2.9,) * OUTPUT_TOKENS)
    loads = tuple(
        replace(READY, load_s=2.0, load_expected_s=expected_s, tier=LoadTier.DISK)
        for expected_s in (1.8, 2.6)
    )
    found = figures([scene(ON_TIME, LATE, early, loads=loads), scene(ON_TIME, REFUSED)])
    assert found == {
        "scenes": ["made up", "made up"],
        "calls": [3, 2],
        "served": [3, 1],
        "told_in_time": [1, 1],
        "met_of_told_in_time": [1.0, 1.0],
        "told_late": [2, 0],
        "late_over_told_p50": [pytest.approx(1.05), None],
        "late_over_told_min": [pytest.approx(0.9), None],
        "late_over_told_max": [pytest.approx(1.2), None],
        "late_ratio": [pytest.approx(1.05), None],
        "load_estimate_error": [pytest.approx(0.2), None],
        "load_tiers": [{"disk": 2}, {}],
        "refused_by_reason": [{}, {"memory_full": 1}],
    }
    assert len(row(scene(ON_TIME, LATE))) == len(row(scene(REFUSED))) == len(HEADINGS)


@pytest.mark.parametrize(
    ("answers", "missed"),
    [
        ((ON_TIME, LATE), set()),
        ((LATE, LATE), set()),
        ((ON_TIME, REFUSED), {"served"}),
        ((ON_TIME, replace(LATE, grace_s=0.0)), {"met_of_told_in_time"}),
        ((replace(LATE, grace_s=0.9),), {"late_over_told"}),
        ((replace(LATE, grace_s=1.8),), {"late_over_told"}),
        ((replace(LATE, tokens_s=(), failed="unavailable"),), {"served", "late_over_told"}),
    ],
)
def test_what_was_told_must_hold(answers: Sequence[Answer], missed: set[str]) -> None:
    kept = targets([scene(*answers)])
    assert {name for name, reached in kept.items() if not reached} == missed
