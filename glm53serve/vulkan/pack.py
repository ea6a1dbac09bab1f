"""Weights as the kernels read them: rows of whole 64-column blocks, one scale a row and block (or a row), padding that counts as zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import quant
from glm53serve.model.weights import F32Array, FfnWeights, Matrix, MatrixFormat

Narrow = Callable[[Matrix], Matrix]
"""What dense matrices go through on their way to the device."""
BLOCK = 64
EIGHTHS = {"f32": 32, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Bytes of eight weights."""


def padded(size: int, unit: int = BLOCK) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Rows:
    """Weight rows of one format: data uint8 [rows, bytes a row], cols a multiple of 64, scales float32 [rows, blocks] (int8: [rows, 1]) or None."""

    format: MatrixFormat
    cols: int
    data: NDArray[np.uint8]
    scales: F32Array | None

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return int(self.data.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))

    def extended(self, rows: int) -> Rows:
        """With rows of zeros appended up to `rows`."""
        extra = rows - self.count
        if extra == 0:
            return self
        blank = 0x88 if self.format == "int4" else 0
        data = np.concatenate([self.data, np.full((extra, self.data.shape[1]), blank, np.uint8)])
        scales = None if self.scales is None else np.concatenate([self.scales, np.zeros((extra, self.scales.shape[1]), np.float32)])
        return Rows(self.format, self.cols, data, scales)

    def slice(self, first: int, last: int) -> Rows:
        """Rows first..last-1."""
        return Rows(self.format, self.cols, self.data[first:last], None if self.scales is None else self.scales[first:last])


def pack(matrix: Matrix) -> Rows:
    """A matrix in its own format."""
    cols = padded(matrix.cols)
    width = cols * EIGHTHS[matrix.format] // 8
    raw = np.ascontiguousarray(matrix.data).view(np.uint8).reshape(matrix.rows, -1)
    if raw.shape[1] == width and matrix.cols % 2 == 0:
        data = raw
    else:
        data = np.full((matrix.rows, width), 0x88 if matrix.format == "int4" else 0, np.uint8)
        data[:, : raw.shape[1]] = raw
        if matrix.format == "int4" and matrix.cols % 2:
            data[:, matrix.cols // 2] = (data[:, matrix.cols // 2] & 15) | 0x80
    return Rows(matrix.format, cols, data, _scales(matrix, cols // BLOCK))


def _scales(matrix: Matrix, blocks: int) -> F32Array | None:
    if matrix.scale is None:
        return None
    scale = np.asarray(matrix.scale, np.float32)
    if matrix.format == "int8":
        return np.ascontiguousarray(scale.reshape(-1, 1))
    if matrix.format == "fp8":
        spread = np.repeat(np.repeat(scale, 128, axis=0)[: matrix.rows], 2, axis=1)[:, :blocks]
        return np.ascontiguousarray(spread)
    return np.ascontiguousarray(scale.reshape(matrix.rows, blocks))


def pack_values(values: NDArray[Any]) -> Rows:
    """Float32 values, or bfloat16 bits (uint16), [rows, cols]."""
    kind: MatrixFormat = "bf16" if values.dtype == np.uint16 else "f32"
    return pack(Matrix(kind, values.shape[0], values.shape[1], np.ascontiguousarray(values)))


def common_format(matrices: Sequence[Matrix]) -> list[Matrix]:
    """The same matrices if they share a format, else all as float32."""
    if len({m.format for m in matrices}) == 1:
        return list(matrices)
    return [quant.requantise(m, 32) for m in matrices]


def gate_up(ffn: FfnWeights) -> Rows:
    """Gate and up rows of a feed-forward, alternating, as the SwiGLU epilogue wants them."""
    gate, up = (pack(m) for m in common_format([ffn.gate, ffn.up]))
    data = np.stack([gate.data, up.data], axis=1).reshape(2 * gate.count, -1)
    scales = None
    if gate.scales is not None and up.scales is not None:
        scales = np.stack([gate.scales, up.scales], axis=1).reshape(2 * gate.count, -1)
    return Rows(gate.format, gate.cols, data, scales)


def by_heads(rows: Rows, heads: int, size: int) -> Rows:
    """Rows [heads x d] with every head extended to `size` rows."""
    d = rows.count // heads
    if d == size:
        return rows
    parts = [rows.slice(h * d, (h + 1) * d).extended(size) for h in range(heads)]
    return join(parts)


def join(parts: Sequence[Rows]) -> Rows:
    """Rows of one format, one part after another."""
    first = parts[0]
    scales = None if first.scales is None else np.concatenate([p.scales for p in parts if p.scales is not None])
    return Rows(first.format, first.cols, np.concatenate([p.data for p in parts]), scales)


def key_and_value(kv_b: Matrix, heads: int, qk: int, v: int) -> tuple[Rows, Rows]:
    """The two absorbed halves of kv_b (model spec 5.1): per head the key part transposed to [rank padded to 64, qk] and the value part [v, rank].

    Exact: bfloat16 and float32 stay as they are, other formats become float32 (a scale runs along the rank, which the transpose cuts).
    """
    if kv_b.format == "bf16":
        values: NDArray[Any] = np.ascontiguousarray(kv_b.data)
    else:
        values = quant.dequantise(kv_b)
    rank = kv_b.cols
    heads_first = values.reshape(heads, qk + v, rank)
    keys = np.zeros((heads, padded(rank), qk), values.dtype)
    keys[:, :rank] = heads_first[:, :qk].transpose(0, 2, 1)
    return pack_values(keys.reshape(heads * padded(rank), qk)), pack_values(heads_first[:, qk:].reshape(heads * v, rank))
