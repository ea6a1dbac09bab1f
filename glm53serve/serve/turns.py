"""Turns and the desk that keeps them: which ids and slots are taken, who may end a turn, and the one terminal frame.

Four threads meet here. Everything is under one lock, which is never held while something is computed or written to the pipe:
the reader marks cancels and ends turns whose rows are in no running pass, admission adds turns, the engine marks a turn `busy`
while its rows are in a pass and ends it afterwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.engine import Cost
from glm53serve.engine.sampling import Sampling
from glm53serve.engine.slots import Slot


class Phase(Enum):
    """Where a turn is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class End(Enum):
    """Why a turn ends."""

    STOP_TOKEN = "stop token"
    STOPPED = "STOP"
    LIMIT = "limit"
    SCORED = "scored"
    CANCELLED = "CANCELLED"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Turn:
    """One accepted prompt on its way through a slot.

    `limit` is how many tokens it may emit (its budget, or what the slot's capacity leaves); `scores` how many log-probabilities a frame
    carries (0 = none). `cancelled` and `stopped` are set by the reader; `busy` is true while rows of the turn are in a running pass.
    `forwards` are its passes, `uses` (uint32 [sparse layers, experts]) what the first `counted` of them used.
    """

    id: int
    slot: Slot
    prompt: list[int]
    sampling: Sampling
    limit: int
    scores: int = 0
    pin: bool = False
    accepted: float = field(default_factory=perf_counter)
    phase: Phase = Phase.WAITING
    busy: bool = False
    cancelled: bool = False
    stopped: bool = False
    emitted: int = 0
    forwards: int = 0
    counted: int = 0
    uses: NDArray[np.uint32] | None = None
    cost: Cost = field(default_factory=Cost)
    logits: NDArray[np.float32] | None = None
    blank_run: bool = False

    @property
    def live(self) -> bool:
        """True until the terminal frame is on its way."""
        return self.phase is not Phase.ENDED


Finish = Callable[[Turn, End, str], None]


class Desk:
    """Registry of turns. `finish(turn, end, detail)` writes what a turn's end owes the peer; it is called under the lock, once a turn.

    `interrupt` is called, in the reader's thread, when rows of a turn that was just cancelled (or, while it decodes, stopped) are in a pass.
    """

    def __init__(self, finish: Finish, interrupt: Callable[[Turn], None] = lambda _turn: None) -> None:
        self.lock = threading.RLock()
        self.wake = threading.Condition(self.lock)
        self._finish = finish
        self._interrupt = interrupt
        self._turns: dict[int, Turn] = {}
        self._slots: dict[int, Turn] = {}
        self._arriving: set[int] = set()
        self._cancel_on_arrival: set[int] = set()
        self._stop_on_arrival: set[int] = set()
        self._waiting: deque[Turn] = deque()
        self._prefilling: Turn | None = None
        self._decoding: list[Turn] = []
        self.no_more = False
        self.stopping = False

    # -- the reader's side

    def announce(self, id_: int) -> bool:
        """A PROMPT with this id was read and goes to admission; False when the id is already in flight, waiting or on its way there."""
        with self.lock:
            if id_ in self._turns or id_ in self._arriving:
                return False
            self._arriving.add(id_)
            return True

    def cancel(self, id_: int) -> bool:
        """A CANCEL was read: mark its turn, and end it at once when no pass holds its rows. False when there is no such turn."""
        with self.lock:
            if id_ in self._arriving:
                self._cancel_on_arrival.add(id_)
                return True
            turn = self._turns.get(id_)
            if turn is None:
                return False
            turn.cancelled = True
            if not turn.busy:
                self.end(turn, End.CANCELLED)
            else:
                self._interrupt(turn)
            return True

    def stop(self, id_: int) -> None:
        """A STOP was read: mark its turn, and end it at once when no pass holds its rows. Unknown ids are ignored."""
        with self.lock:
            if id_ in self._arriving:
                self._stop_on_arrival.add(id_)
                return
            turn = self._turns.get(id_)
            if turn is None:
                return
            turn.stopped = True
            if not turn.busy:
                self.end(turn, End.STOPPED)
            elif turn.phase is Phase.DECODE:
                self._interrupt(turn)

    # -- admission's side

    def refuse(self, id_: int) -> None:
        """The announced prompt was refused: its id is free again."""
        with self.lock:
            self._arriving.discard(id_)
            self._cancel_on_arrival.discard(id_)
            self._stop_on_arrival.discard(id_)

    def slot_taken(self, slot: int) -> bool:
        """True while a turn is in flight or waiting on the slot."""
        with self.lock:
            return slot in self._slots

    def admit(self, turn: Turn) -> None:
        """An announced prompt becomes a waiting turn; a CANCEL or STOP that came before it takes effect now."""
        with self.lock:
            self._arriving.discard(turn.id)
            self._turns[turn.id] = turn
            self._slots[turn.slot.index] = turn
            self._waiting.append(turn)
            turn.stopped = turn.id in self._stop_on_arrival
            turn.cancelled = turn.id in self._cancel_on_arrival
            self._stop_on_arrival.discard(turn.id)
            self._cancel_on_arrival.discard(turn.id)
            if turn.cancelled or turn.stopped:
                self.end(turn, End.CANCELLED if turn.cancelled else End.STOPPED)
            self.wake.notify_all()

    def end_of_input(self) -> None:
        """No further prompt will come."""
        with self.lock:
            self.no_more = True
            self.wake.notify_all()

    # -- the engine's side

    def prefilling(self) -> Turn | None:
        """The one turn whose prompt is being computed; the next waiting one when there is none. Under the lock."""
        if self._prefilling is None and self._waiting:
            self._prefilling = self._waiting.popleft()
            self._prefilling.phase = Phase.PREFILL
        return self._prefilling

    def decoding(self) -> list[Turn]:
        """Turns that are emitting tokens. Under the lock."""
        return list(self._decoding)

    def prefilled(self, turn: Turn) -> None:
        """A turn's prompt is complete; it decodes from now on. Under the lock."""
        self._prefilling = None
        turn.phase = Phase.DECODE
        self._decoding.append(turn)

    def running(self) -> list[Turn]:
        """Turns whose slots hold something of theirs. Under the lock."""
        return [turn for turn in self._turns.values() if turn.phase in (Phase.PREFILL, Phase.DECODE)]

    def idle(self) -> bool:
        """True when no turn is in flight or waiting. Under the lock."""
        return not self._turns

    def everything_done(self) -> bool:
        """True when input has ended and no turn is left anywhere. Under the lock."""
        return self.no_more and not self._turns and not self._arriving

    # -- anyone's

    def end(self, turn: Turn, end: End, detail: str = "") -> None:
        """End a turn that no pass holds: free its id and slot, then let `finish` write its terminal frame. A CANCEL beats any good end."""
        with self.lock:
            if not turn.live:
                return
            if turn.cancelled and end is not End.FAILED:
                end = End.CANCELLED
            was, turn.phase = turn.phase, Phase.ENDED
            turn.busy = False
            del self._turns[turn.id]
            del self._slots[turn.slot.index]
            if was is Phase.WAITING:
                self._waiting.remove(turn)
            elif was is Phase.PREFILL:
                self._prefilling = None
            else:
                self._decoding.remove(turn)
            self._finish(turn, end, detail)
            turn.logits = None
            self.wake.notify_all()
