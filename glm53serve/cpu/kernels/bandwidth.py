"""Reading memory as fast as it goes: the yardstick of the benchmarks."""

from __future__ import annotations

from numba import cfunc

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.fields import offsets
from glm53serve.cpu.kernels.target import CFUNC, VECTOR_BYTES
from glm53serve.cpu.kernels.team import KERNEL

FIELDS = ("data", "size", "sums")
"""size bytes at data, a multiple of 4 vectors a chunk; a sum a chunk, 256 bytes apart, so that nothing is left out."""
_DATA, _SIZE, _SUMS = offsets(FIELDS)
VB = VECTOR_BYTES


@cfunc(KERNEL, **CFUNC)
def read(a, chunk, chunks):
    """Sum of a chunk."""
    step = 4 * VB
    blocks = s.ldi(a + _SIZE) // step
    data = s.ldi(a + _DATA)
    p, q, r, t = s.zero(), s.zero(), s.zero(), s.zero()
    for i in range(data + blocks * chunk // chunks * step, data + blocks * (chunk + 1) // chunks * step, step):
        p, q = s.add(p, s.ld(i)), s.add(q, s.ld(i + VB))
        r, t = s.add(r, s.ld(i + 2 * VB)), s.add(t, s.ld(i + 3 * VB))
    s.stf(s.ldi(a + _SUMS) + 256 * (chunk % 64), s.total(s.add(s.add(p, q), s.add(r, t))))
