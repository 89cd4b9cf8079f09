"""What `mesh demo` makes of answers that did not complete."""

import pytest

from mesh.cli.verbs.demo import Talk, _tell_failures
from mesh.domain.errors import MeshError, Refused, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.reasons import RefusalReason


def talk(failure: MeshError | None) -> Talk:
    made = Talk(deployment=DeploymentName("chat"), prompt="hi")
    made.failure = failure
    return made


REFUSED = Refused("late", reason=RefusalReason.FIRST_TOKEN_LATE)


def test_a_busy_machine_refuses_some_prompts_and_that_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _tell_failures([talk(None), talk(REFUSED)])
    assert "this machine is busy: 1 of 2 prompts were refused" in capsys.readouterr().err
    _tell_failures([talk(None)])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("failures", [[REFUSED, REFUSED], [None, Unavailable("gone")]])
def test_a_demo_without_answers_or_with_another_failure_fails(
    failures: list[MeshError | None],
) -> None:
    with pytest.raises(MeshError, match="of 2 answers did not complete"):
        _tell_failures([talk(failure) for failure in failures])
