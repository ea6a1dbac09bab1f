"""Decoding turns on a device that runs ahead: rows go into a `DecodeLoop`, tokens come out of its ring some steps later.

A row's turn is `busy` from its first fed token to the step after which nothing launched can touch its slot any more; only then does it
end. What the device committed before a row was parked is sent, so a slot's history is always what was sent.

While something else has the engine for a while (a prompt's chunk), rows rest: nothing is outstanding, the last token is not sent yet, so the
turn is as one between two steps and may end at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from glm53serve.engine.decode_loop import Commit, DecodeLoop
from glm53serve.engine.engine import Cost, Engine
from glm53serve.engine.sampling import choose
from glm53serve.engine.step_device import End as RowEnd
from glm53serve.engine.step_device import RowPlan
from glm53serve.serve.emitter import Emitter
from glm53serve.serve.turns import Desk, End, Turn

MOST_STOP_IDS = 8
"""What the commit on the device can compare a token with; with more, steps go through the host."""


@dataclass(slots=True)
class _Row:
    """A turn in the loop: the token that is being fed, and how the turn will end once its slot is released.

    `last` is the token of a turn that has reached its limit. It is sent with the end, so that a cancel that comes before finds a history
    of what was sent.
    """

    turn: Turn
    fed: int
    end: End = End.STOPPED
    last: int | None = None

    @property
    def resting(self) -> bool:
        """Nothing of it is outstanding, and `fed` will be sent when it goes on."""
        return not self.turn.busy


@dataclass(slots=True)
class Ahead:
    """Keeps the turns that decode on the device in step with its commits."""

    engine: Engine
    desk: Desk
    emitter: Emitter
    _rows: dict[int, _Row] = field(default_factory=dict)

    def places(self, turns: list[Turn]) -> list[Turn]:
        """Those of the turns that the device decodes: the ones it has, and as many others as its largest bucket still takes."""
        loop = self.engine.ahead
        assert loop is not None
        for slot in [slot for slot, row in self._rows.items() if not row.turn.live]:
            self._forget(loop, slot)
        room = max(0, loop.device.buckets[-1] - len(self._rows))
        others = [turn for turn in turns if turn.slot.index not in self._rows]
        taken = others[:room]
        return [turn for turn in turns if turn.slot.index in self._rows or turn in taken]

    def held(self) -> list[Turn]:
        """The turns in the loop."""
        return [row.turn for row in self._rows.values() if row.turn.live]

    def turn(self, turns: list[Turn], drain: bool, rest: bool) -> tuple[int, int]:
        """Let new turns join, harvest what the device committed, end what ended. `drain`: nothing is outstanding afterwards; `rest`: and rows rest.

        Returns (steps, rows) that were harvested.
        """
        loop = self.engine.ahead
        assert loop is not None
        for turn in turns:
            row = self._rows.get(turn.slot.index)
            if row is None:
                self._join(loop, turn)
            elif row.resting:
                self._go_on(loop, row)
        began = perf_counter()
        before = loop.harvested
        commits = loop.turn()
        if drain or rest:
            commits += loop.drain()
        seconds = perf_counter() - began
        latest = {commit.slot: number for number, commit in enumerate(commits)}
        for number, commit in enumerate(commits):
            self._take(loop, commit, seconds / len(commits), rest=rest and latest[commit.slot] == number)
        for slot in loop.take_released():
            self._leave(loop, slot)
        return loop.harvested - before, len(commits)

    def _join(self, loop: DecodeLoop, turn: Turn) -> None:
        if turn.logits is None:
            return
        token = choose(turn.logits, turn.sampling, turn.emitted)
        with self.desk.lock:
            if not turn.live or not self.emitter.emit(turn, token):
                return
            turn.busy = True
        slot = turn.slot
        how = turn.sampling
        self._rows[slot.index] = _Row(turn, token)
        loop.start(
            RowPlan(
                slot=slot.index,
                token=token,
                position=slot.filled,
                limit=turn.limit - turn.emitted,
                room=self.engine.capacity - slot.filled,
                stop_ids=tuple(sorted(self.emitter.stop_ids)),
                temperature=0.0 if how.greedy else how.temperature,
                top_p=how.top_p,
                seed=how.seed,
                counter=turn.emitted,
            )
        )
        if turn.cancelled or turn.stopped:  # it came between the token and the start
            loop.cancel(slot.index)

    def _take(self, loop: DecodeLoop, commit: Commit, seconds: float, rest: bool) -> None:
        """Book a commit; `rest`: it is its row's last before something else has the engine."""
        row = self._rows[commit.slot]
        turn = row.turn
        slot = turn.slot
        slot.cut(slot.filled)
        if commit.filled > slot.filled:
            slot.history.append(row.fed)
            slot.filled = commit.filled
            turn.forwards += 1
            turn.cost.add(Cost(attention=seconds))
        slot.logits = None
        slot.resumable = False
        if commit.end is RowEnd.CANCELLED or commit.token is None:
            row.end = End.STOPPED
        elif commit.token in self.emitter.stop_ids:
            row.end = End.STOP_TOKEN
        elif commit.end is RowEnd.LIVE:
            row.fed = commit.token
            if rest:
                self._rest(loop, row)
            else:
                with self.desk.lock:
                    self.emitter.send(turn, row.fed)
        else:
            row.end, row.last = End.LIMIT, commit.token

    def _rest(self, loop: DecodeLoop, row: _Row) -> None:
        """Let the row's turn be ended by whoever is asked to, until it goes on."""
        turn = row.turn
        turn.slot.logits = loop.logits(turn.slot.index)
        turn.slot.resumable = True
        with self.desk.lock:
            turn.busy = False
            if turn.cancelled or turn.stopped:
                self.desk.end(turn, End.STOPPED)

    def _go_on(self, loop: DecodeLoop, row: _Row) -> None:
        turn = row.turn
        with self.desk.lock:
            if turn.live:
                self.emitter.send(turn, row.fed)
                turn.busy = True
                return
        self._forget(loop, turn.slot.index)

    def _forget(self, loop: DecodeLoop, slot: int) -> None:
        """A turn that ended while its row rested has left."""
        loop.drop(slot)
        del self._rows[slot]

    def _leave(self, loop: DecodeLoop, slot: int) -> None:
        row = self._rows.pop(slot)
        row.turn.slot.logits = loop.device.last_logits(slot)
        row.turn.slot.resumable = row.turn.slot.logits is not None
        with self.desk.lock:
            row.turn.busy = False
            if row.last is not None:
                self.emitter.emit(row.turn, row.last)
            else:
                self.desk.end(row.turn, row.end)
