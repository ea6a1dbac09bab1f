"""Register tiles of the products with float32 activations, generated as LLVM IR.

A float tile computes y[m, n] = sum over k of x[m, k] * W[n, k] for M rows of x and N rows of W, with one vector accumulator for each pair
that runs through k in order and is folded once at the end. The sum's order depends on LANES alone, so every tile shape gives a row the
same bits.

Activations meet int4 weights in the order in which the nibbles lie: of each 64 columns first the even ones, then the odd ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.extending import intrinsic

from glm53serve.cpu.kernels.ir_build import BF16, F32_, FP8, GROUP_BYTES, INT4, INT8, call_case, fetch_next, function, i64, loop, row_addresses
from glm53serve.cpu.kernels.simd import F32, I8, I16, VF, VI, constant, fma, hsum, load, splat, store
from glm53serve.cpu.kernels.simd import call as call_intrinsic
from glm53serve.cpu.kernels.target import LANES

FLOAT_TILES = ((6, 4), (4, 4), (2, 8), (1, 8)) if LANES == 16 else ((6, 2), (4, 2), (2, 4), (1, 8))
"""(M, N) of the float tiles for M = 6, 4, 2, 1."""


def _weights(b: ir.IRBuilder, kind: int, row: Value, group: Value, j: int, scale: Value | None) -> Value:
    """LANES float32 weights: columns j * LANES .. of a group of 64, of the row of W at address `row`."""
    at = j * LANES
    if kind == F32_:
        return load(b, b.add(row, b.add(b.mul(group, i64(256)), i64(4 * at))), VF)
    if kind == BF16:
        half = load(b, b.add(row, b.add(b.mul(group, i64(128)), i64(2 * at))), ir.VectorType(I16, LANES))
        return b.bitcast(b.shl(b.zext(half, VI), constant(VI, 16)), VF)
    if kind == INT8:
        byte = load(b, b.add(row, b.add(b.mul(group, i64(64)), i64(at))), ir.VectorType(I8, LANES))
        return b.sitofp(b.sext(byte, VI), VF)
    assert scale is not None
    if kind == FP8:
        byte = load(b, b.add(row, b.add(b.mul(group, i64(64)), i64(at))), ir.VectorType(I8, LANES))
        return b.fmul(_e4m3(b, b.zext(byte, VI)), scale)
    byte = load(b, b.add(row, b.add(b.mul(group, i64(32)), i64(at % 32))), ir.VectorType(I8, LANES))
    if LANES == 16:
        # `scale` is a table of the 16 values; the lookup minds the lowest four bits only
        wide = b.zext(byte, VI)
        return call_intrinsic(b, "llvm.x86.avx512.permvar.sf.512", VF, [scale, wide if at < 32 else b.lshr(wide, constant(VI, 4))])
    nibble = b.and_(byte, constant(byte.type, 15)) if at < 32 else b.lshr(byte, constant(byte.type, 4))
    level = b.fsub(b.sitofp(b.zext(nibble, VI), VF), constant(VF, 8.0))
    return b.fmul(level, scale)


def _e4m3(b: ir.IRBuilder, byte: Value) -> Value:
    """e4m3 bytes in int32 lanes to float32: exponent and mantissa moved into place, subnormals (exponent 0) by 2x - 2^-6, NaN kept."""
    magnitude = b.and_(byte, constant(VI, 0x7F))
    normal = b.bitcast(b.add(b.shl(magnitude, constant(VI, 20)), constant(VI, 120 << 23)), VF)
    subnormal = b.fsub(b.fadd(normal, normal), constant(VF, 2.0**-6))
    value = b.select(b.icmp_signed("<", magnitude, constant(VI, 8)), subnormal, normal)
    value = b.select(b.icmp_signed("==", magnitude, constant(VI, 0x7F)), constant(VF, float("nan")), value)
    sign = b.shl(b.and_(byte, constant(VI, 0x80)), constant(VI, 24))
    return b.bitcast(b.or_(b.bitcast(value, VI), sign), VF)


def _float_tile(kind: int, rows: int, width: int) -> Callable[..., None]:
    def body(
        b: ir.IRBuilder, w: Value, ws: Value, s: Value, ss: Value, x: Value, xs: Value, first: Value, count: Value, old: Value, new: Value, y: Value, ys: Value
    ) -> None:
        w_rows, x_rows, s_rows = row_addresses(b, w, ws, width), row_addresses(b, x, xs, rows), row_addresses(b, s, ss, width)
        slots = [i64(4 * LANES * k) for k in range(rows * width)]

        def group_scales(group: Value) -> list[Value | None]:
            if kind == INT4:
                scales = [splat(b, load(b, b.add(row, b.mul(group, i64(4))), F32), LANES) for row in s_rows]
                levels = ir.Constant(VF, [float(level - 8) for level in range(LANES)])
                return [b.fmul(levels, scale) for scale in scales] if LANES == 16 else scales
            if kind == FP8:
                block = b.mul(b.lshr(group, i64(1)), i64(4))
                return [splat(b, load(b, b.add(s, block), F32), LANES)] * width
            return [None] * width

        def step(number: Value, sums: list[Value]) -> list[Value]:
            group = b.add(first, number)
            sums = list(sums)
            scales = group_scales(group)
            if rows <= 2:
                fetch_next(b, w, ws, width, group, GROUP_BYTES[kind])
            x_at = b.mul(group, i64(256))
            for j in range(64 // LANES):
                weights = [_weights(b, kind, w_rows[n], group, j, scales[n]) for n in range(width)]
                for m in range(rows):
                    lane = load(b, b.add(x_rows[m], b.add(x_at, i64(4 * j * LANES))), VF)
                    for n in range(width):
                        sums[m * width + n] = fma(b, lane, weights[n], sums[m * width + n])
            return sums

        def resumed() -> list[Value]:
            return [load(b, b.add(old, slot), VF) for slot in slots]

        zeros: list[Value] = [constant(VF, 0.0)] * (rows * width)
        sums = loop(b, count, _either(b, b.icmp_signed("!=", old, i64(0)), resumed, zeros), step)
        with b.if_else(b.icmp_signed("!=", new, i64(0))) as (unfinished, finished):
            with unfinished:
                for value, slot in zip(sums, slots, strict=True):
                    store(b, value, b.add(new, slot))
            with finished:
                for m in range(rows):
                    for n in range(width):
                        value = hsum(b, sums[m * width + n])
                        if kind == INT8:
                            value = b.fmul(value, load(b, s_rows[n], F32))
                        store(b, value, b.add(y, b.add(b.mul(ys, i64(m)), i64(4 * n))))

    return body


def _either(b: ir.IRBuilder, condition: Value, there: Callable[[], list[Value]], otherwise: list[Value]) -> list[Value]:
    """there() if the condition holds, else `otherwise`."""
    before, taken, after = b.block, b.append_basic_block("taken"), b.append_basic_block("joined")
    b.cbranch(condition, taken, after)
    b.position_at_end(taken)
    values = there()
    b.branch(after)
    b.position_at_end(after)
    joined = []
    for value, other in zip(values, otherwise, strict=True):
        phi = b.phi(value.type)
        phi.add_incoming(value, taken)
        phi.add_incoming(other, before)
        joined.append(phi)
    return joined


def _float_dispatch(b: ir.IRBuilder, kind: Value, rows: Value, wide: Value, args: list[Value]) -> None:
    """Call the tile of that kind, M = rows, N = its full width when `wide` is 1, else 1 (and M = 1)."""
    cases = {
        k * 16 + m * 2 + wide_case: function(b.module, f"tile_{k}_{m}_{wide_case}", len(args), _float_tile(k, m, n))
        for k in range(5)
        for m, n, wide_case in (*((m, n, 1) for m, n in FLOAT_TILES), (1, 1, 0))
    }
    call_case(b, b.add(b.mul(kind, i64(16)), b.add(b.mul(rows, i64(2)), wide)), cases, args)


@intrinsic
def float_tile(typing, kind, rows, wide, w, ws, s, ss, x, xs, first, count, old, new, y, ys):
    """A float tile: kind, M in (6, 4, 2, 1), 1 for full width or 0 for one row of W (M = 1), then W, its row stride, scales, their row
    stride, x, its row stride, first group of 64 columns and their number, where unfinished sums lie (0: start from nothing), where to
    leave them (0: finish), y, its row stride; strides in bytes. An FP8 tile must lie within one block of 128 rows, its scale address is
    that block's row."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _float_dispatch(b, args[0], args[1], args[2], list(args[3:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 15), codegen
