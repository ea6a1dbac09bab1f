"""Where the pieces of each routed expert lie on disk and in a buffer: the fewest aligned reads that fetch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.checkpoint import Piece
from glm53serve.model.weights import FfnWeights, Matrix

PAGE = 4096
"""Alignment of a direct read's offset, length and memory: no disk in use needs more."""


@dataclass(frozen=True, slots=True)
class Run:
    """One read: `nbytes` (whole pages) from the page-aligned `offset` of file number `file` into the buffer at `at`.

    The first `needed` bytes must come; the file may end after them. `tensors` are (end, name) of the pieces in order of their bytes.
    """

    file: int
    offset: int
    nbytes: int
    needed: int
    at: int
    tensors: tuple[tuple[int, str], ...]

    def tensor_at(self, position: int) -> str:
        """Name of the tensor that the byte `position` of the file belongs to."""
        return next((name for end, name in self.tensors if position < end), self.tensors[-1][1])


@dataclass(frozen=True, slots=True)
class Place:
    """One routed expert: its reads, and its pieces (in the order of `Checkpoint.expert_pieces`) each with its first byte in the buffer."""

    runs: tuple[Run, ...]
    pieces: tuple[tuple[Piece, int], ...]
    nbytes: int
    stored: int

    def weights(self, buffer: NDArray[np.uint8]) -> FfnWeights:
        """The expert as views of a filled buffer."""
        arrays = {p.role: buffer[at : at + p.nbytes].view(p.dtype).reshape(p.shape) for p, at in self.pieces}
        formats = {p.role: p.format for p, _ in self.pieces}

        def matrix(role: str) -> Matrix:
            data, fmt = arrays[role], formats[role]
            rows = data.shape[0]
            cols = data.shape[1] if fmt != "int4" else self._int4_cols(role)
            return Matrix(fmt, rows, cols, data, arrays.get(f"{role}.scale"))

        return FfnWeights(matrix("gate"), matrix("up"), matrix("down"))

    def _int4_cols(self, role: str) -> int:
        """A row of nibbles does not tell whether its last one counts: columns of gate and up are rows of down and the other way round."""
        other = "down" if role != "down" else "gate"
        return next(p.shape[0] for p, _ in self.pieces if p.role == other)


def place(pieces: Sequence[Piece], file_number: Callable[[Path], int]) -> Place:
    """The reads of one expert: pieces whose pages touch are fetched together."""
    ordered = sorted(((file_number(p.path), p.offset, p) for p in pieces), key=lambda item: item[:2])
    runs: list[Run] = []
    placed: dict[str, int] = {}
    group: list[tuple[int, int, Piece]] = []
    at = 0

    def finish() -> int:
        first = group[0][1] // PAGE * PAGE
        end = group[-1][1] + group[-1][2].nbytes
        nbytes = -(-(end - first) // PAGE) * PAGE
        runs.append(Run(group[0][0], first, nbytes, end - first, at, tuple((o + p.nbytes, p.tensor) for _, o, p in group)))
        placed.update({p.role: at + o - first for _, o, p in group})
        return nbytes

    for item in ordered:
        if group and (item[0] != group[-1][0] or item[1] // PAGE > -(-(group[-1][1] + group[-1][2].nbytes) // PAGE)):
            at += finish()
            group = []
        group.append(item)
    at += finish()
    return Place(tuple(runs), tuple((p, placed[p.role]) for p in pieces), at, sum(p.nbytes for p in pieces))
