"""Cutting a batch into row groups for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm53serve.engine.seam import Batch


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` rows of a slot from position `start`."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows first..first+rows-1 of a batch. Either one piece, or single-row pieces of distinct slots."""

    first: int
    rows: int
    pieces: tuple[Piece, ...]


def cut(batch: Batch, most: int) -> Iterator[Group]:
    """Groups of at most `most` rows, in order: a longer span alone, single-row spans together."""
    at = 0
    singles: list[Piece] = []
    for span in batch.spans:
        if span.count == 1:
            singles.append(Piece(span.slot, span.start, 1))
            if len(singles) == most:
                yield Group(at, most, tuple(singles))
                at, singles = at + most, []
            continue
        if singles:
            yield Group(at, len(singles), tuple(singles))
            at, singles = at + len(singles), []
        for done in range(0, span.count, most):
            count = min(most, span.count - done)
            yield Group(at, count, (Piece(span.slot, span.start + done, count),))
            at += count
    if singles:
        yield Group(at, len(singles), tuple(singles))
