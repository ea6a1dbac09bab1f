"""Vectors for Numba: intrinsics on raw addresses, written as LLVM IR, so that loops stay in plain Python syntax.

Addresses are int64. A vector holds `LANES` float32 values; loads and stores need no alignment. Every operation lowers on any processor;
the order of operations in `hsum` and `exp` is fixed, so a kernel's result depends on nothing but its inputs and LANES.
"""

from __future__ import annotations

from typing import Any

from glm53serve.cpu.kernels.target import LANES, VECTOR_BYTES  # isort: skip  (sets the cache folder first)

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VB = VECTOR_BYTES


class VectorType(types.Type):
    """Numba type of one float32 vector."""

    def __init__(self) -> None:
        super().__init__(name=f"f32x{LANES}")


VEC = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VF)


# --- IR helpers, shared with the matrix kernels ----------------------------------------------------------------------------------


def load(b: ir.IRBuilder, address: ir.Value, type_: ir.Type, align: int = 1) -> ir.Value:
    """Unaligned load at an integer address."""
    value = b.load(b.inttoptr(address, type_.as_pointer()))
    value.align = align
    return value


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Unaligned store at an integer address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def splat(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """The scalar in every lane."""
    vector = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value | None, lanes: list[int]) -> ir.Value:
    """Lanes picked from x and y (numbered on from x's)."""
    other = ir.Constant(x.type, ir.Undefined) if y is None else y
    return b.shuffle_vector(x, other, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def constant(type_: ir.VectorType, value: float) -> ir.Constant:
    """A vector constant with equal lanes."""
    return ir.Constant(type_, [value] * type_.count)


def call(b: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    """Call of an LLVM intrinsic or a C library function by name."""
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, args)


def prefetch(b: ir.IRBuilder, address: ir.Value, first_cache: bool) -> None:
    """Have the cache line of an address on its way to the first or the second cache; any address will do."""
    pointer = b.inttoptr(address, I8.as_pointer())
    arguments = [pointer, *(ir.Constant(I32, value) for value in (0, 3 if first_cache else 2, 1))]
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), [a.type for a in arguments]), "llvm.prefetch.p0i8")
    b.call(fn, arguments)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, fused where the processor can."""
    kind = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
    return call(b, f"llvm.fmuladd.{kind}", x.type, [x, y, z])


def hsum(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Sum of the lanes, halves folded onto each other."""
    return _fold(b, x, lambda p, q: b.fadd(p, q))


def _fold(b: ir.IRBuilder, x: ir.Value, combine: Any) -> ir.Value:
    width = x.type.count
    while width > 1:
        width //= 2
        low = shuffle(b, x, None, list(range(width)))
        high = shuffle(b, x, None, list(range(width, 2 * width)))
        x = combine(low, high)
    return b.extract_element(x, ir.Constant(I32, 0))


def maximum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Larger of two, lane by lane; y where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def minimum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Smaller of two, lane by lane; y where x is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e to the x within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; 0 below -87, x held to 87 above."""

    def c(value: float) -> ir.Constant:
        return constant(VF, value)

    low = b.fcmp_ordered("<", x, c(-87.0))
    x = minimum(b, maximum(b, x, c(-87.0)), c(87.0))
    n = call(b, f"llvm.rint.v{LANES}f32", VF, [b.fmul(x, c(1.4426950408889634))])
    r = fma(b, n, c(-0.693359375), x)
    r = fma(b, n, c(2.12194440e-4), r)
    p = c(1.9875691500e-4)
    for k in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(b, p, r, c(k))
    p = b.fadd(fma(b, p, b.fmul(r, r), r), c(1.0))
    power = b.shl(b.add(b.fptosi(n, VI), constant(VI, 127)), constant(VI, 23))
    return b.select(low, c(0.0), b.fmul(p, b.bitcast(power, VF)))


# --- intrinsics ------------------------------------------------------------------------------------------------------------------


def _op(result: Any, arguments: tuple[Any, ...], build: Any) -> Any:
    """An intrinsic whose code `build(builder, *values)` makes."""

    def make(count: int) -> Any:
        def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            value = build(b, *args)
            return context.get_dummy_value() if result is types.void else value

        if count == 0:
            return lambda typing: (result(), codegen)
        if count == 1:
            return lambda typing, p: (result(*arguments), codegen)
        if count == 2:
            return lambda typing, p, q: (result(*arguments), codegen)
        if count == 3:
            return lambda typing, p, q, r: (result(*arguments), codegen)
        return lambda typing, p, q, r, s: (result(*arguments), codegen)

    return intrinsic(make(len(arguments)))


_A = types.int64
_S = types.float32

ld = _op(VEC, (_A,), lambda b, a: load(b, a, VF))
st = _op(types.void, (_A, VEC), lambda b, a, v: store(b, v, a))
zero = _op(VEC, (), lambda b: constant(VF, 0.0))
dup = _op(VEC, (_S,), lambda b, x: splat(b, x, LANES))
lds = _op(VEC, (_A,), lambda b, a: splat(b, load(b, a, F32), LANES))
add = _op(VEC, (VEC, VEC), lambda b, x, y: b.fadd(x, y))
sub = _op(VEC, (VEC, VEC), lambda b, x, y: b.fsub(x, y))
mul = _op(VEC, (VEC, VEC), lambda b, x, y: b.fmul(x, y))
div = _op(VEC, (VEC, VEC), lambda b, x, y: b.fdiv(x, y))
vmax = _op(VEC, (VEC, VEC), maximum)
vmin = _op(VEC, (VEC, VEC), minimum)
vfma = _op(VEC, (VEC, VEC, VEC), fma)
vexp = _op(VEC, (VEC,), _exp)
vabs = _op(VEC, (VEC,), lambda b, x: call(b, f"llvm.fabs.v{LANES}f32", VF, [x]))
total = _op(_S, (VEC,), hsum)
largest = _op(_S, (VEC,), lambda b, x: _fold(b, x, lambda p, q: maximum(b, p, q)))
sfma = _op(_S, (_S, _S, _S), fma)


def _sigmoid(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    e = _exp(b, b.fneg(x))
    one = constant(VF, 1.0)
    return b.fdiv(one, b.fadd(one, e))


sigmoid = _op(VEC, (VEC,), _sigmoid)

ldf = _op(_S, (_A,), lambda b, a: load(b, a, F32))
stf = _op(types.void, (_A, _S), lambda b, a, v: store(b, v, a))
ldi = _op(_A, (_A,), lambda b, a: load(b, a, I64))
sti = _op(types.void, (_A, _A), lambda b, a, v: store(b, v, a))
ldw = _op(_A, (_A,), lambda b, a: b.sext(load(b, a, I32), I64))
stw = _op(types.void, (_A, _A), lambda b, a, v: store(b, b.trunc(v, I32), a))
bits = _op(types.uint32, (_S,), lambda b, x: b.bitcast(x, I32))


def _store_bytes(b: ir.IRBuilder, address: ir.Value, x: ir.Value) -> None:
    """LANES float32 whole numbers of -128..127 as bytes."""
    store(b, b.trunc(b.fptosi(x, VI), ir.VectorType(I8, LANES)), address)


stb = _op(types.void, (_A, VEC), _store_bytes)
vrint = _op(VEC, (VEC,), lambda b, x: call(b, f"llvm.rint.v{LANES}f32", VF, [x]))


vfloor = _op(VEC, (VEC,), lambda b, x: call(b, f"llvm.floor.v{LANES}f32", VF, [x]))


def _evens(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return shuffle(b, x, y, list(range(0, 2 * LANES, 2)))


def _odds(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return shuffle(b, x, y, list(range(1, 2 * LANES, 2)))


evens = _op(VEC, (VEC, VEC), _evens)
odds = _op(VEC, (VEC, VEC), _odds)


@intrinsic
def keep(typing, array):
    """Keep an array alive up to here: Numba frees it after its last use by name, and an address is none."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), codegen


# --- between threads -------------------------------------------------------------------------------------------------------------


def _atomic_add(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), value, "seq_cst")


def _atomic_load(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


def _atomic_store(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


def _call_kernel(b: ir.IRBuilder, kernel: ir.Value, args: ir.Value, chunk: ir.Value, chunks: ir.Value) -> None:
    fn = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    b.call(b.inttoptr(kernel, fn.as_pointer()), [args, chunk, chunks])


def _pause(b: ir.IRBuilder) -> None:
    from glm53serve.cpu.kernels.target import FEATURES

    if "sse2" in FEATURES:
        call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])


def _yield(b: ir.IRBuilder) -> None:
    import os

    if os.name == "posix":
        call(b, "sched_yield", I32, [])


atomic_add = _op(_A, (_A, _A), _atomic_add)
atomic_load = _op(_A, (_A,), _atomic_load)
atomic_store = _op(types.void, (_A, _A), _atomic_store)
call_kernel = _op(types.void, (_A, _A, _A, _A), _call_kernel)
pause = _op(types.void, (), _pause)
yield_thread = _op(types.void, (), _yield)
