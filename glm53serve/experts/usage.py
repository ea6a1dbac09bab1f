"""The expert usage history: how often each routed expert was chosen, kept in a small text file from one run to the next.

Format (ASCII, LF): a version line, the model's fingerprint, then one line of counts for each sparse layer:

    glm53serve expert usage 1
    model <sparse layers> <experts>
    <count> <count> ...

Counts are halved when a run loads them, so that what a model was used for long ago fades.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VERSION_LINE = "glm53serve expert usage 1"
_COUNT_LIMIT = 1 << 64


class UsageError(ValueError):
    """A usage file that cannot be used; the message says what was found and what was expected."""


def render(counts: NDArray[np.uint64]) -> str:
    """The text of a usage file. counts: uint64 [sparse layers, experts]."""
    layers, experts = counts.shape
    lines = [VERSION_LINE, f"model {layers} {experts}"]
    lines += [" ".join(map(str, row)) for row in counts.tolist()]
    return "\n".join(lines) + "\n"


def parse(text: str, layers: int, experts: int) -> NDArray[np.uint64]:
    """The counts of a usage file as they stand in it: uint64 [sparse layers, experts]. Raises UsageError naming the first wrong line."""
    lines = text.split("\n")
    if lines[0] != VERSION_LINE:
        raise UsageError(f"line 1 is {lines[0][:40]!r}, expected {VERSION_LINE!r}")
    fingerprint = f"model {layers} {experts}"
    if len(lines) < 2 or lines[1] != fingerprint:
        raise UsageError(f"line 2 is {(lines[1:2] or [''])[0][:40]!r}, expected {fingerprint!r}")
    if len(lines) != layers + 3 or lines[-1]:
        raise UsageError(f"{len(lines) - 1} complete lines, expected {layers + 2}")
    counts = np.zeros((layers, experts), np.uint64)
    for layer, line in enumerate(lines[2:-1]):
        fields = line.split(" ")
        if len(fields) != experts or not all(f.isascii() and f.isdecimal() and len(f) <= 20 and int(f) < _COUNT_LIMIT for f in fields):
            raise UsageError(f"line {layer + 3}: expected {experts} counts from 0 to 2^64-1")
        counts[layer] = np.array([int(f) for f in fields], np.uint64)
    return counts


def read_history(path: Path, layers: int, experts: int) -> NDArray[np.uint64] | None:
    """The counts for a run to start from, aged: uint64 [sparse layers, experts]; None where no regular file stands. Raises UsageError for one of no use."""
    limit = len(render(np.full((layers, experts), _COUNT_LIMIT - 1, np.uint64)))
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise UsageError(error.strerror or str(error)) from error
    if len(raw) > limit:
        raise UsageError(f"over {limit} bytes")
    return parse(raw.decode("latin-1"), layers, experts) // np.uint64(2)


class UsageFile:
    """One usage file. No failure of it is ever an error: each kind is told once through `note` and the counts simply stay in memory.

    A regular file that is damaged, unreadable or of another model is renamed to `<name>.aside` before the first save writes a new one. Anything but
    a regular file (/dev/null, a directory) is neither read nor written.
    """

    def __init__(self, path: Path, layers: int, experts: int, note: Callable[[str], None]) -> None:
        self.path = Path(os.path.realpath(path))
        self._shape = (layers, experts)
        self._note = note
        self._foreign = False
        self._noted = False
        self._saved: NDArray[np.uint64] | None = None
        self._makes_folder = not os.path.isdir(self.path.parent)
        self._lock = threading.Lock()

    def load(self) -> NDArray[np.uint64]:
        """The counts to start from, aged: uint64 [sparse layers, experts]; zeros when there is no usable file."""
        try:
            counts = read_history(self.path, *self._shape)
        except UsageError as error:
            self._foreign = True
            self._note(f"{self.path}: no usable usage history ({error}); starting without, the file will be kept as {self._aside().name}")
            counts = None
        return np.zeros(self._shape, np.uint64) if counts is None else counts

    def save(self, counts: NDArray[np.uint64]) -> bool:
        """Replace the file by these counts, atomically, one thread at a time. True when the file says so now; a failure is noted once."""
        if counts.shape != self._shape:
            raise ValueError(f"usage counts {counts.shape}, expected {self._shape}")
        with self._lock:
            return self._replace(counts)

    def _replace(self, counts: NDArray[np.uint64]) -> bool:
        if self._saved is not None and np.array_equal(self._saved, counts):
            return True
        try:
            if not self._replaceable():
                return False
            if self._foreign:
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self.path, self._aside())
                self._foreign = False
            self._write(render(counts))
        except OSError as error:
            if not self._noted:
                self._noted = True
                self._note(f"{self.path}: usage history cannot be saved ({error.strerror})")
            return False
        self._saved = counts.copy()
        return True

    def _replaceable(self) -> bool:
        """True unless something stands there that is no regular file."""
        try:
            return stat.S_ISREG(os.stat(self.path).st_mode)
        except FileNotFoundError:
            return True

    def _aside(self) -> Path:
        return self.path.with_name(self.path.name + ".aside")

    def _write(self, text: str) -> None:
        # No fsync: after a power cut an old or an empty history is as good, and a turn's end must not wait for a disk.
        if self._makes_folder:  # but a model directory that was removed meanwhile stays removed
            self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(text, encoding="ascii", newline="\n")
            os.replace(beside, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
