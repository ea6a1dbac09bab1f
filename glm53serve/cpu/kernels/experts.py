"""Kernels over routed experts: assignments sorted by expert, each expert's rows together, results added up in order of the expert.

Assignment i is row `order_rows[i]` at weight `order_weights[i]`.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.fields import offsets
from glm53serve.cpu.kernels.ir_build import BF16, F32_, FP8, INT4, INT8
from glm53serve.cpu.kernels.matmul import CALL_WORDS, TILE, set_rows, set_weights
from glm53serve.cpu.kernels.rows import FORM_FIELDS
from glm53serve.cpu.kernels.target import CFUNC, JIT, VECTOR_BYTES
from glm53serve.cpu.kernels.team import KERNEL

VB = VECTOR_BYTES
_NAT, _NATS, _PERM, _PERMS, _BYTES, _BYTESS, _SCALE, _OFFSET, _SCALES, _GROUPS = offsets(FORM_FIELDS)

RECORD_FIELDS = ("kind", "gate", "gate_scale", "up", "up_scale", "down", "down_scale")
"""One routed expert; strides follow from the kind and the widths."""
_REC_BYTES = 8 * len(RECORD_FIELDS)

RUN_FIELDS = ("assignments", "first", "first_expert", "last_expert", "row")
"""The assignments first .. first + assignments - 1, all of experts first_expert .. last_expert - 1; row: where the first one's rows lie in
the run's buffers."""
_RUN_COUNT, _RUN_FIRST, _RUN_E0, _RUN_E1, _RUN_ROW = offsets(RUN_FIELDS)

GATHER_FIELDS = ("run", "order_rows", "source", "target")
_G_RUN, _G_ROWS, _G_SOURCE, _G_TARGET = offsets(GATHER_FIELDS)

EXPERTS_FIELDS = ("product", "run", "starts", "table", "form", "groups", "n", "pairs", "y", "y_stride", "second")
"""One half of the experts' work: `pairs` 1 = gate and up to y and y + second bytes, 0 = down to y. form: activations by assignment; groups =
columns / 64; n = rows of each matrix."""
_X_PRODUCT, _X_RUN, _X_STARTS, _X_TABLE, _X_FORM, _X_G, _X_N, _X_PAIRS, _X_Y, _X_YS, _X_SECOND = offsets(EXPERTS_FIELDS)

COMBINE_FIELDS = ("run", "order_rows", "order_weights", "out", "out_stride", "y", "y_stride", "groups")
_C_RUN, _C_ROWS, _C_WEIGHTS, _C_OUT, _C_OUTS, _C_Y, _C_YS, _C_GROUPS = offsets(COMBINE_FIELDS)


@njit("void(int64, int64, int64)", **JIT)
def _copy(target, source, size):
    for i in range(0, size, 8):
        s.sti(target + i, s.ldi(source + i))


@cfunc(KERNEL, **CFUNC)
def gather(a, chunk, chunks):
    """Every form of the rows that the run's assignments name."""
    run, source, target = s.ldi(a + _G_RUN), s.ldi(a + _G_SOURCE), s.ldi(a + _G_TARGET)
    rows = s.ldi(run + _RUN_COUNT)
    names = s.ldi(a + _G_ROWS) + 8 * s.ldi(run + _RUN_FIRST)
    groups = s.ldi(source + _GROUPS)
    to = s.ldi(run + _RUN_ROW)
    for n in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        row = s.ldi(names + 8 * n)
        i = to + n
        _copy(s.ldi(target + _NAT) + i * s.ldi(target + _NATS), s.ldi(source + _NAT) + row * s.ldi(source + _NATS), 256 * groups)
        if s.ldi(target + _PERM) != 0:
            _copy(s.ldi(target + _PERM) + i * s.ldi(target + _PERMS), s.ldi(source + _PERM) + row * s.ldi(source + _PERMS), 256 * groups)
        if s.ldi(target + _BYTES) != 0:
            _copy(s.ldi(target + _BYTES) + i * s.ldi(target + _BYTESS), s.ldi(source + _BYTES) + row * s.ldi(source + _BYTESS), 128 * groups)
            t, u = i * s.ldi(target + _SCALES), row * s.ldi(source + _SCALES)
            for g in range(0, 4 * groups, 4):
                s.stw(s.ldi(target + _SCALE) + t + g, s.ldw(s.ldi(source + _SCALE) + u + g))
                s.stw(s.ldi(target + _OFFSET) + t + g, s.ldw(s.ldi(source + _OFFSET) + u + g))


@njit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", **JIT)
def _describe(call, kind, w, sc, first, last, groups, form, row, rows, y, ys):
    """Rows first..last-1 of one expert's matrix times `rows` activation rows from `row` on, in the form its format takes."""
    x, xs = s.ldi(form + _NAT), s.ldi(form + _NATS)
    ws, ss = 32 * groups, 4 * groups
    if kind == F32_:
        ws, ss = 256 * groups, np.int64(0)
    elif kind == BF16:
        ws, ss = 128 * groups, np.int64(0)
    elif kind == INT8:
        ws, ss = 64 * groups, np.int64(4)
    elif kind == FP8:
        ws, ss = 64 * groups, 4 * ((groups + 1) // 2)
    elif kind == INT4:
        x, xs = s.ldi(form + _PERM), s.ldi(form + _PERMS)
    else:
        x, xs = s.ldi(form + _BYTES), s.ldi(form + _BYTESS)
    qs = s.ldi(form + _SCALES)
    q, o = s.ldi(form + _SCALE) + row * qs, s.ldi(form + _OFFSET) + row * qs
    set_weights(call, kind, w, ws, sc, ss, first, last, groups)
    set_rows(call, x + row * xs, xs, q, o, qs, rows, y + row * ys, ys)


@cfunc(KERNEL, **CFUNC)
def experts(a, chunk, chunks):
    """Chunk of the run's products: 16-row tiles of W over its experts' matrices."""
    run, starts = s.ldi(a + _X_RUN), s.ldi(a + _X_STARTS)
    begin = s.ldi(run + _RUN_FIRST)
    finish = begin + s.ldi(run + _RUN_COUNT)
    to = s.ldi(run + _RUN_ROW) - begin
    e0, e1 = s.ldi(run + _RUN_E0), s.ldi(run + _RUN_E1)
    n, groups, pairs = s.ldi(a + _X_N), s.ldi(a + _X_G), s.ldi(a + _X_PAIRS)
    tiles = (n + TILE - 1) // TILE
    matrices = 1 + pairs
    used = 0
    for e in range(e0, e1):
        if s.ldi(starts + 8 * e + 8) > s.ldi(starts + 8 * e):
            used += 1
    tile, end = used * matrices * tiles * chunk // chunks, used * matrices * tiles * (chunk + 1) // chunks
    passed = np.int64(0)
    form, ys = s.ldi(a + _X_FORM), s.ldi(a + _X_YS)
    words = np.empty(CALL_WORDS, np.int64)
    call = words.ctypes.data
    for e in range(e0, e1):
        lo, hi = s.ldi(starts + 8 * e), s.ldi(starts + 8 * e + 8)
        if hi <= lo:
            continue
        lo, hi = max(lo, begin), min(hi, finish)
        record = s.ldi(a + _X_TABLE) + e * _REC_BYTES
        for m in range(matrices):
            if tile < end and passed + tiles > tile:
                first, last = tile - passed, min(tiles, end - passed)
                which = 1 + m
                y = s.ldi(a + _X_Y) + m * s.ldi(a + _X_SECOND)
                if pairs == 0:
                    which = 3
                w, sc = s.ldi(record + 16 * which - 8), s.ldi(record + 16 * which)
                _describe(call, s.ldi(record), w, sc, first * TILE, min(n, last * TILE), groups, form, lo + to, hi - lo, y, ys)
                s.call_kernel(s.ldi(a + _X_PRODUCT), call, 0, 1)
                tile = passed + last
            passed += tiles
    s.keep(words)


@cfunc(KERNEL, **CFUNC)
def combine(a, chunk, chunks):
    """y[row] += weight * out, assignment by assignment; chunks over groups of 64 columns."""
    run = s.ldi(a + _C_RUN)
    begin, count, groups = s.ldi(run + _RUN_FIRST), s.ldi(run + _RUN_COUNT), s.ldi(a + _C_GROUPS)
    first, last = groups * chunk // chunks * 256, groups * (chunk + 1) // chunks * 256
    for i in range(count):
        weight = s.lds(s.ldi(a + _C_WEIGHTS) + 4 * (begin + i))
        out = s.ldi(a + _C_OUT) + (s.ldi(run + _RUN_ROW) + i) * s.ldi(a + _C_OUTS)
        y = s.ldi(a + _C_Y) + s.ldi(s.ldi(a + _C_ROWS) + 8 * (begin + i)) * s.ldi(a + _C_YS)
        for j in range(first, last, VB):
            s.st(y + j, s.vfma(weight, s.ld(out + j), s.ld(y + j)))


CLEAR_FIELDS = ("count", "y", "y_stride", "size")
_CL_COUNT, _CL_Y, _CL_YS, _CL_SIZE = offsets(CLEAR_FIELDS)


@cfunc(KERNEL, **CFUNC)
def clear(a, chunk, chunks):
    """Zero `size` bytes of rows of y."""
    rows = s.ldi(s.ldi(a + _CL_COUNT))
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        y = s.ldi(a + _CL_Y) + row * s.ldi(a + _CL_YS)
        for j in range(0, s.ldi(a + _CL_SIZE), VB):
            s.st(y + j, s.zero())
