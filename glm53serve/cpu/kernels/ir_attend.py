"""Register tiles of attention over scattered rows, generated as LLVM IR. Sums run in a fixed order whatever the tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.extending import intrinsic

from glm53serve.cpu.kernels.ir_build import function, i64, loop, row_addresses
from glm53serve.cpu.kernels.simd import F32, I64, VF, constant, fma, hsum, load, splat, store
from glm53serve.cpu.kernels.target import LANES, VECTOR_BYTES


def _scores(heads: int) -> Callable[..., None]:
    def body(b: ir.IRBuilder, q: Value, qs: Value, table: Value, groups: Value, out: Value, os: Value) -> None:
        rows = [load(b, b.add(table, i64(8 * j)), I64) for j in range(4)]
        queries = row_addresses(b, q, qs, heads)

        def step(group: Value, sums: list[Value]) -> list[Value]:
            sums = list(sums)
            for j in range(64 // LANES):
                at = b.add(b.mul(group, i64(256)), i64(j * VECTOR_BYTES))
                tokens = [load(b, b.add(row, at), VF) for row in rows]
                for h in range(heads):
                    lane = load(b, b.add(queries[h], at), VF)
                    for n in range(4):
                        sums[4 * h + n] = fma(b, lane, tokens[n], sums[4 * h + n])
            return sums

        sums = loop(b, groups, [constant(VF, 0.0)] * (4 * heads), step)
        for h in range(heads):
            for n in range(4):
                store(b, hsum(b, sums[4 * h + n]), b.add(out, b.add(b.mul(os, i64(h)), i64(4 * n))))

    return body


def _mix(heads: int) -> Callable[..., None]:
    """64 columns at a time, tokens in order."""

    def body(b: ir.IRBuilder, a: Value, stride: Value, table: Value, tokens: Value, groups: Value, out: Value, os: Value) -> None:
        vectors = 64 // LANES
        part = min(4, vectors)

        def column(block: Value, nothing: list[Value]) -> list[Value]:
            at = b.mul(block, i64(part * VECTOR_BYTES))

            def step(t: Value, sums: list[Value]) -> list[Value]:
                sums = list(sums)
                row = b.add(load(b, b.add(table, b.mul(t, i64(8))), I64), at)
                values = [load(b, b.add(row, i64(v * VECTOR_BYTES)), VF) for v in range(part)]
                for h in range(heads):
                    weight = splat(b, load(b, b.add(b.add(a, b.mul(stride, i64(h))), b.mul(t, i64(4))), F32), LANES)
                    for v in range(part):
                        sums[h * part + v] = fma(b, weight, values[v], sums[h * part + v])
                return sums

            sums = loop(b, tokens, [constant(VF, 0.0)] * (heads * part), step)
            for h in range(heads):
                for v in range(part):
                    store(b, sums[h * part + v], b.add(b.add(out, b.mul(os, i64(h))), b.add(at, i64(v * VECTOR_BYTES))))
            return []

        loop(b, b.mul(groups, i64(vectors // part)), [], column)

    return body


def _by_heads(b: ir.IRBuilder, name: str, heads: Value, args: list[Value], make: Callable[[int], Callable[..., None]]) -> None:
    end = b.append_basic_block("done")
    switch = b.switch(heads, end)
    for count in (1, 4):
        fn = function(b.module, f"{name}_{count}", len(args), make(count))
        block = b.append_basic_block("case")
        switch.add_case(i64(count), block)
        b.position_at_end(block)
        b.call(fn, args)
        b.branch(end)
    b.position_at_end(end)


@intrinsic
def scores_tile(typing, heads, q, qs, table, groups, out, os):
    """Dots of 1 or 4 queries with the four rows whose addresses stand at table: queries `qs` bytes apart, groups of 64 columns; float32
    [heads, 4] to out, `os` bytes a head."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _by_heads(b, "scores", args[0], list(args[1:]), _scores)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def mix_tile(typing, heads, a, stride, table, tokens, groups, out, os):
    """Sum over tokens of a[head, token] * row, for 1 or 4 heads: weights `stride` bytes a head, addresses of rows at table; float32 [heads,
    64 groups] to out, `os` bytes a head."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _by_heads(b, "mix", args[0], list(args[1:]), _mix)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen
