"""Iterations have few sizes, and padding to them is cheap."""

from mesh_nodes.engines.openvino.batch import cut, padded

ROWS_MAX = 5000
ALLOWED = sorted({padded(rows) for rows in range(ROWS_MAX)})


def test_sizes_are_few_and_padding_adds_an_eighth_at_most_later_less() -> None:
    assert len([size for size in ALLOWED if size <= 1024]) <= 90
    for rows in range(ROWS_MAX):
        assert rows <= padded(rows) <= rows + rows // (16 if rows > 128 else 8) + 1


def test_padded_and_cut_are_the_neighbours_among_the_allowed_sizes() -> None:
    for rows in range(ROWS_MAX - 500):
        assert padded(rows) == next(size for size in ALLOWED if size >= rows)
        assert cut(rows) == next(size for size in reversed(ALLOWED) if size <= rows)
