"""Kernel of a KDA layer between its projections: short convolution, gates, the recurrence, the gated output norm (model spec 4).

One chunk is one head, so a head's state stays with one thread. The recurrence makes one pass over the state a token: the pass that
applies token t's update also gathers what token t + 1 reads, in the order of key channels, so a token's numbers do not depend on how the
rows were cut.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cfunc, njit

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.fields import offsets
from glm53serve.cpu.kernels.rows import FORM_FIELDS, shape_row, square_sum
from glm53serve.cpu.kernels.target import CFUNC, JIT, LANES, VECTOR_BYTES
from glm53serve.cpu.kernels.team import KERNEL

VB = VECTOR_BYTES
_NAT, _NATS = offsets(FORM_FIELDS)[:2]
_SLICE = 4 * LANES
_BLOCK = 64

PIECE_FIELDS = ("first", "rows", "slot")
"""Consecutive rows of one slot; slot: address of its table (see `SLOT_FIELDS`)."""
_PC_FIRST, _PC_ROWS, _PC_SLOT = offsets(PIECE_FIELDS)
PIECE_BYTES = 8 * len(PIECE_FIELDS)

KDA_FIELDS = (
    "pieces", "piece_count", "heads", "width", "padded", "conv", "raw", "raw_stride", "part", "taps", "tap_stride", "decay", "decay_stride",
    "dt_bias", "speed", "bounded", "bound", "beta", "beta_stride", "gate", "gate_stride", "norm", "eps", "form", "state", "window",
)  # fmt: skip
"""Of each row: raw q|k|v [3 parts of `part` bytes], decay [P], beta [heads], gate [P] before their activations. taps [K, 3P]; speed =
exp(A_log) [heads]; state and window: offsets in the slot's flat array of [heads, d, d] and [K-1, 3P]."""
(_PIECES, _PCOUNT, _HEADS, _WIDTH, _PADDED, _CONV, _RAW, _RAWS, _PART, _TAPS, _TAPSTRIDE, _DECAY, _DECAYS, _DT, _SPEED, _BOUNDED, _BOUND, _BETA,
 _BETAS, _GATE, _GATES, _NORM, _EPS, _FORM, _STATE, _WINDOW) = offsets(KDA_FIELDS)  # fmt: skip


@njit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", **JIT)
def _convolve(out, out_stride, raw, raw_stride, window, window_stride, taps, tap_stride, rows, conv, size):
    """SiLU of the causal convolution of `size` bytes of channels; rows before the first come from the window."""
    for t in range(rows):
        for i in range(0, size, VB):
            total = s.zero()
            for j in range(conv):
                back = t - (conv - 1) + j
                source = raw + back * raw_stride
                if back < 0:
                    source = window + (conv - 1 + back) * window_stride
                total = s.vfma(s.ld(taps + j * tap_stride + i), s.ld(source + i), total)
            s.st(out + t * out_stride + i, s.mul(total, s.sigmoid(total)))


@njit("void(int64, int64, int64, int64, int64, int64, int64)", **JIT)
def _slide(raw, raw_stride, window, window_stride, rows, keep, size):
    """Put the last `keep` raw rows into the window; fewer rows than that shift it."""
    for j in range(keep):
        back = rows - keep + j
        source = raw + back * raw_stride
        if back < 0:
            source = window + (keep + back) * window_stride
        for i in range(0, size, VB):
            s.st(window + j * window_stride + i, s.ld(source + i))


@njit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)", **JIT)
def recurrence(state, coefficients, v, o, beta, qk, rows, width, stride):
    """`rows` tokens over a slice of 4 vectors of value columns of one head.

    state: its first column, rows `stride` bytes apart, `width` key channels. coefficients: float32 [rows, width, 4] = decay, k, decay * k,
    decay * q of each token and channel. v, o: float32 rows `stride` apart; beta, qk = q . k: float32 a row. Writes o = S^T q and the state.
    """
    z = s.zero()
    d0, d1, d2, d3 = z, z, z, z
    for t in range(rows + 1):
        a0, a1, a2, a3 = z, z, z, z
        c0, c1, c2, c3 = z, z, z, z
        old = coefficients + (t - 1) * width * 16
        new = coefficients + t * width * 16
        if t == 0:
            for i in range(width):
                r = state + i * stride
                k, q = s.lds(new + 16 * i + 8), s.lds(new + 16 * i + 12)
                x = s.ld(r)
                a0, c0 = s.vfma(x, k, a0), s.vfma(x, q, c0)
                x = s.ld(r + VB)
                a1, c1 = s.vfma(x, k, a1), s.vfma(x, q, c1)
                x = s.ld(r + 2 * VB)
                a2, c2 = s.vfma(x, k, a2), s.vfma(x, q, c2)
                x = s.ld(r + 3 * VB)
                a3, c3 = s.vfma(x, k, a3), s.vfma(x, q, c3)
        elif t < rows:
            for i in range(width):
                r = state + i * stride
                e, u = s.lds(old + 16 * i), s.lds(old + 16 * i + 4)
                k, q = s.lds(new + 16 * i + 8), s.lds(new + 16 * i + 12)
                x = s.vfma(u, d0, s.mul(s.ld(r), e))
                s.st(r, x)
                a0, c0 = s.vfma(x, k, a0), s.vfma(x, q, c0)
                x = s.vfma(u, d1, s.mul(s.ld(r + VB), e))
                s.st(r + VB, x)
                a1, c1 = s.vfma(x, k, a1), s.vfma(x, q, c1)
                x = s.vfma(u, d2, s.mul(s.ld(r + 2 * VB), e))
                s.st(r + 2 * VB, x)
                a2, c2 = s.vfma(x, k, a2), s.vfma(x, q, c2)
                x = s.vfma(u, d3, s.mul(s.ld(r + 3 * VB), e))
                s.st(r + 3 * VB, x)
                a3, c3 = s.vfma(x, k, a3), s.vfma(x, q, c3)
        else:
            for i in range(width):
                r = state + i * stride
                e, u = s.lds(old + 16 * i), s.lds(old + 16 * i + 4)
                s.st(r, s.vfma(u, d0, s.mul(s.ld(r), e)))
                s.st(r + VB, s.vfma(u, d1, s.mul(s.ld(r + VB), e)))
                s.st(r + 2 * VB, s.vfma(u, d2, s.mul(s.ld(r + 2 * VB), e)))
                s.st(r + 3 * VB, s.vfma(u, d3, s.mul(s.ld(r + 3 * VB), e)))
            return
        b, w = s.lds(beta + 4 * t), s.lds(qk + 4 * t)
        vt, ot = v + t * stride, o + t * stride
        d0, d1 = s.mul(s.sub(s.ld(vt), a0), b), s.mul(s.sub(s.ld(vt + VB), a1), b)
        d2, d3 = s.mul(s.sub(s.ld(vt + 2 * VB), a2), b), s.mul(s.sub(s.ld(vt + 3 * VB), a3), b)
        s.st(ot, s.vfma(w, d0, c0))
        s.st(ot + VB, s.vfma(w, d1, c1))
        s.st(ot + 2 * VB, s.vfma(w, d2, c2))
        s.st(ot + 3 * VB, s.vfma(w, d3, c3))


@njit("void(int64, int64, float32, int64, float32, int64)", **JIT)
def _decay_row(z, dt, speed, bounded, bound, size):
    """exp(g) of one token and head, in place of z = the low-rank product."""
    if bounded != 0:
        b, f = s.dup(bound), s.dup(speed)
        for i in range(0, size, VB):
            s.st(z + i, s.vexp(s.mul(b, s.sigmoid(s.mul(f, s.add(s.ld(z + i), s.ld(dt + i)))))))
    else:
        for i in range(0, size, 4):
            x = s.ldf(z + i) + s.ldf(dt + i)
            if x <= np.float32(20.0):
                x = np.float32(math.log1p(math.exp(x)))
            s.stf(z + i, np.float32(math.exp(-speed * x)))


@njit("void(int64, int64)", **JIT)
def _head(a, head):
    """All rows of one head."""
    width, padded, conv = s.ldi(a + _WIDTH), s.ldi(a + _PADDED), s.ldi(a + _CONV)
    stride, part = 4 * padded, s.ldi(a + _PART)
    at = head * stride
    form, taps, norm = s.ldi(a + _FORM), s.ldi(a + _TAPS), s.ldi(a + _NORM)
    speed = s.ldf(s.ldi(a + _SPEED) + 4 * head)
    room = 1
    for p in range(s.ldi(s.ldi(a + _PCOUNT))):
        room = max(room, min(_BLOCK, s.ldi(s.ldi(a + _PIECES) + p * PIECE_BYTES + _PC_ROWS)))
    work = np.empty(room * padded * 9 + 2 * room + 64, np.float32)
    q = (work.ctypes.data + 63) & -64
    k, v, e, o = q + room * stride, q + 2 * room * stride, q + 3 * room * stride, q + 4 * room * stride
    coefficients = q + 5 * room * stride
    betas, qks = q + 9 * room * stride, q + 9 * room * stride + 4 * room
    root = np.float32(1.0) / np.float32(math.sqrt(np.float32(width)))
    for p in range(s.ldi(s.ldi(a + _PCOUNT))):
        piece = s.ldi(a + _PIECES) + p * PIECE_BYTES
        first, count = s.ldi(piece + _PC_FIRST), s.ldi(piece + _PC_ROWS)
        flat = s.ldi(s.ldi(piece + _PC_SLOT))
        state = flat + s.ldi(a + _STATE) + head * padded * stride
        window = flat + s.ldi(a + _WINDOW) + at
        raws = s.ldi(a + _RAWS)
        for block in range(0, count, _BLOCK):
            row, rows = first + block, min(_BLOCK, count - block)
            raw = s.ldi(a + _RAW) + row * raws + at
            for i in range(3):
                _convolve(
                    q + i * room * stride, stride, raw + i * part, raws, window + i * part, 3 * part, taps + i * part + at, s.ldi(a + _TAPSTRIDE),
                    rows, conv, stride,
                )  # fmt: skip
                _slide(raw + i * part, raws, window + i * part, 3 * part, rows, conv - 1, stride)
            for t in range(rows):
                decay = s.ldi(a + _DECAY) + (row + t) * s.ldi(a + _DECAYS) + at
                for i in range(0, stride, VB):
                    s.st(e + t * stride + i, s.ld(decay + i))
                _decay_row(e + t * stride, s.ldi(a + _DT) + at, speed, s.ldi(a + _BOUNDED), s.ldf(a + _BOUND), stride)
                beta = s.ldf(s.ldi(a + _BETA) + (row + t) * s.ldi(a + _BETAS) + 4 * head)
                s.stf(betas + 4 * t, np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-beta))))
                qt, kt = q + t * stride, k + t * stride
                fq = root / np.float32(math.sqrt(square_sum(qt, stride) + np.float32(1e-6)))
                fk = np.float32(1.0) / np.float32(math.sqrt(square_sum(kt, stride) + np.float32(1e-6)))
                dots = s.zero()
                for i in range(0, stride, VB):
                    u, w = s.mul(s.ld(qt + i), s.dup(fq)), s.mul(s.ld(kt + i), s.dup(fk))
                    dots = s.vfma(u, w, dots)
                    s.st(qt + i, u)
                    s.st(kt + i, w)
                s.stf(qks + 4 * t, s.total(dots))
                for i in range(width):
                    c = coefficients + (t * width + i) * 16
                    gate, kk, qq = s.ldf(e + t * stride + 4 * i), s.ldf(kt + 4 * i), s.ldf(qt + 4 * i)
                    s.stf(c, gate)
                    s.stf(c + 4, kk)
                    s.stf(c + 8, gate * kk)
                    s.stf(c + 12, gate * qq)
            for j in range(0, padded, _SLICE):
                recurrence(state + 4 * j, coefficients, v + 4 * j, o + 4 * j, betas, qks, rows, width, stride)
            for t in range(rows):
                ot = o + t * stride
                factor = s.dup(np.float32(1.0) / np.float32(math.sqrt(square_sum(ot, stride) / np.float32(width) + s.ldf(a + _EPS))))
                gate = s.ldi(a + _GATE) + (row + t) * s.ldi(a + _GATES) + at
                out = s.ldi(form + _NAT) + (row + t) * s.ldi(form + _NATS) + at
                for i in range(0, stride, VB):
                    s.st(out + i, s.mul(s.mul(s.mul(s.ld(ot + i), factor), s.ld(norm + i)), s.sigmoid(s.ld(gate + i))))
                shape_row(form, row + t, head * padded // 64, (head + 1) * padded // 64)
    s.keep(work)


@cfunc(KERNEL, **CFUNC)
def kda(a, chunk, chunks):
    """Chunk of the heads."""
    heads = s.ldi(a + _HEADS)
    for head in range(heads * chunk // chunks, heads * (chunk + 1) // chunks):
        _head(a, head)
