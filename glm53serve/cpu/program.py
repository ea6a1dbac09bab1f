"""Lists of kernel operations prepared once and run many times, and the memory they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.kernels.fields import Arguments, address
from glm53serve.cpu.packing import GROUP, INT4, INT4_Q16, Packed


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Zeroed memory on a cache line's boundary."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -address(memory) % 64
    aligned: NDArray[Any] = memory[start : start + size].view(dtype).reshape(shape)
    return aligned


@dataclass(slots=True)
class Cell:
    """One int64 in memory that kernels read by address, such as the number of rows."""

    array: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))

    @property
    def at(self) -> int:
        """Its address."""
        return address(self.array)

    def set(self, value: int) -> None:
        """Change it."""
        self.array[0] = value


class Form:
    """The forms of one activation matrix of up to `rows` rows: float32 in order, and what int4 weights read."""

    def __init__(self, rows: int, width: int, kinds: set[int], natural: NDArray[np.float32] | None = None, offset: int = 0) -> None:
        """width: columns, a multiple of 64. kinds: of the weights that read it. natural, offset: an existing float32 [rows, ...] whose columns
        from `offset` on are the matrix."""
        from glm53serve.cpu.kernels.rows import FORM_FIELDS

        self.groups = width // GROUP
        self.natural = zeros(rows, width) if natural is None else natural
        self.start = address(self.natural) + 4 * offset
        self.stride = self.natural.strides[0]
        self.permuted = zeros(rows, width) if INT4 in kinds else None
        quantised = INT4_Q16 in kinds
        self.bytes = zeros(rows, 2 * width, dtype=np.int8) if quantised else None
        self.scale = zeros(rows, self.groups) if quantised else None
        self.offset = zeros(rows, self.groups, dtype=np.int32) if quantised else None

        def at(array: NDArray[Any] | None) -> int:
            return 0 if array is None else address(array)

        self.arguments = Arguments(
            FORM_FIELDS,
            natural=self.start,
            stride=self.stride,
            permuted=at(self.permuted),
            permuted_stride=4 * width,
            bytes=at(self.bytes),
            bytes_stride=2 * width,
            scale=at(self.scale),
            offset=at(self.offset),
            scale_stride=4 * self.groups,
            groups=self.groups,
        )

    @property
    def at(self) -> int:
        """Address of the description kernels take."""
        return self.arguments.address

    def read_by(self, kind: int) -> dict[str, int]:
        """The fields of a product with weights of that kind."""
        x, stride = self.start, self.stride
        if kind == INT4:
            assert self.permuted is not None
            x, stride = address(self.permuted), 256 * self.groups
        elif kind == INT4_Q16:
            assert self.bytes is not None
            x, stride = address(self.bytes), 128 * self.groups
        scale = 0 if self.scale is None else address(self.scale)
        offset = 0 if self.offset is None else address(self.offset)
        return {"x": x, "x_stride": stride, "x_scale": scale, "x_offset": offset, "x_scale_stride": 4 * self.groups}


class Program:
    """Operations in order. Arguments and whatever they point to are kept alive by it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._words: list[int] = []
        self._keep: list[Any] = []
        self._zero = Cell()
        self._keep.append(self._zero)
        self._array: NDArray[np.int64] | None = None
        self._at = 0

    def add(self, kernel: int, arguments: Arguments, most: int = 1, per_row: int = 1) -> None:
        """An operation in min(most, rows * per_row) chunks, at least one."""
        from glm53serve.cpu.kernels.team import MAX_CHUNKS

        self._words += [kernel, arguments.address, min(most, MAX_CHUNKS), per_row]
        self._keep.append(arguments)
        self._array = None

    def extend(self, other: Program) -> None:
        """Append another program's operations."""
        self._words += other._words
        self._keep.append(other._keep)
        self._array = None

    def by_row(self, kernel: int, arguments: Arguments, per_row: int = 1) -> None:
        """An operation whose chunks are runs of rows, or of `per_row` parts of each."""
        self.add(kernel, arguments, 8 * self.threads, per_row)

    def matmul(
        self,
        parts: Sequence[Packed],
        form: Form,
        count: Cell,
        y: NDArray[np.float32],
        offset: int = 0,
        heads: int = 1,
        x_head: int = 0,
        y_head: int = 0,
        x_at: Cell | None = None,
        y_at: Cell | None = None,
    ) -> None:
        """y[:, offset:] = form @ parts.T, part after part; x_at, y_at: number of the first row in form and y.

        heads: each part is a stack of that many, reading form's columns from x_head * head on and writing y's from y_head * head on.
        """
        from glm53serve.cpu.kernels import matmul as kernels

        for part in parts:
            n = part.rows // heads
            arguments = Arguments(
                kernels.FIELDS,
                product=kernels.product.address,
                count=count.at,
                kind=part.kind,
                w=address(part.data),
                w_stride=part.stride,
                scale=0 if part.scale is None else address(part.scale),
                scale_stride=part.scale_stride,
                n=n,
                groups=part.groups,
                x_at=(x_at or self._zero).at,
                y_at=(y_at or self._zero).at,
                y=address(y) + 4 * offset,
                y_stride=y.strides[0],
                heads=heads,
                w_head=n * part.stride,
                scale_head=n * part.scale_stride,
                x_head=x_head * {INT4_Q16: 2}.get(part.kind, 4),
                x_scale_head=x_head // GROUP * 4,
                y_head=4 * y_head,
                **form.read_by(part.kind),
            )
            self._keep += [part, form, y, count, x_at, y_at]
            pieces = max(1, min(4 * self.threads, part.nbytes >> 15))
            # a chunk of a large matrix stays short, since a cancel waits for the chunks that run
            most = max(8 * self.threads, min(64 * self.threads, part.nbytes >> 16))
            self.add(kernels.matmul.address, arguments, most, pieces)
            offset += part.rows

    def run(self, team: Any, rows: int, stop: Cell | None = None) -> bool:
        """Run all operations on a team; `rows` decides the chunks. True when `stop` was set meanwhile: what was computed is incomplete."""
        if self._array is None:
            self._array = np.array(self._words, np.int64)
            self._at = address(self._array)
        stopped: bool = team.run(self._at, len(self._words) // 4, rows, (stop or self._zero).at)
        return stopped
