"""Routed experts on disk, being read, or in RAM, under a budget.

Buffers are of two kinds: `keep` of them hold the experts worth most (`Heat`); the few `transit` ones take a missing expert that is not worth
keeping, from its read to its last product (and serve it again if it is asked for before they are needed). So a small budget never stops,
and a cold expert never pushes out a hot one.

Everything below the lock is in one of the states QUEUED, READING, READY; an expert without an entry is on disk only. Buffers are given when a
read begins. The queue is first in, first out: if its head finds no buffer, a READY expert that a need wants later is sent back to the queue,
so there is always a way on.

Nothing is read on a guess from earlier tokens: on the shipped model's routing the likeliest absent expert of the next layer is used 30 to 39
times in 100, and while the disk is what everything waits for, a wrong read is in the way of a needed one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.seam import Halt, Halted, never
from glm53serve.experts.files import THREADS, ExpertFiles
from glm53serve.experts.heat import Heat
from glm53serve.experts.memory import allocate
from glm53serve.experts.places import Place, place
from glm53serve.experts.supply import Ready
from glm53serve.model.checkpoint import Checkpoint
from glm53serve.model.weights import FfnWeights, Matrix

POLL_SECONDS = 0.002
"""How often a waiting layer asks whether it should stop."""
EXTRA_SHARE = 10
"""As many transit buffers as there are readers may come on top of the budget, up to this part of it."""
MANY = 50
"""With this many buffers a reader one transit buffer more is worth its place: a read goes on while another's product is computed."""
Key = tuple[int, int]
Buffer = NDArray[np.uint8]


class State(Enum):
    """What is going on with an expert that is not merely on disk."""

    QUEUED = 0
    READING = 1
    READY = 2


@dataclass(slots=True, eq=False)
class Entry:
    """An expert that is wanted or in memory. `pinned` while a need wants it, `position` its turn in that need, `shown` once it was handed out."""

    key: Key
    state: State = State.QUEUED
    buffer: Buffer | None = None
    kept: bool = False
    pinned: bool = False
    shown: bool = False
    position: int = 0
    ready: Ready | None = None
    error: BaseException | None = None


class ExpertStore:
    """All routed experts of a checkpoint. An `ExpertSource` and a `Supply`; one thread computes with it.

    Made small and idle; `open` sets the budget and starts the readers. `note` gets the few lines worth telling.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        files: ExpertFiles,
        note: Callable[[str], None] = lambda _line: None,
        allocator: Callable[[int], Buffer] = allocate,
    ) -> None:
        config = checkpoint.config
        numbers = {path: number for number, path in enumerate(checkpoint.files)}
        self.layers = config.sparse_layers
        self.experts = config.n_routed_experts
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self.places: dict[Key, Place] = {
            (layer, e): place(checkpoint.expert_pieces(layer, e), numbers.__getitem__) for layer in self.layers for e in range(self.experts)
        }
        self.buffer_bytes = max((p.nbytes for p in self.places.values()), default=0)
        self.expert_bytes = max((p.stored for p in self.places.values()), default=1)
        self.heat = Heat(len(self.layers), self.experts)
        self.files = files
        self.keep = self.transit = 0
        self.reads = self.bytes_read = 0
        self._a_token = config.num_experts_per_tok
        self._note = note
        self._allocate = allocator
        self._entries: dict[Key, Entry] = {}
        shape = (len(self.layers), self.experts)
        self._kept, self._ready, self._pinned = (np.zeros(shape, np.bool_) for _ in range(3))
        self._starving = self._stable = False
        self._reading = 0
        self._in_transit: list[Entry] = []
        self._free: list[Buffer] = []
        self._buffers = 0
        self._queue: deque[Entry] = deque()
        self._warm: deque[Key] = deque()
        self._warming = 0
        self._warm_error: BaseException | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._arrived = threading.Condition(self._lock)
        self._readers: list[threading.Thread] = []
        self._closed = False
        files.on_trouble = note

    # -- life

    def open(self, budget: int) -> None:
        """Start with room for `budget` experts (at least two are held whatever it says)."""
        budget = min(max(budget, 2), len(self.places))
        readers = THREADS * len(self.files.copies)
        extra = min(budget // EXTRA_SHARE, readers)
        self.transit = 0 if budget == len(self.places) else min(readers + (budget >= MANY * readers), budget)
        self.keep = budget - max(0, self.transit - extra)
        for number in range(readers):
            reader = threading.Thread(target=self._read_loop, args=(number % len(self.files.copies),), name=f"experts-{number}", daemon=True)
            self._readers.append(reader)
            reader.start()

    @property
    def holds_all(self) -> bool:
        """True when every expert has a place in RAM."""
        return self.keep == len(self.places)

    @property
    def stable(self) -> bool:
        """True once every expert is in RAM, where it then stays."""
        if not self._stable and self.holds_all:
            self._stable = bool(self._ready.all())
        return self._stable

    def warm(self, history: NDArray[np.uint64] | None = None) -> None:
        """Fill free buffers in the background, the most used experts of the history first. history: uint64 [sparse layers, experts]."""
        if history is not None:
            self.heat.start_from(history, self._a_token)
        order = np.argsort(-self.heat.chance, axis=None, kind="stable")
        if not self.holds_all:
            order = order[self.heat.chance.reshape(-1)[order] > 0]
        with self._lock:
            self._warm = deque((self.layers[int(at) // self.experts], int(at) % self.experts) for at in order[: self.keep])
            self._work.notify_all()

    def wait_warm(self) -> None:
        """Wait until the background has filled what it could. Raises what its first failed read raised."""
        with self._lock:
            while (self._warm or self._warming) and self._warm_error is None and not self._closed:
                self._arrived.wait()
            if self._warm_error is not None:
                raise self._warm_error

    def close(self) -> None:
        """Stop the readers after the reads they are in, close the files, release memory."""
        with self._lock:
            self._closed = True
            self._warm.clear()
            self._queue.clear()
            self._work.notify_all()
            self._arrived.notify_all()
        for reader in self._readers:
            reader.join()
        self._readers.clear()
        self._entries.clear()
        self._free.clear()
        self._in_transit.clear()
        self.files.close()

    # -- asking

    def need(self, layer: int, experts: NDArray[np.int64], counts: NDArray[np.int64], rows: int, halt: Halt, in_order: bool) -> StoreNeed:
        """See `Supply`."""
        self.heat.use(self._row[layer], experts, counts, rows)
        return StoreNeed(self, layer, [(layer, int(e)) for e in experts], halt, in_order)

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """One expert's weights: a copy unless all are in RAM for good.

        Raises IndexError when there is none of that number, ExpertReadError when it cannot be read.
        """
        if (layer, expert) not in self.places:
            raise IndexError(f"no routed expert {expert} in layer {layer}")
        with StoreNeed(self, layer, [(layer, expert)], never, True) as need:
            for ready in next(iter(need)):
                w = ready.weights
                if self.stable:
                    return w
                return FfnWeights(_copied(w.gate), _copied(w.up), _copied(w.down))
        raise AssertionError("a need without experts")

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """Which experts of a layer are in RAM now: bool [experts]."""
        with self._lock:
            row: NDArray[np.bool_] = self._ready[self._row[layer]].copy()
            return row

    # -- under the lock: needs

    def _want(self, position: int, key: Key) -> tuple[Entry, bool]:
        """An entry pinned for a need, queued when it is not on its way; and whether it was in memory."""
        entry = self._entries.get(key)
        found = entry is not None and entry.state is State.READY
        if entry is None:
            entry = self._entries[key] = Entry(key)
            self._queue.append(entry)
        entry.shown, entry.position, entry.error = False, position, None
        self._pin(entry, True)
        if found and not entry.kept:
            self._promote(entry)
        return entry, found

    def _promote(self, entry: Entry) -> None:
        """Keep an expert in transit that has become hotter than the coldest kept one; they change places."""
        if self.keep == 0:
            return
        if np.count_nonzero(self._kept) >= self.keep:
            victim = self._victim(entry.key)
            if victim is None:
                return
            self._mark(victim, False)
            self._in_transit.append(victim)
        self._in_transit.remove(entry)
        self._mark(entry, True)

    def _pin(self, entry: Entry, pinned: bool) -> None:
        entry.pinned = pinned
        self._pinned[self._at(entry)] = pinned

    def _at(self, entry: Entry) -> tuple[int, int]:
        return self._row[entry.key[0]], entry.key[1]

    def _drop(self, entry: Entry) -> None:
        """Forget an expert; its buffer is free."""
        if entry.kept:
            self._mark(entry, False)
        elif entry.buffer is not None:
            self._in_transit.remove(entry)
        if entry.buffer is not None:
            self._free.append(entry.buffer)
        entry.buffer = entry.ready = None
        self._ready[self._at(entry)] = False
        self._entries.pop(entry.key, None)

    def _mark(self, entry: Entry, kept: bool) -> None:
        entry.kept = kept
        self._kept[self._at(entry)] = kept

    # -- under the lock: buffers

    def _victim(self, key: Key) -> Entry | None:
        """The coldest kept expert that nobody needs, if it is colder than `key`."""
        among = self._kept & self._ready & ~self._pinned
        coldest = self.heat.coldest(among)
        if coldest is None:
            return None
        row, expert = coldest
        if self.heat.worth[row, expert] >= self.heat.worth[self._row[key[0]], key[1]]:
            return None
        return self._entries[self.layers[row], expert]

    def _room(self, entry: Entry) -> bool:
        """Give an entry a buffer to be read into; False when it has to wait for one."""
        buffer: Buffer | None
        kept = int(np.count_nonzero(self._kept))
        victim = self._victim(entry.key) if kept >= self.keep else None
        if victim is not None:
            self._drop(victim)
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
        if buffer is None and self._starving and not self._reading:
            buffer = self._wanted_later_buffer(entry)
        if buffer is None:
            return False
        entry.buffer = buffer
        self._in_transit.append(entry)
        return True

    def _idle_buffer(self) -> Buffer | None:
        """The buffer of the longest unused expert in transit."""
        idle = next((e for e in self._in_transit if e.state is State.READY and not e.pinned), None)
        if idle is None:
            return None
        self._drop(idle)
        return self._free.pop()

    def _wanted_later_buffer(self, entry: Entry) -> Buffer | None:
        """When nothing else moves: the buffer of the READY expert that is needed last, if its turn comes after this one's."""
        wanted = [self._entries[self.layers[row], int(e)] for row, e in np.argwhere(self._pinned & self._ready)]
        later = [e for e in wanted if not e.shown and e.position > entry.position]
        if not later:
            return None
        self._requeue(max(later, key=lambda e: e.position))
        return self._free.pop()

    def _requeue(self, entry: Entry) -> None:
        self._drop(entry)
        entry.state = State.QUEUED
        self._entries[entry.key] = entry
        self._queue = deque(sorted((*self._queue, entry), key=lambda e: e.position))

    def _buffer(self) -> Buffer | None:
        """A free or new buffer; None when all are in use. When memory is short the budget becomes what is there, once told."""
        if self._free:
            return self._free.pop()
        if self._buffers >= self.keep + self.transit:
            return None
        try:
            buffer = self._allocate(self.buffer_bytes)
        except MemoryError:
            if self._buffers < 2:
                raise
            wanted = self.keep + self.transit
            self.transit = min(max(self.transit, 1), self._buffers)
            self.keep = self._buffers - self.transit
            while np.count_nonzero(self._kept) > self.keep and (coldest := self.heat.coldest(self._kept)) is not None:
                demoted = self._entries[self.layers[coldest[0]], coldest[1]]
                self._mark(demoted, False)
                self._in_transit.append(demoted)
            self._note(f"no memory for more routed experts: {self._buffers} of {wanted} are kept, the others are read when needed")
            self._warm.clear()
            return None
        self._buffers += 1
        return buffer

    # -- reader threads

    def _read_loop(self, copy: int) -> None:
        while True:
            with self._lock:
                entry = self._next()
                while entry is None:
                    if self._closed:
                        return
                    self._work.wait()
                    entry = self._next()
                warming = not entry.pinned
                self._warming += warming
                self._reading += 1
                buffer = entry.buffer
            assert buffer is not None
            error: BaseException | None = None
            ready = None
            where = self.places[entry.key]
            try:
                self.files.fetch(where, buffer, copy)
                ready = Ready(*entry.key, where.weights(buffer))
            except Exception as reason:  # noqa: BLE001 - handed to the thread that asked for the expert
                error = reason
            with self._lock:
                self._warming -= warming
                self._reading -= 1
                self._landed(entry, ready, error, where.nbytes)

    def _next(self) -> Entry | None:
        """The next read, with its buffer; None when there is nothing to do or no room to do it in."""
        if self._closed:
            return None
        if self._queue:
            entry = self._queue[0]
            try:
                if not self._room(entry):
                    return None
            except MemoryError as error:
                entry.error = error
                self._queue.popleft()
                self._arrived.notify_all()
                return None
            # giving room may have put another one at the end, never before this one
            self._queue.popleft()
            entry.state = State.READING
            return entry
        # one reader stays free for what is needed now
        while self._warm and self._warming < max(1, len(self._readers) - 1):
            key = self._warm.popleft()
            if key in self._entries:
                continue
            if np.count_nonzero(self._kept) >= self.keep or (buffer := self._buffer()) is None:
                self._warm.clear()
                self._arrived.notify_all()
                return None
            entry = self._entries[key] = Entry(key, State.READING, buffer)
            self._mark(entry, True)
            return entry
        return None

    def _landed(self, entry: Entry, ready: Ready | None, error: BaseException | None, nbytes: int) -> None:
        self.reads += 1
        self.bytes_read += nbytes
        if error is None:
            entry.ready, entry.state = ready, State.READY
            self._ready[self._at(entry)] = True
        else:
            pinned = entry.pinned
            self._drop(entry)
            if pinned:
                entry.error = error
            elif self._warm_error is None:
                self._warm_error = error
                self._note(f"{error}; it is tried again when needed")
        self._arrived.notify_all()
        if self._queue or self._warm:
            self._work.notify_all()


class StoreNeed:
    """See `Need`."""

    def __init__(self, store: ExpertStore, layer: int, keys: list[Key], halt: Halt, in_order: bool) -> None:
        self.layer = layer
        self.wanted = len(keys)
        self.found = 0
        self.blocked = 0.0
        self._store = store
        self._keys = keys
        self._halt = halt
        self._in_order = in_order
        self._left: list[Entry] = []
        self._shown: list[Entry] = []

    def __enter__(self) -> Self:
        store = self._store
        with store._lock:
            for position, key in enumerate(self._keys):
                entry, found = store._want(position, key)
                self.found += found
                self._left.append(entry)
            if self.found < self.wanted:
                store._work.notify_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        store = self._store
        with store._lock:
            for entry in (*self._left, *self._shown):
                store._pin(entry, False)
                if entry.state is State.QUEUED:
                    if entry in store._queue:
                        store._queue.remove(entry)
                    if store._entries.get(entry.key) is entry:
                        del store._entries[entry.key]
            self._left, self._shown = [], []
            store._work.notify_all()

    def __iter__(self) -> Iterator[list[Ready]]:
        store = self._store
        first = True
        while self._left:
            if not first and self._halt():
                raise Halted(self.layer)
            first = False
            with store._lock:
                for entry in self._shown:
                    store._pin(entry, False)
                if self._shown and store._queue:
                    store._work.notify_all()
                self._shown = self._take()
            yield [entry.ready for entry in self._shown if entry.ready is not None]

    def _take(self) -> list[Entry]:
        """Wait for the next experts that are in memory. Under the lock."""
        began: float | None = None
        try:
            while True:
                failed = next((e for e in self._left if e.error is not None), None)
                if failed is not None and failed.error is not None:
                    raise failed.error
                if self._in_order:
                    count = next((n for n, e in enumerate(self._left) if e.state is not State.READY), len(self._left))
                    taken, left = self._left[:count], self._left[count:]
                else:
                    taken = [e for e in self._left if e.state is State.READY]
                    left = [e for e in self._left if e.state is not State.READY]
                if taken:
                    for entry in taken:
                        entry.shown = True
                    self._left = left
                    return taken
                began = perf_counter() if began is None else began
                self._store._starving = True
                if self._store._queue:
                    self._store._work.notify_all()
                self._store._arrived.wait(POLL_SECONDS)
                if self._store._closed:
                    raise RuntimeError("the expert store is closed")
                if self._halt():
                    raise Halted(self.layer)
        finally:
            self._store._starving = False
            if began is not None:
                self.blocked += perf_counter() - began


def _copied(m: Matrix) -> Matrix:
    scale: Any = None if m.scale is None else m.scale.copy()
    return Matrix(m.format, m.rows, m.cols, m.data.copy(), scale)
