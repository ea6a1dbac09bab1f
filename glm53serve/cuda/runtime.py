"""The device as the CUDA backend sees it: memory, kernels, recorded graphs. One product implementation (`cupy_runtime`), one emulated for tests."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

KERNEL_DIR = Path(__file__).parent / "kernels"
SOURCES = (
    "gemv", "gemm", "gemm_exact", "hyper", "hyper_prompt", "kda", "kda_prompt",
    "dsa", "dsa_select", "attention", "attention_prompt", "attention_few", "moe", "sample", "step",
)  # fmt: skip
MODULES = (*(("gemv", {"ONLY": rows}) for rows in (4, 8, 16)), *((name, {}) for name in SOURCES[1:]))
"""What is compiled side by side: a source and its own defines."""
HEADERS = {
    "matmul.cuh": ("gemv", "gemm", "gemm_exact"),
    "gemv_feed.cuh": ("gemv",),
    "hyper.cuh": ("hyper", "hyper_prompt"),
    "gemm.cuh": ("gemm", "gemm_exact"),
    "kda.cuh": ("kda", "kda_prompt"),
}
"""Parts that several sources share, beside common.cuh."""
MAX_ROWS = 16
BUCKETS = (1, 2, 4, 8, 16)
FORMAT_CODES = {"f32": 0, "bf16": 1, "fp8": 2, "int8": 3, "int4": 4}
FORMAT_NAMES = {code: name for name, code in FORMAT_CODES.items()}


class Pointer(int):
    """An address on the device."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory. Whoever holds the device's allocation list keeps it alive."""

    address: int
    nbytes: int

    def at(self, offset: int = 0) -> Pointer:
        """The address `offset` bytes in."""
        if not 0 <= offset <= self.nbytes:
            raise IndexError(f"offset {offset} in a buffer of {self.nbytes} bytes")
        return Pointer(self.address + offset)


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Pinned host memory that kernels read and write at `address`; `bytes` is the host's view."""

    address: int
    bytes: NDArray[np.uint8]

    def at(self, offset: int = 0) -> Pointer:
        """The device's address `offset` bytes in."""
        return Pointer(self.address + offset)


class Graph(Protocol):
    """Launches recorded once, replayed with one call."""

    def launch(self) -> None:
        """Enqueue all of them."""
        ...


class Loop(Protocol):
    """A recorded body that the device repeats by itself while its condition kernel says so."""

    def launch(self) -> None:
        """Enqueue the loop."""
        ...


class Fence(Protocol):
    """A point in the queue."""

    def reached(self) -> bool:
        """Everything enqueued before it is done."""
        ...

    def wait(self) -> None:
        """Block until it is reached."""
        ...


Argument = Buffer | HostBuffer | Pointer | int | float | None | ctypes.Structure | ctypes.c_int64 | ctypes.c_uint64


class Device(Protocol):
    """A GPU with the project's kernels loaded. Everything enqueued runs in order. Errors of the device raise `DeviceLost`."""

    name: str

    def alloc(self, nbytes: int) -> Buffer:
        """Zeroed device memory. Raises MemoryError."""
        ...

    def host(self, nbytes: int) -> HostBuffer:
        """Zeroed pinned host memory that kernels can address."""
        ...

    def upload(self, to: Pointer, array: NDArray[Any]) -> None:
        """Copy an array to the device, in order; the array may be reused on return."""
        ...

    def download(self, start: Pointer, array: NDArray[Any]) -> None:
        """Copy device memory into an array, waiting for it."""
        ...

    def copy(self, to: Pointer, start: Pointer, nbytes: int) -> None:
        """Copy device memory, in order."""
        ...

    def copy_host(self, to: Pointer, start: HostBuffer, nbytes: int) -> None:
        """Copy pinned memory to the device in order; the pinned memory must stay as it is until then."""
        ...

    def zero(self, to: Pointer, nbytes: int) -> None:
        """Zero device memory, in order."""
        ...

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Argument], shared: int = 0, cluster: int = 1) -> None:
        """Enqueue a kernel. Arguments: buffers and Pointers by address, int as a C int, float as a C float, None as null, structures by value.

        `cluster`: so many blocks side by side (1, 2, 4, 8 or 16) run together and reach each other's shared memory.
        """
        ...

    def tensor_map(self, start: Pointer, rows: int, row_bytes: int, box_rows: int) -> TensorMap:
        """A map by which kernels copy boxes of `box_rows` rows of 64 bf16 values out of an array of `rows` rows of `row_bytes` bytes."""
        ...

    def record(self, body: Callable[[], None]) -> Graph:
        """Record the launches of `body` (which enqueues nothing else)."""
        ...

    def record_loop(self, body: Callable[[int], None]) -> Loop:
        """Record a loop body; it receives the handle that its condition kernel sets."""
        ...

    def fence(self) -> Fence:
        """A fence behind everything enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Wait for everything enqueued."""
        ...

    def idle(self) -> bool:
        """Nothing enqueued is left to run. Raises DeviceLost when the device failed."""
        ...

    def free_bytes(self) -> int:
        """Device memory not in use."""
        ...

    def close(self) -> None:
        """Release everything allocated here."""
        ...


def pack_arguments(arguments: Sequence[Argument]) -> tuple[Any, list[Any]]:
    """A C array of the addresses of the arguments, and the objects that must live as long as it."""
    values = [_as_c(a) for a in arguments]
    return (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values]), values


def _as_c(value: Argument) -> Any:
    if isinstance(value, Buffer | HostBuffer):
        return ctypes.c_void_p(value.address)
    if value is None or isinstance(value, Pointer):
        return ctypes.c_void_p(value)
    if isinstance(value, int):
        return ctypes.c_int(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return value


class Job(ctypes.Structure):
    """One matrix (or one a head, or one an expert) of a product launch; mirrors `struct Job` of matmul.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("x_high", ctypes.c_void_p),
        ("x_low", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_high", ctypes.c_void_p),
        ("y_low", ctypes.c_void_p),
        ("data_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("ldx", ctypes.c_int),
        ("ldy", ctypes.c_int),
        ("format", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("granules", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("slices", ctypes.c_int),
        ("out", ctypes.c_int),
        ("x_map", ctypes.c_int),
        ("y_map", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("which", ctypes.c_int),
        ("first_block", ctypes.c_int),
        ("token_tiles", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("slice_bits", ctypes.c_int),
        ("each", ctypes.c_int),
        ("by_each", ctypes.c_uint32),
        ("chunk", ctypes.c_int),
        ("chunks", ctypes.c_int),
    )


MAX_JOBS = 6


class Jobs(ctypes.Structure):
    """The matrices of one launch; mirrors `struct Jobs` of matmul.cuh."""

    _fields_ = (
        ("count", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("list", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("top_k", ctypes.c_int),
        ("share", ctypes.c_int),
        ("rest", ctypes.c_int),
        ("places", ctypes.c_int),
        ("place_bytes", ctypes.c_int),
        ("job", Job * MAX_JOBS),
    )


class TensorMap(ctypes.Structure):
    """A two-dimensional array as the copy engine sees it; opaque to all but the driver."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class Maps(ctypes.Structure):
    """The activations of every matrix of a launch; mirrors `struct Maps` of gemm.cu."""

    _fields_ = (("map", TensorMap * MAX_JOBS),)


class Returned(ctypes.Structure):
    """What a half layer returned; mirrors `struct Returned` of hyper.cuh."""

    _fields_ = (("y", ctypes.c_void_p), ("pairs", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("top_k", ctypes.c_int))


class SiteGiven(ctypes.Structure):
    """What a site of few rows is given; mirrors `struct SiteGiven` of hyper.cu."""

    _fields_ = (
        ("streams", ctypes.c_void_p),
        ("mixed", ctypes.c_int),
        ("coefficients", ctypes.c_void_p),
        ("returned", Returned),
        ("fn", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("hc_eps", ctypes.c_float),
        ("iterations", ctypes.c_int),
        ("x_high", ctypes.c_void_p),
        ("x_low", ctypes.c_void_p),
        ("ldx", ctypes.c_int),
    )


def kda_in_chunks(head_dim: int) -> bool:
    """Heads of this size have the kernels of kda_prompt.cu."""
    return head_dim % 16 == 0 and head_dim <= 128


def kernel_source(name: str) -> str:
    """The text of a kernel file with the shared parts in front."""
    own = [part for part, users in HEADERS.items() if name in users]
    return "".join((KERNEL_DIR / part).read_text() for part in ("common.cuh", *own, f"{name}.cu"))


def kernel_names(text: str, sizes: Mapping[str, int]) -> list[str]:
    """Kernels in a source compiled for these sizes."""
    left_out = {"gemm", "gemm_long", "attend_prompt"} if sizes.get("EXACT") else {"gemm_exact"}
    if sizes.get("EXACT") or not kda_in_chunks(sizes["KDA_D"]):
        left_out |= {"kda_prepare_prompt", "kda_chunks", "kda_finish_prompt"}
    return sorted(set(re.findall(r"^KERNEL (?:__launch_bounds__\([^)]*\) )?(\w+)\(", text, re.M)) - left_out)
