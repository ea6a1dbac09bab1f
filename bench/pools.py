"""Two thread pools on the same cores: BLAS products and the engine's own kernels, each alone and in turn.

    python -m bench.pools

A pool that spins while the other works shows as an alternation that takes longer than the sum of its parts. The daemon keeps BLAS at one
thread for that reason; the last line shows what it would be with all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from threadpoolctl import threadpool_limits

from bench.kernels import copies
from glm53serve.cpu import warm
from glm53serve.cpu.packing import pack
from glm53serve.cpu.program import Cell, Form, Program, zeros
from glm53serve.cpu.threads import physical_cores
from glm53serve.model.quant import requantise
from glm53serve.model.weights import Matrix

ROUNDS = 8
SHAPE = (2048, 4096)


def timed(run: Callable[[], None], repeats: int = 15) -> float:
    """Median milliseconds of a call."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def main() -> int:
    """Print the parts, their sum and the alternation."""
    warm.ensure_compiled(print)
    from glm53serve.cpu.kernels import rows
    from glm53serve.cpu.kernels.fields import Arguments
    from glm53serve.cpu.kernels.team import shared_team

    threads = physical_cores()
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SHAPE, np.float32)
    x = rng.standard_normal((4, SHAPE[1]), np.float32)
    packed = copies(pack(requantise(Matrix("f32", *SHAPE, weights), 4), True), 0)[0]
    form, count, y = Form(4, packed.groups * 64, {packed.kind}), Cell(), zeros(4, packed.rows)
    form.natural[:] = x
    count.set(4)
    program = Program(threads)
    program.by_row(rows.shape.address, Arguments(rows.SHAPE_FIELDS, count=count.at, form=form.at))
    program.matmul([packed], form, count, y)
    team = shared_team(threads)

    def kernels() -> None:
        program.run(team, 4)

    def blas() -> None:
        np.matmul(x, weights.T)

    def in_turn() -> None:
        for _ in range(ROUNDS):
            kernels()
            blas()

    for limit in (1, None):
        with threadpool_limits(limit):
            apart = ROUNDS * (timed(kernels) + timed(blas))
            together = timed(in_turn)
        name = "one BLAS thread" if limit else "all BLAS threads"
        print(f"{name}: {ROUNDS} alternations {together:.2f} ms, the parts alone {apart:.2f} ms, ratio {together / apart:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
