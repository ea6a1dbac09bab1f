"""Speed of the CPU kernels at the real model's widths, against what the machine can do, measured in the same run.

    python -m bench.kernels [--seconds 0.4] [--threads N] [--quick]

Few rows are bound by reading weights: GB/s and the share of the read bandwidth. Many rows are bound by arithmetic: GFLOP/s (2 x rows x
weights) and the ratio to the float32 matrix rate of NumPy's BLAS. Weights are read from several copies, so that no cache holds them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.options import Parser, number, whole
from glm53serve.cpu import warm
from glm53serve.cpu.packing import Packed, pack
from glm53serve.cpu.program import Cell, Form, Program, zeros
from glm53serve.cpu.threads import physical_cores
from glm53serve.model.quant import requantise
from glm53serve.model.weights import Matrix

SHAPES = ((2048, 4096), (4096, 2048))
SPREAD_BYTES = 640 << 20


def timed(run: Callable[[int], None], seconds: float) -> tuple[float, float]:
    """Median and least seconds of run(i), called with a growing i until `seconds` have passed (five times at least)."""
    run(0)
    run(1)
    times: list[float] = []
    i, began = 2, time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run(i)
        times.append(time.perf_counter() - start)
        i += 1
    return float(np.median(times)), min(times)


def reader(threads: int) -> tuple[Callable[[], object], int]:
    """A function that reads `SPREAD_BYTES` bytes with that many threads, and the number of bytes."""
    from glm53serve.cpu.kernels import bandwidth
    from glm53serve.cpu.kernels.fields import Arguments, address
    from glm53serve.cpu.kernels.team import shared_team

    data, sums = zeros(SPREAD_BYTES // 4), zeros(64 * 64)
    data[:] = 1
    program = Program(threads)
    program.add(bandwidth.read.address, Arguments(bandwidth.FIELDS, data=address(data), size=data.nbytes, sums=address(sums)), 8 * threads, 8 * threads)
    team = shared_team(threads)

    def read() -> object:
        return program.run(team, 1), data, sums

    return read, data.nbytes


def read_bandwidth(threads: int, seconds: float) -> float:
    """Bytes a second that `threads` threads read from memory."""
    read, size = reader(threads)
    return size / timed(lambda _i: read(), seconds)[0]


def share_of_read(run: Callable[[int], None], nbytes: int, read: Callable[[], object], read_bytes: int, seconds: float) -> tuple[float, float]:
    """Median seconds of run(i), and the median share of the read bandwidth: reads and runs take turns, so both meet the same neighbours."""
    run(0)
    times, shares, turns = [], [], max(1, read_bytes // nbytes)
    i, began = 1, time.perf_counter()
    while len(shares) < 5 or time.perf_counter() - began < 3 * seconds:
        start = time.perf_counter()
        read()
        middle = time.perf_counter()
        for _ in range(turns):
            run(i)
            i += 1
        end = time.perf_counter()
        times.append((end - middle) / turns)
        shares.append((turns * nbytes / (end - middle)) / (read_bytes / (middle - start)))
    return float(np.median(times)), float(np.median(shares))


def matrix_rate(seconds: float) -> float:
    """GFLOP/s of NumPy's float32 matrix product with all its threads."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((512, 4096), np.float32), rng.standard_normal((2048, 4096), np.float32)
    return 2 * x.size * len(w) / timed(lambda _i: np.matmul(x, w.T), seconds)[0] / 1e9


def product(parts: list[Packed], row_count: int, threads: int) -> Callable[[int], None]:
    """run(i): one product with one of the copies in `parts`."""
    from glm53serve.cpu.kernels import rows
    from glm53serve.cpu.kernels.fields import Arguments
    from glm53serve.cpu.kernels.team import shared_team

    rng = np.random.default_rng(1)
    form = Form(row_count, parts[0].groups * 64, {parts[0].kind})
    form.natural[:] = rng.standard_normal(form.natural.shape)
    count, y = Cell(), zeros(row_count, parts[0].rows)
    count.set(row_count)
    shaped = Program(threads)
    shaped.by_row(rows.shape.address, Arguments(rows.SHAPE_FIELDS, count=count.at, form=form.at))
    team = shared_team(threads)
    shaped.run(team, row_count)
    programs = []
    for part in parts:
        program = Program(threads)
        program.matmul([part], form, count, y)
        programs.append(program)

    def run(i: int) -> None:
        programs[i % len(programs)].run(team, row_count)

    return run


def copies(w: Packed, total: int) -> list[Packed]:
    """w in as many places as fill `total` bytes."""

    def again(a: NDArray[np.generic] | None) -> NDArray[np.generic] | None:
        return None if a is None else a.copy()

    return [w] + [Packed(w.kind, w.rows, w.groups, w.data.copy(), again(w.scale)) for _ in range(total // w.nbytes)]  # type: ignore[arg-type]


def main() -> None:
    """Print the table."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=number(0.0, 3600.0), default=0.4, help="time for each figure")
    parser.add_argument("--threads", type=whole(1, 1024), default=physical_cores())
    parser.add_argument("--quick", action="store_true", help="one shape, few row counts")
    args = parser.parse_args()
    warm.ensure_compiled(print)
    from glm53serve.cpu.kernels import target

    read, read_bytes = reader(args.threads)
    bandwidth, gemm = read_bandwidth(args.threads, args.seconds), matrix_rate(args.seconds)
    vnni = "VNNI" if target.HAS_VNNI else "AVX2" if target.HAS_AVX2 else "portable"
    print(f"{args.threads} threads, {target.LANES} lanes, {vnni}; load average {os.getloadavg()[0]:.1f}")
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, float32 matrix product {gemm:.0f} GFLOP/s")
    print("the first is measured again beside every figure of few rows, the second before each format\n")
    print(f"{'weights x activations':28}{'shape':>12}{'rows':>6}{'ms':>9}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}{'of sgemm':>9}")
    counts = (1, 64) if args.quick else (1, 2, 4, 16, 64, 256, 512)
    rng = np.random.default_rng(2)
    for shape in SHAPES[:1] if args.quick else SHAPES:
        values = rng.standard_normal(shape, np.float32)
        plain = Matrix("f32", *shape, values)
        kinds = [("int4 x 16-bit", requantise(plain, 4), True), ("int4 x f32", requantise(plain, 4), False), ("int8 x f32", requantise(plain, 8), False)]
        kinds += [("bf16 x f32", requantise(plain, 16), False), ("f32 x f32", plain, False)]
        for name, w, levels in kinds:
            spread = copies(pack(w, levels), SPREAD_BYTES)
            gemm = matrix_rate(args.seconds)
            for count in counts:
                run = product(spread if count <= 4 else spread[:2], count, args.threads)
                if count <= 4:
                    seconds, share = share_of_read(run, spread[0].nbytes, read, read_bytes, args.seconds)
                    of_read = f"{spread[0].nbytes / seconds / 1e9:>8.1f}{share:>9.0%}"
                else:
                    seconds, of_read = timed(run, args.seconds)[0], " " * 17
                flops = 2 * count * values.size / seconds / 1e9
                print(f"{name:28}{f'{shape[0]}x{shape[1]}':>12}{count:>6}{1e3 * seconds:>9.3f}{of_read}{flops:>9.0f}{flops / gemm:>9.0%}", flush=True)


if __name__ == "__main__":
    main()
