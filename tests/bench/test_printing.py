"""How a benchmark ends."""

import pytest

from bench.printing import errors_told
from mesh.domain.errors import Unavailable


@pytest.mark.parametrize(
    ("hint", "told"),
    [("", "error: it is gone"), ("wait for it", "error: it is gone\nhint: wait for it")],
)
def test_an_error_ends_it_with_what_to_do(hint: str, told: str) -> None:
    with pytest.raises(SystemExit) as ended, errors_told():
        raise Unavailable("it is gone", hint=hint)
    assert ended.value.code == told
