"""A device that decodes by itself, as the host sees it: rows go in, a record of each row comes out of every step.

A step feeds every live row's token, and its last kernel *commits*: it writes a record for each row into a ring, and parks rows that ended
(a parked row is never written again, so no step ever has to be undone).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class End(IntEnum):
    """Why a row was parked, as the commit kernel writes it; LIVE = the row goes on, PADDING = there was no live row here."""

    LIVE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    PADDING = 4


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A row to decode: feed `token` at `position` of `slot`, then go on until an end.

    limit = tokens it may still produce (>= 1), room = positions left in the slot from `position` on (>= 1); the row ends with LENGTH at the smaller.
    `counter` numbers the token to be drawn first (for sampling). `host_row`: the next step must wait until the host has seen this one's logits.
    """

    slot: int
    token: int
    position: int
    limit: int
    room: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    counter: int = 0
    host_row: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One ring record, as the commit kernel wrote it: `token` was produced by feeding `position`; with CANCELLED it is not part of the answer."""

    generation: int
    position: int
    token: int
    end: End


class StepDevice(Protocol):
    """A device that runs decode steps in launch order and commits each into a ring."""

    buckets: tuple[int, ...]

    def upload(self, bucket: int, rows: Sequence[tuple[RowPlan, int]]) -> None:
        """Set the inputs of the next steps (plans with their generations), in stream order. Called with no step outstanding."""
        ...

    def launch(self, bucket: int, steps: int, loop: bool) -> None:
        """Enqueue `steps` steps, back to back or (with `loop`) as one device loop bounded by them."""
        ...

    def committed(self) -> int:
        """Steps committed since start."""
        ...

    def wait(self, step: int) -> None:
        """Return when more than `step` steps are committed, or nothing that could commit them is running any more."""
        ...

    def record(self, step: int, row: int) -> Record:
        """The record of a row of a committed step (at most a ring's length old)."""
        ...

    def cancel(self, row: int, generation: int) -> None:
        """Park a row at the next commit. May be called from any thread."""
        ...

    def stop_loop(self) -> None:
        """End a running device loop at its next step border; a no-op for plain steps."""
        ...

    def logits(self, row: int) -> NDArray[np.float32]:
        """Logits [V] of a row of the last step, as long as no later one is launched."""
        ...

    def last_logits(self, slot: int) -> NDArray[np.float32] | None:
        """Logits [V] after the last position a parked row of this slot was fed, kept when it was parked; None when they were not kept."""
        ...
