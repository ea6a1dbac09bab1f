"""Weights from their stored layout into tensor-core fragment order (the layout is described at the top of kernels/matmul.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import quant
from glm53serve.model.weights import F32Array, Matrix, MatrixFormat

TILE = 16
GRANULE = {"f32": 32, "bf16": 64, "fp8": 128, "int8": 128, "int4": 256}
GRANULE_BYTES = 2048
COLUMN_PAD = 256


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in fragment order: data uint8 [tiles, granules, 2048]; scale float32, flat (empty for bf16 and f32)."""

    format: MatrixFormat
    rows: int
    cols: int
    tiles: int
    granules: int
    data: NDArray[np.uint8]
    scale: F32Array


def shape_of(fmt: MatrixFormat, rows: int, cols: int) -> tuple[int, int, int]:
    """(tiles, granules, floats of scale) of a packed matrix."""
    tiles, granules = -(-rows // TILE), -(-cols // GRANULE[fmt])
    return tiles, granules, {"int4": tiles * granules * 64, "fp8": tiles * granules * 2, "int8": tiles * TILE}.get(fmt, 0)


def pack(matrix: Matrix) -> Packed:
    """Fragment order of a matrix; rows and columns are padded with zero weights."""
    fmt = matrix.format
    tiles, granules, _ = shape_of(fmt, matrix.rows, matrix.cols)
    width = granules * GRANULE[fmt]
    data = _fragments(fmt, matrix, tiles, granules, width)
    return Packed(fmt, matrix.rows, matrix.cols, tiles, granules, data, _scales(fmt, matrix, tiles, granules))


def _padded(values: NDArray[Any], rows: int, cols: int, fill: int = 0) -> NDArray[Any]:
    out = np.full((rows, cols), fill, values.dtype)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _fragments(fmt: MatrixFormat, matrix: Matrix, tiles: int, granules: int, width: int) -> NDArray[np.uint8]:
    rows = tiles * TILE
    if fmt == "int4":
        stored = np.asarray(matrix.data).reshape(matrix.rows, -1)
        levels = np.empty((matrix.rows, stored.shape[1] * 2), np.uint8)
        levels[:, 0::2], levels[:, 1::2] = stored & 15, stored >> 4
        levels = _padded(levels[:, : matrix.cols], rows, width, 8)
        #       tile h  g  granule  b  u  t  i  odd   ->   tile granule b h g t u odd i
        parts = levels.reshape(tiles, 2, 8, granules, 2, 4, 4, 4, 2).transpose(0, 3, 4, 1, 2, 6, 5, 8, 7)
        nibbles = np.ascontiguousarray(parts).reshape(-1, 2)
        packed = nibbles[:, 0] | (nibbles[:, 1] << 4)
    elif fmt in ("int8", "fp8"):
        values = _padded(np.asarray(matrix.data).reshape(matrix.rows, matrix.cols).view(np.uint8), rows, width)
        packed = values.reshape(tiles, 2, 8, granules, 2, 2, 4, 8).transpose(0, 3, 4, 1, 2, 6, 5, 7)
    elif fmt == "bf16":
        values = _padded(np.asarray(matrix.data).reshape(matrix.rows, matrix.cols), rows, width)
        packed = values.reshape(tiles, 2, 8, granules, 2, 4, 8).transpose(0, 3, 4, 1, 2, 5, 6)
    else:
        values = _padded(np.asarray(matrix.data).reshape(matrix.rows, matrix.cols), rows, width)
        packed = values.reshape(tiles, 2, 8, granules, 4, 2, 4).transpose(0, 3, 5, 1, 2, 4, 6)
    return np.ascontiguousarray(packed).reshape(-1).view(np.uint8).reshape(tiles, granules, GRANULE_BYTES)


def _scales(fmt: MatrixFormat, matrix: Matrix, tiles: int, granules: int) -> F32Array:
    if matrix.scale is None:
        return np.empty(0, np.float32)
    scale = np.asarray(matrix.scale, np.float32)
    if fmt == "int4":
        padded = _padded(scale.reshape(matrix.rows, -1), tiles * TILE, granules * 4)
        return np.ascontiguousarray(padded.reshape(tiles, 2, 8, granules, 2, 2).transpose(0, 3, 4, 1, 2, 5)).reshape(-1)
    if fmt == "int8":
        return _padded(scale.reshape(1, -1), 1, tiles * TILE).reshape(-1)
    blocks = scale.reshape(-(-matrix.rows // quant.BLOCK), -1)
    halves = np.minimum(np.arange(tiles * 2) * 8 // quant.BLOCK, len(blocks) - 1)  # padding rows have zero weights: any scale will do
    return np.ascontiguousarray(_padded(blocks[halves], tiles * 2, granules).reshape(tiles, 2, granules).transpose(0, 2, 1)).reshape(-1)


def pack_pair(gate: Matrix, up: Matrix) -> Packed:
    """Gate and up matrices as one: every tile holds 8 rows of gate, then the same 8 of up, so a block has both halves of the SwiGLU."""
    if (gate.format, gate.rows, gate.cols) != (up.format, up.rows, up.cols):
        raise ValueError(f"gate is {gate.format} {gate.rows}x{gate.cols}, up is {up.format} {up.rows}x{up.cols}")
    fmt, rows = gate.format, gate.rows
    tiles = -(-rows // 8)
    first, second = (pack(m) for m in (gate, up))
    granules = first.granules
    data = np.concatenate([_halves(p.data, tiles, granules) for p in (first, second)], axis=3).reshape(tiles, granules, GRANULE_BYTES)
    return Packed(fmt, rows, gate.cols, tiles, granules, data, _paired_scales(fmt, first, second, tiles, granules))


def _halves(data: NDArray[np.uint8], tiles: int, granules: int) -> NDArray[np.uint8]:
    """[full tiles, granules, 2048] -> [8-row tiles, granules, 2 (pieces), 1 (half), 512]."""
    full = data.reshape(-1, granules, 2, 2, 512)  # tile, granule, piece pair, h, lanes
    split = full.transpose(0, 3, 1, 2, 4).reshape(-1, granules, 2, 1, 512)
    return np.ascontiguousarray(split[:tiles])


def _paired_scales(fmt: MatrixFormat, first: Packed, second: Packed, tiles: int, granules: int) -> F32Array:
    if fmt in ("bf16", "f32"):
        return np.empty(0, np.float32)
    parts = []
    for p in (first, second):
        if fmt == "int4":
            s = p.scale.reshape(-1, granules, 2, 2, 16).transpose(0, 3, 1, 2, 4).reshape(-1, granules, 2, 1, 16)[:tiles]
        elif fmt == "fp8":
            s = p.scale.reshape(-1, granules, 2, 1).transpose(0, 2, 1, 3).reshape(-1, granules, 1, 1)[:tiles]
        else:
            s = p.scale.reshape(-1, 1, 1, 8)[:tiles]
        parts.append(s)
    return np.ascontiguousarray(np.concatenate(parts, axis=-2)).reshape(-1)


def unpack(packed: Packed) -> F32Array:
    """The values of a packed matrix, float32 [rows, cols]: the inverse of `pack`, for tests and to check a device's memory."""
    tiles, granules, fmt = packed.tiles, packed.granules, packed.format
    flat = packed.data.reshape(-1)
    if fmt == "int4":
        nibbles = np.stack([flat & 15, flat >> 4], axis=-1).reshape(tiles, granules, 2, 2, 8, 4, 4, 2, 4)
        values = (nibbles.transpose(0, 3, 4, 1, 2, 6, 5, 8, 7).reshape(tiles * TILE, -1).astype(np.float32)) - 8
        scale = packed.scale.reshape(tiles, granules, 2, 2, 8, 2).transpose(0, 3, 4, 1, 2, 5).reshape(tiles * TILE, -1)
        values = values * np.repeat(scale, 64, axis=1)
    elif fmt in ("int8", "fp8"):
        codes = flat.reshape(tiles, granules, 2, 2, 8, 4, 2, 8).transpose(0, 3, 4, 1, 2, 6, 5, 7).reshape(tiles * TILE, -1)
        if fmt == "int8":
            values = codes.view(np.int8).astype(np.float32) * packed.scale[:, None]
        else:
            scale = packed.scale.reshape(tiles, granules, 2).transpose(0, 2, 1).reshape(tiles * 2, granules)
            values = quant.e4m3_table()[codes] * np.repeat(np.repeat(scale, 8, axis=0), 128, axis=1)
    elif fmt == "bf16":
        values = quant.bf16_to_f32(flat.view(np.uint16).reshape(tiles, granules, 2, 2, 8, 4, 8).transpose(0, 3, 4, 1, 2, 5, 6).reshape(tiles * TILE, -1))
    else:
        values = flat.view(np.float32).reshape(tiles, granules, 2, 2, 8, 4, 4).transpose(0, 3, 4, 1, 5, 2, 6).reshape(tiles * TILE, -1)
    return np.ascontiguousarray(values[: packed.rows, : packed.cols])
