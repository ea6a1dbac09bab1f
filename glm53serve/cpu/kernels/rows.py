"""Kernels over rows: the forms activations take before a product, hyper-connections, SwiGLU, final norm.

All widths are padded to 64 with zeros, so vectors never have a tail. `count` fields are addresses of the number of rows, `at` fields
addresses of the first row's number in a buffer of the whole chunk. Strides are in bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cfunc, njit

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.fields import offsets
from glm53serve.cpu.kernels.target import CFUNC, JIT, LANES, VECTOR_BYTES
from glm53serve.cpu.kernels.team import KERNEL

VB = VECTOR_BYTES
_GROUP_BYTES = 256

FORM_FIELDS = ("natural", "stride", "permuted", "permuted_stride", "bytes", "bytes_stride", "scale", "offset", "scale_stride", "groups")
"""The forms of one activation matrix: float32 in order; evens before odds in each 64 (0 = not wanted); 16-bit levels in that
order, 64 high bytes before 64 low ones, with a scale and 8 * sum a group (0 = not wanted)."""
_NAT, _NATS, _PERM, _PERMS, _BYTES, _BYTESS, _SCALE, _OFFSET, _SCALES, _GROUPS = offsets(FORM_FIELDS)


@njit(inline="always")
def store_levels(at, x, inverse):
    """16-bit levels of a vector, at most 127 * 256 either way: high bytes at `at`, low bytes 64 further. Returns the levels."""
    bound, floor = s.dup(np.float32(32512.0)), s.dup(np.float32(-32512.0))
    level = s.vmax(s.vmin(s.vrint(s.mul(x, s.dup(inverse))), bound), floor)
    high = s.vfloor(s.vfma(level, s.dup(np.float32(1.0 / 256.0)), s.dup(np.float32(0.5))))
    s.stb(at, high)
    s.stb(at + 64, s.vfma(high, s.dup(np.float32(-256.0)), level))
    return level


@njit("void(int64, int64, int64, int64)", **JIT)
def shape_row(form, row, first, last):
    """Make the wanted forms of groups first..last-1 of a row whose natural form is there."""
    natural = s.ldi(form + _NAT) + row * s.ldi(form + _NATS)
    permuted = s.ldi(form + _PERM)
    packed = s.ldi(form + _BYTES)
    if permuted != 0:
        permuted += row * s.ldi(form + _PERMS)
        for g in range(first, last):
            x, p = natural + g * _GROUP_BYTES, permuted + g * _GROUP_BYTES
            for j in range(0, 128, VB):
                u, v = s.ld(x + 2 * j), s.ld(x + 2 * j + VB)
                s.st(p + j, s.evens(u, v))
                s.st(p + 128 + j, s.odds(u, v))
    if packed != 0:
        packed += row * s.ldi(form + _BYTESS)
        scales = s.ldi(form + _SCALE) + row * s.ldi(form + _SCALES)
        sums = s.ldi(form + _OFFSET) + row * s.ldi(form + _SCALES)
        for g in range(first, last):
            x, p = natural + g * _GROUP_BYTES, packed + g * 128
            top = s.zero()
            for j in range(0, _GROUP_BYTES, VB):
                top = s.vmax(s.vabs(s.ld(x + j)), top)
            scale = s.largest(top) * np.float32(1.0 / 32512.0)
            inverse = np.float32(0.0)
            if scale > np.float32(1e-38):
                inverse = np.float32(1.0) / scale
            total = s.zero()
            for j in range(0, 128, VB):
                u, v = s.ld(x + 2 * j), s.ld(x + 2 * j + VB)
                total = s.add(total, store_levels(p + j // 4, s.evens(u, v), inverse))
                total = s.add(total, store_levels(p + 32 + j // 4, s.odds(u, v), inverse))
            s.stf(scales + 4 * g, scale)
            s.stw(sums + 4 * g, np.int64(s.total(total)) * 8)


SHAPE_FIELDS = ("count", "form")
_SH_COUNT, _SH_FORM = offsets(SHAPE_FIELDS)


@cfunc(KERNEL, **CFUNC)
def shape(a, chunk, chunks):
    """Forms of whole rows."""
    rows = s.ldi(s.ldi(a + _SH_COUNT))
    form = s.ldi(a + _SH_FORM)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        shape_row(form, row, 0, s.ldi(form + _GROUPS))


@njit("float32(int64, int64)", **JIT)
def square_sum(x, size):
    """Sum of squares of `size` bytes of float32 at x."""
    p, q = s.zero(), s.zero()
    for i in range(0, size, 2 * VB):
        u, v = s.ld(x + i), s.ld(x + i + VB)
        p, q = s.vfma(u, u, p), s.vfma(v, v, q)
    return s.total(s.add(p, q))


@njit("void(int64, int64, int64, int64, int64, float32)", **JIT)
def rms_row(x, weight, out, size, width, eps):
    """RMS norm of `size` bytes at x, of which `width` values are not padding, to out (may be x)."""
    factor = s.dup(np.float32(1.0) / np.float32(math.sqrt(square_sum(x, size) / np.float32(width) + eps)))
    for i in range(0, size, VB):
        s.st(out + i, s.mul(s.mul(s.ld(x + i), factor), s.ld(weight + i)))


# --- hyper-connections (model spec 3) --------------------------------------------------------------------------------------------

COLLAPSE_FIELDS = (
    "count", "at", "out_at", "streams", "stream_row", "stream", "n", "width", "y", "y_stride", "base", "scale", "norm_eps", "hc_eps",
    "iterations", "norm", "form", "mixes", "mix_stride",
)  # fmt: skip
"""streams [rows, n, H]; y = fn products of the unnormalised streams; writes the normalised sub-layer input in its forms, and post [n] and
M [n, n] to mixes."""
(_C_COUNT, _C_AT, _C_OUT, _C_X, _C_XROW, _C_XSTREAM, _C_N, _C_WIDTH, _C_Y, _C_YS, _C_BASE, _C_SCALE, _C_EPS, _C_HCEPS, _C_ITER, _C_NORM,
 _C_FORM, _C_MIX, _C_MIXS) = offsets(COLLAPSE_FIELDS)  # fmt: skip


@njit("float32(float32)", **JIT)
def sigmoid(x):
    """Of one value."""
    return np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-x)))


@njit("void(int64, int64, float32, int64)", **JIT)
def sinkhorn(m, n, eps, iterations):
    """Logits float32 [n, n] at m, in place: row softmax, then column and row steps, a column step last."""
    one = np.float32(1.0)
    for j in range(n):
        row = m + 4 * n * j
        top = s.ldf(row)
        for k in range(1, n):
            top = max(top, s.ldf(row + 4 * k))
        total = np.float32(0.0)
        for k in range(n):
            e = np.float32(math.exp(s.ldf(row + 4 * k) - top))
            s.stf(row + 4 * k, e)
            total += e
        total = one / total
        for k in range(n):
            s.stf(row + 4 * k, s.ldf(row + 4 * k) * total + eps)
    for step in range(2 * iterations - 1):
        along, across = (4 * n, 4) if step % 2 == 0 else (4, 4 * n)
        for k in range(n):
            line = m + across * k
            total = eps
            for j in range(n):
                total += s.ldf(line + along * j)
            total = one / total
            for j in range(n):
                s.stf(line + along * j, s.ldf(line + along * j) * total)


@cfunc(KERNEL, **CFUNC)
def collapse(a, chunk, chunks):
    """mHC site before a sub-layer, and the sub-layer's norm."""
    rows, first, out_first = s.ldi(s.ldi(a + _C_COUNT)), s.ldi(s.ldi(a + _C_AT)), s.ldi(s.ldi(a + _C_OUT))
    n, width, stream = s.ldi(a + _C_N), s.ldi(a + _C_WIDTH), s.ldi(a + _C_XSTREAM)
    base, scale, form = s.ldi(a + _C_BASE), s.ldi(a + _C_SCALE), s.ldi(a + _C_FORM)
    eps, hc_eps = s.ldf(a + _C_EPS), s.ldf(a + _C_HCEPS)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        x = s.ldi(a + _C_X) + (first + row) * s.ldi(a + _C_XROW)
        y = s.ldi(a + _C_Y) + row * s.ldi(a + _C_YS)
        mix = s.ldi(a + _C_MIX) + (first + row) * s.ldi(a + _C_MIXS)
        inverse = np.float32(1.0) / np.float32(math.sqrt(square_sum(x, n * stream) / np.float32(n * width) + eps))
        for j in range(n):
            logit = s.ldf(y + 4 * (n + j)) * inverse * s.ldf(scale + 4) + s.ldf(base + 4 * (n + j))
            s.stf(mix + 4 * j, np.float32(2.0) * sigmoid(logit))
        for j in range(n * n):
            s.stf(mix + 4 * (n + j), s.ldf(y + 4 * (2 * n + j)) * inverse * s.ldf(scale + 8) + s.ldf(base + 4 * (2 * n + j)))
        sinkhorn(mix + 4 * n, n, hc_eps, s.ldi(a + _C_ITER))
        out = s.ldi(form + _NAT) + (out_first + row) * s.ldi(form + _NATS)
        for j in range(n):
            pre = s.dup(sigmoid(s.ldf(y + 4 * j) * inverse * s.ldf(scale) + s.ldf(base + 4 * j)) + hc_eps)
            source = x + j * stream
            if j == 0:
                for i in range(0, stream, VB):
                    s.st(out + i, s.mul(pre, s.ld(source + i)))
            else:
                for i in range(0, stream, VB):
                    s.st(out + i, s.vfma(pre, s.ld(source + i), s.ld(out + i)))
        rms_row(out, s.ldi(a + _C_NORM), out, stream, width, eps)
        shape_row(form, out_first + row, 0, s.ldi(form + _GROUPS))


EXPAND_FIELDS = ("count", "at", "y_at", "streams", "stream_row", "stream", "n", "y", "y_stride", "y2", "y2_stride", "mixes", "mix_stride")
"""streams = post (x) (y + y2) + M^T streams; y2 = 0: not there, else rows numbered as y's."""
_E_COUNT, _E_AT, _E_YAT, _E_X, _E_XROW, _E_XSTREAM, _E_N, _E_Y, _E_YS, _E_Y2, _E_Y2S, _E_MIX, _E_MIXS = offsets(EXPAND_FIELDS)


@njit("void(int64, int64, int64, int64, int64)", **JIT)
def _expand_four(x, y, post, mix, stream):
    """Four streams, all of a column's values in registers."""
    for i in range(0, stream, VB):
        v = s.ld(y + i)
        a, b, c, d = s.ld(x + i), s.ld(x + stream + i), s.ld(x + 2 * stream + i), s.ld(x + 3 * stream + i)
        for k in range(4):
            total = s.mul(s.lds(post + 4 * k), v)
            total = s.vfma(s.lds(mix + 4 * k), a, total)
            total = s.vfma(s.lds(mix + 16 + 4 * k), b, total)
            total = s.vfma(s.lds(mix + 32 + 4 * k), c, total)
            total = s.vfma(s.lds(mix + 48 + 4 * k), d, total)
            s.st(x + k * stream + i, total)


@cfunc(KERNEL, **CFUNC)
def expand(a, chunk, chunks):
    """mHC site after a sub-layer, in place."""
    rows, first, y_first = s.ldi(s.ldi(a + _E_COUNT)), s.ldi(s.ldi(a + _E_AT)), s.ldi(s.ldi(a + _E_YAT))
    n, stream = s.ldi(a + _E_N), s.ldi(a + _E_XSTREAM)
    second = s.ldi(a + _E_Y2)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        x = s.ldi(a + _E_X) + (first + row) * s.ldi(a + _E_XROW)
        y = s.ldi(a + _E_Y) + (y_first + row) * s.ldi(a + _E_YS)
        post = s.ldi(a + _E_MIX) + (first + row) * s.ldi(a + _E_MIXS)
        mix = post + 4 * n
        if second != 0:
            y2 = second + (y_first + row) * s.ldi(a + _E_Y2S)
            for i in range(0, stream, VB):
                s.st(y + i, s.add(s.ld(y + i), s.ld(y2 + i)))
        if n == 4:
            _expand_four(x, y, post, mix, stream)
            continue
        old = np.empty(n * LANES, np.float32)
        saved = old.ctypes.data
        for i in range(0, stream, VB):
            for j in range(n):
                s.st(saved + j * VB, s.ld(x + j * stream + i))
            for k in range(n):
                total = s.mul(s.lds(post + 4 * k), s.ld(y + i))
                for j in range(n):
                    total = s.vfma(s.lds(mix + 4 * (n * j + k)), s.ld(saved + j * VB), total)
                s.st(x + k * stream + i, total)
        s.keep(old)


# --- feed-forward (model spec 6) -------------------------------------------------------------------------------------------------

SWIGLU_FIELDS = ("count", "at", "gate", "up", "stride", "limit", "form")
_S_COUNT, _S_AT, _S_GATE, _S_UP, _S_STRIDE, _S_LIMIT, _S_FORM = offsets(SWIGLU_FIELDS)


@cfunc(KERNEL, **CFUNC)
def swiglu(a, chunk, chunks):
    """silu(min(gate, limit)) * clip(up, -limit, limit) in its forms; chunks over groups of 64 columns of all rows, from row `at` on."""
    form = s.ldi(a + _S_FORM)
    groups = s.ldi(form + _GROUPS)
    every = s.ldi(s.ldi(a + _S_COUNT)) * groups
    limit = s.ldf(a + _S_LIMIT)
    high, low = s.dup(limit), s.dup(-limit)
    first = s.ldi(s.ldi(a + _S_AT))
    for unit in range(every * chunk // chunks, every * (chunk + 1) // chunks):
        group = unit % groups
        row, at = first + unit // groups, group * _GROUP_BYTES
        gate = s.ldi(a + _S_GATE) + row * s.ldi(a + _S_STRIDE) + at
        up = s.ldi(a + _S_UP) + row * s.ldi(a + _S_STRIDE) + at
        out = s.ldi(form + _NAT) + row * s.ldi(form + _NATS) + at
        for i in range(0, _GROUP_BYTES, VB):
            g = s.vmin(s.ld(gate + i), high)
            u = s.vmax(s.vmin(s.ld(up + i), high), low)
            s.st(out + i, s.mul(s.mul(g, s.sigmoid(g)), u))
        shape_row(form, row, group, group + 1)


FINAL_FIELDS = ("count", "streams", "stream_row", "stream", "n", "width", "eps", "norm", "form")
_F_COUNT, _F_X, _F_XROW, _F_XSTREAM, _F_N, _F_WIDTH, _F_EPS, _F_NORM, _F_FORM = offsets(FINAL_FIELDS)


@cfunc(KERNEL, **CFUNC)
def final(a, chunk, chunks):
    """Mean of the streams, then the final norm."""
    rows, n, stream, form = s.ldi(s.ldi(a + _F_COUNT)), s.ldi(a + _F_N), s.ldi(a + _F_XSTREAM), s.ldi(a + _F_FORM)
    share = s.dup(np.float32(1.0) / np.float32(n))
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        x = s.ldi(a + _F_X) + row * s.ldi(a + _F_XROW)
        out = s.ldi(form + _NAT) + row * s.ldi(form + _NATS)
        for i in range(0, stream, VB):
            total = s.ld(x + i)
            for j in range(1, n):
                total = s.add(total, s.ld(x + j * stream + i))
            s.st(out + i, s.mul(total, share))
        rms_row(out, s.ldi(a + _F_NORM), out, stream, s.ldi(a + _F_WIDTH), s.ldf(a + _F_EPS))
        shape_row(form, row, 0, s.ldi(form + _GROUPS))
