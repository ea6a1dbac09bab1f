"""Which routed experts are wanted, on their way or in memory, and which buffer each has.

Buffers are of two kinds: `keep` of them hold the experts worth most (`Heat`); the few `transit` ones take a missing expert that is not worth
keeping, from its read to its last product (and serve it again if it is asked for before they are needed). So a small budget never stops,
and a cold expert never pushes out a hot one.

An expert is in one of the states QUEUED, READING, READY; one without an entry is on disk only. Buffers are given when a read begins. The
queue is first in, first out: if its head finds no buffer and nothing else moves, the coldest expert that nobody wants goes, else a READY one
that the need wants later is sent back to the queue, so there is always a way on. What was read ahead for the need is not sent back: no
expert is read twice for one chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from glm53serve.experts.heat import Heat
from glm53serve.experts.supply import Ready

Key = tuple[int, int]
Buffer = NDArray[np.uint8]


class State(Enum):
    """What is going on with an expert that is not merely on disk."""

    QUEUED = 0
    READING = 1
    READY = 2


@dataclass(slots=True, eq=False)
class Entry:
    """An expert that is wanted or in memory. `pinned` while a need wants it, `position` its turn in that need, `shown` once it was handed out;
    `guessed` when it was read before it was asked for, until it is; `ahead` when the need that wants it found it so."""

    key: Key
    state: State = State.QUEUED
    buffer: Buffer | None = None
    kept: bool = False
    pinned: bool = False
    shown: bool = False
    guessed: bool = False
    ahead: bool = False
    position: int = 0
    ready: Ready | None = None
    error: BaseException | None = None


class Residence:
    """The books of an expert store, its lock, and what its threads wait for. Every method is called with `lock` held.

    guesses: experts likely to be needed soon, read while nothing else is to be read.
    work: there may be something to read. arrived: a read has ended, or will never begin. starving: a need waits and has nothing to compute.
    reading: reads going on. allocate: makes a buffer of `buffer_bytes` bytes or raises MemoryError. short: called with one line when it did.
    """

    def __init__(self, layers: Sequence[int], heat: Heat, buffer_bytes: int, allocate: Callable[[int], Buffer], short: Callable[[str], None]) -> None:
        self.layers = layers
        self.heat = heat
        self.buffer_bytes = buffer_bytes
        self.keep = self.transit = 0
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        self.arrived = threading.Condition(self.lock)
        self.closed = self.starving = False
        self.reading = 0
        self.entries: dict[Key, Entry] = {}
        self.queue: deque[Entry] = deque()
        self.guesses: deque[Key] = deque()
        self._foreseen: frozenset[Key] = frozenset()
        self.ready, self._kept, self._pinned = (np.zeros(heat.worth.shape, np.bool_) for _ in range(3))
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._in_transit: list[Entry] = []
        self._free: list[Buffer] = []
        self.buffers = 0
        self._allocate = allocate
        self._short = short

    @property
    def full(self) -> bool:
        """True when as many experts are kept as may be."""
        return int(np.count_nonzero(self._kept)) >= self.keep

    def clear(self) -> None:
        """Forget every expert and release the buffers."""
        self.entries.clear()
        self._free.clear()
        self._in_transit.clear()

    # -- what is wanted

    def want(self, position: int, key: Key) -> tuple[Entry, bool]:
        """An entry pinned for a need, queued when it is not on its way; and whether it was in memory other than by a guess, whose read is
        this need's."""
        entry = self.entries.get(key)
        ready = entry is not None and entry.state is State.READY
        found = ready and entry is not None and not entry.guessed
        if entry is None:
            entry = self.entries[key] = Entry(key)
            self.queue.append(entry)
        entry.ahead = entry.guessed
        entry.shown, entry.guessed, entry.position, entry.error = False, False, position, None
        self.pin(entry, True)
        if entry.buffer is not None and not entry.kept:
            self._promote(entry)
        return entry, found

    def _promote(self, entry: Entry) -> None:
        """Keep an expert in transit that has become hotter than the coldest kept one; they change places."""
        if self.keep == 0:
            return
        if self.full:
            victim = self._victim(entry.key)
            if victim is None:
                return
            self._mark(victim, False)
            self._in_transit.append(victim)
        self._in_transit.remove(entry)
        self._mark(entry, True)

    def leave(self, entry: Entry) -> None:
        """A need does not want this expert any more; it is not read if its read has not begun."""
        self.pin(entry, False)
        if entry.state is State.QUEUED:
            if entry in self.queue:
                self.queue.remove(entry)
            if self.entries.get(entry.key) is entry:
                del self.entries[entry.key]

    def landed(self, entry: Entry, ready: Ready) -> None:
        """The expert's bytes are in its buffer. Perhaps a need that waits can go on: it says so if not."""
        entry.ready, entry.state = ready, State.READY
        self.starving = False
        self.ready[self._at(entry.key)] = True

    def pin(self, entry: Entry, pinned: bool) -> None:
        """Whether a need wants this expert, so that its buffer cannot be given to another one that may wait."""
        entry.pinned = pinned
        self._pinned[self._at(entry.key)] = pinned

    def _at(self, key: Key) -> tuple[int, int]:
        return self._row[key[0]], key[1]

    def drop(self, entry: Entry) -> None:
        """Forget an expert; its buffer is free."""
        if entry.kept:
            self._mark(entry, False)
        elif entry.buffer is not None:
            self._in_transit.remove(entry)
        if entry.buffer is not None:
            self._free.append(entry.buffer)
        entry.buffer = entry.ready = None
        self.ready[self._at(entry.key)] = False
        self.entries.pop(entry.key, None)

    def _mark(self, entry: Entry, kept: bool) -> None:
        entry.kept = kept
        self._kept[self._at(entry.key)] = kept

    # -- buffers

    def _victim(self, key: Key) -> Entry | None:
        """The coldest kept expert that nobody needs, if it is colder than `key`."""
        coldest = self._coldest_unwanted()
        if coldest is None or self.heat.worth[self._at(coldest.key)] >= self.heat.worth[self._at(key)]:
            return None
        return coldest

    def _coldest_unwanted(self) -> Entry | None:
        coldest = self.heat.coldest(self._kept & self.ready & ~self._pinned)
        return None if coldest is None else self.entries[self.layers[coldest[0]], coldest[1]]

    def room(self, entry: Entry) -> bool:
        """Give an entry a buffer to be read into; False when it has to wait for one."""
        buffer: Buffer | None
        kept = int(np.count_nonzero(self._kept))
        victim = self._victim(entry.key) if kept >= self.keep else None
        if victim is not None:
            self.drop(victim)
        if victim is not None or kept < self.keep:
            buffer = self._buffer()
            if buffer is None and len(self._in_transit) > self.transit:
                buffer = self._idle_buffer()
            if buffer is not None:
                entry.buffer = buffer
                self._mark(entry, True)
                return True
        buffer = self._buffer() if len(self._in_transit) < self.transit else None
        if buffer is None:
            buffer = self._idle_buffer()
        if buffer is None and self.starving and not self.reading:
            victim = self._coldest_unwanted()
            if victim is not None:
                self.drop(victim)
                entry.buffer = self._free.pop()
                self._mark(entry, True)
                return True
            buffer = self._wanted_later_buffer(entry)
        if buffer is None:
            return False
        entry.buffer = buffer
        self._in_transit.append(entry)
        return True

    def foresee(self, keys: Iterable[Key]) -> None:
        """What is likely to be needed next, in the order in which to read it. What was guessed before and did not come true is an expert in
        transit like any other."""
        for entry in self._in_transit:
            entry.guessed = entry.guessed and entry.state is State.READING
        self.guesses = deque(keys)
        self._foreseen = frozenset(self.guesses)
        self.work.notify_all()

    def guess(self) -> Entry | None:
        """An entry to be read on a guess, with a buffer; None when nothing is guessed or no buffer is to be had."""
        while self.guesses and self.guesses[0] in self.entries:
            self.guesses.popleft()
        # one buffer is left for what a need wants and nobody guessed, or it could only go on by giving up a guess that came true
        if not self.guesses or sum(e.guessed for e in self._in_transit) >= self.keep + self.transit - 1:
            return None
        entry = Entry(self.guesses[0], State.READING, guessed=True)
        # a guess pushes out nothing that is kept, nor what is guessed too; it takes a place among the kept when it is asked for
        entry.buffer = self._buffer() if len(self._in_transit) < self.transit else None
        entry.buffer = entry.buffer if entry.buffer is not None else self._idle_buffer(spare_guesses=True)
        if entry.buffer is None:
            return None
        self._in_transit.append(entry)
        self.entries[self.guesses.popleft()] = entry
        return entry

    def room_unasked(self, key: Key) -> Entry | None:
        """An entry to be read before anybody needs it, with a buffer nobody has used; None when every kept one is taken."""
        if self.full or (buffer := self._buffer()) is None:
            return None
        entry = self.entries[key] = Entry(key, State.READING, buffer)
        self._mark(entry, True)
        return entry

    def _idle_buffer(self, spare_guesses: bool = False) -> Buffer | None:
        """The buffer of the longest unused expert in transit; `spare_guesses`: not of one that is foreseen or was read on a guess."""
        idle = (e for e in self._in_transit if e.state is State.READY and not e.pinned)
        chosen = next((e for e in idle if not (spare_guesses and (e.guessed or e.key in self._foreseen))), None)
        if chosen is None:
            return None
        self.drop(chosen)
        return self._free.pop()

    def _wanted_later_buffer(self, entry: Entry) -> Buffer | None:
        """When nothing else moves: the buffer of the READY expert that is needed last, if its turn comes after this one's; of one read ahead
        for this need only when there is no other (memory ran short meanwhile)."""
        wanted = [self.entries[self.layers[row], int(e)] for row, e in np.argwhere(self._pinned & self.ready)]
        later = [e for e in wanted if not e.shown and e.position > entry.position]
        if not later:
            return None
        self._requeue(max(later, key=lambda e: (not e.ahead, e.position)))
        return self._free.pop()

    def _requeue(self, entry: Entry) -> None:
        self.drop(entry)
        entry.state = State.QUEUED
        self.entries[entry.key] = entry
        self.queue = deque(sorted((*self.queue, entry), key=lambda e: e.position))

    def _buffer(self) -> Buffer | None:
        """A free or new buffer; None when all are in use. When memory is short the budget becomes what is there, once told."""
        if self._free:
            return self._free.pop()
        if self.buffers >= self.keep + self.transit:
            return None
        try:
            buffer = self._allocate(self.buffer_bytes)
        except MemoryError:
            if self.buffers < 2:
                raise
            wanted = self.keep + self.transit
            self.transit = min(max(self.transit, 1), self.buffers)
            self.keep = self.buffers - self.transit
            while np.count_nonzero(self._kept) > self.keep and (coldest := self.heat.coldest(self._kept)) is not None:
                demoted = self.entries[self.layers[coldest[0]], coldest[1]]
                self._mark(demoted, False)
                self._in_transit.append(demoted)
            self._short(f"no memory for more routed experts: {self.buffers} of {wanted} are kept, the others are read when needed")
            return None
        self.buffers += 1
        return buffer
