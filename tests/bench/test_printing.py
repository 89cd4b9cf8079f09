"""How a benchmark ends."""

import pytest

from bench.printing import errors_told, exit_by
from mesh.domain.errors import Unavailable


@pytest.mark.parametrize(
    ("hint", "told"),
    [("", "error: it is gone"), ("wait for it", "error: it is gone\nhint: wait for it")],
)
def test_an_error_ends_it_with_what_to_do(hint: str, told: str) -> None:
    with pytest.raises(SystemExit) as ended, errors_told():
        raise Unavailable("it is gone", hint=hint)
    assert ended.value.code == told


def test_an_interrupt_ends_it_as_it_ends_the_command() -> None:
    with pytest.raises(SystemExit) as ended, errors_told():
        raise KeyboardInterrupt
    assert ended.value.code == 130


def test_a_target_that_is_missed_is_named_and_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_by({"met": True, "served": False})
    assert ended.value.code == 1
    assert capsys.readouterr().err == "missed: served\n"
    with pytest.raises(SystemExit) as ended:
        exit_by({"met": True})
    assert ended.value.code == 0
