"""Which sizes an iteration may have: so few that OpenVINO's kernels for them are soon all built.

The CPU plugin builds and keeps kernels for every number of rows that it meets: 10 to 20 ms and 0.7
MB each for a small model. `batch` therefore pads an iteration, and cuts prompt chunks, to the sizes
given here: every one up to 8, then 8 and later 16 to a power of two, so that padding adds an eighth
at most, and a sixteenth where a row costs most.
"""

_EXACT_MAX = 8
_SIZES_PER_OCTAVE = 8
_FINE_ROWS_MIN = 128
_FINE_SIZES_PER_OCTAVE = 16


def padded(rows: int) -> int:
    """The least allowed size that is not below `rows`."""
    step = _step(rows)
    return -(-rows // step) * step


def cut(rows: int) -> int:
    """The largest allowed size that is not above `rows`."""
    step = _step(rows + 1)
    return rows // step * step


def _step(rows: int) -> int:
    """Distance of the allowed sizes around `rows`, which is in (octave, 2 * octave]."""
    if rows <= _EXACT_MAX:
        return 1
    octave = 1 << ((rows - 1).bit_length() - 1)
    sizes = _FINE_SIZES_PER_OCTAVE if octave >= _FINE_ROWS_MIN else _SIZES_PER_OCTAVE
    return octave // sizes
