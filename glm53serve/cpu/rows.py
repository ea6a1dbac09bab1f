"""Cutting a batch into row groups: few enough rows that the halt question between two groups comes soon."""

from __future__ import annotations

from dataclasses import dataclass

from glm53serve.engine.seam import Batch

GROUP_ROWS = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one slot inside a group: rows first .. first + count - 1 of the group, positions start, start + 1, ..."""

    slot: int
    start: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows first .. first + count - 1 of the batch, and whose they are."""

    first: int
    count: int
    pieces: tuple[Piece, ...]


def row_groups(batch: Batch, limit: int = GROUP_ROWS) -> list[Group]:
    """The batch's rows in order, in groups of at most `limit` rows; a span may be spread over several groups."""
    groups: list[Group] = []
    pieces: list[Piece] = []
    first = filled = 0
    for span in batch.spans:
        done = 0
        while done < span.count:
            count = min(span.count - done, limit - filled)
            pieces.append(Piece(span.slot, span.start + done, filled, count))
            done += count
            filled += count
            if filled == limit:
                groups.append(Group(first, filled, tuple(pieces)))
                first, filled, pieces = first + filled, 0, []
    if filled:
        groups.append(Group(first, filled, tuple(pieces)))
    return groups
