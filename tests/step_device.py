"""A decode device made of the engine's own layers: launched steps run when somebody waits for them, or earlier, as a real one would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53serve.engine.engine import Engine
from glm53serve.engine.sampling import Sampling, choose
from glm53serve.engine.seam import Batch, Span, never
from glm53serve.engine.step_device import End, Record, RowPlan


@dataclass(slots=True)
class _Row:
    plan: RowPlan
    generation: int
    token: int
    position: int
    left: int
    counter: int
    live: bool = True


class EngineStepDevice:
    """A `StepDevice` over the layers of an engine. `rng` decides how many queued steps run early."""

    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng
        self._rows: list[_Row] = []
        self._queued = 0
        self._ring: list[list[Record]] = []
        self._cancelled: set[tuple[int, int]] = set()
        self._last: dict[int, np.ndarray] = {}
        self._logits: dict[int, np.ndarray] = {}

    def upload(self, bucket: int, rows: Sequence[tuple[RowPlan, int]]) -> None:
        assert self._queued == 0 and len(rows) <= bucket
        self._cancelled.clear()
        self._rows = [_Row(p, g, p.token, p.position, min(p.limit, p.room), p.counter) for p, g in rows]

    def launch(self, bucket: int, steps: int, loop: bool) -> None:
        self._queued += steps
        for _ in range(self._rng.randint(0, self._queued)):
            self._step()

    def committed(self) -> int:
        return len(self._ring)

    def wait(self, step: int) -> None:
        while self._queued and len(self._ring) <= step:
            self._step()

    def record(self, step: int, row: int) -> Record:
        return self._ring[step][row]

    def cancel(self, row: int, generation: int) -> None:
        self._cancelled.add((row, generation))

    def stop_loop(self) -> None:
        return

    def logits(self, row: int) -> np.ndarray:
        assert self._queued == 0
        return self._logits[row]

    def last_logits(self, slot: int) -> np.ndarray | None:
        return self._last.pop(slot, None)

    def _step(self) -> None:
        self._queued -= 1
        live = [row for row in self._rows if row.live]
        records = {id(row): Record(row.generation, row.position, 0, End.PADDING) for row in self._rows}
        if live:
            batch = Batch(tuple(Span(row.plan.slot, row.position, 1) for row in live))
            streams = self._engine.head.embed(np.array([row.token for row in live], np.int64))
            logits = self._engine.head.logits(self._engine.run_layers(streams, batch, never))
            for row, line in zip(live, logits, strict=True):
                records[id(row)] = self._commit(row, line)
                self._logits[self._rows.index(row)] = line.copy()
        self._ring.append([records[id(row)] for row in self._rows])

    def _commit(self, row: _Row, logits: np.ndarray) -> Record:
        plan = row.plan
        token = choose(logits, Sampling(plan.temperature, plan.top_p, plan.seed), row.counter)
        end = End.LIVE
        if (self._rows.index(row), row.generation) in self._cancelled:
            end = End.CANCELLED
        elif token in plan.stop_ids:
            end = End.STOP
        elif row.left == 1:
            end = End.LENGTH
        record = Record(row.generation, row.position, token, end)
        row.live = end is End.LIVE
        if not row.live:
            self._last[plan.slot] = logits.copy()
        row.token, row.position, row.left, row.counter = token, row.position + 1, row.left - 1, row.counter + 1
        return record
