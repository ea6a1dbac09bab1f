"""What the CUDA backend would launch at the published widths, on a device that only writes it down: every launch fits the machine it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.cuda_random import RandomModel
from glm53serve.cuda.layers import CudaLayers
from glm53serve.cuda.pipeline import RowArrays
from glm53serve.cuda.products import _share_places
from glm53serve.cuda.runtime import BUCKETS, FORMAT_CODES, FORMAT_NAMES, Argument, Buffer, HostBuffer, Job, Jobs, Pointer, TensorMap
from glm53serve.model.config_file import parse_config
from glm53serve.model.shapes import shape_config
from glm53serve.model.weights import MatrixFormat

BLOCK_MOST, PROCESSOR_MOST, RESERVED = 227 << 10, 228 << 10, 1 << 10
"""Shared memory of one block, of a multiprocessor, and what the machine takes of it for every block; bytes."""
STATIC = {"gemv_4": 928, "gemv_8": 1696, "gemv_16": 3232}
"""Static shared memory of the skinny products, as the compiler reports it."""
COLUMNS = {"f32": 32, "bf16": 64, "fp8": 128, "int8": 128, "int4": 256}


class PaperDevice:
    """A `Device` that has no memory and runs nothing: it keeps the launches."""

    name = "paper"

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, ...], int, list[Argument], int]] = []
        self._next = 1 << 20

    def alloc(self, nbytes: int) -> Buffer:
        self._next += -(-nbytes // 512) * 512
        return Buffer(self._next - -(-nbytes // 512) * 512, nbytes)

    def host(self, nbytes: int) -> HostBuffer:
        return HostBuffer(self.alloc(nbytes).address, np.zeros(nbytes, np.uint8))

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Argument], shared: int = 0, cluster: int = 1) -> None:
        self.launches.append((kernel, tuple(grid), threads, list(arguments), shared))

    def tensor_map(self, start: Pointer, rows: int, row_bytes: int, box_rows: int) -> TensorMap:
        return TensorMap()

    def upload(self, to: Pointer, array: NDArray[Any]) -> None: ...
    def download(self, start: Pointer, array: NDArray[Any]) -> None: ...
    def copy(self, to: Pointer, start: Pointer, nbytes: int) -> None: ...
    def copy_host(self, to: Pointer, start: HostBuffer, nbytes: int) -> None: ...
    def zero(self, to: Pointer, nbytes: int) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...
    def record(self, body: Callable[[], None]) -> Any: ...
    def record_loop(self, body: Callable[[int], None]) -> Any: ...
    def fence(self) -> Any: ...
    def idle(self) -> bool:
        return True

    def free_bytes(self) -> int:
        return 1 << 40


def step_launches(dense: MatrixFormat, expert: MatrixFormat, rows: int) -> list[tuple[str, tuple[int, ...], int, list[Argument], int]]:
    """Launches of a decode step of `rows` rows through four layers of the published widths (all kinds of layers among them)."""
    config = parse_config(shape_config("flash", 4, 16, fp8=False))
    device = PaperDevice()
    model = RandomModel(device, config, dense, expert).build()
    layers = CudaLayers(device, model, 16, 4096, 64, exact=False)
    device.launches.clear()
    at = RowArrays(*(device.alloc(4 * 64).at() for _ in range(6)))
    layers.pipeline.layers(rows, at, rows)
    layers.pipeline.logits(rows, device.alloc(4 * rows * config.vocab_size))
    return device.launches


@pytest.mark.parametrize("expert", ["int4", "bf16"])
@pytest.mark.parametrize("dense", ["int4", "int8", "fp8", "bf16"])
@pytest.mark.parametrize("rows", [*BUCKETS, 3, 5, 12])
def test_products_of_few_rows_fit_the_machine(rows: int, dense: MatrixFormat, expert: MatrixFormat) -> None:
    seen = 0
    for kernel, grid, _threads, arguments, shared in step_launches(dense, expert, rows):
        assert shared <= BLOCK_MOST
        if not kernel.startswith("gemv"):
            continue
        seen += 1
        jobs = arguments[0]
        assert isinstance(jobs, Jobs)
        own = shared + STATIC[kernel]
        assert own <= BLOCK_MOST
        assert grid[0] <= 132 or (grid[0] <= 264 and kernel == "gemv_4" and 2 * (own + RESERVED) <= PROCESSOR_MOST)
        for job in jobs.job[: jobs.count]:
            columns = COLUMNS[FORMAT_NAMES[job.format]]
            assert job.chunk * job.chunks >= job.granules > job.chunk * (job.chunks - 1)
            assert 128 * jobs.rows * (job.chunk * columns // 32 | 1) <= jobs.place_bytes
            assert job.each * (2 * 8 // job.slices) >= job.tiles
    assert seen >= 20


def test_matrices_over_the_same_activations_have_the_same_chunks() -> None:
    """Else a block would bring what it has already once more, or read it as something else."""
    for rows in BUCKETS:
        for kernel, _, _, arguments, _ in step_launches("int8", "int4", rows):
            if not kernel.startswith("gemv"):
                continue
            jobs = arguments[0]
            assert isinstance(jobs, Jobs)
            by_input: dict[int, set[int]] = {}
            for job in jobs.job[: jobs.count]:
                by_input.setdefault(job.x_high, set()).add(job.chunk * COLUMNS[FORMAT_NAMES[job.format]])
            assert all(len(chunks) == 1 for chunks in by_input.values())


def test_a_step_reads_every_matrix_in_as_many_bytes_as_it_has() -> None:
    """The launches of a step hold each matrix once, whatever the bucket."""

    def matrices(rows: int) -> list[tuple[int, int, int]]:
        found: list[Job] = []
        for kernel, _, _, arguments, _ in step_launches("int8", "int4", rows):
            if kernel.startswith("gemv"):
                jobs = arguments[0]
                assert isinstance(jobs, Jobs)
                found += jobs.job[: jobs.count]
        return sorted((job.tiles, job.granules, job.format) for job in found)

    assert matrices(1) == matrices(4) == matrices(16)


def test_activations_that_do_not_fit_are_refused() -> None:
    """However little room is left for them, none at all included."""
    job = Job()
    job.format, job.slices, job.granules = FORMAT_CODES["int8"], 8, 32
    for room in (-(20 << 10), 0, 4 << 10):
        with pytest.raises(ValueError, match="activations of 16 rows do not fit"):
            _share_places(Jobs(), 16, [job], room)
