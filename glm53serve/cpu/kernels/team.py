"""Threads that run kernels: a list of operations is handed to native code once and needs no Python until its end.

An operation is four int64: kernel address, argument address, most chunks, chunks a row. A kernel is a C function
`(arguments, chunk, chunks)`. Chunks are claimed one by one, by the caller and by workers that spin for a short while and then park in
Python; a worker that the system does not schedule costs nothing, since the caller claims what is left. Which thread runs a chunk
changes no result: a chunk writes only what belongs to it.

Control block, int64 each on a cache line of its own:
  ticket   epoch << 32 | chunks << 16 | next chunk, claimed by adding 1
  finished chunks of this epoch that are done
  kernel, arguments of this epoch
  parked   workers waiting in Python
  quit     not 0: workers leave
  stop     address of the word that, once not 0, makes everybody skip the chunks that are left
"""

from __future__ import annotations

import functools
import threading

import numpy as np
from numba import cfunc, njit, types

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.target import JIT

KERNEL = types.void(types.int64, types.int64, types.int64)

_LINE = 64
_TICKET, _FINISHED, _KERNEL, _ARGS, _PARKED, _QUIT, _STOP = (i * _LINE for i in range(7))
_PAUSES = 400
_SPINS = _PAUSES + 1000
"""How often an idle worker looks before it parks: some 20 us of pauses, then giving way to whoever else wants the core."""
MAX_CHUNKS = 1 << 14


@njit("int64(int64)", **JIT)
def _work(control: int) -> int:
    """Run chunks until nothing came for a while (0) or the team is closed (1)."""
    idle = 0
    while idle < _SPINS:
        ticket = s.atomic_load(control + _TICKET)
        if (ticket & 0xFFFF) >= ((ticket >> 16) & 0xFFFF):
            idle += 1
            if idle > _PAUSES:
                s.yield_thread()
            else:
                s.pause()
            continue
        ticket = s.atomic_add(control + _TICKET, 1)
        chunk = ticket & 0xFFFF
        chunks = (ticket >> 16) & 0xFFFF
        if chunk < chunks:
            if s.atomic_load(s.ldi(control + _STOP)) == 0:
                s.call_kernel(s.ldi(control + _KERNEL), s.ldi(control + _ARGS), chunk, chunks)
            s.atomic_add(control + _FINISHED, 1)
            idle = 0
        if s.ldi(control + _QUIT) != 0:
            return 1
    left: int = s.ldi(control + _QUIT)
    return left


@njit("int64(int64, int64, int64, int64, int64, int64)", **JIT)
def _run(control: int, operations: int, count: int, rows: int, workers: int, stop: int) -> int:
    """Run operations one after another, each spread over the team, until the word at `stop` is not 0. Returns that word."""
    s.sti(control + _STOP, stop)
    for i in range(count):
        if s.atomic_load(stop) != 0:
            break
        operation = operations + 32 * i
        kernel = s.ldi(operation)
        args = s.ldi(operation + 8)
        chunks = max(1, min(s.ldi(operation + 16), rows * s.ldi(operation + 24)))
        if chunks == 1 or workers == 0:
            for chunk in range(chunks):
                if s.atomic_load(stop) == 0:
                    s.call_kernel(kernel, args, chunk, chunks)
            continue
        s.sti(control + _KERNEL, kernel)
        s.sti(control + _ARGS, args)
        s.atomic_store(control + _FINISHED, 0)
        epoch = (s.atomic_load(control + _TICKET) >> 32) + 1
        s.atomic_store(control + _TICKET, (epoch << 32) | (chunks << 16))
        while True:
            chunk = s.atomic_add(control + _TICKET, 1) & 0xFFFF
            if chunk >= chunks:
                break
            if s.atomic_load(stop) == 0:
                s.call_kernel(kernel, args, chunk, chunks)
            s.atomic_add(control + _FINISHED, 1)
        spins = 0
        while s.atomic_load(control + _FINISHED) < chunks:
            spins += 1
            if spins > _PAUSES:
                s.yield_thread()
            else:
                s.pause()
    stopped: int = s.atomic_load(stop)
    return stopped


class Team:
    """`threads` threads, the caller among them. Callers of `run` take turns."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = np.zeros(9 * _LINE // 8, np.int64)
        self._control = (self._memory.ctypes.data + _LINE - 1) // _LINE * _LINE
        self._view = self._memory[(self._control - self._memory.ctypes.data) // 8 :]
        self._wake = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._workers = [threading.Thread(target=self._loop, name=f"kernels-{i}", daemon=True) for i in range(1, threads)]
        for worker in self._workers:
            worker.start()

    def _loop(self) -> None:
        while _work(self._control) == 0:
            with self._lock:
                self._view[_PARKED // 8] += 1
            self._wake.acquire()
            if self._view[_QUIT // 8]:
                return

    def run(self, operations: int, count: int, rows: int, stop: int) -> bool:
        """Run `count` operations at address `operations`; `rows` scales the chunks of those that are split by row.

        `stop`: address of an int64. As soon as it is not 0 no further chunk is begun, and True is returned: what was computed is incomplete.
        """
        with self._one_at_a_time:
            if self._view[_PARKED // 8]:
                with self._lock:
                    parked, self._view[_PARKED // 8] = int(self._view[_PARKED // 8]), 0
                self._wake.release(parked)
            stopped: int = _run(self._control, operations, count, rows, self.threads - 1, stop)
        return stopped != 0

    def close(self) -> None:
        """End the workers."""
        self._view[_QUIT // 8] = 1
        self._wake.release(len(self._workers))
        for worker in self._workers:
            worker.join()


@functools.cache
def shared_team(threads: int) -> Team:
    """The process's one team of that size."""
    return Team(threads)


__all__ = ["KERNEL", "MAX_CHUNKS", "Team", "cfunc", "shared_team"]
