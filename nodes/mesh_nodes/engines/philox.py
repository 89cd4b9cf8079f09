"""Counter-based random numbers: a function of (seed, counter) without state.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), over
arrays, so that one call serves a whole batch. `sampling` takes one number per token from it.
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = npt.NDArray[np.uint64]
"""32-bit words, each in 64 bits."""


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Four words for each element of the counters and keys."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _32) ^ c1 ^ k0,
            second & _LOW,
            (first >> _32) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: list[int], indices: list[int], count: int, first: int = 0
) -> npt.NDArray[np.float64]:
    """Numbers `first` to `first + count` in [0, 1) of each pair of a seed (its low 64 bits) and an
    index below 2^32: [pairs, count].
    """
    seed = np.array([value & (2**64 - 1) for value in seeds], np.uint64)[:, None]
    index = np.array(indices, np.uint64)[:, None]
    trial = np.arange(first, first + count, dtype=np.uint64)
    zero = np.zeros((), np.uint64)
    high, low, _, _ = philox((index, trial, zero, zero), (seed & _LOW, seed >> _32))
    return ((high << _32 | low) >> np.uint64(11)).astype(np.float64) * 2.0**-53
