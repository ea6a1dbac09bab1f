"""Kernels of a DSA layer between its projections: its rows, pool keys, the choice of pools, attention over latents (model spec 5)."""

from __future__ import annotations

import math

import numpy as np
from numba import cfunc, njit

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.fields import offsets
from glm53serve.cpu.kernels.ir_attend import mix_tile, scores_tile
from glm53serve.cpu.kernels.kda import PIECE_BYTES
from glm53serve.cpu.kernels.rows import FORM_FIELDS, rms_row, shape_row
from glm53serve.cpu.kernels.target import CFUNC, JIT, LANES, VECTOR_BYTES
from glm53serve.cpu.kernels.team import KERNEL

VB = VECTOR_BYTES
_NAT, _NATS = offsets(FORM_FIELDS)[:2]
_GROUPS = 8 * FORM_FIELDS.index("groups")
_LOWEST = np.float32(-np.inf)

ROW_FIELDS = ("position", "slot")
"""Of each row of the group: its position, and its slot's table: the flat array, then latents and pool keys of each DSA layer."""
_ROW_BYTES = 8 * len(ROW_FIELDS)

ROWS_FIELDS = (
    "count", "rows", "latents", "projected", "stride", "query", "query_width", "query_norm", "latent", "latent_size", "latent_width",
    "latent_norm", "key", "key_size", "key_width", "key_weight", "key_bias", "eps", "form",
)  # fmt: skip
"""projected: q latent at `query`, kv latent at `latent`, index key at `key` bytes of each row (key_size 0: shared layer). latents: offset of
the layer's latents in a slot's table. The normalised q latent goes to form, the latent to the slot, the index key back in place."""
(_O_COUNT, _O_ROWS, _O_LATENTS, _O_X, _O_XS, _O_Q, _O_QW, _O_QN, _O_L, _O_LSIZE, _O_LW, _O_LN, _O_K, _O_KSIZE, _O_KW, _O_KWEIGHT, _O_KBIAS,
 _O_EPS, _O_FORM) = offsets(ROWS_FIELDS)  # fmt: skip


@njit("void(int64, int64, int64, int64, int64)", **JIT)
def _layer_norm_row(x, weight, bias, size, width):
    """Layer norm in place; padding is zero in x, weight and bias and stays so."""
    total = s.zero()
    for i in range(0, size, VB):
        total = s.add(total, s.ld(x + i))
    mean = s.total(total) / np.float32(width)
    square = np.float32(0.0)
    total, middle = s.zero(), s.dup(mean)
    for i in range(0, size, VB):
        v = s.sub(s.ld(x + i), middle)
        total = s.vfma(v, v, total)
    square = s.total(total) - np.float32(size // 4 - width) * mean * mean
    factor = s.dup(np.float32(1.0) / np.float32(math.sqrt(square / np.float32(width) + np.float32(1e-6))))
    for i in range(0, size, VB):
        s.st(x + i, s.vfma(s.mul(s.sub(s.ld(x + i), middle), factor), s.ld(weight + i), s.ld(bias + i)))


@cfunc(KERNEL, **CFUNC)
def dsa_rows(a, chunk, chunks):
    """Norms of what was projected; the latent row goes to its slot."""
    rows, form = s.ldi(s.ldi(a + _O_COUNT)), s.ldi(a + _O_FORM)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        x = s.ldi(a + _O_X) + row * s.ldi(a + _O_XS)
        info = s.ldi(a + _O_ROWS) + row * _ROW_BYTES
        position, slot = s.ldi(info), s.ldi(info + 8)
        out = s.ldi(form + _NAT) + row * s.ldi(form + _NATS)
        eps = s.ldf(a + _O_EPS)
        rms_row(x + s.ldi(a + _O_Q), s.ldi(a + _O_QN), out, 256 * s.ldi(form + _GROUPS), s.ldi(a + _O_QW), eps)
        shape_row(form, row, 0, s.ldi(form + _GROUPS))
        size = s.ldi(a + _O_LSIZE)
        latent = s.ldi(slot + s.ldi(a + _O_LATENTS)) + position * size
        rms_row(x + s.ldi(a + _O_L), s.ldi(a + _O_LN), latent, size, s.ldi(a + _O_LW), eps)
        if s.ldi(a + _O_KSIZE) != 0:
            _layer_norm_row(x + s.ldi(a + _O_K), s.ldi(a + _O_KWEIGHT), s.ldi(a + _O_KBIAS), s.ldi(a + _O_KSIZE), s.ldi(a + _O_KW))


POOL_FIELDS = ("pieces", "piece_count", "rows", "keys", "x", "stride", "gate", "kpool", "size", "ape", "raw")
"""x: index keys of the group's rows, gates `gate` bytes after them; keys: offset of the pool keys in a slot's table; raw: offset of
[2, kpool - 1, di] in the slot's flat array."""
_L_PIECES, _L_PCOUNT, _L_ROWS, _L_KEYS, _L_X, _L_XS, _L_GATE, _L_KP, _L_SIZE, _L_APE, _L_RAW = offsets(POOL_FIELDS)


@cfunc(KERNEL, **CFUNC)
def pools(a, chunk, chunks):
    """Keys of the pools that the rows complete; raw rows of the incomplete ones stay with their slots (one chunk only)."""
    kp, size, gate, xs = s.ldi(a + _L_KP), s.ldi(a + _L_SIZE), s.ldi(a + _L_GATE), s.ldi(a + _L_XS)
    ape = s.ldi(a + _L_APE)
    sources = np.empty(2 * kp, np.int64)
    for p in range(s.ldi(s.ldi(a + _L_PCOUNT))):
        piece = s.ldi(a + _L_PIECES) + p * PIECE_BYTES
        first, count, slot = s.ldi(piece), s.ldi(piece + 8), s.ldi(piece + 16)
        start = s.ldi(s.ldi(a + _L_ROWS) + first * _ROW_BYTES)
        raw = s.ldi(slot) + s.ldi(a + _L_RAW)
        keys = s.ldi(slot + s.ldi(a + _L_KEYS))
        x = s.ldi(a + _L_X) + first * xs
        end = start + count
        for pool in range(start // kp, end // kp):
            for j in range(kp):
                back = pool * kp + j - start
                if back >= 0:
                    sources[j], sources[kp + j] = x + back * xs, x + back * xs + gate
                else:
                    sources[j], sources[kp + j] = raw + j * size, raw + (kp - 1 + j) * size
            for i in range(0, size, VB):
                top = s.add(s.ld(sources[kp] + i), s.ld(ape + i))
                for j in range(1, kp):
                    top = s.vmax(top, s.add(s.ld(sources[kp + j] + i), s.ld(ape + j * size + i)))
                total, key = s.zero(), s.zero()
                for j in range(kp):
                    e = s.vexp(s.sub(s.add(s.ld(sources[kp + j] + i), s.ld(ape + j * size + i)), top))
                    total = s.add(total, e)
                    key = s.vfma(e, s.ld(sources[j] + i), key)
                s.st(keys + pool * size + i, s.div(key, total))
        for t in range(max(start, end // kp * kp), end):
            j = t % kp
            source = x + (t - start) * xs
            for i in range(0, size, VB):
                s.st(raw + j * size + i, s.ld(source + i))
                s.st(raw + (kp - 1 + j) * size + i, s.ld(source + gate + i))


SCORE_FIELDS = ("count", "rows", "keys", "query", "query_stride", "weights", "weight_stride", "heads", "size", "kpool", "budget", "scores", "room")
"""scores: address of the address of float32 [FEW_ROWS, room], room: address of its pools a row."""
_W_COUNT, _W_ROWS, _W_KEYS, _W_Q, _W_QS, _W_W, _W_WS, _W_HEADS, _W_SIZE, _W_KP, _W_BUDGET, _W_SCORES, _W_ROOM = offsets(SCORE_FIELDS)
FEW_ROWS = 8
"""Up to so many rows are scored by all threads together, pool by pool; more are shared out by row."""

SELECT_FIELDS = (*SCORE_FIELDS, "at", "chosen", "counts")
"""chosen int32 [rows, budget] ascending, counts int64 [rows]: pools chosen, or -1 for all."""
_T_AT, _T_CHOSEN, _T_COUNTS = offsets(SELECT_FIELDS)[-3:]


@njit("void(int64, int64, int64, int64, int64, int64, int64)", **JIT)
def index_scores(query, heads, size, weights, keys, count, out):
    """Scores of pools 0..count-1 for one query, roots left out: they change no order."""
    rows = np.empty(4, np.int64)
    dots = np.empty(16, np.float32)
    table, d = rows.ctypes.data, dots.ctypes.data
    for p in range(0, count, 4):
        for j in range(4):
            rows[j] = keys + min(p + j, count - 1) * size
        for j in range(min(4, count - p)):
            s.stf(out + 4 * (p + j), np.float32(0.0))
        for h in range(0, heads, 4):
            tile = min(4, heads - h)
            if tile == 4:
                scores_tile(4, query + h * size, size, table, size // 256, d, 16)
            else:
                for i in range(tile):
                    scores_tile(1, query + (h + i) * size, size, table, size // 256, d + 16 * i, 16)
            for j in range(min(4, count - p)):
                total = s.ldf(out + 4 * (p + j))
                for i in range(tile):
                    dot = dots[4 * i + j]
                    if dot > np.float32(0.0):
                        total = s.sfma(s.ldf(weights + 4 * (h + i)), dot, total)
                s.stf(out + 4 * (p + j), total)
    s.keep(rows)
    s.keep(dots)


@njit("int64(float32)", **JIT)
def _rank(value):
    """A whole number that orders as the float32 does, -0 as 0."""
    bits = np.int64(s.bits(value + np.float32(0.0)))
    if bits & 0x80000000:
        return bits ^ 0xFFFFFFFF
    return bits | 0x80000000


@njit("void(int64, int64, int64, int64)", **JIT)
def best_pools(scores, count, budget, chosen):
    """Indices int32, ascending, of the `budget` largest of count >= budget scores; of equal ones the lower index first.

    A radix descent finds the cut, two bytes at a time, without sorting.
    """
    histogram = np.empty(65536, np.int32)
    prefix, left = np.int64(0), budget
    for shift in (16, 0):
        histogram[:] = 0
        for i in range(count):
            rank = _rank(s.ldf(scores + 4 * i))
            if shift == 16 or (rank >> 16) == prefix:
                histogram[(rank >> shift) & 0xFFFF] += 1
        bucket = 65535
        while histogram[bucket] < left:
            left -= histogram[bucket]
            bucket -= 1
        prefix = (prefix << 16) | bucket
    taken = 0
    for i in range(count):
        rank = _rank(s.ldf(scores + 4 * i))
        if rank > prefix:
            s.stw(chosen + 4 * taken, i)
            taken += 1
        elif rank == prefix and left > 0:
            s.stw(chosen + 4 * taken, i)
            taken += 1
            left -= 1


@cfunc(KERNEL, **CFUNC)
def score(a, chunk, chunks):
    """Chunk of the pools of every row, when there are few rows; where all pools fit nothing is scored."""
    rows, kp, size = s.ldi(s.ldi(a + _W_COUNT)), s.ldi(a + _W_KP), s.ldi(a + _W_SIZE)
    if rows > FEW_ROWS:
        return
    for row in range(rows):
        info = s.ldi(a + _W_ROWS) + row * _ROW_BYTES
        complete = (s.ldi(info) + 1) // kp
        first, last = complete * chunk // chunks, complete * (chunk + 1) // chunks
        if complete <= s.ldi(a + _W_BUDGET) or first == last:
            continue
        query, weights = s.ldi(a + _W_Q) + row * s.ldi(a + _W_QS), s.ldi(a + _W_W) + row * s.ldi(a + _W_WS)
        keys = s.ldi(s.ldi(info + 8) + s.ldi(a + _W_KEYS)) + first * size
        out = s.ldi(s.ldi(a + _W_SCORES)) + 4 * (row * s.ldi(s.ldi(a + _W_ROOM)) + first)
        index_scores(query, s.ldi(a + _W_HEADS), size, weights, keys, last - first, out)


@cfunc(KERNEL, **CFUNC)
def select(a, chunk, chunks):
    """Pools of each row."""
    rows, first = s.ldi(s.ldi(a + _W_COUNT)), s.ldi(s.ldi(a + _T_AT))
    kp, budget, size = s.ldi(a + _W_KP), s.ldi(a + _W_BUDGET), s.ldi(a + _W_SIZE)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        info = s.ldi(a + _W_ROWS) + row * _ROW_BYTES
        complete = (s.ldi(info) + 1) // kp
        if complete <= budget:
            s.sti(s.ldi(a + _T_COUNTS) + 8 * (first + row), -1)
            continue
        own = np.empty(complete, np.float32)
        scores = own.ctypes.data
        if rows <= FEW_ROWS:
            scores = s.ldi(s.ldi(a + _W_SCORES)) + 4 * row * s.ldi(s.ldi(a + _W_ROOM))
        else:
            query, weights = s.ldi(a + _W_Q) + row * s.ldi(a + _W_QS), s.ldi(a + _W_W) + row * s.ldi(a + _W_WS)
            index_scores(query, s.ldi(a + _W_HEADS), size, weights, s.ldi(s.ldi(info + 8) + s.ldi(a + _W_KEYS)), complete, scores)
        best_pools(scores, complete, budget, s.ldi(a + _T_CHOSEN) + (first + row) * 4 * budget)
        s.sti(s.ldi(a + _T_COUNTS) + 8 * (first + row), budget)
        s.keep(own)


ATTEND_FIELDS = ("count", "at", "rows", "latents", "query", "query_stride", "heads", "size", "scale", "kpool", "budget", "chosen", "counts", "form")
"""query: absorbed queries [rows, heads, r]; form: the mixed latents [rows, heads, r]."""
_A_COUNT, _A_AT, _A_ROWS, _A_LATENTS, _A_Q, _A_QS, _A_HEADS, _A_SIZE, _A_SCALE, _A_KP, _A_BUDGET, _A_CHOSEN, _A_COUNTS, _A_FORM = offsets(ATTEND_FIELDS)
HEAD_UNIT = 4
_UNITS = 4


@njit("int64(int64, int64, int64, int64, int64, int64, int64)", **JIT)
def _selected(table, latents, size, position, kp, pools_chosen, chosen):
    """Addresses of the latent rows attended, ascending, at table; how many."""
    if pools_chosen < 0:
        for t in range(position + 1):
            s.sti(table + 8 * t, latents + t * size)
        return position + 1
    n = 0
    for i in range(pools_chosen):
        token = s.ldw(chosen + 4 * i) * kp
        for j in range(kp):
            s.sti(table + 8 * n, latents + (token + j) * size)
            n += 1
    for t in range((position + 1) // kp * kp, position + 1):
        s.sti(table + 8 * n, latents + t * size)
        n += 1
    return n


@njit("void(int64, int64, int64, int64, int64, int64, float32, int64, int64)", **JIT)
def attend_heads(query, table, tokens, heads, size, scores, scale, out, stride):
    """A few heads of one row over the latents in table: absorbed queries [heads, r] -> mixed latents [heads, r]; scores: scratch of `stride`
    bytes a head, room for four tokens more than there are."""
    groups = size // 256
    for t in range(0, tokens, 4):
        h = 0
        while h + 4 <= heads:
            scores_tile(4, query + h * size, size, table + 8 * t, groups, scores + h * stride + 4 * t, stride)
            h += 4
        while h < heads:
            scores_tile(1, query + h * size, size, table + 8 * t, groups, scores + h * stride + 4 * t, stride)
            h += 1
    for h in range(heads):
        row = scores + h * stride
        for t in range(tokens, (tokens + LANES - 1) // LANES * LANES):
            s.stf(row + 4 * t, _LOWEST)
        top = s.dup(_LOWEST)
        for i in range(0, 4 * tokens, VB):
            top = s.vmax(s.ld(row + i), top)
        peak, factor, total = s.dup(s.largest(top)), s.dup(scale), s.zero()
        for i in range(0, 4 * tokens, VB):
            e = s.vexp(s.mul(s.sub(s.ld(row + i), peak), factor))
            total = s.add(total, e)
            s.st(row + i, e)
        share = s.dup(np.float32(1.0) / s.total(total))
        for i in range(0, 4 * tokens, VB):
            s.st(row + i, s.mul(s.ld(row + i), share))
    h = 0
    while h + 4 <= heads:
        mix_tile(4, scores + h * stride, stride, table, tokens, groups, out + h * size, size)
        h += 4
    while h < heads:
        mix_tile(1, scores + h * stride, stride, table, tokens, groups, out + h * size, size)
        h += 1


@cfunc(KERNEL, **CFUNC)
def attend(a, chunk, chunks):
    """Chunk of the pairs of row and four heads."""
    rows, first = s.ldi(s.ldi(a + _A_COUNT)), s.ldi(s.ldi(a + _A_AT))
    heads, size, kp, budget, form = s.ldi(a + _A_HEADS), s.ldi(a + _A_SIZE), s.ldi(a + _A_KP), s.ldi(a + _A_BUDGET), s.ldi(a + _A_FORM)
    units = (heads + HEAD_UNIT - 1) // HEAD_UNIT
    unit, end = rows * units * chunk // chunks, rows * units * (chunk + 1) // chunks
    while unit < end:
        row = unit // units
        info = s.ldi(a + _A_ROWS) + row * _ROW_BYTES
        position = s.ldi(info)
        latents = s.ldi(s.ldi(info + 8) + s.ldi(a + _A_LATENTS))
        count = s.ldi(s.ldi(a + _A_COUNTS) + 8 * (first + row))
        room = position + 1
        if count >= 0:
            room = (budget + 1) * kp
        addresses = np.empty(room + 4, np.int64)
        table = addresses.ctypes.data
        tokens = _selected(table, latents, size, position, kp, count, s.ldi(a + _A_CHOSEN) + (first + row) * 4 * budget)
        for i in range(tokens, tokens + 4):
            addresses[i] = addresses[tokens - 1]
        stride = 4 * ((tokens + 2 * LANES) // LANES * LANES)
        work = np.empty(_UNITS * HEAD_UNIT * stride // 4 + LANES, np.float32)
        scores = (work.ctypes.data + 63) & -64
        last = min(end, (row + 1) * units)
        while unit < last:
            some = min(_UNITS, last - unit)
            head = (unit - row * units) * HEAD_UNIT
            number = min(heads, head + some * HEAD_UNIT) - head
            query = s.ldi(a + _A_Q) + row * s.ldi(a + _A_QS) + head * size
            out = s.ldi(form + _NAT) + row * s.ldi(form + _NATS) + head * size
            attend_heads(query, table, tokens, number, size, scores, s.ldf(a + _A_SCALE), out, stride)
            shape_row(form, row, head * (size // 256), (head + number) * (size // 256))
            unit += some
        s.keep(addresses)
        s.keep(work)
