"""Measuring on the GPU: rates of the machine, time by kernel, gaps between decode steps."""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cuda_random import SOURCE
from glm53serve.cuda.cupy_runtime import CupyDevice
from glm53serve.cuda.runtime import KERNEL_DIR, Argument


class BenchDevice(CupyDevice):
    """A device with the bench's own kernels, that can time every launch."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes, extra_sources={"bench": (KERNEL_DIR / "common.cuh").read_text() + SOURCE})
        self._timed: list[tuple[str, Any, Any]] | None = None

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Argument], shared: int = 0) -> None:
        """Enqueue a kernel, between two events when profiling."""
        if self._timed is None:
            super().launch(kernel, grid, threads, arguments, shared)
            return
        events = [self.cupy.cuda.Event() for _ in range(2)]
        events[0].record(self.stream)
        super().launch(kernel, grid, threads, arguments, shared)
        events[1].record(self.stream)
        self._timed.append((f"{kernel} {'x'.join(map(str, grid))}", *events))

    def profile(self, body: Callable[[], None], delay_ms: float = 40.0) -> dict[str, tuple[int, float]]:
        """Launches and microseconds by kernel and grid. The queue is filled behind a busy kernel, so the host does not show."""
        self.synchronize()
        self._timed = []
        timed = self._timed
        CupyDevice.launch(self, "busy", (1,), 32, [ctypes.c_uint64(int(delay_ms * 1e6))])
        body()
        self._timed = None
        self.synchronize()
        out: dict[str, list[float]] = defaultdict(list)
        for name, start, end in timed:
            out[name].append(1e3 * self.cupy.cuda.get_elapsed_time(start, end))
        return {name: (len(v), float(sum(v))) for name, v in out.items()}

    def timed(self, body: Callable[[], None], repeat: int = 10) -> float:
        """Best seconds of one `body`, by events."""
        best = 1e9
        body()
        for _ in range(repeat):
            start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record(self.stream)
            body()
            end.record(self.stream)
            end.synchronize()
            best = min(best, 1e-3 * self.cupy.cuda.get_elapsed_time(start, end))
        return best

    def copy_bandwidth(self) -> float:
        """GB/s read and written by a copy of 2 GiB through the multiprocessors."""
        size = 2 << 30
        a, b = self._pool.malloc(size), self._pool.malloc(size)
        best = min(
            self.timed(lambda g=grid: CupyDevice.launch(self, "copy_bytes", (g,), 256, [_pointer(a.ptr), _pointer(b.ptr), ctypes.c_uint64(size // 16)]))  # type: ignore[misc]
            for grid in (528, 1056, 2112, 4224)
        )
        return 2 * size / best / 1e9

    def gemm_rate(self, n: int = 8192) -> float:
        """TFLOP/s of a bf16 product n x n x n by cuBLAS on random data."""
        from cupy_backends.cuda.libs import cublas

        cp = self.cupy
        values = [(cp.random.random(n * n, dtype=cp.float32) - 0.5).view(cp.uint32) >> 16 for _ in range(2)]
        a, b = (v.astype(cp.uint16) for v in values)
        c = cp.zeros(n * n, cp.uint16)
        one, zero = np.array(1, np.float32), np.array(0, np.float32)
        handle = cp.cuda.device.get_cublas_handle()

        def go() -> None:
            with self.stream:
                multiply()

        def multiply() -> None:
            cublas.setStream(handle, self.stream.ptr)
            cublas.gemmEx(handle, 1, 0, n, n, n, one.ctypes.data, a.data.ptr, 14, n, b.data.ptr, 14, n, zero.ctypes.data, c.data.ptr, 14, n, 68, -1)

        cp.cuda.Device().synchronize()
        rate = 2 * n**3 / self.timed(go) / 1e12
        del values
        cp.get_default_memory_pool().free_all_blocks()
        return rate


def _pointer(address: int) -> Argument:
    from glm53serve.cuda.runtime import Pointer

    return Pointer(address)


def percentiles(values: NDArray[Any]) -> str:
    """min / p50 / p99 / max, in microseconds."""
    v = np.asarray(values, float)
    return f"min {v.min():.2f}  p50 {np.median(v):.2f}  p99 {np.percentile(v, 99):.2f}  max {v.max():.2f}"


def table(title: str, rows: Mapping[str, tuple[int, float]], most: int = 40) -> None:
    """Print a profile, the largest first."""
    total = sum(us for _, us in rows.values())
    print(f"{title}: {total / 1e3:.3f} ms in {sum(n for n, _ in rows.values())} launches")
    for name, (count, us) in sorted(rows.items(), key=lambda item: -item[1][1])[:most]:
        print(f"  {name:44s} {count:5d} x {us / count:9.2f} us = {us / 1e3:9.3f} ms  {100 * us / total:5.1f} %")


class Stopwatch:
    """Seconds since it was made, for the log."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def say(self, *words: object) -> None:
        """Print with the time."""
        print(f"[{time.perf_counter() - self.start:6.1f} s]", *words, flush=True)
