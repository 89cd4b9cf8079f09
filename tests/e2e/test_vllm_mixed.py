"""A mixed cell as a user runs it: bursts spill over from OpenVINO to vLLM, and come back."""

import sys
from pathlib import Path

import pytest

from bench.mixed import (
    BURST,
    FIRST,
    QUIET_AFTER,
    QUIET_BEFORE,
    SECOND,
    TARGET,
    Requests,
    mixed_cell,
    model_in,
    phased,
    promise,
    report,
)

REQUESTS = Requests(prompt_tokens=64, served_s=3.5, ttft_s=30.0)
"""The TPOT SLO is what a burst is too much for; the TTFT SLO is what a busy machine may take."""
QUIET_REQUESTS = 4
REFUSED_SHARE_MAX = 0.2
"""The share refused at once: two slow cores refused 4 of 32 in one of two runs, else none."""


def note(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@pytest.mark.timeout(900)
def test_a_burst_spills_over_to_the_vllm_node_in_time_and_the_quiet_after_it_comes_back(
    tmp_path: Path,
) -> None:
    """A minute on an idle machine, most of it for the profiles; several on a busy one."""
    with mixed_cell(tmp_path) as cell:
        sized = promise(cell, model_in(tmp_path), REQUESTS, note)
        made = phased(cell, sized, rounds=1, quiet_requests=QUIET_REQUESTS, seed=1, note=note)
    judged = made.judged
    report(made).end()
    assert made.phases[QUIET_BEFORE].served_by(FIRST) == QUIET_REQUESTS
    assert made.phases[QUIET_AFTER].served_by(FIRST) == QUIET_REQUESTS
    burst = made.phases[BURST]
    assert burst.requests == sized.burst
    assert burst.served_by(FIRST), "the first node is tried first"
    assert burst.served_by(SECOND), "what it cannot take in time goes to the second"
    assert not judged.torn, "admitted, and not answered in full"
    assert judged.met_tokens_share >= TARGET
    assert len(judged.refused) <= REFUSED_SHARE_MAX * judged.requests, judged.refused_by_reason
