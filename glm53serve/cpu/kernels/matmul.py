"""Products with stored matrices: y = x @ W.T for any number of rows, one kernel for all formats and row counts.

A product is described by int64 fields (see `FIELDS`). W may be a stack of heads, each with its own part of x and of y.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.ir_build import FP8, INT4_Q16
from glm53serve.cpu.kernels.ir_float import float_tile
from glm53serve.cpu.kernels.ir_integer import PANEL, PANEL_ROWS, pack_panel, panel_tile, rows_tile
from glm53serve.cpu.kernels.target import CFUNC, JIT, LANES
from glm53serve.cpu.kernels.team import KERNEL

FIELDS = (
    "product",  # address of the kernel `product`
    "count",  # address of the number of rows of x
    "kind",
    "w",
    "w_stride",  # bytes a row
    "scale",
    "scale_stride",
    "n",  # rows of W, of each head
    "groups",  # columns / 64
    "x_at",  # address of the first row's number in x
    "x",
    "x_stride",
    "x_scale",  # INT4_Q16: float32 a group
    "x_offset",  # INT4_Q16: int32 a group, 8 * sum
    "x_scale_stride",
    "y_at",
    "y",
    "y_stride",
    "heads",
    "w_head",  # bytes from head to head
    "scale_head",
    "x_head",
    "x_scale_head",
    "y_head",
)
_PRODUCT, _COUNT, _KIND, _W, _WS, _S, _SS, _N, _G, _XAT, _X, _XS, _Q, _O, _QS, _YAT, _Y, _YS, _H, _WH, _SH, _XH, _QH, _YH = (8 * i for i in range(len(FIELDS)))

TILE = 16
_PACK_FROM = 8
_BLOCK_ROWS = 48
_RUN_GROUPS = 16
_FLOAT_WIDE = 4 if LANES == 16 else 2


@njit(inline="always")
def _float_shape(rows, step):
    """Rows of the next tile, its width, and 1 if it is a wide one."""
    if step == 1:
        return 1, 1, 0
    if rows >= 6:
        return 6, _FLOAT_WIDE, 1
    if rows >= 4:
        return 4, _FLOAT_WIDE, 1
    if rows >= 2:
        return 2, 2 * _FLOAT_WIDE, 1
    return 1, 8, 1


@njit(inline="always")
def _floats(kind, w, ws, sc, ss, first, last, groups, x, xs, rows, y, ys):
    """Rows first..last-1 of W in a float format times all rows of x.

    Many rows are taken in blocks of x that stay in the second cache and runs of columns that stay in the first; sums wait in between.
    """
    columns = groups
    if rows > 2:
        columns = min(groups, _RUN_GROUPS)
    waiting = np.empty(_BLOCK_ROWS * 8 * LANES, np.float32)
    carry = waiting.ctypes.data
    for m0 in range(0, rows, _BLOCK_ROWS):
        m1 = min(rows, m0 + _BLOCK_ROWS)
        n = first
        while n < last:
            step = 8
            if last - n < 8:
                step = 1
            for g in range(0, groups, columns):
                count = min(columns, groups - g)
                m = m0
                while m < m1:
                    tile, width, wide = _float_shape(m1 - m, step)
                    for i in range(n, n + step, width):
                        scale = sc + i * ss
                        if kind == FP8:
                            scale = sc + (i >> 7) * ss
                        slot = carry + ((m - m0) * 8 + (i - n) * tile) * 4 * LANES
                        old, new = slot, slot
                        if g == 0:
                            old = 0
                        if g + count == groups:
                            new = 0
                        float_tile(kind, tile, wide, w + i * ws, ws, scale, ss, x + m * xs, xs, g, count, old, new, y + m * ys + 4 * i, ys)
                    m += tile
            n += step
    s.keep(waiting)


@njit(inline="always")
def _integers(w, ws, sc, ss, first, last, groups, x, xs, q, o, qs, rows, y, ys):
    """Rows first..last-1 of an int4 W times 16-bit x: where they lie for few rows, through unpacked panels for many."""
    n = first
    if rows >= _PACK_FROM and last - first >= PANEL:
        packed = np.empty(groups * 1024 + groups * 64 + 64, np.uint8)
        panel = (packed.ctypes.data + 63) & -64
        scales = panel + groups * 1024
        while n + PANEL <= last:
            pack_panel(w + n * ws, ws, sc + n * ss, ss, groups, panel, scales)
            m = 0
            while m < rows:
                tile = PANEL_ROWS
                while tile > rows - m:
                    tile //= 2
                panel_tile(tile, panel, scales, x + m * xs, xs, q + m * qs, o + m * qs, qs, groups, y + m * ys + 4 * n, ys)
                m += tile
            n += PANEL
        s.keep(packed)
    while n < last:
        step = 8
        wide = 1
        if last - n < 8:
            step = 1
            wide = 0
        m = 0
        while m < rows:
            tile = 1
            if wide == 1:
                tile = 4
                while tile > rows - m:
                    tile //= 2
            rows_tile(tile, wide, w + n * ws, ws, sc + n * ss, ss, x + m * xs, xs, q + m * qs, o + m * qs, qs, groups, y + m * ys + 4 * n, ys)
            m += tile
        n += step


CALL_FIELDS = ("kind", "w", "w_stride", "scale", "scale_stride", "first", "last", "groups", "x", "x_stride", "q", "o", "q_stride", "rows", "y", "y_stride")
"""Arguments of `product`: rows first..last-1 of W, x with its forms, y; strides in bytes."""
CALL_WORDS = len(CALL_FIELDS)


@cfunc(KERNEL, **CFUNC)
def product(a, chunk, chunks):
    """y[:, first:last] = x @ W[first:last].T. Called by address, so that the tiles are compiled once."""
    kind, w, ws, sc, ss = s.ldi(a), s.ldi(a + 8), s.ldi(a + 16), s.ldi(a + 24), s.ldi(a + 32)
    first, last, groups, x, xs = s.ldi(a + 40), s.ldi(a + 48), s.ldi(a + 56), s.ldi(a + 64), s.ldi(a + 72)
    q, o, qs, rows, y, ys = s.ldi(a + 80), s.ldi(a + 88), s.ldi(a + 96), s.ldi(a + 104), s.ldi(a + 112), s.ldi(a + 120)
    if kind == INT4_Q16:
        _integers(w, ws, sc, ss, first, last, groups, x, xs, q, o, qs, rows, y, ys)
    else:
        _floats(kind, w, ws, sc, ss, first, last, groups, x, xs, rows, y, ys)


@njit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)", **JIT)
def set_weights(call, kind, w, ws, sc, ss, first, last, groups):
    """Fill the first half of `product`'s arguments."""
    s.sti(call, kind)
    s.sti(call + 8, w)
    s.sti(call + 16, ws)
    s.sti(call + 24, sc)
    s.sti(call + 32, ss)
    s.sti(call + 40, first)
    s.sti(call + 48, last)
    s.sti(call + 56, groups)


@njit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)", **JIT)
def set_rows(call, x, xs, q, o, qs, rows, y, ys):
    """Fill the second half of `product`'s arguments."""
    s.sti(call + 64, x)
    s.sti(call + 72, xs)
    s.sti(call + 80, q)
    s.sti(call + 88, o)
    s.sti(call + 96, qs)
    s.sti(call + 104, rows)
    s.sti(call + 112, y)
    s.sti(call + 120, ys)


@cfunc(KERNEL, **CFUNC)
def matmul(a, chunk, chunks):
    """Chunk of a product: a run of 16-row tiles of W over all heads."""
    rows = s.ldi(s.ldi(a + _COUNT))
    kind, n, groups = s.ldi(a + _KIND), s.ldi(a + _N), s.ldi(a + _G)
    ws, ss, xs, qs, ys = s.ldi(a + _WS), s.ldi(a + _SS), s.ldi(a + _XS), s.ldi(a + _QS), s.ldi(a + _YS)
    x_at, y_at = s.ldi(s.ldi(a + _XAT)), s.ldi(s.ldi(a + _YAT))
    words = np.empty(CALL_WORDS, np.int64)
    call = words.ctypes.data
    tiles = (n + TILE - 1) // TILE
    every = tiles * s.ldi(a + _H)
    tile = every * chunk // chunks
    end = every * (chunk + 1) // chunks
    while tile < end:
        head = tile // tiles
        first = tile - head * tiles
        last = min(tiles, first + end - tile)
        tile += last - first
        w, sc = s.ldi(a + _W) + head * s.ldi(a + _WH), s.ldi(a + _S) + head * s.ldi(a + _SH)
        x, y = s.ldi(a + _X) + head * s.ldi(a + _XH) + x_at * xs, s.ldi(a + _Y) + head * s.ldi(a + _YH) + y_at * ys
        part = head * s.ldi(a + _QH) + x_at * qs
        q, o = s.ldi(a + _Q) + part, s.ldi(a + _O) + part
        set_weights(call, kind, w, ws, sc, ss, first * TILE, min(n, last * TILE), groups)
        set_rows(call, x, xs, q, o, qs, rows, y, ys)
        s.call_kernel(s.ldi(a + _PRODUCT), call, 0, 1)
    s.keep(words)
