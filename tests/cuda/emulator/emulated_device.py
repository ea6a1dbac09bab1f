"""The project's CUDA kernels on a CPU: the same sources compiled by g++ through emulate.h, launches run at once, graphs are lists of launches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.runtime import HEADERS, KERNEL_DIR, SOURCES, Argument, Buffer, HostBuffer, Pointer, TensorMap, kernel_names, pack_arguments

HERE = Path(__file__).parent


def compiler() -> str | None:
    """A C++ compiler that can build the emulated kernels, if there is one."""
    return shutil.which("g++") or shutil.which("clang++")


def build(defines: Mapping[str, int], flags: Sequence[str] = ("-O2",), edit: Callable[[str], str] = str, sources: Sequence[str] = SOURCES) -> Path:
    """Compile kernels with these sizes into a shared library, once for each text and sizes. `edit` may change their text."""
    common = "".join((KERNEL_DIR / part).read_text() for part in ("common.cuh", *HEADERS))
    body = "".join((KERNEL_DIR / f"{name}.cu").read_text() for name in sources)
    names = kernel_names(body, defines)
    calls = "".join(f'extern "C" void call_{name}(void** p) {{ call_kernel({name}, p); }}\n' for name in names)
    text = f'#define GLM_EMULATE 1\n#include "{HERE / "emulate.h"}"\nnamespace {{\n{edit(common + body)}}}\n{calls}'
    flags = ["-std=c++17", "-fPIC", "-w", *flags, *(f"-D{key}={value}" for key, value in sorted(defines.items()))]
    parts = [text, *((HERE / part).read_text() for part in ("emulate.h", "watch.h"))]
    digest = hashlib.sha256("".join([*flags, *parts]).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / "glm53serve-emulated-kernels"
    folder.mkdir(exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        source = folder / f"{digest}.cpp"
        source.write_text(text)
        part, made = (folder / f"{digest}.{os.getpid()}.{kind}" for kind in ("o", "so"))
        command = compiler()
        assert command is not None
        for arguments in ([*flags, "-c", "-o", str(part), str(source)], ["-shared", "-o", str(made), str(part)]):
            done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[:4000])
        part.unlink()
        made.replace(library)
    return library


class EmulatedGraph:
    """A list of launches."""

    def __init__(self, calls: list[Callable[[], None]], again: Callable[[], bool] | None = None) -> None:
        self.calls, self.again = calls, again

    def launch(self) -> None:
        while True:
            for call in self.calls:
                call()
            if self.again is None or not self.again():
                return


class EmulatedFence:
    """Reached at once: launches run when they are made."""

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class EmulatedDevice:
    """A `Device` whose memory is host memory. `crossed` counts the bytes of uploads and downloads.

    `copies_late`, `warps_run_ahead`, `last_warp_first`: see emulate.h.
    """

    name = "emulated"

    def __init__(self, defines: Mapping[str, int], memory: int = 1 << 40) -> None:
        self._library = ctypes.CDLL(str(self._build(defines)))
        self._library.emulate_launch.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 6 + [ctypes.c_int, ctypes.c_void_p]
        self._library.emulate_launch.restype = None
        self._kernels: dict[str, int] = {}
        self._memory: list[NDArray[np.uint8]] = []
        self._recording: list[Callable[[], None]] | None = None
        self.launches: dict[str, int] = {}
        self.left = memory
        self.crossed = 0
        self.copies_late = True
        self.warps_run_ahead = False
        self.last_warp_first = False
        self.after_launch: Callable[[str], None] = lambda _kernel: None

    def _build(self, defines: Mapping[str, int]) -> Path:
        return build(defines)

    def _zeros(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory from a multiple of 256 on, and as much behind it as a kernel may read too far."""
        memory = np.zeros(nbytes + 512, np.uint8)
        self._memory.append(memory)
        start = -memory.ctypes.data % 256
        return memory[start : start + nbytes]

    def alloc(self, nbytes: int) -> Buffer:
        if nbytes > self.left:
            raise MemoryError(f"no room for {nbytes} bytes on the device")
        self.left -= nbytes
        return Buffer(self._zeros(nbytes).ctypes.data, nbytes)

    def host(self, nbytes: int) -> HostBuffer:
        memory = self._zeros(nbytes)
        return HostBuffer(memory.ctypes.data, memory)

    def _do(self, call: Callable[[], None]) -> None:
        if self._recording is not None:
            self._recording.append(call)
        else:
            call()

    def upload(self, to: Pointer, array: NDArray[Any]) -> None:
        assert self._recording is None
        flat = np.ascontiguousarray(array)
        self.crossed += flat.nbytes
        ctypes.memmove(to, flat.ctypes.data, flat.nbytes)

    def download(self, start: Pointer, array: NDArray[Any]) -> None:
        assert array.flags.c_contiguous and self._recording is None
        self.crossed += array.nbytes
        ctypes.memmove(array.ctypes.data, start, array.nbytes)

    def copy(self, to: Pointer, start: Pointer, nbytes: int) -> None:
        self._do(lambda: ctypes.memmove(to, start, nbytes) and None)

    def copy_host(self, to: Pointer, start: HostBuffer, nbytes: int) -> None:
        self._do(lambda: ctypes.memmove(to, start.address, nbytes) and None)

    def zero(self, to: Pointer, nbytes: int) -> None:
        self._do(lambda: ctypes.memset(to, 0, nbytes) and None)

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Argument], shared: int = 0, cluster: int = 1) -> None:
        if kernel not in self._kernels:
            self._kernels[kernel] = ctypes.cast(self._library[f"call_{kernel}"], ctypes.c_void_p).value or 0
        array, keep = pack_arguments(arguments)
        x, y, z = (*grid, 1, 1)[:3]
        assert cluster in (1, 2, 4, 8, 16) and x % cluster == 0, (kernel, grid, cluster)
        assert 0 < threads <= 1024 and threads % 32 == 0 and min(x, y, z) > 0 and max(y, z) < 65536 and shared <= 227 << 10, (kernel, grid, threads, shared)

        def call() -> None:
            assert keep
            self.launches[kernel] = self.launches.get(kernel, 0) + 1
            order = int(self.copies_late) + 2 * int(self.warps_run_ahead) + 4 * int(self.last_warp_first)
            self._run(kernel, (x, y, z, threads, shared, cluster, order, ctypes.cast(array, ctypes.c_void_p)))
            self.after_launch(kernel)

        self._do(call)

    def _run(self, kernel: str, how: tuple[Any, ...]) -> None:
        self._library.emulate_launch(self._kernels[kernel], *how)

    def tensor_map(self, start: Pointer, rows: int, row_bytes: int, box_rows: int) -> TensorMap:
        assert start % 16 == 0 and row_bytes % 16 == 0 and 0 < box_rows <= 256
        made = TensorMap()
        made.opaque[:4] = [start, row_bytes, rows, box_rows]
        return made

    def record(self, body: Callable[[], None]) -> EmulatedGraph:
        assert self._recording is None
        self._recording = []
        try:
            body()
            return EmulatedGraph(self._recording)
        finally:
            self._recording = None

    def record_loop(self, body: Callable[[int], None]) -> EmulatedGraph:
        graph = self.record(lambda: body(3))
        graph.again = lambda: bool(self._library.emulate_condition(3))
        return graph

    def fence(self) -> EmulatedFence:
        return EmulatedFence()

    def synchronize(self) -> None:
        return None

    def idle(self) -> bool:
        return True

    def free_bytes(self) -> int:
        return self.left

    def close(self) -> None:
        self._memory.clear()
