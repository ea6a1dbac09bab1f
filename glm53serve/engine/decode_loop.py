"""The host's books of decoding on a `StepDevice`: which rows run, which steps are outstanding, which slots nothing can write any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.launch_ahead import DepthControl, LaunchRefused, Lease, Shape, Situation, consume, lease
from glm53serve.engine.ranks import RankMismatch, agree
from glm53serve.engine.step_device import End, Record, RowPlan, StepDevice


@dataclass(frozen=True, slots=True)
class Commit:
    """A token (or an end) of a slot. `filled` = positions of the slot computed; `token` is None when the row ended by a cancel."""

    slot: int
    token: int | None
    end: End
    filled: int


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

    def drop(self, slot: int) -> None:
        """Forget a slot's row while nothing is outstanding: no Commit of it comes, and the slot is free at once."""
        if self.outstanding:
            raise RuntimeError(f"slot {slot}: a row cannot be dropped with {self.outstanding} steps outstanding")
        self._rows = [row for row in self._rows if row.plan.slot != slot]
        self._arriving = [row for row in self._arriving if row.plan.slot != slot]

    def logits(self, slot: int) -> NDArray[np.float32]:
        """Logits [V] after the last committed position of a slot's live row, while nothing is outstanding."""
        return self.device.logits(next(index for index, row in enumerate(self._running) if row.plan.slot == slot))

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
