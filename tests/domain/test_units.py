"""Byte sizes as people write them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.domain.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5kib", 1536), ("2GB", 2 * 10**9), ("77", 77)],
)
def test_sizes_parse_with_either_base(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


def test_a_size_may_have_any_number_of_digits() -> None:
    assert parse_bytes("9" * 400) > 10**399


@given(st.text())
def test_other_text_is_invalid_input_and_nothing_else(text: str) -> None:
    with contextlib.suppress(InvalidInput):
        assert parse_bytes(text) >= 0


@given(st.integers(0, 1 << 50))
def test_formatted_sizes_are_right_within_their_digits(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= max(0.06 * size_bytes, 1)
