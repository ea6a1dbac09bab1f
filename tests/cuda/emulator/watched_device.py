"""An emulated device whose kernels are watched access by access: they rely on no more than CUDA promises, whatever the order in which the emulator runs them.

Programmatic dependent launch: launch M of a recorded graph may begin when every block of launch M-1 has let it (LET_NEXT_START before its wait, WAIT_BEFORE
behind it). Before its own wait it may rely on what was complete then: everything older than the last launch before it that lets the next one start behind its
wait; of that launch and those after it nothing. Behind its wait it sees all. The first launch of a graph, or of a round of a loop, follows whatever ran before
it completely. A read too early, a write before the wait and a thread that never waits are faults.

Blocks of a launch run in any order and at once: it is a fault, too, if one touches what another one writes. Those of a cluster wait for each other, and count
as one block.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from emulated_device import EmulatedDevice, EmulatedGraph, build
from numpy.typing import NDArray

ARENA = 64 << 20
WATCHED = ("-O1", "-fsanitize=thread")
MOST_FAULTS = 32


class Kind(IntEnum):
    """What a kernel may not do, as watch.h numbers it."""

    EARLY_READ = 0
    EARLY_WRITE = 1
    NO_WAIT = 2
    READ_OTHERS = 3
    WRITE_OTHERS = 4
    OVERWRITE = 5


TOLD = {
    Kind.EARLY_READ: "reads before its wait {what}, which {writer} writes",
    Kind.EARLY_WRITE: "writes before its wait {what}",
    Kind.NO_WAIT: "ends without a wait",
    Kind.READ_OTHERS: "reads {what}, which another block writes",
    Kind.WRITE_OTHERS: "writes {what}, which another block writes",
    Kind.OVERWRITE: "writes {what}, which another block reads",
}


class _Fault(ctypes.Structure):
    """Mirrors `struct Fault` of watch.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("kind", "launch", "writer", "block", "thread", "bytes")),
        ("at", ctypes.c_uint64),
        ("times", ctypes.c_uint64),
    )


class OrderFault(AssertionError):
    """A kernel depends on an order that CUDA does not promise."""


class WatchedGraph(EmulatedGraph):
    """A list of launches that may overlap, one round of a loop after the other."""

    def __init__(self, device: WatchedDevice, graph: EmulatedGraph) -> None:
        super().__init__(graph.calls, graph.again)
        self.device = device

    def launch(self) -> None:
        while True:
            with self.device.overlapping():
                for call in self.calls:
                    call()
            if self.again is None or not self.again():
                return


class WatchedDevice(EmulatedDevice):
    """Raises OrderFault behind the launch that has one; when `collecting`, goes on and notes it in `faults`, {(kernel, what)}.

    `edit` may change the kernels' text. `deaf`: kernels whose wait does not count; `hasty`: those taken to let the next one start before they have waited.
    `early`, `late`: kernels of graphs that let the next one start before and behind their wait.
    """

    def __init__(self, defines: Mapping[str, int], memory: int = 1 << 40, edit: Callable[[str], str] = str) -> None:
        self._edit = edit
        self._arena, self._accesses, self._used = np.zeros(ARENA, np.uint8), np.zeros((2, ARENA), np.uint64), 0
        self._starts: list[int] = []
        self._names = ["nothing"]  # of the launches, from number 0 on
        self._young = 0
        self.deaf: set[str] = set()
        self.hasty: set[str] = set()
        self.early: set[str] = set()
        self.late: set[str] = set()
        self.faults: set[tuple[str, Kind]] = set()
        self.collecting = False
        super().__init__(defines, memory)
        pointer = ctypes.c_void_p
        self._library.emulate_watched.argtypes = [pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
        self._watching = (self._arena.ctypes.data, ARENA, *[accesses.ctypes.data for accesses in self._accesses])

    def _build(self, defines: Mapping[str, int]) -> Path:
        return build(defines, WATCHED, self._edit)

    def _zeros(self, nbytes: int) -> NDArray[np.uint8]:
        start = self._used + -(self._arena.ctypes.data + self._used) % 256
        self._used = start + nbytes + 256
        assert self._used <= ARENA
        self._starts.append(start)
        return self._arena[start : start + nbytes]

    def record(self, body: Callable[[], None]) -> EmulatedGraph:
        return WatchedGraph(self, super().record(body))

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Launches in here may overlap each other."""
        self._young = len(self._names)
        try:
            yield
        finally:
            self._young = 0

    def _run(self, kernel: str, how: tuple[Any, ...]) -> None:
        number = len(self._names)
        self._names.append(kernel)
        self._library.emulate_watched(*self._watching, number, self._young, int(kernel in self.deaf))
        super()._run(kernel, how)
        if self._young:
            early = self._library.emulate_was_early() or kernel in self.hasty
            (self.early if early else self.late).add(kernel)
            self._young = self._young if early else number
        found = (_Fault * MOST_FAULTS)()
        for fault in found[: self._library.emulate_faults(found)]:
            self.faults.add((kernel, Kind(fault.kind)))
            if not self.collecting:
                raise OrderFault(self._told(kernel, fault))

    def _told(self, kernel: str, fault: _Fault) -> str:
        start = fault.at - self._arena.ctypes.data
        number = bisect_right(self._starts, start) - 1
        what = f"{fault.bytes} bytes at {start - self._starts[number]} of allocation {number}"
        told = TOLD[Kind(fault.kind)].format(what=what, writer=f"{self._names[fault.writer]} {fault.launch - fault.writer} launches ahead of it")
        return f"{kernel}, block {fault.block}, thread {fault.thread}, {told} ({fault.times} times)"
