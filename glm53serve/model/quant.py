"""Weight number formats in NumPy: bf16, FP8 e4m3, int8, int4 (model spec 9). The reference that every kernel is compared with.

Large matrices are converted in blocks of rows, so a conversion needs little more memory than its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.errors import ModelError
from glm53serve.model.weights import F32Array, Matrix

BLOCK = 128
GROUP = 64
E4M3_MAX = np.float32(448.0)
SCALE_FLOOR = np.float32(1e-8)
BLOCK_ELEMENTS = 1 << 19

U8Array = NDArray[np.uint8]
U16Array = NDArray[np.uint16]
I8Array = NDArray[np.int8]


def bf16_to_f32(bits: NDArray[Any]) -> F32Array:
    """uint16 bf16 patterns of any shape to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: NDArray[Any]) -> U16Array:
    """float32 of any shape to uint16 bf16 patterns, rounding half to even; NaN stays NaN, overflow becomes infinity."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return result


@cache
def e4m3_table() -> F32Array:
    """float32 [256]: the value of every e4m3 byte; 0x7F and 0xFF are NaN, there are no infinities, the largest is 448."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(byte & 0x7F) == 0x7F] = np.nan
    table = np.where(byte >= 128, -magnitude, magnitude).astype(np.float32)
    table.flags.writeable = False
    return table


def f32_to_e4m3(values: NDArray[Any]) -> U8Array:
    """float32 of any shape to e4m3 bytes: nearest, half to even, beyond 448 saturating; NaN becomes NaN."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    magnitude = np.minimum(np.abs(values), E4M3_MAX)
    with np.errstate(invalid="ignore"):  # NaN: replaced below
        subnormal = np.rint(magnitude * np.float32(512.0)).astype(np.uint32)
    clipped = magnitude.view(np.uint32)
    normal = ((clipped + (np.uint32(0x7FFFF) + ((clipped >> np.uint32(20)) & np.uint32(1)))) >> np.uint32(20)) - np.uint32(120 << 3)
    code: NDArray[np.uint32] = np.where(magnitude < np.float32(2.0**-6), subnormal, normal)
    code = np.where(bits > np.uint32(0x7F800000), np.uint32(0x7F), code)
    code |= np.signbit(values).astype(np.uint32) << np.uint32(7)
    return code.astype(np.uint8, copy=False)


def _spread(scales: F32Array, size: int, block: int) -> F32Array:
    """One scale an element of the last axis from one a block; a ragged last block has its own scale."""
    return np.repeat(scales, block, axis=-1)[..., :size]


def dequantise_fp8(data: U8Array, scale: F32Array) -> F32Array:
    """e4m3 bytes [O, I] and float32 [ceil(O/128), ceil(I/128)] to float32 [O, I]: value times the scale of its block."""
    rows, cols = data.shape
    values = e4m3_table()[data]
    for top in range(0, rows, BLOCK):
        values[top : top + BLOCK] *= _spread(np.asarray(scale[top // BLOCK], np.float32), cols, BLOCK)
    return values


def quantise_fp8(values: F32Array) -> tuple[U8Array, F32Array]:
    """float32 [O, I] to e4m3 bytes [O, I] and scales [ceil(O/128), ceil(I/128)] with the largest of each block at 448."""
    rows, cols = values.shape
    grid = (-(-rows // BLOCK), -(-cols // BLOCK))
    padded = np.zeros((grid[0] * BLOCK, grid[1] * BLOCK), np.float32)
    padded[:rows, :cols] = values
    amax = np.abs(padded).reshape(grid[0], BLOCK, grid[1], BLOCK).max(axis=(1, 3))
    _require_finite(amax)
    scale = np.maximum(amax / E4M3_MAX, SCALE_FLOOR)
    data = np.empty((rows, cols), np.uint8)
    for top in range(0, rows, BLOCK):
        data[top : top + BLOCK] = f32_to_e4m3(values[top : top + BLOCK] / _spread(scale[top // BLOCK], cols, BLOCK))
    return data, scale


def quantise_int4(values: F32Array) -> tuple[U8Array, F32Array]:
    """float32 [O, I] to packed nibbles [O, ceil(I/2)] and scales [O, ceil(I/64)].

    A group is 64 columns, a ragged last one has its own scale; scale = max(amax / 7, 1e-8), level = round half to even, -8..7, stored
    as level + 8, low nibble first. The unused nibble of an odd row is level 0.
    """
    rows, cols = values.shape
    groups = -(-cols // GROUP)
    padded = np.zeros((rows, groups * GROUP), np.float32)
    padded[:, :cols] = values
    grouped = padded.reshape(rows, groups, GROUP)
    amax = np.abs(grouped).max(axis=2)
    _require_finite(amax)
    scale = np.maximum(amax / np.float32(7.0), SCALE_FLOOR)
    level = np.clip(np.rint(grouped / scale[:, :, None]), -8, 7).astype(np.int8)
    nibble = (level + np.int8(8)).view(np.uint8).reshape(rows, groups * GROUP)
    packed = nibble[:, 0::2] | (nibble[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(packed[:, : -(-cols // 2)]), scale


def dequantise_int4(data: U8Array, scale: F32Array, cols: int) -> F32Array:
    """Packed nibbles [O, ceil(cols/2)] and scales [O, ceil(cols/64)] to float32 [O, cols]: (nibble - 8) times scale."""
    nibble = np.empty((data.shape[0], data.shape[1] * 2), np.uint8)
    np.bitwise_and(data, np.uint8(15), out=nibble[:, 0::2])
    np.right_shift(data, np.uint8(4), out=nibble[:, 1::2])
    values = nibble[:, :cols].astype(np.float32)
    values -= np.float32(8.0)
    values *= _spread(np.asarray(scale, np.float32), cols, GROUP)
    return values


def quantise_int8(values: F32Array) -> tuple[I8Array, F32Array]:
    """float32 [O, I] to int8 [O, I] and scales [O]: scale = max(amax / 127, 1e-8), round half to even, -128..127."""
    amax = np.abs(values).max(axis=1)
    _require_finite(amax)
    scale = np.maximum(amax / np.float32(127.0), SCALE_FLOOR)
    return np.clip(np.rint(values / scale[:, None]), -128, 127).astype(np.int8), scale


def dequantise_int8(data: I8Array, scale: F32Array) -> F32Array:
    """int8 [O, I] and scales [O] to float32 [O, I]."""
    return np.multiply(data, np.asarray(scale, np.float32)[:, None], dtype=np.float32)


def _require_finite(amax: F32Array) -> None:
    if not np.isfinite(amax).all():
        raise ModelError("a weight matrix holds a value that is not a finite number, it cannot be quantised", "format")


def dequantise_rows(matrix: Matrix, first: int, last: int) -> F32Array:
    """Rows first..last-1 of a matrix in any format as a new float32 array; `first` is a multiple of 128 for fp8."""
    data = matrix.data[first:last]
    if matrix.format == "f32":
        return np.array(data, np.float32)
    if matrix.format == "bf16":
        return bf16_to_f32(data)
    assert matrix.scale is not None
    if matrix.format == "fp8":
        assert first % BLOCK == 0
        return dequantise_fp8(data, matrix.scale[first // BLOCK : -(-last // BLOCK)])
    if matrix.format == "int8":
        return dequantise_int8(data, matrix.scale[first:last])
    return dequantise_int4(data, matrix.scale[first:last], matrix.cols)


def _blocks(matrix: Matrix) -> range:
    """First rows of blocks of about half a million elements (temporaries stay in the cache), each a multiple of 128 rows."""
    step = max(BLOCK, BLOCK_ELEMENTS // max(matrix.cols, 1) // BLOCK * BLOCK)
    return range(0, matrix.rows, step)


def dequantise(matrix: Matrix) -> F32Array:
    """A matrix in any format as a new float32 [rows, cols]."""
    result = np.empty((matrix.rows, matrix.cols), np.float32)
    blocks = _blocks(matrix)
    for first in blocks:
        last = min(first + blocks.step, matrix.rows)
        result[first:last] = dequantise_rows(matrix, first, last)
    return result


_PACKERS: dict[int, Callable[[F32Array], tuple[NDArray[Any], F32Array]]] = {4: quantise_int4, 8: quantise_int8}


def requantise(matrix: Matrix, bits: int) -> Matrix:
    """A matrix at 4, 8, 16 or 32 bits a weight, in memory of its own unless it is already there.

    32: float32, exact.
    16: as stored, at most 16 bits: f32 and fp8 are rounded to bf16 (an e4m3 value times a float32 scale has more digits than bf16, the
        relative error is at most 2^-9); bf16, int8 and int4 stay what they are, since widening them would only round again.
     8: int8 with a scale a row; int4 stays int4.
     4: int4 with a scale for every 64 columns.
    A matrix that stays is returned as it is. Raises ModelError when a value that must be quantised is not finite.
    """
    if bits not in (4, 8, 16, 32):
        raise ValueError(f"bits is {bits}, must be 4, 8, 16 or 32")
    stays = {4: ("int4",), 8: ("int4", "int8"), 16: ("int4", "int8", "bf16"), 32: ("f32",)}[bits]
    if matrix.format in stays:
        return matrix
    if bits == 32:
        return Matrix("f32", matrix.rows, matrix.cols, dequantise(matrix))
    blocks = _blocks(matrix)
    if bits == 16:
        data: NDArray[Any] = np.empty((matrix.rows, matrix.cols), np.uint16)
        for first in blocks:
            last = min(first + blocks.step, matrix.rows)
            data[first:last] = f32_to_bf16(dequantise_rows(matrix, first, last))
        return Matrix("bf16", matrix.rows, matrix.cols, data)
    pack = _PACKERS[bits]
    parts = [pack(dequantise_rows(matrix, first, min(first + blocks.step, matrix.rows))) for first in blocks]
    data = np.concatenate([part[0] for part in parts])
    scale = np.concatenate([part[1] for part in parts])
    return Matrix("int4" if bits == 4 else "int8", matrix.rows, matrix.cols, data, scale)


def stored_bytes(rows: int, cols: int, bits: int) -> int:
    """Bytes of a [rows, cols] matrix at 4, 8, 16 or 32 bits, scales included (what `requantise` makes of wider formats)."""
    if bits == 4:
        return rows * (-(-cols // 2) + 4 * -(-cols // GROUP))
    return rows * cols * bits // 8 + (4 * rows if bits == 8 else 0)
