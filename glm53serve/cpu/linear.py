"""Products with stored matrices: `x @ W.T`, each row's bits independent of the rows beside it unless the matrix is float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.quant import dequantise, requantise
from glm53serve.model.weights import Matrix

F32 = NDArray[np.float32]


def stack(matrices: Sequence[Matrix]) -> list[Matrix]:
    """The matrices, top to bottom, with neighbours of one format merged (FP8 only where its 128-row scale blocks still line up)."""
    runs: list[list[Matrix]] = []
    for m in matrices:
        last = runs[-1][-1] if runs else None
        if last is not None and last.format == m.format and last.cols == m.cols and (m.format != "fp8" or last.rows % 128 == 0):
            runs[-1].append(m)
        else:
            runs.append([m])
    return [_merged(run) for run in runs]


def _merged(run: Sequence[Matrix]) -> Matrix:
    if len(run) == 1:
        return run[0]
    scales = [m.scale for m in run if m.scale is not None]
    data = np.concatenate([m.data for m in run])
    return Matrix(run[0].format, sum(m.rows for m in run), run[0].cols, data, np.concatenate(scales) if scales else None)


def multiply(x: F32, w: Matrix) -> F32:
    """x [rows, cols] @ W.T -> float32 [rows, W.rows]."""
    if w.format == "f32":
        product: F32 = x @ w.data.T
        return product
    plain = dequantise(w)
    out = np.empty((len(x), w.rows), np.float32)
    for row, y in zip(x, out, strict=True):
        np.dot(plain, row, out=y)
    return out


class Linear:
    """Dense matrices of equal width merged into one product, in the memory format that `bits` names."""

    def __init__(self, matrices: Sequence[Matrix], bits: int) -> None:
        self.ends = np.cumsum([m.rows for m in matrices]).tolist()
        self.parts = stack([requantise(m, bits) for m in matrices])

    def __call__(self, x: F32) -> F32:
        """x [rows, cols] -> float32 [rows, sum of the matrices' rows]."""
        products = [multiply(x, part) for part in self.parts]
        return products[0] if len(products) == 1 else np.concatenate(products, axis=1)

    def split(self, x: F32) -> list[F32]:
        """The same, one view per matrix."""
        return np.split(self(x), self.ends[:-1], axis=1)
