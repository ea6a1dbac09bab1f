"""Product launches: which matrices go together, how many blocks they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glm53serve.cuda.model import DeviceMatrix
from glm53serve.cuda.packing import GRANULE
from glm53serve.cuda.runtime import FORMAT_CODES, MAX_JOBS, MAX_ROWS, Buffer, Device, Job, Jobs, Maps, Pointer
from glm53serve.cuda.scratch import SplitRows

OUT_F32, OUT_SPLIT, OUT_SWIGLU = 0, 1, 2
MAP_SAME, MAP_TOKEN, MAP_SORTED, MAP_PAIR = 0, 1, 2, 3
GEMM_TILES = 16
LONG_ROWS = 512
"""From this many rows on, products of whole matrices take 256 tokens a block."""
MULTIPROCESSORS = 132
"""Of an H200, which runs one block of a skinny product on each, or two where their memory allows; beyond that a block does several rounds."""
BLOCK_BYTES, PAIRED_BYTES = 227 << 10, (228 << 10) // 2 - (1 << 10)
"""Shared memory of a block: the most there is, and the most of each of two on a multiprocessor."""
SKINNY_THREADS = {4: 256, 8: 512, 16: 512}
ROUND_TILES, RING_BYTES, SUMS_BYTES = 16, 16 * 4 * 1152, 2 * 4 * 16 * 20  # tiles of a round x slices; the last of a row; as gemv.cu has them
GRANULE_COLUMNS = {FORMAT_CODES[name]: columns for name, columns in GRANULE.items()}
GEMM_SHARED = 1024 + 6 * 16384 + 2 * 16 * 4096  # the swizzled tiles' alignment, activations, weights; the other tiled kernels take less


@dataclass(slots=True)
class ExpertGroups:
    """Device lists of a mixture's rows by expert: places (pairs sorted by expert) and groups, at most `most` of them."""

    places: Buffer
    groups: Buffer
    top_k: int
    most: int


def product(
    matrix: DeviceMatrix,
    x: SplitRows,
    y: Pointer | Buffer | None = None,
    ldy: int = 0,
    split: SplitRows | None = None,
    swiglu: float | None = None,
    x_stride: int = 0,
    y_stride: int = 0,
    table: Buffer | None = None,
    which: int = 0,
    x_map: int = MAP_SAME,
    y_map: int = MAP_SAME,
    x_at: int = 0,
    split_at: int = 0,
    ldx: int = 0,
) -> Job:
    """One matrix of a launch. Output: float32 at `y`, or bf16 pairs in `split` (with `swiglu` = its limit: of gate|up pairs).

    Several heads: x and y move by their strides (values) from one to the next. `table`: an expert table; `x_at`, `split_at`: first row used.
    """
    job = Job()
    job.data = matrix.data.address
    job.scale = matrix.scale.address if matrix.scale else 0
    job.table = table.address if table else 0
    job.which = which
    job.ldx = ldx or x.ld
    job.x_high = x.high.at(2 * x_at * job.ldx)
    job.x_low = x.low.at(2 * x_at * job.ldx) if x.low else 0
    if split is not None:
        job.ldy = ldy or split.ld
        job.y_high = split.high.at(2 * split_at * job.ldy)
        job.y_low = split.low.at(2 * split_at * job.ldy) if split.low else 0
        job.out = OUT_SPLIT if swiglu is None else OUT_SWIGLU
        job.limit = swiglu or 0.0
    else:
        assert y is not None
        job.y, job.ldy, job.out = y.address if isinstance(y, Buffer) else int(y), ldy, OUT_F32
    job.data_stride = matrix.tiles * matrix.granules * 128
    job.scale_stride = matrix.scale.nbytes // 4 // matrix.heads if matrix.scale else 0
    job.x_stride, job.y_stride = x_stride, y_stride
    job.format, job.tiles, job.granules, job.rows = matrix.format, matrix.tiles, matrix.granules, matrix.rows
    job.slices = next(s for s in ((2, 1) if table else (8, 4, 2, 1)) if s == 1 or 2 * s <= matrix.granules)
    job.x_map, job.y_map, job.groups = x_map, y_map, matrix.heads
    return job


def run_products(device: Device, rows: int, jobs: list[Job], token_tile: int, experts: ExpertGroups | None = None, tiled: bool = False) -> None:
    """Enqueue products of several matrices over the same number of rows: skinny ones up to 16 rows, tiled ones beyond (or when asked for).

    One launch; of many rows on high parts only (token_tile 128) those of whole matrices and those of experts go separately, in blocks of other shapes.
    """
    if len(jobs) > MAX_JOBS:
        raise ValueError(f"{len(jobs)} matrices in a launch, at most {MAX_JOBS}")
    skinny = rows <= MAX_ROWS and not tiled
    long = [job for job in jobs if not job.table] if rows >= LONG_ROWS and token_tile == 128 else []
    if long:
        _launch(device, "gemm_long", rows, long, None, lambda job: (-(-rows // 256), 8), 256)
        jobs = [job for job in jobs if job.table]
    if jobs and skinny:
        _launch_skinny(device, rows, jobs, experts)
    elif jobs:
        most = experts.most if experts else 0
        kernel, mapped = ("gemm", token_tile) if token_tile == 128 else ("gemm_exact", 0)
        _launch(device, kernel, rows, jobs, experts, lambda job: (most if job.table else -(-rows // token_tile), GEMM_TILES), mapped)


def _launch_skinny(device: Device, rows: int, jobs: list[Job], experts: ExpertGroups | None) -> None:
    """One launch whose blocks share the rounds of all matrices. At most one matrix a launch is an expert table."""
    columns = skinny_columns(rows)
    everything = _header(rows, jobs, experts)
    sums = SUMS_BYTES * rows
    other = RING_BYTES + sums + 16 + 24 * 8 * columns + 320  # the last two: of a block's groups, gates and finished rounds, and a little more
    paired = columns == 4 and _share_places(everything, rows, jobs, PAIRED_BYTES - other)
    if not paired:
        _share_places(everything, rows, jobs, BLOCK_BYTES - other)
    whole = most = 0
    for i, job in enumerate(sorted(jobs, key=lambda job: bool(job.table))):
        if job.table and i + 1 < len(jobs):
            raise ValueError("two expert tables in a launch")
        job.slice_bits = job.slices.bit_length() - 1
        job.each = -(-job.tiles // (ROUND_TILES // job.slices))
        job.by_each = 0 if job.each == 1 else -(-(1 << 32) // job.each)
        job.first_block = 0 if job.table else whole
        whole += 0 if job.table else job.groups * job.each
        most += (experts.most if job.table and experts else job.groups) * job.each
        everything.job[i] = job
    blocks = min(most, MULTIPROCESSORS * (2 if paired else 1))
    everything.share, everything.rest = divmod(whole, blocks)
    shared = RING_BYTES + sums + 16 + everything.places * everything.place_bytes
    if blocks <= MULTIPROCESSORS:
        shared = max(shared, PAIRED_BYTES)  # no two of them on one, while others have none
    device.launch(f"gemv_{columns}", (blocks,), SKINNY_THREADS[columns], [everything], shared)


def _share_places(everything: Jobs, rows: int, jobs: list[Job], room: int) -> bool:
    """Cut the activations of every job into chunks and `room` bytes into places for them. Returns whether all chunks of each job have a place.

    A chunk is a multiple of what all slices of every job take in turn, where there is room for that: then no warp is without work in it. In any case it is
    one of all jobs' granules, so jobs over the same activations have the same chunks.
    """
    widths = [GRANULE_COLUMNS[job.format] for job in jobs]
    even = max(job.slices * width for job, width in zip(jobs, widths, strict=True))
    for places, least in ((4, even), (2, even), (4, max(widths))):
        units = room // places // (128 * rows)  # of 32 columns, high and low; an odd number of them is taken
        most = (units - 1 + units % 2) * 32 // least * least
        if most > 0:
            break
    else:
        raise ValueError(f"activations of {rows} rows do not fit: {room} bytes for chunks of {max(widths)} columns")
    resident, widest = True, 0
    for job, width in zip(jobs, widths, strict=True):
        wanted = -(-job.granules * width // (places * least)) * least
        job.chunk = min(min(wanted, most) // width, job.granules)
        job.chunks = -(-job.granules // job.chunk)
        resident &= job.chunks <= places
        widest = max(widest, job.chunk * width // 32)
    everything.places, everything.place_bytes = places, 128 * rows * (widest | 1)
    return resident


def _header(rows: int, jobs: list[Job], experts: ExpertGroups | None) -> Jobs:
    everything = Jobs()
    everything.count, everything.rows = len(jobs), rows
    if experts:
        everything.list, everything.groups, everything.top_k = experts.places.address, experts.groups.address, experts.top_k
    return everything


def _launch(
    device: Device, kernel: str, rows: int, jobs: list[Job], experts: ExpertGroups | None, shape: Callable[[Job], tuple[int, int]], mapped: int = 0
) -> None:
    """One launch. shape(job): blocks side by side for every run of rows of W, and tiles in such a run. `mapped`: tokens of a block that copies by maps."""
    everything, maps = _header(rows, jobs, experts), Maps()
    blocks = 0
    for i, job in enumerate(jobs):
        job.first_block = blocks
        beside, tiles = shape(job)
        job.token_tiles = beside
        beside *= 1 if job.table else job.groups
        if mapped:
            there = rows * experts.top_k if experts and job.x_map == MAP_SORTED else rows
            maps.map[i] = device.tensor_map(Pointer(job.x_high), there, 2 * job.ldx, mapped)
        blocks += beside * -(-job.tiles // tiles)
        everything.job[i] = job
    device.launch(kernel, (blocks,), 384 if mapped else 256, [everything, maps] if mapped else [everything], GEMM_SHARED)


def skinny_columns(rows: int) -> int:
    """Rows the skinny kernel for this many rows has room for: 4, 8 or 16."""
    return 4 if rows <= 4 else 8 if rows <= 8 else 16
