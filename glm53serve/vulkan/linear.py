"""Matrices on the device and the kernels that multiply by them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from glm53serve.model.weights import MatrixFormat
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.pack import EIGHTHS, Rows, join, padded

VECTOR_ROWS = 8
"""Up to so many rows go through the vector kernel, more through a matrix kernel."""
FIRST_TILE_AT = 52
UNITS_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatch: module, specialisation constants, buffers in binding order, push constants, workgroups, and what it costs.

    flops and nbytes are the estimate that segments are sized by."""

    module: str
    constants: dict[int, int]
    buffers: list[Buffer]
    push: bytes
    groups: tuple[int, int, int]
    flops: float = 0.0
    nbytes: float = 0.0
    units: bool = False
    """Runs on matrix units."""
    first_tile_at: int | None = None
    """Where in `push` the number of the first workgroup row stands, for dispatches that may be cut along y."""

    def cut(self, parts: int) -> list[Op]:
        """The same work as up to `parts` dispatches."""
        x, rows, z = self.groups
        if self.first_tile_at is None or parts <= 1 or rows <= 1:
            return [self]
        step = -(-rows // min(parts, rows))
        made = []
        for first in range(0, rows, step):
            count = min(step, rows - first)
            push = self.push[: self.first_tile_at] + struct.pack("I", first) + self.push[self.first_tile_at + 4 :]
            share = count / rows
            made.append(replace(self, push=push, groups=(x, count, z), flops=self.flops * share, nbytes=self.nbytes * share))
        return made


Stage = list[Op]
"""Dispatches that do not depend on each other; a barrier follows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one format in one binding: they make columns first..first+rows-1 of the output."""

    format: MatrixFormat
    first: int
    rows: int
    weights: Buffer
    scales: Buffer | None


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of floats in a buffer: `stride` between rows, `offset` of the first column, `step` between groups (heads)."""

    buffer: Buffer
    stride: int
    offset: int = 0
    step: int = 0


@dataclass(slots=True)
class Linear:
    """W[rows, cols] on the device, or with `groups` > 1 that many matrices of `rows` rows, one a head."""

    cols: int
    rows: int
    pieces: list[Piece]
    groups: int = 1
    offsets: dict[str, int] = field(default_factory=dict)
    """Where each named part's output begins."""
    units: bool = False
    """Many rows go to matrix units."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(p.weights.nbytes + (p.scales.nbytes if p.scales else 0) for p in self.pieces)

    def ops(self, bucket: int, x: Target, y: Target, swiglu: float | None = None, tile: int | None = None) -> Stage:
        """y = x W^T for up to `bucket` rows. With `swiglu` (the clamp) the rows alternate gate and up and y has half the columns."""
        return [self._op(piece, bucket, x, y, swiglu, tile) for piece in self.pieces]

    def _op(self, piece: Piece, bucket: int, x: Target, y: Target, swiglu: float | None, tile: int | None) -> Op:
        shift = piece.first // 2 if swiglu is not None else piece.first
        push = _push(piece.rows, self.cols, x, Target(y.buffer, y.stride, y.offset + shift, y.step), swiglu)
        buffers = [x.buffer, piece.weights, piece.scales or piece.weights, y.buffer]
        cost = (2.0 * bucket * piece.rows * self.cols * self.groups, float(piece.weights.nbytes))
        epilogue = {4: int(swiglu is not None)}
        if bucket <= VECTOR_ROWS:
            together = min(bucket, 4)
            rows = vector_rows(piece.format, together)
            constants = {2: rows, 3: together, **epilogue}
            return Op(f"gemv_{piece.format}", constants, buffers, push, (-(-piece.rows // rows), -(-bucket // together), self.groups), *cost)
        if self.units:
            blocks = tile or unit_blocks(bucket)
            groups = (-(-piece.rows // UNITS_COLUMNS), -(-bucket // (16 * blocks)), self.groups)
            return Op(f"gemm_coop_{piece.format}", {2: blocks, **epilogue}, buffers, push, groups, *cost, units=True, first_tile_at=FIRST_TILE_AT)
        per_thread = tile or tile_rows(bucket, piece.rows * self.groups)
        groups = (-(-piece.rows // 64), -(-bucket // (16 * per_thread)), self.groups)
        return Op(f"gemm_{piece.format}", {2: per_thread, **epilogue}, buffers, push, groups, *cost, first_tile_at=FIRST_TILE_AT)


def vector_rows(kind: MatrixFormat, together: int) -> int:
    """Weight rows of a workgroup of the vector kernel: short rows are taken eight at a time, or starting a workgroup costs as much as its work."""
    return 8 if kind == "int4" and together == 1 else 4


def tile_rows(bucket: int, columns: int) -> int:
    """Rows a thread of the matrix kernel computes (a tile has 16 times as many): large tiles only where there are enough of them."""
    if bucket <= 16:
        return 1
    if bucket <= 32:
        return 2
    return 8 if bucket > 64 and -(-columns // 64) * -(-bucket // 128) >= 256 else 4


def unit_blocks(rows: float) -> int:
    """Blocks of 16 rows in a tile of the matrix-unit kernel."""
    return 1 if rows <= 16 else 2 if rows <= 32 else 4


def _push(rows: int, cols: int, x: Target, y: Target, swiglu: float | None, experts: tuple[int, int] = (0, 0), share: int = 1) -> bytes:
    words = (rows, cols, x.stride, x.offset, y.stride, y.offset, x.step, y.step, 0, *experts, share)
    return struct.pack("12IfI", *words, swiglu if swiglu is not None else 0.0, 0)


def upload(device: Device, parts: Sequence[tuple[str, Rows]], groups: int = 1, exact: bool = False) -> Linear:
    """Put named parts that read the same x on the device as one matrix, each part's output at a multiple of 64 (see `offsets`).

    Runs of one format become one piece, cut where a binding would grow over the device's limit. With groups > 1 there is one part of that many
    heads. `exact` keeps the products in float32. Raises OutOfDeviceMemory.
    """
    units = device.matrix_units and not exact
    if groups > 1:
        ((name, rows),) = parts
        return Linear(rows.cols, rows.count // groups, [_piece(device, rows, 0, rows.count // groups)], groups, {name: 0}, units)
    offsets, pieces, at = {}, list[Piece](), 0
    run: list[Rows] = []
    run_first = 0
    for name, rows in parts:
        offsets[name] = at
        rows = rows.extended(padded(rows.count)) if len(parts) > 1 else rows
        if run and run[0].format != rows.format:
            pieces += _pieces(device, join(run), run_first)
            run, run_first = [], at
        run.append(rows)
        at += rows.count
    pieces += _pieces(device, join(run) if len(run) > 1 else run[0], run_first)
    return Linear(parts[0][1].cols, at, pieces, 1, offsets, units)


def _pieces(device: Device, rows: Rows, first: int) -> Iterable[Piece]:
    most = device.info.binding_limit // (rows.cols * EIGHTHS[rows.format] // 8) // 64 * 64
    for at in range(0, rows.count, most):
        part = rows.slice(at, min(at + most, rows.count))
        yield _piece(device, part, first + at, part.count)


def _piece(device: Device, rows: Rows, first: int, count: int) -> Piece:
    weights = device.local(rows.data.nbytes)
    device.put(weights, rows.data)
    scales = None
    if rows.scales is not None:
        scales = device.local(rows.scales.nbytes)
        device.put(scales, rows.scales)
    return Piece(rows.format, first, count, weights, scales)


@dataclass(frozen=True, slots=True)
class Arena:
    """Experts first..last-1 of one format in one binding."""

    format: MatrixFormat
    first: int
    last: int
    weights: Buffer
    scales: Buffer | None


@dataclass(slots=True)
class ExpertMatrices:
    """One matrix [rows, cols] of every routed expert of a layer, resident; the kernels find them by number."""

    rows: int
    cols: int
    arenas: list[Arena]
    units: bool = False

    def ops(self, bucket: int, topk: int, x: Target, y: Target, share: int, ids: Buffer, tiles: tuple[Buffer, Buffer, int, int], swiglu: float | None) -> Stage:
        """y[pair] = W[expert of pair] x[pair / share] for up to bucket x topk pairs.

        Few rows go pair by pair through `ids`, many through the sorted `tiles` = (tile table, order, rows a thread, most tiles)."""
        table, order, per_thread, most = tiles
        made = []
        used = min(len(self.arenas) and sum(a.last - a.first for a in self.arenas), bucket * topk)
        for arena in self.arenas:
            push = _push(self.rows, self.cols, x, y, swiglu, (arena.first, arena.last), share)
            buffers = [x.buffer, arena.weights, arena.scales or arena.weights, y.buffer]
            epilogue = {4: int(swiglu is not None)}
            share_of = used / max(1, self.arenas[-1].last)
            cost = (2.0 * bucket * topk * self.rows * self.cols / len(self.arenas), arena.weights.nbytes * share_of)
            if bucket <= VECTOR_ROWS:
                rows = vector_rows(arena.format, 1)
                constants = {2: rows, 3: 1, 5: topk, **epilogue}
                made.append(Op(f"gemv_expert_{arena.format}", constants, [*buffers, ids], push, (-(-self.rows // rows), bucket * topk, 1), *cost))
            else:
                kernel, columns = ("gemm_coop", UNITS_COLUMNS) if self.units else ("gemm", 64)
                groups, bound = (-(-self.rows // columns), most, 1), [*buffers, table, order]
                constants = {2: per_thread, **epilogue}
                made.append(
                    Op(f"{kernel}_expert_{arena.format}", constants, bound, push, groups, *cost, units=self.units, first_tile_at=FIRST_TILE_AT)
                )
        return made


def upload_experts(device: Device, count: int, experts: Iterable[Sequence[Rows]]) -> list[ExpertMatrices]:
    """Put matrices of `count` experts on the device as they come, each expert once: one ExpertMatrices for each matrix of an expert.

    Arenas are no larger than a binding, and a change of format begins another. Raises OutOfDeviceMemory.
    """
    writers: list[_ArenaWriter] = []
    for number, matrices in enumerate(experts):
        if not writers:
            writers = [_ArenaWriter(device, count) for _ in matrices]
        for writer, rows in zip(writers, matrices, strict=True):
            writer.add(number, rows)
    return [writer.matrices() for writer in writers]


class _ArenaWriter:
    """Fills arenas with one matrix of each expert."""

    def __init__(self, device: Device, count: int) -> None:
        self.device, self.count = device, count
        self._arenas: list[Arena] = []
        self._shape = (0, 0)

    def add(self, number: int, rows: Rows) -> None:
        """Expert `number`, the next one."""
        self._shape = (rows.count, rows.cols)
        size = rows.data.nbytes
        arena = self._arenas[-1] if self._arenas else None
        room = 0 if arena is None else arena.weights.nbytes // size
        if arena is None or arena.format != rows.format or number - arena.first >= room:
            held = max(1, min(self.count - number, min(self.device.info.binding_limit, 1 << 32) // size))
            scales = None if rows.scales is None else self.device.local(held * rows.scales.nbytes)
            arena = Arena(rows.format, number, number, self.device.local(held * size), scales)
            self._arenas.append(arena)
        place = number - arena.first
        self.device.put(arena.weights.part(place * size, size), rows.data)
        if arena.scales is not None and rows.scales is not None:
            self.device.put(arena.scales.part(place * rows.scales.nbytes, rows.scales.nbytes), rows.scales)
        self._arenas[-1] = replace(arena, last=number + 1)

    def matrices(self) -> ExpertMatrices:
        """What was added."""
        return ExpertMatrices(*self._shape, self._arenas, self.device.matrix_units)
