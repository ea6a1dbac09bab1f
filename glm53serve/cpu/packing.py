"""Stored matrices in the form the kernels take: columns and heads padded to 64 with zeros, neighbours of one format merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.linear import stack
from glm53serve.cpu.state import padded
from glm53serve.model.quant import dequantise, requantise
from glm53serve.model.weights import FfnWeights, Matrix, MatrixFormat

GROUP = 64
KINDS: dict[MatrixFormat, int] = {"f32": 0, "bf16": 1, "int8": 2, "fp8": 3, "int4": 4}
INT4 = 4
INT4_Q16 = 5
"""int4 weights that meet 16-bit activations (see `glm53serve.cpu.kernels.ir_integer`)."""
_ROW_BYTES = {0: 256, 1: 128, 2: 64, 3: 64, 4: 32, 5: 32}


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix whose columns fill whole groups of 64, contiguous; strides in bytes follow from kind and groups."""

    kind: int
    rows: int
    groups: int
    data: NDArray[Any]
    scale: NDArray[np.float32] | None

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return _ROW_BYTES[self.kind] * self.groups

    @property
    def scale_stride(self) -> int:
        """Bytes of scales from row to row (for FP8 from one block of 128 rows to the next)."""
        if self.kind == KINDS["int8"]:
            return 4
        if self.kind == KINDS["fp8"]:
            return 4 * ((self.groups + 1) // 2)
        return 4 * self.groups if self.kind >= INT4 else 0

    @property
    def nbytes(self) -> int:
        """Bytes read by one product."""
        return int(self.data.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))


def pack(m: Matrix, level_activations: bool) -> Packed:
    """A matrix as stored, in place where its columns fill whole groups, else padded into memory of its own."""
    groups = -(-m.cols // GROUP)
    kind = KINDS[m.format]
    data: NDArray[Any] = m.data
    extra = groups * GROUP - m.cols
    if extra:
        if kind == INT4:
            data = np.full((m.rows, groups * 32), 0x88, np.uint8)
            data[:, : m.data.shape[1]] = m.data
            if m.cols % 2:
                data[:, m.cols // 2] = (data[:, m.cols // 2] & 15) | 0x80
        else:
            data = np.pad(m.data, ((0, 0), (0, extra)))
    if kind == INT4 and level_activations:
        kind = INT4_Q16
    scale = None if m.scale is None else np.ascontiguousarray(m.scale, np.float32)
    return Packed(kind, m.rows, groups, np.ascontiguousarray(data), scale)


def pad_heads(m: Matrix, head_rows: int) -> Matrix:
    """Each run of `head_rows` rows followed by zero rows up to a multiple of 64."""
    if head_rows % GROUP == 0:
        return m
    heads, room = m.rows // head_rows, padded(head_rows, GROUP)

    def spread(values: NDArray[Any], fill: int) -> NDArray[Any]:
        out = np.full((heads, room, *values.shape[1:]), fill, values.dtype)
        out[:, :head_rows] = values.reshape(heads, head_rows, *values.shape[1:])
        return out.reshape(heads * room, *values.shape[1:])

    assert m.format != "fp8"
    return Matrix(m.format, heads * room, m.cols, spread(m.data, 0x88 if m.format == "int4" else 0), None if m.scale is None else spread(m.scale, 0))


def pad_head_columns(m: Matrix, head_cols: int) -> Matrix:
    """The same for columns. Groups of quantised columns would cross heads, so such a matrix is widened to float32 without rounding."""
    if head_cols % GROUP == 0:
        return m
    heads, room = m.cols // head_cols, padded(head_cols, GROUP)
    out = np.zeros((m.rows, heads, room), np.float32)
    out[:, :, :head_cols] = dequantise(m).reshape(m.rows, heads, head_cols)
    return Matrix("f32", m.rows, heads * room, out.reshape(m.rows, heads * room))


def pack_dense(matrices: Sequence[tuple[Matrix, int]], bits: int) -> list[Packed]:
    """Dense matrices of equal width, each with the rows of one of its heads, in the format that `bits` names; top to bottom, padded by head,
    merged where the format stays the same."""
    return [pack(run, bits < 32) for run in stack([pad_heads(requantise(m, bits), head_rows) for m, head_rows in matrices])]


def pack_expert(w: FfnWeights, bits: int) -> tuple[Packed, Packed, Packed]:
    """A routed expert as stored: gate, up, down, all of one format. Raises ValueError when they differ."""
    if not w.gate.format == w.up.format == w.down.format:
        raise ValueError(f"a routed expert's matrices are {w.gate.format}, {w.up.format} and {w.down.format}: they must have one format")
    return pack(w.gate, bits < 32), pack(w.up, bits < 32), pack(w.down, bits < 32)


def pad_vector(values: NDArray[np.float32], head: int | None = None) -> NDArray[np.float32]:
    """float32 values, each head's run padded to 64 with zeros (one head when not named)."""
    head = head or len(values)
    room = padded(head, GROUP)
    out = np.zeros((len(values) // head, room), np.float32)
    out[:, :head] = values.reshape(-1, head)
    return out.ravel()
