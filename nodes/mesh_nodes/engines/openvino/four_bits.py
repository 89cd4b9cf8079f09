"""4-bit weights as the graph takes them: signed nibbles in groups, a scale for each group.

A weight is `scale * nibble + offset`, both f32 and of its group, as they are made here; `offset`
only where blocks have minima of their own. Blocks of GGUF files are taken over exactly
(ggml-common.h and ggml-quants.c of llama.cpp define them); weights of other checkpoints are
quantised here. After `checkpoint`, before `prepared` and `graph`.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from mesh.domain.values import dataclass

GROUP = 32
"""Weights of a row that share a scale: what llama.cpp's 4-bit types have, and ours with offsets."""
_SIGN = np.uint8(0x88)
"""What makes two unsigned nibbles, 8 above, two signed ones."""
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 1.05, -1.143)
"""The scales that are tried, as shares of the scale that puts the largest weight at -8."""
_STEPS = (15.0, 14.2, 15.5)
"""Between a group's least and largest weight, as rounded before the line through them is fitted.
Errors' squares, of SmolLM2-135M's and of normal weights, come to 0.89 times what 15 alone leaves;
further ones gain 1 %.
"""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FourBits:
    """Rows of a matrix."""

    nibbles: Bytes
    """[rows, groups, weights of a group / 2]: the earlier weight of a byte is in its lower half."""
    scale: Floats
    """[rows, groups, 1]"""
    offset: Floats | None = None
    """[rows, groups]"""

    def values(self) -> Floats:
        """[rows, columns]"""
        rows, groups, half = self.nibbles.shape
        signed = np.empty((rows, groups, 2 * half), np.float32)
        unsigned = self.nibbles ^ _SIGN
        signed[:, :, 0::2] = unsigned & 15
        signed[:, :, 1::2] = unsigned >> 4
        signed -= 8
        signed *= self.scale
        if self.offset is not None:
            signed += self.offset[:, :, np.newaxis]
        return signed.reshape(rows, groups * 2 * half)


def stacked(parts: list[FourBits]) -> FourBits:
    """One below the other."""
    offset = None
    if any(part.offset is not None for part in parts):
        zeros = (np.zeros(part.scale.shape[:2], np.float32) for part in parts)
        offset = np.concatenate(
            [zero if p.offset is None else p.offset for p, zero in zip(parts, zeros, strict=True)]
        )
    return FourBits(
        np.concatenate([part.nibbles for part in parts]),
        np.concatenate([part.scale for part in parts]),
        offset,
    )


def from_blocks(kind: str, blocks: Bytes) -> FourBits:
    """`blocks`: [rows, bytes of a row] of the type that llama.cpp names so, one of EXACT."""
    return EXACT[kind](blocks)


def quantise_groups(weights: Floats, group: int = GROUP) -> FourBits:
    """[rows, columns], a multiple of `group` columns, to symmetric groups. The largest weight of a
    group is put at -8 or, where that costs less in squares, beyond it; of a few tried scales the
    best.
    """
    grouped = weights.reshape(len(weights), -1, group)
    at = np.abs(grouped).argmax(axis=2, keepdims=True)
    largest = np.take_along_axis(grouped, at, axis=2)
    best_scale, best = np.ones_like(largest), np.zeros_like(grouped)
    least = np.full_like(largest, np.inf)
    for share in _SHARES:
        scale = largest * np.float32(share / -8)
        scale[scale == 0] = 1
        steps = np.clip(np.rint(grouped / scale), -8, 7)
        lost = np.square(steps * scale - grouped).sum(axis=2, keepdims=True)
        better = lost < least
        np.copyto(best, steps, where=better)
        np.copyto(best_scale, scale, where=better)
        np.minimum(least, lost, out=least)
    return FourBits(_packed((best + 8).astype(np.uint8)), best_scale)


def quantise_with_offsets(weights: Floats) -> FourBits:
    """[rows, columns], a multiple of 32 columns. A group's scale and offset are those of the least
    squares for its nibbles, as in `make_qkx2_quants` of llama.cpp; of a few ways to round the best.
    What lies on a grid of 16 values, as what was dequantised does, is found again.
    """
    grouped = weights.reshape(len(weights), -1, GROUP)
    low = grouped.min(axis=2, keepdims=True)
    span = grouped.max(axis=2, keepdims=True) - low
    share = (grouped - low) / np.where(span == 0, 1, span)
    total = (grouped - low).sum(axis=2, keepdims=True)
    best, best_scale = np.zeros(grouped.shape, np.uint8), np.zeros_like(low)
    best_low, most = low.copy(), np.full_like(low, -np.inf)
    for steps in _STEPS:
        nibbles = np.clip(np.rint(share * np.float32(steps)), 0, 15)
        ones, squares = nibbles.sum(axis=2, keepdims=True), _dot(nibbles, nibbles)
        product = _dot(nibbles, grouped - low)
        determinant = GROUP * squares - ones * ones
        scale = (GROUP * product - ones * total) / np.where(determinant == 0, 1, determinant)
        shift = (total - scale * ones) / GROUP
        explained = scale * product + shift * total  # the weights' squares less the error's
        better = explained > most
        np.copyto(best, nibbles, where=better, casting="unsafe")
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_low, low + shift, where=better)
        np.maximum(most, explained, out=most)
    return FourBits(_packed(best), best_scale, (best_low + 8 * best_scale)[:, :, 0])


def _dot(one: Floats, other: Floats) -> Floats:
    """The dot product in each group: [rows, groups, 1]."""
    products: Floats = np.einsum("rgi,rgi->rg", one, other)
    return products[:, :, np.newaxis]


def _q4_0(blocks: Bytes) -> FourBits:
    """struct block_q4_0: f16 d, 16 bytes; d * (q - 8)."""
    parts = blocks.reshape(len(blocks), -1, 18)
    return FourBits(_in_order(parts[:, :, 2:]), _f16(parts[:, :, :2]))


def _q4_1(blocks: Bytes) -> FourBits:
    """struct block_q4_1: f16 d, f16 m, 16 bytes; d * q + m."""
    parts = blocks.reshape(len(blocks), -1, 20)
    scale, minimum = _f16(parts[:, :, :2]), _f16(parts[:, :, 2:4])
    return FourBits(_in_order(parts[:, :, 4:]), scale, (minimum + 8 * scale)[:, :, 0])


def _q4_k(blocks: Bytes) -> FourBits:
    """struct block_q4_K: f16 d, f16 dmin, eight scales s and minima m of 6 bits in 12 bytes (see
    get_scale_min_k4), 128 bytes; d * s * q - dmin * m. The lower halves of 32 bytes are a group,
    the upper ones the next.
    """
    rows = len(blocks)
    parts = blocks.reshape(rows, -1, 144)
    factors = parts[:, :, 4:16].reshape(rows, -1, 3, 4)
    low, middle, high = factors[:, :, 0], factors[:, :, 1], factors[:, :, 2]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=2)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=2)
    scale = (_f16(parts[:, :, :2]) * scales).reshape(rows, -1, 1)
    minimum = (_f16(parts[:, :, 2:4]) * minima).reshape(rows, -1)
    packed = parts[:, :, 16:].reshape(rows, -1, 4, 1, GROUP)
    unsigned = np.concatenate([packed & 15, packed >> 4], axis=3)
    nibbles = _packed(unsigned.reshape(rows, -1, GROUP))
    return FourBits(nibbles, scale, 8 * scale[:, :, 0] - minimum)


EXACT: Mapping[str, Callable[[Bytes], FourBits]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
"""By the type's name in llama.cpp."""


def _in_order(halves: Bytes) -> Bytes:
    """Puts the weights of a group in order: the lower halves of its 16 bytes are the first 16
    weights, the upper halves the rest.
    """
    return _packed(np.concatenate([halves & 15, halves >> 4], axis=2))


def _packed(unsigned: Bytes) -> Bytes:
    """Weights of 0 to 15, for -8 to 7, two a byte."""
    packed = (unsigned[..., 0::2] | (unsigned[..., 1::2] << 4)) ^ _SIGN
    return packed.astype(np.uint8, copy=False)


def _f16(two_bytes: Bytes) -> Floats:
    """[…, 2] to [..., 1]"""
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)
