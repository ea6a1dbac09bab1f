"""Decode steps launched before their predecessors' tokens are seen: the decisions, and the host's side of the books.

A device runs steps in order. A step feeds every live row's token, and its last kernel *commits*: it writes a record for each row into a ring,
and parks rows that ended (a parked row is never written again, so no step ever has to be undone). The host stays up to `depth` steps behind.

The decisions (`lease`, `consume`, `agree`) are pure functions of plain data; `DecodeLoop` applies them to anything that is a `StepDevice`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_DEPTH = 8


class End(IntEnum):
    """Why a row was parked, as the commit kernel writes it; LIVE = the row goes on, PADDING = there was no live row here."""

    LIVE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    PADDING = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step runs on: its bucket and the rows in it, each a (slot, generation). Rows from len(rows) to bucket are padding."""

    bucket: int
    rows: tuple[tuple[int, int], ...]


class RankMismatch(RuntimeError):
    """The ranks do not agree on the step: fatal, never answered by falling back on one of them."""


class LaunchRefused(RuntimeError):
    """A step was asked for that cannot run at all: no graph for its bucket, or more rows than the largest bucket."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything `lease` looks at. Counts are taken after the last harvest.

    outstanding       steps launched and not harvested
    limit_left        the smallest number of tokens a live row may still produce, outstanding steps not yet taken off
    room_left         the smallest number of positions left in a live row's slot, outstanding steps not yet taken off
    shape_changed     rows were added or left since the last launch: the next step needs its inputs uploaded
    admission         a waiting turn could start at the next boundary (a turn that cannot start yet is not an admission)
    leaving           a live row must leave the batch now (its end is known to the host only)
    deferred          slots waiting for the fence of their last step
    host_rows         some row's next token depends on the host (log-probabilities, grammars)
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


def agree(views: Sequence[tuple[Shape | None, Lease]]) -> tuple[Shape | None, Lease]:
    """The one decision all ranks take, from what each of them holds in flight and would do. Raises RankMismatch when they differ."""
    if not views:
        raise RankMismatch("no rank took part in the decision")
    for rank, view in enumerate(views):
        if view != views[0]:
            raise RankMismatch(f"rank {rank} holds {view}, rank 0 holds {views[0]}")
    return views[0]


class Worker(Protocol):
    """A rank's worker as shutdown sees it."""

    def tell(self) -> None:
        """Ask it to stop; returns at once."""
        ...

    def join(self) -> None:
        """Wait for its end."""
        ...


def shut_down(workers: Sequence[Worker]) -> None:
    """Tell every worker before joining any: a worker may wait for its peers while it stops. The first error is raised after all were joined."""
    errors: list[Exception] = []
    for act in [worker.tell for worker in workers] + [worker.join for worker in workers]:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - every other worker must still be told and joined; raised below
            errors.append(error)
    if errors:
        raise errors[0]


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


@dataclass(frozen=True, slots=True)
class Commit:
    """A token (or an end) of a slot. `filled` = positions of the slot computed; `token` is None when the row ended by a cancel."""

    slot: int
    token: int | None
    end: End
    filled: int


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

    def last_logits(self, slot: int) -> NDArray[np.float32] | None:
        """Logits [V] after the last position a parked row of this slot was fed, kept when it was parked; None when they were not kept."""
        ...


@dataclass(slots=True)
class _Row:
    plan: RowPlan
    generation: int
    cancelled: bool = False


class DecodeLoop:
    """The host's side of decoding on a `StepDevice`: start rows, take turns, cancel. One thread calls everything but `cancel`.

    A turn launches what the lease allows, waits for the oldest outstanding step and returns what it committed. `loop_bound` > 0 makes
    the device loop by itself for that many steps a launch.
    """

    def __init__(self, device: StepDevice, depth: int | None = None, loop_bound: int = 0, clock: Callable[[], float] = perf_counter) -> None:
        self.device = device
        self.fixed_depth = depth
        self.loop_bound = loop_bound
        self.control = DepthControl()
        self._clock = clock
        self._rows: list[_Row] = []
        self._arriving: list[_Row] = []
        self._flying: deque[Shape] = deque()
        self._running: tuple[_Row, ...] = ()
        self._deferred: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._generation = 0
        self.launched = 0
        self.harvested = 0
        self._last_harvest = 0.0

    # -- what is running

    @property
    def live_slots(self) -> tuple[int, ...]:
        """Slots with a live or arriving row."""
        return tuple(row.plan.slot for row in self._rows + self._arriving)

    @property
    def outstanding(self) -> int:
        """Steps launched and not harvested."""
        return self.launched - self.harvested

    @property
    def depth(self) -> int:
        """Steps the host may be behind."""
        return self.control.depth if self.fixed_depth is None else self.fixed_depth

    def take_released(self) -> list[int]:
        """Slots of ended rows that no launched step can write any more, each once."""
        freed, self._free = self._free, []
        return freed

    # -- rows

    def start(self, plan: RowPlan) -> None:
        """Add a row; it joins at the next boundary. Raises ValueError for a slot still live, held back, or a plan with nothing to do."""
        if plan.slot in self.live_slots or any(slot == plan.slot for slot, _ in self._deferred):
            raise ValueError(f"slot {plan.slot} still has a row")
        if plan.limit < 1 or plan.room < 1:
            raise ValueError(f"slot {plan.slot}: nothing to decode (limit {plan.limit}, room {plan.room})")
        if len(self._rows) + len(self._arriving) >= self.device.buckets[-1]:
            raise LaunchRefused(f"more rows than the largest bucket, {self.device.buckets[-1]}")
        self._generation += 1
        self._arriving.append(_Row(plan, self._generation))

    def cancel(self, slot: int) -> None:
        """Park a slot's row at its next commit; the end arrives as a Commit. A slot without a row is left alone.

        A row that has not begun makes its first step all the same: its token was chosen, and what was chosen is computed.
        """
        for row in self._rows + self._arriving:
            if row.plan.slot == slot:
                row.cancelled = True
        for index, row in enumerate(self._running):
            if row.plan.slot == slot:
                self.device.cancel(index, row.generation)

    # -- a turn

    def turn(self, admission: bool = False) -> list[Commit]:
        """Launch what may be launched, harvest the oldest outstanding step. `admission`: a waiting turn could start now (drains the device)."""
        commits: list[Commit] = []
        decision = self._decide(admission)
        if decision.stop_loop:
            self.device.stop_loop()
        if decision.release:
            self._release()
            if not admission:
                decision = self._decide(admission)
        if decision.enqueue:
            self._launch(decision)
        if self.outstanding:
            commits += self._harvest()
        if not self.outstanding:
            self._release()
        return commits

    def drain(self) -> list[Commit]:
        """Harvest everything outstanding without launching more; the device is idle afterwards as far as decode goes."""
        if self.loop_bound and self.outstanding:
            self.device.stop_loop()
        commits: list[Commit] = []
        while self.outstanding:
            commits += self._harvest()
        self._release()
        return commits

    def _situation(self, admission: bool) -> Situation:
        rows = self._rows + self._arriving
        return Situation(
            active_rows=len(rows),
            outstanding=self.outstanding,
            depth=self.depth,
            limit_left=min((row.plan.limit for row in rows), default=0),
            room_left=min((row.plan.room for row in rows), default=0),
            captured=len(rows) <= self.device.buckets[-1],
            shape_changed=tuple(rows) != self._running,
            admission=admission,
            deferred=len(self._deferred),
            host_rows=any(row.plan.host_row for row in rows),
            loop_bound=self.loop_bound,
        )

    def _decide(self, admission: bool) -> Lease:
        in_flight = self._flying[-1] if self._flying else None
        return agree([(in_flight, lease(self._situation(admission)))])[1]

    def _shape(self, rows: Sequence[_Row]) -> Shape:
        bucket = next(b for b in self.device.buckets if b >= len(rows))
        return Shape(bucket, tuple((row.plan.slot, row.generation) for row in rows))

    def _launch(self, decision: Lease) -> None:
        rows = self._rows + self._arriving
        shape = self._shape(rows)
        if decision.prologue:
            self.device.upload(shape.bucket, [(row.plan, row.generation) for row in rows])
            self._rows, self._arriving, self._running = rows, [], tuple(rows)
            for index, row in enumerate(rows):
                if row.cancelled:
                    self.device.cancel(index, row.generation)
        elif self._flying and not consume(self._flying[-1], shape):
            raise RankMismatch(f"the device runs {self._flying[-1]}, the next step would be {shape}")
        self.device.launch(shape.bucket, decision.enqueue, self.loop_bound > 0)
        self.launched += decision.enqueue
        self._flying.extend([shape] * decision.enqueue)

    def _harvest(self) -> list[Commit]:
        away = self._clock() - self._last_harvest if self._last_harvest else 0.0
        self.device.wait(self.harvested)
        if self.device.committed() <= self.harvested:
            # A loop that was stopped (or parked all its rows) before it ran every step it was launched for.
            self.launched = self.harvested
            self._deferred = [(slot, min(fence, self.launched)) for slot, fence in self._deferred]
            self._flying.clear()
            return []
        shape = self._flying.popleft()
        commits = [c for index, key in enumerate(shape.rows) if (c := self._take(self.harvested, index, key)) is not None]
        self.harvested += 1
        now = self._clock()
        if self._last_harvest:
            self.control.observe(away, now - self._last_harvest)
        self._last_harvest = now
        return commits

    def _take(self, step: int, index: int, key: tuple[int, int]) -> Commit | None:
        slot, generation = key
        record = self.device.record(step, index)
        if record.generation != generation:
            raise RankMismatch(f"step {step} row {index}: generation {record.generation} in the ring, {generation} launched")
        if record.end == End.PADDING:
            return None
        row = next(r for r in self._rows if r.generation == generation)
        filled = record.position + 1
        if record.end != End.LIVE:
            self._rows.remove(row)
            self._deferred.append((slot, self.launched))
        if record.end == End.CANCELLED:
            return Commit(slot, None, record.end, filled)
        row.plan = _advanced(row.plan, record)
        return Commit(slot, record.token, record.end, filled)

    def _release(self) -> None:
        held = self._deferred
        self._free += [slot for slot, fence in held if self.harvested >= fence]
        self._deferred = [(slot, fence) for slot, fence in held if self.harvested < fence]


def _advanced(plan: RowPlan, record: Record) -> RowPlan:
    return replace(
        plan, token=record.token, position=record.position + 1, limit=plan.limit - 1, room=plan.room - 1, counter=plan.counter + 1
    )
