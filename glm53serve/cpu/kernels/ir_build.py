"""What the generators of kernels in LLVM IR share: kinds of product, vector types, loops, functions of a module, fetching ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llvmlite import ir
from llvmlite.ir import Value

from glm53serve.cpu.kernels.simd import F32, I8, I32, I64, prefetch

F32_, BF16, INT8, FP8, INT4, INT4_Q16 = range(6)
"""Kinds of product: weights as named times float32 activations, INT4_Q16 times 16-bit ones."""
GROUP_BYTES = {F32_: 256, BF16: 128, INT8: 64, FP8: 64, INT4: 32}
"""Bytes of 64 weights of a row."""

V16I = ir.VectorType(I32, 16)
V64B = ir.VectorType(I8, 64)
V32B = ir.VectorType(I8, 32)
V16F = ir.VectorType(F32, 16)
V8I = ir.VectorType(I32, 8)


def i64(value: int) -> ir.Constant:
    """An int64 constant."""
    return ir.Constant(I64, value)


def loop(b: ir.IRBuilder, count: Value, carried: list[Value], body: Callable[[Value, list[Value]], list[Value]]) -> list[Value]:
    """for i in range(count): carried = body(i, carried). Returns what is carried at the end."""
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(i64(0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    b.cbranch(b.icmp_signed("<", i, count), inside, after)
    b.position_at_end(inside)
    new = body(i, phis)
    i.add_incoming(b.add(i, i64(1)), b.block)
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return phis


def fetch_next(b: ir.IRBuilder, block: Value, stride: Value, width: int, group: Value, row_bytes: int) -> None:
    """Fetch what the next `width` rows hold of this group. A group's share of them is one run of memory where rows lie one after another:
    the processor's own prefetching follows a few runs well, but not `width` of them at once. Rows of bytes or wider would push each other
    out of the first cache before they are met."""
    share = width * row_bytes
    at = b.add(b.add(block, b.mul(stride, i64(width))), b.mul(group, i64(share)))
    for line in range(0, share, 64):
        prefetch(b, b.add(at, i64(line)), row_bytes < 64)


def function(module: ir.Module, name: str, arguments: int, body: Callable[..., None]) -> ir.Function:
    """The module's own function of that name, built at first use: int64 arguments, no result."""
    if name in module.globals:
        return module.globals[name]
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
    fn.linkage = "internal"
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    body(b, *fn.args)
    b.ret_void()
    return fn


def call_case(b: ir.IRBuilder, value: Value, cases: Mapping[int, ir.Function], args: Sequence[Value]) -> None:
    """Call the function of the case that `value` is; none where there is no such case."""
    end = b.append_basic_block("done")
    switch = b.switch(value, end)
    for number, fn in cases.items():
        block = b.append_basic_block("case")
        switch.add_case(i64(number), block)
        b.position_at_end(block)
        b.call(fn, args)
        b.branch(end)
    b.position_at_end(end)


def row_addresses(b: ir.IRBuilder, first: Value, stride: Value, count: int) -> list[Value]:
    """Addresses of `count` rows."""
    return [b.add(first, b.mul(stride, i64(n))) for n in range(count)]
