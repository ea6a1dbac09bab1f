"""Reading experts from one or more copies of a model's files, past the page cache or through it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.faults import Faults
from glm53serve.experts.copies import Copies, Read
from glm53serve.experts.memory import allocate
from glm53serve.experts.places import PAGE, Place, Run
from glm53serve.model.errors import CheckpointError, ModelError

THREADS = 2
"""Reads under way on each copy: one disk gains nothing from more (a single read of some megabytes nearly fills it)."""
SAMPLE_SECONDS = 0.15
BUFFERED_GAIN = 1.25
"""Reading through the page cache costs a quarter of a core; it must be this much faster to be worth it."""


class ExpertReadError(CheckpointError):
    """A routed expert could not be read. `tensor` is the name of the tensor whose bytes did not come."""

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message, "io")
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of expert reads, measured; `direct` is None where the file system cannot read past the page cache."""

    direct: float | None
    buffered: float

    @property
    def prefer_direct(self) -> bool:
        """Which of the two to use."""
        return self.direct is not None and self.buffered < BUFFERED_GAIN * self.direct


class ExpertFiles:
    """The weight files of a model, open in each of its copies. `fetch` may be called from any thread."""

    def __init__(self, copies: Sequence[Sequence[Path]], faults: Faults | None = None) -> None:
        """copies: for each copy its files, in one order. Raises ModelError (io) when a file of a copy is missing, not the first copy's size or, at
        a look into it, not its content."""
        self.copies = [list(files) for files in copies]
        self.direct = False
        self.on_trouble: Callable[[str], None] = _silent
        self._faults = faults or Faults()
        self._lock = threading.Lock()
        self._reads = Copies(len(self.copies), THREADS)
        self._read_ended = threading.Condition()
        self._buffered = _open_copies(self.copies, 0)
        self._direct: list[list[int]] = []
        self._bad: set[int] = set()
        self._measuring = False
        try:
            for files, fds in zip(self.copies[1:], self._buffered[1:], strict=True):
                for path, fd, first in zip(files, fds, self._buffered[0], strict=True):
                    _check_copy(path, fd, first)
        except ModelError:
            self.close()
            raise

    def fetch(self, place: Place, buffer: NDArray[np.uint8]) -> None:
        """Read one expert into a page-aligned buffer, from the copy that will have read it first (see `Copies`); one that fails is stood in for by
        the others. Raises ExpertReadError."""
        failure: ExpertReadError | None = None
        tried: set[int] = set()
        while len(tried) < len(self.copies):
            read = self._begin(tried)
            failed = True
            try:
                for run in place.runs:
                    self._read(read.copy, run, buffer)
                failed = False
                return
            except ExpertReadError as error:
                failure = failure or error
                tried.add(read.copy)
                if len(self.copies) > 1 and read.copy not in self._bad:
                    self._bad.add(read.copy)
                    self.on_trouble(f"{error}; its reads go to another copy of the model")
            finally:
                self._end(read, failed)
        assert failure is not None
        raise failure

    def _begin(self, tried: set[int]) -> Read:
        with self._read_ended:
            while (read := self._reads.begin(tried)) is None:
                self._read_ended.wait()
            return read

    def _end(self, read: Read, failed: bool) -> None:
        with self._read_ended:
            self._reads.end(read, failed)
            self._read_ended.notify_all()

    def _read(self, copy: int, run: Run, buffer: NDArray[np.uint8]) -> None:
        fd = (self._direct if self.direct else self._buffered)[copy][run.file]
        path = self.copies[copy][run.file]
        view = buffer.data[run.at : run.at + run.nbytes]
        done = 0
        try:
            with self._lock:
                if not self._measuring:
                    self._faults.hit("read")
            while done < run.needed:
                # after an odd number of bytes a direct read can only go on from the page's start
                done = done // PAGE * PAGE if self.direct else done
                count = os.preadv(fd, [view[done:]], run.offset + done)
                if count == 0 or (self.direct and done + count < run.needed and count % PAGE):
                    at, end = run.offset + done + count, os.fstat(fd).st_size
                    raise ExpertReadError(f"{path}: {run.tensor_at(at)}: the file has {end} bytes now, it had more when it was opened", run.tensor_at(at))
                done += count
        except OSError as error:
            tensor = run.tensor_at(run.offset + done)
            raise ExpertReadError(f"{path}: {tensor}: cannot be read ({os.strerror(error.errno or 0)})", tensor) from None

    # -- direct or buffered

    def open_direct(self) -> bool:
        """Open the files a second time for reads past the page cache; False when the system or a file system has none."""
        flag = getattr(os, "O_DIRECT", 0)
        if flag == 0:
            return False
        if not self._direct:
            try:
                self._direct = _open_copies(self.copies, flag)
            except ModelError:
                return False
        return True

    def measure(self, places: Sequence[Place], seconds: float = SAMPLE_SECONDS, rng: np.random.Generator | None = None) -> Rates:
        """Read randomly chosen experts for `seconds` each way, with the threads of real use."""
        rng = rng or np.random.default_rng()
        order = [places[i] for i in rng.permutation(len(places))]
        direct = None
        before = self.direct
        self._measuring = True
        try:
            # what the page cache already holds must not be put there by ourselves, so direct reads go first and the other way takes other experts
            half = max(1, len(order) // 2)
            if self.open_direct():
                self.direct = True
                try:
                    direct = self._rate(order[:half], seconds)
                except ExpertReadError:
                    direct = None
            self.direct = False
            return Rates(direct, self._rate(order[half:] or order, seconds))
        finally:
            self.direct, self._measuring = before, False

    def _rate(self, places: Sequence[Place], seconds: float) -> float:
        buffers = [allocate(max(p.nbytes for p in places)) for _ in range(THREADS * len(self.copies))]
        began = time.perf_counter()
        items = iter(places)

        def work(number: int) -> int:
            total = 0
            while total == 0 or time.perf_counter() - began < seconds:
                with self._lock:
                    item = next(items, None)
                if item is None:
                    break
                self.fetch(item, buffers[number])
                total += item.nbytes
            return total

        with ThreadPoolExecutor(len(buffers)) as pool:
            total = sum(pool.map(work, range(len(buffers))))
        return total / (time.perf_counter() - began)

    def close(self) -> None:
        """Close every file."""
        for fds in (*self._buffered, *self._direct):
            for fd in fds:
                os.close(fd)
        self._buffered, self._direct = [], []


def _silent(_line: str) -> None:
    return


def _check_copy(path: Path, fd: int, first: int) -> None:
    """Compare a file with the model's own: its size, and a page at the start (which tensors lie where), in the middle and at the end."""
    size, wanted = os.fstat(fd).st_size, os.fstat(first).st_size
    if size != wanted:
        raise ModelError(f"{path}: {size} bytes, the model's own file has {wanted}: not a copy of it", "io")
    try:
        for offset in (0, size // 2, max(0, size - PAGE)):
            if os.pread(fd, PAGE, offset) != os.pread(first, PAGE, offset):
                raise ModelError(f"{path}: other bytes than the model's own file behind byte {offset}: not a copy of it", "io")
    except OSError as error:
        raise ModelError(f"{path}: cannot be compared with the model's own file ({error.strerror})", "io") from None


def _open_copies(copies: Sequence[Sequence[Path]], flags: int) -> list[list[int]]:
    """The files of every copy, opened; all or none. Raises ModelError (io)."""
    fds: list[list[int]] = []
    try:
        for files in copies:
            fds.append([])
            for path in files:
                fds[-1].append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags))
    except OSError as error:
        for fd in chain.from_iterable(fds):
            os.close(fd)
        detail = "no such file" if error.errno == errno.ENOENT else error.strerror
        raise ModelError(f"{path}: cannot be read ({detail})", "io") from None
    return fds


def model_copies(directory: Path, files: Sequence[Path], mirrors: str) -> list[list[Path]]:
    """The files of the model and of each directory in `mirrors` (separated by `;` or `,`), in the same order."""
    names = [part.strip() for part in mirrors.replace(";", ",").split(",")]
    return [list(files)] + [[Path(name) / path.relative_to(directory) for path in files] for name in names if name]
