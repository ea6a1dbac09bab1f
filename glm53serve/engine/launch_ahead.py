"""Decode steps launched before their predecessors' tokens are seen: how many, and which, as pure functions of plain data.

A device runs steps in order; the host stays up to `depth` steps behind. `glm53serve.engine.decode_loop` applies the decisions.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step runs on: its bucket and the rows in it, each a (slot, generation). Rows from len(rows) to bucket are padding."""

    bucket: int
    rows: tuple[tuple[int, int], ...]


class LaunchRefused(RuntimeError):
    """A step was asked for that cannot run at all: no graph for its bucket, or more rows than the largest bucket."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything `lease` looks at. Counts are taken after the last harvest.

    active_rows       rows live or arriving
    outstanding       steps launched and not harvested
    depth             steps the host may be behind
    limit_left        the smallest number of tokens a live row may still produce, outstanding steps not yet taken off
    room_left         the smallest number of positions left in a live row's slot, outstanding steps not yet taken off
    captured          there is a graph for a bucket that takes these rows
    shape_changed     rows were added or left since the last launch: the next step needs its inputs uploaded
    admission         a waiting turn could start at the next boundary (a turn that cannot start yet is not an admission)
    leaving           a live row must leave the batch now (its end is known to the host only)
    deferred          slots waiting for the fence of their last step
    host_rows         some row's next token depends on the host (log-probabilities, grammars)
    loop_bound        steps a device loop runs by itself at the most; 0: no device loop
    """

    active_rows: int
    outstanding: int
    depth: int
    limit_left: int
    room_left: int
    captured: bool = True
    shape_changed: bool = False
    admission: bool = False
    leaving: bool = False
    deferred: int = 0
    host_rows: bool = False
    loop_bound: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """What to do at a boundary: steps to enqueue now, whether their inputs are uploaded first, whether a running device loop must stop,
    and whether deferred slots may be released (nothing that can write them is outstanding)."""

    enqueue: int
    prologue: bool = False
    stop_loop: bool = False
    release: bool = False


def lease(s: Situation) -> Lease:
    """May steps be launched now, and how many? First match counts; see `tests/test_launch_ahead.py` for the table.

    Raises LaunchRefused when the bucket has no graph although rows are live.
    """
    release = s.deferred > 0 and s.outstanding == 0
    if s.active_rows <= 0:
        return Lease(0, release=release)
    if not s.captured:
        raise LaunchRefused(f"no step is captured for {s.active_rows} rows")
    if s.admission or s.leaving or s.deferred or s.shape_changed:
        if s.outstanding:
            return Lease(0, stop_loop=s.loop_bound > 0)
        if s.admission:
            return Lease(0, release=release)
    possible = min(s.limit_left, s.room_left) - s.outstanding
    if possible <= 0:
        return Lease(0, release=release)
    if s.host_rows:
        return Lease(0 if s.outstanding else 1, prologue=s.shape_changed, release=release)
    if s.loop_bound:
        return Lease(0 if s.outstanding else min(s.loop_bound, possible), prologue=s.shape_changed, release=release)
    wanted = max(1, s.depth + 1) - s.outstanding
    return Lease(max(0, min(wanted, possible)), prologue=s.shape_changed, release=release)


def consume(in_flight: Shape | None, wanted: Shape) -> bool:
    """Is the step in flight exactly the step wanted now: same bucket, same number of live rows, same slots in the same hands?

    A slot handed to another turn has a new generation, so it never looks unchanged; a row that turned into padding changes the row count.
    """
    return in_flight is not None and in_flight == wanted


@dataclass(slots=True)
class DepthControl:
    """How many steps ahead to run: 1 when the host is prompt, up to 8 when it stalls (the worst recent delay over the step time)."""

    step_seconds: float = 0.0
    delays: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def observe(self, host_seconds: float, step_seconds: float) -> None:
        """Note how long the host was away between two harvests, and how long a step takes."""
        self.delays.append(host_seconds)
        self.step_seconds = step_seconds if self.step_seconds == 0.0 else 0.9 * self.step_seconds + 0.1 * step_seconds

    @property
    def depth(self) -> int:
        """Steps ahead, 1..8."""
        if not self.delays or self.step_seconds <= 0.0:
            return 1
        return max(1, min(MAX_DEPTH, math.ceil(max(self.delays) / self.step_seconds)))
