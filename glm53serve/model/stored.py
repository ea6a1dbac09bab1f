"""Where a weight matrix lies in the files, in which format, and whether its bytes are the ones the config needs (model spec 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from glm53serve.model.errors import CheckpointError
from glm53serve.model.layout import Need
from glm53serve.model.quant import BLOCK, GROUP
from glm53serve.model.safetensors_file import TensorInfo
from glm53serve.model.weights import MatrixFormat

MATRIX_FORMATS: dict[str, MatrixFormat] = {"F32": "f32", "BF16": "bf16", "F8_E4M3": "fp8", "I8": "int8", "U8": "int4"}
SCALE_SUFFIX: dict[MatrixFormat, str] = {"fp8": "_scale_inv", "int8": ".qs", "int4": ".qs"}
DATA_DTYPE: dict[MatrixFormat, type[np.generic]] = {"f32": np.float32, "bf16": np.uint16, "fp8": np.uint8, "int8": np.int8, "int4": np.uint8}
SMALL_DTYPES = ("F32", "BF16")


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of one weight file that holds an array: shard number, absolute offset, NumPy dtype and shape, the tensor it is part of."""

    shard: int
    offset: int
    nbytes: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    tensor: str


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One matrix [rows, cols] in the files: the extents of its data and scales, shaped as `Matrix` wants them."""

    format: MatrixFormat
    rows: int
    cols: int
    data: Extent
    scale: Extent | None

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


def data_cols(fmt: MatrixFormat, cols: int) -> int:
    """Array columns of a data row."""
    return -(-cols // 2) if fmt == "int4" else cols


def scale_shape(fmt: MatrixFormat, rows: int, cols: int) -> tuple[int, ...] | None:
    """Shape of a matrix's scales; None for formats without."""
    if fmt == "fp8":
        return (-(-rows // BLOCK), -(-cols // BLOCK))
    if fmt == "int8":
        return (rows,)
    return (rows, -(-cols // GROUP)) if fmt == "int4" else None


def format_of(tensor: TensorInfo) -> MatrixFormat | None:
    """The weight format a matrix with this dtype is in."""
    return MATRIX_FORMATS.get(tensor.dtype)


def scale_name(name: str, fmt: MatrixFormat) -> str | None:
    """Name of the scale tensor that goes with a matrix tensor."""
    suffix = SCALE_SUFFIX.get(fmt)
    return None if suffix is None else name + suffix


def check_small(tensor: TensorInfo, need: Need) -> None:
    """A tensor that is not a matrix: dtype F32 or BF16 and one of the shapes allowed. Raises CheckpointError."""
    if tensor.dtype not in SMALL_DTYPES:
        raise CheckpointError(f"{tensor.name}: {tensor}, the config needs F32 or BF16 {list(need.shape)}", "unsupported")
    if tensor.shape != need.shape and tensor.shape not in need.also:
        raise CheckpointError(f"{tensor.name}: {tensor}, the config needs {list(need.shape)}")


def check_matrix(tensor: TensorInfo, need: Need, scale: TensorInfo | None) -> None:
    """A matrix and its scales: known format, shapes and byte counts as the config needs them. Raises CheckpointError.

    The containers of int4 and int8 store flat or shaped arrays; both are taken.
    """
    fmt = format_of(tensor)
    if fmt is None:
        raise CheckpointError(f"{tensor.name}: {tensor}, the config needs {', '.join(MATRIX_FORMATS)} {list(need.shape)}", "unsupported")
    *lead, rows, cols = need.shape
    shape = (*lead, rows, data_cols(fmt, cols))
    flat = fmt in ("int4", "int8")
    if tensor.shape != shape and not (flat and tensor.shape == (prod(shape),)):
        packed = f"{list(need.shape)} as {tensor.dtype} {[prod(shape)]}" if flat else str(list(shape))
        raise CheckpointError(f"{tensor.name}: {tensor}, the config needs {packed}")
    if lead and fmt == "fp8" and need.shape[-2] % (2 * BLOCK) and tensor.name.endswith("gate_up_proj"):
        raise CheckpointError(f"{tensor.name}: {tensor}, a scale block that spans gate and up rows is not supported", "unsupported")
    inner = scale_shape(fmt, rows, cols)
    if inner is None:
        return
    assert scale is not None
    full = (*lead, *inner)
    if scale.dtype != "F32" or (scale.shape != full and not (flat and scale.shape == (prod(full),))):
        raise CheckpointError(f"{scale.name}: {scale}, the config needs F32 {list(full)}")


def locate(tensors: Mapping[str, TensorInfo], name: str, need: Need, expert: int = 0, first: int = 0, rows: int | None = None) -> StoredMatrix:
    """Where rows first..first+rows-1 of one expert of a checked matrix tensor lie (`expert` and `first` 0, all rows: a plain matrix)."""
    tensor = tensors[name]
    fmt = MATRIX_FORMATS[tensor.dtype]
    all_rows, cols = need.shape[-2:]
    rows = all_rows - first if rows is None else rows
    dtype = np.dtype(DATA_DTYPE[fmt])
    width = data_cols(fmt, cols)
    row_bytes = width * dtype.itemsize
    data = Extent(tensor.shard, tensor.offset + (expert * all_rows + first) * row_bytes, rows * row_bytes, dtype, (rows, width), tensor.name)
    shape = scale_shape(fmt, rows, cols)
    if shape is None:
        return StoredMatrix(fmt, rows, cols, data, None)
    scale = tensors[name + SCALE_SUFFIX[fmt]]
    whole = scale_shape(fmt, all_rows, cols)
    assert whole is not None
    start = expert * whole[0] + (first // BLOCK if fmt == "fp8" else first)
    line = 4 * prod(shape[1:])
    extent = Extent(scale.shard, scale.offset + start * line, shape[0] * line, np.dtype(np.float32), shape, scale.name)
    return StoredMatrix(fmt, rows, cols, data, extent)
