"""Measuring on the GPU: rates of the machine, time by kernel, gaps between decode steps."""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cuda_random import SOURCE
from glm53serve.cuda.cupy_runtime import CupyDevice
from glm53serve.cuda.runtime import FORMAT_NAMES, KERNEL_DIR, Argument, Jobs


class BenchDevice(CupyDevice):
    """A device with the bench's own kernels, that can time every launch."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes, extra_sources={"bench": (KERNEL_DIR / "common.cuh").read_text() + SOURCE})
        self._timed: list[tuple[str, Any, Any]] | None = None
        self._left_out: frozenset[str] = frozenset()
        self._seen: dict[str, list[float]] | None = None

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Argument], shared: int = 0, cluster: int = 1) -> None:
        """Enqueue a kernel, between two events when profiling; not at all when it is left out."""
        name = f"{kernel} {'x'.join(map(str, grid))}"
        if self._seen is not None:
            self._seen.setdefault(name, []).append(_weight_bytes(arguments))
        if kernel in self._left_out or name in self._left_out:
            return
        if self._timed is None:
            super().launch(kernel, grid, threads, arguments, shared, cluster)
            return
        events = [self.cupy.cuda.Event() for _ in range(2)]
        events[0].record(self.stream)
        super().launch(kernel, grid, threads, arguments, shared, cluster)
        events[1].record(self.stream)
        self._timed.append((name, *events))

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

    def costs(self, body: Callable[[], None], frozen: frozenset[str] = frozenset(), repeat: int = 24) -> tuple[float, dict[str, tuple[int, float, float]]]:
        """What each kernel and grid costs inside the recorded graph of `body`: microseconds of the whole less those of a graph without it.

        Kernels of `frozen` decide what the others do: these are measured without them, all on what those wrote last. Returns the whole and (launches,
        microseconds, bytes of weights of whole matrices) by name.
        """
        self._seen = seen = {}
        body()
        self._seen = None
        whole = self._graph_time(body, repeat)
        self._left_out = frozen
        base = self._graph_time(body, repeat)
        out: dict[str, tuple[int, float, float]] = {}
        for name, weights in seen.items():
            if name.split()[0] in frozen:
                self._left_out = frozenset({name})
                without = whole - self._graph_time(body, repeat)
            else:
                self._left_out = frozen | {name}
                without = base - self._graph_time(body, repeat)
            out[name] = len(weights), without, sum(weights)
        self._left_out = frozenset()
        return whole, out

    def _graph_time(self, body: Callable[[], None], repeat: int) -> float:
        """Median microseconds of the graph of `body`."""
        graph = self.record(body)
        graph.launch()
        events = [self.cupy.cuda.Event() for _ in range(repeat + 1)]
        events[0].record(self.stream)
        for event in events[1:]:
            graph.launch()
            event.record(self.stream)
        self.synchronize()
        return float(np.median([1e3 * self.cupy.cuda.get_elapsed_time(a, b) for a, b in pairwise(events)]))

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


def _weight_bytes(arguments: Sequence[Argument]) -> float:
    """Bytes of the whole matrices a product launch reads (experts are not counted)."""
    jobs = arguments[0] if arguments else None
    if not isinstance(jobs, Jobs):
        return 0.0
    each = ((job, FORMAT_NAMES[job.format]) for job in jobs.job[: jobs.count] if not job.table)
    return float(sum(job.groups * job.tiles * (job.granules * (2048 + {"int4": 256, "fp8": 8}.get(fmt, 0)) + 64 * (fmt == "int8")) for job, fmt in each))


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


def cost_table(title: str, whole: float, rows: Mapping[str, tuple[int, float, float]], copy: float) -> None:
    """Print what `BenchDevice.costs` found, the largest first; `copy` in GB/s."""
    print(f"{title}: {whole:.0f} us in one graph; us less without each (launches, us a launch, weights of whole matrices, their share of copy)")
    for name, (count, us, nbytes) in sorted(rows.items(), key=lambda item: -item[1][1]):
        share = f"{nbytes / 1e6:8.1f} MB {100 * nbytes / copy / 1e3 / us:5.1f} %" if nbytes and us > 0 else ""
        print(f"  {name:44s} {count:4d} x {us / count:7.2f} = {us:8.1f} {share}")


class Stopwatch:
    """Seconds since it was made, for the log."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def say(self, *words: object) -> None:
        """Print with the time."""
        print(f"[{time.perf_counter() - self.start:6.1f} s]", *words, flush=True)
