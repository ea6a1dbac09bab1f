"""Register tiles of the products of int4 weights and 16-bit activations, generated as LLVM IR.

A tile (64 columns a scale) sums each group of 64 products exactly in int32 and then the groups in order in float32: every tile shape and
every instruction set gives the same bits. An activation is 256 * high + low, two int8 that meet the same unpacked weights one after the
other, so byte products do for 16 bits; in memory 64 high bytes come before their 64 low ones.

Activations meet the weights in the order in which the nibbles lie: of each 64 columns first the even ones, then the odd ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.extending import intrinsic

from glm53serve.cpu.kernels.ir_build import V8I, V16F, V16I, V32B, V64B, call_case, fetch_next, function, i64, loop, row_addresses
from glm53serve.cpu.kernels.simd import F32, I8, I16, I32, constant, fma, load, shuffle, splat, store
from glm53serve.cpu.kernels.simd import call as call_intrinsic
from glm53serve.cpu.kernels.target import HAS_AVX2, HAS_VNNI, LANES

PANEL = 16
"""Rows of W packed side by side for products with many rows."""
PANEL_ROWS = 8 if LANES == 16 else 4
"""Rows of x in the widest integer tile."""


def _dot4(b: ir.IRBuilder, acc: Value, unsigned: Value, signed: Value) -> Value:
    """acc + sums of four byte products, lane by lane: acc of 8 or 16 int32, the bytes four times as many. Nibbles times int8."""
    lanes = acc.type.count
    if HAS_VNNI:
        words = ir.VectorType(I32, lanes)
        return call_intrinsic(b, f"llvm.x86.avx512.vpdpbusd.{lanes * 32}", words, [acc, b.bitcast(unsigned, words), b.bitcast(signed, words)])
    if lanes == 16:
        low, high = list(range(32)), list(range(32, 64))
        halves = [
            _dot4(b, shuffle(b, acc, None, a), shuffle(b, unsigned, None, c), shuffle(b, signed, None, c))
            for a, c in ((list(range(8)), low), (list(range(8, 16)), high))
        ]
        return shuffle(b, halves[0], halves[1], list(range(16)))
    return b.add(acc, _pairs(b, _products(b, unsigned, signed)))


def _products(b: ir.IRBuilder, unsigned: Value, signed: Value) -> Value:
    """32 nibble bytes times 32 int8, neighbours added: 16 int16."""
    v16 = ir.VectorType(I16, 16)
    if HAS_AVX2:
        return call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", v16, [unsigned, signed])
    v32 = ir.VectorType(I16, 32)
    product = b.mul(b.zext(unsigned, v32), b.sext(signed, v32))
    return b.add(shuffle(b, product, None, list(range(0, 32, 2))), shuffle(b, product, None, list(range(1, 32, 2))))


def _pairs(b: ir.IRBuilder, words: Value) -> Value:
    """16 int16, neighbours added: 8 int32."""
    if HAS_AVX2:
        return call_intrinsic(b, "llvm.x86.avx2.pmadd.wd", V8I, [words, constant(words.type, 1)])
    wide = b.sext(words, V16I)
    return b.add(shuffle(b, wide, None, list(range(0, 16, 2))), shuffle(b, wide, None, list(range(1, 16, 2))))


def _nibbles(b: ir.IRBuilder, address: Value) -> tuple[Value, Value]:
    packed = load(b, address, V32B)
    return b.and_(packed, constant(V32B, 15)), b.lshr(packed, constant(V32B, 4))


def _fold_eight(b: ir.IRBuilder, v: list[Value]) -> Value:
    """Lane sums of eight vectors of 8 int32 as one vector."""
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    v = [b.add(shuffle(b, p, q, low), shuffle(b, p, q, high)) for p, q in zip(v[0::2], v[1::2], strict=True)]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    v = [b.add(shuffle(b, p, q, low), shuffle(b, p, q, high)) for p, q in zip(v[0::2], v[1::2], strict=True)]
    return b.add(shuffle(b, v[0], v[1], [0, 1, 2, 3, 8, 9, 10, 11]), shuffle(b, v[0], v[1], [4, 5, 6, 7, 12, 13, 14, 15]))


def _add_group(b: ir.IRBuilder, total: Value, dots: Value, offset: Value, w_scale: Value, x_scale: Value) -> Value:
    """total + (dots - offset) * (w_scale * x_scale): one group's share. The levels were 8 too high, offset = 8 * sum of the activations."""
    lanes = dots.type.count
    exact = b.sitofp(b.sub(dots, splat(b, offset, lanes)), total.type)
    return fma(b, exact, b.fmul(w_scale, splat(b, x_scale, lanes)), total)


def _rows_tile(rows: int, width: int) -> Callable[..., None]:
    """M rows of x times `width` (8 or 1) rows of W where they lie."""

    def body(
        b: ir.IRBuilder, w: Value, ws: Value, s: Value, ss: Value, x: Value, xs: Value, q: Value, o: Value, qs: Value, groups: Value, y: Value, ys: Value
    ) -> None:
        w_rows, s_rows, x_rows = row_addresses(b, w, ws, width), row_addresses(b, s, ss, width), row_addresses(b, x, xs, rows)
        q_rows = [b.mul(qs, i64(m)) for m in range(rows)]

        def step(group: Value, totals: list[Value]) -> list[Value]:
            at = b.mul(group, i64(4))
            if width > 1:
                fetch_next(b, w, ws, width, group, 32)
                fetch_next(b, s, ss, width, group, 4)
            halves = [_nibbles(b, b.add(row, b.mul(group, i64(32)))) for row in w_rows]
            scale = ir.Constant(ir.VectorType(F32, width), ir.Undefined)
            for n, row in enumerate(s_rows):
                scale = b.insert_element(scale, load(b, b.add(row, at), F32), ir.Constant(I32, n))
            result = []
            for m in range(rows):
                x_at = b.add(x_rows[m], b.mul(group, i64(128)))
                x_parts = [load(b, b.add(x_at, i64(32 * part)), V32B) for part in range(4)]
                dots = []
                for low, high in halves:
                    upper = _dot4(b, _dot4(b, constant(V8I, 0), low, x_parts[0]), high, x_parts[1])
                    upper = b.shl(upper, constant(V8I, 8))
                    dots.append(_dot4(b, _dot4(b, upper, low, x_parts[2]), high, x_parts[3]))
                folded = _fold_eight(b, dots) if width == 8 else _fold_one(b, dots[0])
                offset = load(b, b.add(b.add(o, q_rows[m]), at), I32)
                x_scale = load(b, b.add(b.add(q, q_rows[m]), at), F32)
                result.append(_add_group(b, totals[m], folded, offset, scale, x_scale))
            return result

        totals = loop(b, groups, [constant(ir.VectorType(F32, width), 0.0)] * rows, step)
        for m in range(rows):
            store(b, totals[m], b.add(y, b.mul(ys, i64(m))))

    return body


def _fold_one(b: ir.IRBuilder, v: Value) -> Value:
    width = 8
    while width > 1:
        width //= 2
        v = b.add(shuffle(b, v, None, list(range(width))), shuffle(b, v, None, list(range(width, 2 * width))))
    return v


ROWS_TILES = (4, 2, 1)


@intrinsic
def rows_tile(typing, rows, wide, w, ws, s, ss, x, xs, q, o, qs, groups, y, ys):
    """An integer tile of rows where they lie: M in (4, 2, 1), 1 for eight rows of W or 0 for one (M = 1), then W, its row stride, scales, their row
    stride, x, its row stride, scales of x, offsets of x, their row stride, groups, y, its row stride; strides in bytes."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        shapes = (*((m, 8) for m in ROWS_TILES), (1, 1))
        cases = {m * 2 + (width > 1): function(b.module, f"rows_{m}_{width}", 12, _rows_tile(m, width)) for m, width in shapes}
        call_case(b, b.add(b.mul(args[0], i64(2)), args[1]), cases, list(args[2:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), codegen


def _transpose(b: ir.IRBuilder, rows: list[Value]) -> list[Value]:
    """16 vectors of 16 lanes transposed: swap ever larger blocks."""
    size = 1
    while size < 16:
        new = list(rows)
        for i in range(16):
            if i & size:
                continue
            p, q = rows[i], rows[i + size]
            low = [j if not j & size else 16 + (j - size) for j in range(16)]
            high = [j + size if not j & size else 16 + j for j in range(16)]
            new[i], new[i + size] = shuffle(b, p, q, low), shuffle(b, p, q, high)
        rows = new
        size *= 2
    return rows


def _pack_panel(b: ir.IRBuilder, w: Value, ws: Value, s: Value, ss: Value, groups: Value, out: Value, scales: Value) -> None:
    """16 rows of W to nibble bytes [groups, 16 fours of columns, 16 rows, 4] and scales [groups, 16]."""
    w_rows = row_addresses(b, w, ws, PANEL)

    def step(group: Value, nothing: list[Value]) -> list[Value]:
        words = []
        for row in w_rows:
            low, high = _nibbles(b, b.add(row, b.mul(group, i64(32))))
            words.append(b.bitcast(shuffle(b, low, high, list(range(64))), V16I))
        at = b.add(out, b.mul(group, i64(1024)))
        for k, value in enumerate(_transpose(b, words)):
            store(b, value, b.add(at, i64(64 * k)))
        for n in range(PANEL):
            scale = load(b, b.add(b.add(s, b.mul(ss, i64(n))), b.mul(group, i64(4))), F32)
            store(b, scale, b.add(scales, b.add(b.mul(group, i64(64)), i64(4 * n))))
        return []

    loop(b, groups, [], step)


@intrinsic
def pack_panel(typing, w, ws, s, ss, groups, out, scales):
    """Unpack 16 rows of an int4 W for `panel_tile`: bytes [groups, 16, 16, 4] at out, float32 scales [groups, 16]."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.call(function(b.module, "pack_panel", 7, _pack_panel), list(args))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


def _panel_tile(rows: int) -> Callable[..., None]:
    """M rows of x times a packed panel."""

    def body(b: ir.IRBuilder, p: Value, s: Value, x: Value, xs: Value, q: Value, o: Value, qs: Value, groups: Value, y: Value, ys: Value) -> None:
        x_rows = row_addresses(b, x, xs, rows)
        q_rows = [b.mul(qs, i64(m)) for m in range(rows)]

        def step(group: Value, totals: list[Value]) -> list[Value]:
            at = b.mul(group, i64(4))
            x_at = [b.add(row, b.mul(group, i64(128))) for row in x_rows]
            p_at = b.add(p, b.mul(group, i64(1024)))
            if HAS_AVX2 and not HAS_VNNI:
                dots = _panel_dots_16(b, p_at, x_at)
            else:
                upper, lower = [constant(V16I, 0)] * rows, [constant(V16I, 0)] * rows
                for k in range(16):
                    weights = load(b, b.add(p_at, i64(64 * k)), V64B)
                    for m in range(rows):
                        upper[m] = _dot4(b, upper[m], weights, _four(b, x_at[m], 4 * k, 16))
                        lower[m] = _dot4(b, lower[m], weights, _four(b, x_at[m], 64 + 4 * k, 16))
                dots = [b.add(b.shl(u, constant(V16I, 8)), v) for u, v in zip(upper, lower, strict=True)]
            scale = load(b, b.add(s, b.mul(group, i64(64))), V16F)
            result = []
            for m in range(rows):
                offset = load(b, b.add(b.add(o, q_rows[m]), at), I32)
                x_scale = load(b, b.add(b.add(q, q_rows[m]), at), F32)
                result.append(_add_group(b, totals[m], dots[m], offset, scale, x_scale))
            return result

        totals = loop(b, groups, [constant(V16F, 0.0)] * rows, step)
        for m in range(rows):
            store(b, totals[m], b.add(y, b.mul(ys, i64(m))))

    return body


def _four(b: ir.IRBuilder, x: Value, at: int, lanes: int) -> Value:
    """Four activation bytes repeated for every lane."""
    return b.bitcast(splat(b, load(b, b.add(x, i64(at)), I32), lanes), ir.VectorType(I8, 4 * lanes))


def _panel_dots_16(b: ir.IRBuilder, panel: Value, x_at: list[Value]) -> list[Value]:
    """The group's dots with int16 sums of eight products each (at most 8 * 2 * 15 * 128 < 2^15) before they widen."""
    v16 = ir.VectorType(I16, 16)
    rows = len(x_at)
    halves: list[list[Value]] = []
    for half in range(2):
        dots = [constant(V8I, 0)] * rows
        for plane in (0, 64):
            dots = [b.shl(dot, constant(V8I, 8)) for dot in dots]
            for first in (0, 8):
                sums = [constant(v16, 0)] * rows
                for k in range(first, first + 8):
                    weights = load(b, b.add(panel, i64(64 * k + 32 * half)), V32B)
                    for m in range(rows):
                        sums[m] = b.add(sums[m], _products(b, weights, _four(b, x_at[m], plane + 4 * k, 8)))
                dots = [b.add(dot, _pairs(b, words)) for dot, words in zip(dots, sums, strict=True)]
        halves.append(dots)
    return [shuffle(b, low, high, list(range(16))) for low, high in zip(*halves, strict=True)]


PANEL_TILES = (8, 4, 2, 1) if PANEL_ROWS == 8 else (4, 2, 1)


@intrinsic
def panel_tile(typing, rows, p, s, x, xs, q, o, qs, groups, y, ys):
    """An integer tile of a packed panel: M in PANEL_TILES, panel, its scales, x, its row stride, scales of x, offsets of x, their row
    stride, groups, y, its row stride; strides in bytes."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        call_case(b, args[0], {m: function(b.module, f"panel_{m}", 10, _panel_tile(m)) for m in PANEL_TILES}, list(args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen
